"""NIID-Bench as Flower's baseline of it prints it: settings, methods and tables.

Ten clients, all in every round, ten local epochs of SGD with momentum. Pixels are in [0, 1]. The
best mu of FedProx is printed, of 0.001, 0.01, 0.1 and 1; here it is 0.01. The baseline pads
CIFAR-10's pictures by reflection, fedloom with zeros.
"""

from fedloom.reviews.papers.paper import Change, ExhibitTemplate, Hour, Paper

NIID_BENCH = Paper(
    titles={"niid-bench": "NIID-Bench (Li et al., ICDE 2022), Flower's baseline"},
    words={"measure": "best"},
    setting={
        "clients": 10,
        "model": "fedmr_cnn(variant=cifar)",
        "participation": 1.0,
        "evaluate_every": 1,
        "rounds": 50,
        "seeds": [0, 1, 2],
        "training": {
            "learning_rate": 0.01,
            "momentum": 0.9,
            "weight_decay": 1e-05,
            "epochs": 10,
            "batch_size": 64,
        },
    },
    changes={
        "dataset": {
            "mnist": Change(label="MNIST", setting={"data": "mnist(normalise='none')"}),
            "cifar10": Change(
                label="CIFAR-10",
                setting={
                    "data": "cifar10(normalise='none')",
                    "training": {"augmentation": "flip_crop"},
                },
            ),
        },
        "heterogeneity": {
            "iid": Change(label="IID", setting={"partition": "iid"}),
            "dir:0.5": Change(label="Dir(0.5)", setting={"partition": "dirichlet(0.5)"}),
            "labels:1": Change(label="1 label", setting={"partition": "label_quantity(1)"}),
            "labels:2": Change(label="2 labels", setting={"partition": "label_quantity(2)"}),
            "labels:3": Change(label="3 labels", setting={"partition": "label_quantity(3)"}),
        },
    },
    methods={
        "FedAvg": "fedavg",
        "SCAFFOLD": "scaffold",
        "FedProx": "fedprox(mu=0.01)",
        "FedNova": "fednova",
    },
    hour=Hour(
        exhibit="niid-bench.table-mnist",
        limits={"columns": ["MNIST 2 labels"], "rounds": 10, "seeds": [0]},
        can="all four methods with two labels a client, ten of fifty rounds, one seed",
        cannot="the printed numbers (fifty rounds, three seeds) and CIFAR-10",
    ),
    templates=[
        ExhibitTemplate(
            ids=("niid-bench.table-mnist",),
            shows="best test accuracy, MNIST, four methods",
            numbers="niid-bench/MNIST",
        ),
        ExhibitTemplate(
            ids=("niid-bench.table-cifar-10",),
            shows="best test accuracy, CIFAR-10, four methods",
            numbers="niid-bench/CIFAR-10",
        ),
    ],
)
