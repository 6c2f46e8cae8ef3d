"""FedALA: settings, methods, tables and figures.

The protocol (section "Experiments", with the authors' code where the paper is silent): training and
test part are merged, 20 clients that all take part keep a quarter of their samples for testing;
plain SGD, batch 10 with the last short batch dropped, one local epoch, learning rate 0.005, or 0.1
for the CNN on MNIST, fastText and ResNet-18; 2,000 rounds, 5 runs. The score is the best over
rounds of the accuracy of the clients' own models on their own test samples, before local training.
"""

from dataclasses import replace

from fedloom.reviews.papers.paper import CellTemplate, Change, ExhibitTemplate, Hour, Paper, Rule

_TABLE_1 = ExhibitTemplate(
    ids=("fedala.table-1",),
    shows="shares s of the data and ranges p of layers",
    numbers="fedala/1",
    rules=[
        Rule(
            when={"p": 1, "s": 5},
            methods={"FedALA": "fedala_code(p=1, percent=5.0, rate=1.0, threshold=0.01)"},
        ),
        Rule(
            when={"p": 1, "s": 10},
            methods={"FedALA": "fedala_code(p=1, percent=10.0, rate=1.0, threshold=0.01)"},
        ),
        Rule(
            when={"p": 1, "s": 20},
            methods={"FedALA": "fedala_code(p=1, percent=20.0, rate=1.0, threshold=0.01)"},
        ),
        Rule(
            when={"p": 1, "s": 40},
            methods={"FedALA": "fedala_code(p=1, percent=40.0, rate=1.0, threshold=0.01)"},
        ),
        Rule(
            when={"p": 1, "s": 60},
            methods={"FedALA": "fedala_code(p=1, percent=60.0, rate=1.0, threshold=0.01)"},
        ),
        Rule(
            when={"p": 1, "s": 100},
            methods={"FedALA": "fedala_code(p=1, percent=100.0, rate=1.0, threshold=0.01)"},
        ),
        Rule(
            when={"p": 6, "s": 80},
            methods={"FedALA": "fedala_code(p=6, percent=80.0, rate=1.0, threshold=0.01)"},
        ),
        Rule(
            when={"p": 5, "s": 80},
            methods={"FedALA": "fedala_code(p=5, percent=80.0, rate=1.0, threshold=0.01)"},
        ),
        Rule(
            when={"p": 4, "s": 80},
            methods={"FedALA": "fedala_code(p=4, percent=80.0, rate=1.0, threshold=0.01)"},
        ),
        Rule(
            when={"p": 3, "s": 80},
            methods={"FedALA": "fedala_code(p=3, percent=80.0, rate=1.0, threshold=0.01)"},
        ),
        Rule(
            when={"p": 2, "s": 80},
            methods={"FedALA": "fedala_code(p=2, percent=80.0, rate=1.0, threshold=0.01)"},
        ),
    ],
    cells=[
        CellTemplate(row="s={s} p={p}"),
        CellTemplate(
            row="s={s} p={p}",
            column="{setting} weights",
            measure="weights",
            printed="ala_params",
            needs="ala_params",
        ),
        CellTemplate(
            row="s={s} p={p}",
            column="{setting} weights",
            measure="weights",
            printed="ala_params_million",
            times=1000000.0,
            needs="ala_params_million",
        ),
    ],
)

_FIGURE_6 = ExhibitTemplate(
    # Figures 6 to 9: samples of each class by client. One round, for the report that draws it.
    ids=("fedala.figure-6",),
    shows="labels of the clients, Tiny-ImageNet",
    words={"measure": "classes"},
    over=[{"dataset": "tiny_imagenet", "heterogeneity": ["dir:0.01", "dir:0.1", "dir:0.5"]}],
    setting={"seeds": [0], "rounds": 1},
    methods={"labels": "fedavg"},
)

