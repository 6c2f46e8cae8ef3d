"""McMahan et al. 2017: settings, methods and tables.

MNIST over 100 clients, E local epochs of batches of B, plain SGD. C = 0 is one client a round. The
paper tunes the learning rate for each cell on a multiplicative grid; here the rates are those that
`benchmarks/mcmahan.py` found on the grid 10^(k/3), and cells that it has not tuned have the rate of
their nearest tuned neighbour. Pixels are in [0, 1]: the paper names no other.
"""

from dataclasses import replace

from fedloom.reviews.papers.paper import CellTemplate, Change, ExhibitTemplate, Hour, Paper, Rule

_TABLE_1_2NN = ExhibitTemplate(
    ids=("mcmahan.table-1-2nn",),
    shows="rounds to 97 %, 2NN, by C and B",
    numbers="mcmahan/1-2NN",
    cells=[
        CellTemplate(measure="rounds", interpolated=True, target="target_acc_pct", printed="rounds")
    ],
)

MCMAHAN = Paper(
    titles={"mcmahan": "FedAvg (McMahan et al., AISTATS 2017)"},
    words={"measure": "best"},
    setting={
        "data": "mnist(normalise='none')",
        "clients": 100,
        "evaluate_every": 1,
        "rounds": 1000,
        "seeds": [0, 1, 2],
        "training": {"learning_rate": 0.1},
    },
    as_printed=["rounds"],
    changes={
        "model": {
            "mcmahan_2nn": Change(label="2NN", setting={"model": "mcmahan_2nn"}),
            "mcmahan_cnn": Change(label="CNN", setting={"model": "mcmahan_cnn"}),
        },
        "heterogeneity": {
            "iid": Change(label="IID", setting={"partition": "iid"}),
            "shards:2": Change(label="non-IID", setting={"partition": "shards(2)"}),
        },
        "participation": {
            0.0: Change(label="C=0", setting={"participation": 0.01}),
            0.1: Change(label="C=0.1", setting={"participation": 0.1}),
            0.2: Change(label="C=0.2", setting={"participation": 0.2}),
            0.5: Change(label="C=0.5", setting={"participation": 0.5}),
            1.0: Change(label="C=1", setting={"participation": 1.0}),
        },
        "epochs": {
            1: Change(label="E=1", setting={"training": {"epochs": 1}}),
            5: Change(label="E=5", setting={"training": {"epochs": 5}}),
            20: Change(label="E=20", setting={"training": {"epochs": 20}}),
        },
        "batch": {
            10: Change(label="B=10", setting={"training": {"batch_size": 10}}),
            50: Change(label="B=50", setting={"training": {"batch_size": 50}}),
            "inf": Change(label="B=inf", setting={"training": {"batch_size": "none"}}),
        },
    },
    # The rates that were tuned.
    rules=[
        Rule(
            when={"model": "mcmahan_2nn", "batch": 10},
            setting={"training": {"learning_rate": 0.215}},
        ),
        Rule(
            when={"model": "mcmahan_2nn", "batch": 10, "participation": 0.0},
            setting={"training": {"learning_rate": 0.1}},
        ),
        Rule(
            when={
                "model": "mcmahan_2nn",
                "batch": 10,
                "participation": 0.0,
                "heterogeneity": "shards:2",
            },
            setting={"training": {"learning_rate": 0.0464}},
        ),
        Rule(
            when={"model": "mcmahan_2nn", "batch": "inf", "epochs": 1, "heterogeneity": "iid"},
            setting={"training": {"learning_rate": 0.464}},
        ),
        Rule(
            when={
                "model": "mcmahan_2nn",
                "batch": "inf",
                "epochs": 1,
                "participation": 0.0,
                "heterogeneity": "iid",
            },
            setting={"training": {"learning_rate": 1.0}},
        ),
    ],
    methods={"FedAvg": "fedavg", "FedSGD": "fedavg"},
    hour=Hour(
        exhibit="mcmahan.table-1-2nn",
        limits={"columns": ["C=0.1 E=1 B=10", "C=0.2 E=1 B=10"]},
        can=(
            "both distributions of the 2NN at C = 0.1 and 0.2 and B = 10 with three seeds, at the"
            " tuned rates"
        ),
        cannot="the search for the rates, and the CNN, whose convolutions take days",
    ),
    templates=[
        _TABLE_1_2NN,
        replace(
            _TABLE_1_2NN,
            ids=("mcmahan.table-1-cnn",),
            shows="rounds to 99 %, CNN, by C and B",
            numbers="mcmahan/1-CNN",
        ),
        replace(
            _TABLE_1_2NN,
            ids=("mcmahan.table-2",),
            shows="rounds to 99 %, CNN, by E and B",
            numbers="mcmahan/2",
        ),
    ],
)