FEDALA = Paper(
    titles={"fedala": "FedALA (AAAI 2023)"},
    words={"measure": "personal", "model": "cnn4", "clients": 20, "participation": 1.0},
    setting={
        "training": {"learning_rate": 0.005, "batch_size": 10, "epochs": 1, "drop_last": True},
        "rounds": 2000,
        "evaluate_every": 1,
        "personal": True,
        "seeds": [0, 1, 2, 3, 4],
    },
    changes={
        "dataset": {
            "mnist": Change(
                label="MNIST",
                setting={"data": "mnist(normalise=half)", "training": {"learning_rate": 0.1}},
            ),
            "cifar10": Change(label="CIFAR-10", setting={"data": "cifar10(normalise=half)"}),
            "cifar100": Change(label="CIFAR-100", setting={"data": "cifar100(normalise=half)"}),
            "tiny_imagenet": Change(
                label="Tiny-ImageNet",
                setting={"data": "tiny_imagenet(normalise=half, test=held_out)"},
            ),
            "ag_news": Change(label="AG News", setting={"data": "ag_news(vocabulary_from=all)"}),
        },
        # Batch-norm statistics never leave the clients in the authors' code, which sends only
        # parameters. (FedProx-C without fine-tuning is FedProx; the other methods here do not send
        # their statistics by default.)
        "model": {
            "cnn4": Change(setting={"model": "cnn4"}),
            "fasttext": Change(setting={"model": "fasttext", "training": {"learning_rate": 0.1}}),
            "resnet18": Change(
                label="ResNet-18",
                setting={"model": "resnet18", "training": {"learning_rate": 0.1}},
                methods={"FedAvg": "silobn", "FedProx": "fedprox_c(finetune_epochs=0, mu=0.001)"},
            ),
        },
        # at least min(B / (1 - 0.75), n / (2 N)) samples: 40 with batches of 10 in all settings
        "heterogeneity": {
            "dir:0.01": Change(
                label="Dir(0.01)", setting={"partition": "dirichlet(0.01, minimum=40)"}
            ),
            "dir:0.1": Change(
                label="Dir(0.1)", setting={"partition": "dirichlet(0.1, minimum=40)"}
            ),
            "dir:0.5": Change(
                label="Dir(0.5)", setting={"partition": "dirichlet(0.5, minimum=40)"}
            ),
            "dir:1": Change(label="Dir(1)", setting={"partition": "dirichlet(1, minimum=40)"}),
            "pathological:2": Change(
                label="pathological", setting={"partition": "pathological(2)"}
            ),
            "pathological:10": Change(
                label="pathological", setting={"partition": "pathological(10)"}
            ),
        },
        "clients": {
            20: Change(setting={"clients": 20}),
            50: Change(label="50 clients", setting={"clients": 50}),
            100: Change(label="100 clients", setting={"clients": 100}),
        },
        "participation": {
            0.5: Change(label="50% of them", setting={"participation": 0.5}),
            1.0: Change(setting={"participation": 1.0}),
        },
    },
    rules=[Rule(when={"metric": "test_acc_pct_joining_clients"}, words={"measure": "joining"})],
    methods={
        "FedAvg": "fedavg",
        "FedProx": "fedprox(mu=0.001)",
        "FedAvg-C": "fedavg_c(finetune_epochs=10)",
        "FedProx-C": "fedprox_c(finetune_epochs=10, mu=0.001)",
        "Per-FedAvg": "per_fedavg(passes=2)",
        "FedRep": "fedrep(head_epochs=5)",
        "pFedMe": (
            "pfedme(regularisation=15.0, personal_rate=0.01, inner_steps=5, beta=1.0, "
            "inner_weight_decay=0.001)"
        ),
        "Ditto": "ditto(regularisation=0.1, personal_epochs=2)",
        "FedAMP": "fedamp(alpha=1000.0, regularisation=1.0, sigma=0.1, norm=plain)",
        "FedPHP": "fedphp(mu=0.9, transfer=0.01, deployed=local)",
        "FedFomo": "fedfomo",
        "APPLE": "apple(relation_rate=0.01, mu=0.1, decline=0.2, initial=uniform, variant=pfllib)",
        "PartialFed": "partialfed(model_batches=8, strategy_batches=2)",
        # ALA's weights are learned as in the authors' code: threshold=0.01 and `ala_code`.
        "FedALA": "fedala_code(p=1, percent=80.0, rate=1.0, threshold=0.01)",
        "FedAvg+ALA": "ala_code(fedavg, threshold=0.01)",
        "FedProx+ALA": "ala_code(fedprox(mu=0.001), threshold=0.01)",
        "Per-FedAvg+ALA": "ala_code(per_fedavg(passes=2), threshold=0.01)",
        "FedRep+ALA": "ala_code(fedrep(head_epochs=5), threshold=0.01)",
        "pFedMe+ALA": (
            "ala_code(pfedme(regularisation=15.0, personal_rate=0.01, inner_steps=5, beta=1.0, "
            "inner_weight_decay=0.001), threshold=0.01)"
        ),
        "Ditto+ALA": "ala_code(ditto(regularisation=0.1, personal_epochs=2), threshold=0.01)",
        "FedAMP+ALA": (
            "ala_code(fedamp(alpha=1000.0, regularisation=1.0, sigma=0.1, norm=plain), "
            "threshold=0.01)"
        ),
        "FedPHP+ALA": "ala_code(fedphp(mu=0.9, transfer=0.01, deployed=local), threshold=0.01)",
        "PartialFed+ALA": (
            "ala_code(partialfed(model_batches=8, strategy_batches=2), threshold=0.01)"
        ),
    },
    hour=Hour(
        exhibit="fedala.table-2",
        limits={
            "rows": ["FedAvg", "FedALA", "Ditto", "FedRep"],
            "columns": ["CIFAR-10 Dir(0.1)"],
            "rounds": 200,
            "seeds": [0],
            "samples": 6000,
        },
        can=(
            "that personal models are far better than the global one, and who of four methods "
            "leads on a tenth of the samples"
        ),
        cannot="the printed numbers, which are of 60,000 samples, 2,000 rounds and five runs",
    ),
    not_run={
        "fedala.figure-1": "a drawing",
        "fedala.figure-2": "a drawing",
        "fedala.table-5": "a list of which layers each p covers, no result",
    },
    templates=[
        _TABLE_1,
        ExhibitTemplate(
            ids=("fedala.table-2",), shows="personal accuracy, 14 methods", numbers="fedala/2"
        ),
        # Minutes in all and a round, on the authors' machine, and models sent by one client: 2, M =
        # N = 20 or M = N - 1; FedRep's 2 alpha_f depends on the model.
        ExhibitTemplate(
            ids=("fedala.table-3",),
            shows="time and traffic",
            numbers="fedala/3",
            words={"sent": 2.0},
            rules=[
                Rule(when={"method": "FedRep"}, words={"sent": ""}),
                Rule(when={"method": "FedFomo"}, words={"sent": 21.0}),
                Rule(when={"method": "APPLE"}, words={"sent": 20.0}),
            ],
            cells=[
                CellTemplate(column="{setting} time", measure="total", printed="total_time_min"),
                CellTemplate(
                    column="{setting} time a round", measure="minutes", printed="time_per_iter_min"
                ),
                CellTemplate(
                    column="{setting} time over FedAvg's",
                    measure="slower",
                    printed="time_per_iter_min",
                    baseline="FedAvg",
                    relative=True,
                ),
                CellTemplate(
                    column="{setting} models sent", measure="models", a_client=True, printed="sent"
                ),
            ],
        ),
        ExhibitTemplate(
            ids=("fedala.table-4",),
            shows="heterogeneity, scale, ALA on other methods",
            numbers="fedala/4",
            cells=[
                CellTemplate(),
                CellTemplate(
                    needs="improvement",
                    column="{setting} improvement",
                    measure="improvement",
                    printed="improvement",
                    baseline="{alone}",
                ),
            ],
        ),
        replace(
            _TABLE_1,
            ids=("fedala.table-6",),
            shows="ranges p of layers, CNN and fastText",
            numbers="fedala/6",
        ),
        ExhibitTemplate(
            ids=("fedala.table-7",),
            shows="MNIST Dir(0.1); half of 100 clients a round",
            numbers="fedala/7",
        ),
        # At least six epochs of weight learning in each round, in the default heterogeneous setting
        # (the caption names no other).
        ExhibitTemplate(
            ids=("fedala.figure-3",),
            shows="loss while ALA's weights are learned, client 8",
            over=[{"dataset": ["mnist", "cifar10"], "heterogeneity": "dir:0.1"}],
            setting={"seeds": [0], "record": ["ala(client=8)"]},
            methods={
                "FedALA": "fedala_code(p=1, percent=80.0, rate=1.0, threshold=0.01, epochs=6)"
            },
        ),
        # Rounds 140 to 200; ALA begins in round 156.
        ExhibitTemplate(
            ids=("fedala.figure-4",),
            shows="models of client 4 over its loss surface",
            over=[{"dataset": "mnist", "heterogeneity": "pathological:2"}],
            setting={"seeds": [0], "rounds": 200, "record": ["trajectory(client=4, first=140)"]},
            methods={
                "FedAvg": "fedavg",
                "FedALA": (
                    "fedala_code(p=1, percent=80.0, rate=1.0, threshold=0.01, start_round=156)"
                ),
            },
        ),
        # A dot every 60 rounds.
        ExhibitTemplate(
            ids=("fedala.figure-5",),
            shows="objective before and after local training",
            over=[{"dataset": "mnist", "heterogeneity": "pathological:2", "method": "FedALA"}],
            setting={"seeds": [0], "record": ["objective(every=60)"]},
        ),
        _FIGURE_6,
        replace(
            _FIGURE_6,
            ids=("fedala.figure-7",),
            shows="labels of the clients, pathological",
            over=[
                {"dataset": ["mnist", "cifar10"], "heterogeneity": "pathological:2"},
                {"dataset": "cifar100", "heterogeneity": "pathological:10"},
            ],
        ),
        replace(
            _FIGURE_6,
            ids=("fedala.figure-8",),
            shows="labels of the clients, Dir(0.1)",
            over=[{"dataset": ["mnist", "cifar10", "cifar100"], "heterogeneity": "dir:0.1"}],
        ),
        replace(
            _FIGURE_6,
            ids=("fedala.figure-9",),
            shows="labels of 50 and 100 clients, CIFAR-100",
            over=[{"dataset": "cifar100", "heterogeneity": "dir:0.1", "clients": [50, 100]}],
        ),
    ],
)
