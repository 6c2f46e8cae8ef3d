"""FedUmf: settings, methods, tables and figures.

Main part (tables 1 to 4, figures 3 to 10): 100 clients, batch 50, one local epoch, momentum 0.5,
weight decay 5e-4; McMahan's CNN on MNIST for 150 rounds, ResNet-18 on CIFAR-10 for 300. FedAvg
averages with equal weights (algorithm 1). Appendix (tables A1 and A2, figures A1 to A5): FedDC's
protocol with one local epoch, learning rate 0.1 decayed by 0.998, weight decay 1e-3, clipping at
10; 300 rounds on MNIST and EMNIST-L, 600 on CIFAR. The methods are those of FedDC's code, with its
own way to count the proximal term and to divide; for SCAFFOLD every client takes as many steps as
one of mean size, E ceil(mean n / B), which differs in the unbalanced partition alone.
"""

from dataclasses import replace

from fedloom.reviews.papers.paper import CellTemplate, Change, ExhibitTemplate, Hour, Paper, Rule

_TABLE_1 = ExhibitTemplate(
    ids=("fedumf.table-1",),
    shows="rounds to an accuracy, MNIST IID",
    numbers="fedumf/1",
    words={"part": "main"},
    cells=[
        CellTemplate(
            column="{setting} to {target_acc_pct}%",
            measure="rounds",
            target="target_acc_pct",
            printed="rounds",
        )
    ],
)

_FIGURE_3 = ExhibitTemplate(
    ids=("fedumf.figure-3",),
    shows="FedUmf's alpha, MNIST IID, rate 0.01",
    words={"part": "main", "dataset": "mnist", "heterogeneity": "iid", "lr": 0.01},
    over=[{"participation": [0.1, 0.5]}],
    methods={
        "FedAvg": "fedavg(weighted=false)",
        "FedUmf 0.1": "umf(fedavg(weighted=false), alpha=0.1)",
        "FedUmf 0.5": "umf(fedavg(weighted=false), alpha=0.5)",
        "FedUmf 1": "umf(fedavg(weighted=false), alpha=1)",
    },
)

_FIGURE_A1 = ExhibitTemplate(
    ids=("fedumf.figure-a1",),
    shows="curves of all methods, MNIST",
    words={"part": "appendix", "dataset": "mnist"},
    over=[
        {
            "participation": [0.15, 0.65],
            "heterogeneity": ["iid", "iid_lognormal:0.3", "dir_class_prior:0.6"],
        }
    ],
)

FEDUMF = Paper(
    titles={"fedumf": "FedUmf (Mathematics 2022)"},
    words={"measure": "best"},
    setting={"clients": 100, "evaluate_every": 1},
    changes={
        "part": {
            "main": Change(
                setting={
                    "training": {
                        "momentum": 0.5,
                        "weight_decay": 0.0005,
                        "batch_size": 50,
                        "epochs": 1,
                    }
                },
                methods={"FedAvg": "fedavg(weighted=false)"},
            ),
            "appendix": Change(
                setting={
                    "rounds": 300,
                    "training": {
                        "learning_rate": 0.1,
                        "decay": 0.998,
                        "weight_decay": 0.001,
                        "clip": 10.0,
                        "batch_size": 50,
                        "epochs": 1,
                    },
                }
            ),
            # FedDC's generator, tested on the training data as in FedDC's code. The paper gives no
            # number of rounds; this number is ours.
            "synthetic": Change(
                setting={
                    "clients": 20,
                    "partition": "natural",
                    "model": "logistic(zero_init=true)",
                    "rounds": 200,
                    "training": {
                        "learning_rate": 0.1,
                        "weight_decay": 1e-05,
                        "clip": 10.0,
                        "batch_size": 10,
                        "epochs": 10,
                    },
                }
            ),
        },
        "dataset": {
            "mnist": Change(label="MNIST", setting={"data": "mnist"}),
            "emnist_l": Change(label="EMNIST-L", setting={"data": "emnist_l"}),
            "cifar10": Change(label="CIFAR-10", setting={"data": "cifar10"}),
            "cifar100": Change(label="CIFAR-100", setting={"data": "cifar100"}),
        },
        "heterogeneity": {
            "iid": Change(label="IID", setting={"partition": "iid"}),
            "pathological:2": Change(label="non-IID", setting={"partition": "shards(2)"}),
            "iid_lognormal:0.3": Change(
                label="unbalanced", setting={"partition": "lognormal(0.3)"}
            ),
            "dir_class_prior:0.6": Change(
                label="non-IID", setting={"partition": "class_prior(0.6)"}
            ),
            "synthetic:0,0": Change(
                label="synthetic (0,0)",
                setting={"data": "synthetic_feddc(alpha=0, beta=0, test=train)"},
            ),
            "synthetic:0,1": Change(
                label="synthetic (0,1)",
                setting={"data": "synthetic_feddc(alpha=0, beta=1, test=train)"},
            ),
            "synthetic:1,0": Change(
                label="synthetic (1,0)",
                setting={"data": "synthetic_feddc(alpha=1, beta=0, test=train)"},
            ),
        },
        "participation": {
            0.1: Change(label="10%", setting={"participation": 0.1}),
            0.15: Change(label="15%", setting={"participation": 0.15}),
            0.5: Change(label="50%", setting={"participation": 0.5}),
            0.65: Change(label="65%", setting={"participation": 0.65}),
        },
        "lr": {
            0.01: Change(label="rate 0.01", setting={"training": {"learning_rate": 0.01}}),
            0.05: Change(label="rate 0.05", setting={"training": {"learning_rate": 0.05}}),
        },
        "alpha": {
            0.5: Change(methods={"FedUmf": "umf(fedavg(weighted=false), alpha=0.5)"}),
            1.0: Change(methods={"FedUmf": "umf(fedavg(weighted=false), alpha=1)"}),
        },
    },
    rules=[
        Rule(
            when={"part": "main", "dataset": "mnist"},
            setting={"rounds": 150, "model": "mcmahan_cnn"},
        ),
        Rule(
            when={"part": "main", "dataset": "cifar10"},
            setting={"rounds": 300, "model": "resnet18(stem=cifar)"},
        ),
        Rule(
            when={"part": "appendix", "dataset": ["cifar10", "cifar100"]},
            setting={
                "rounds": 600,
                "model": "feddc_cnn",
                "training": {"augmentation": "flip_crop"},
            },
        ),
        Rule(
            when={"part": "appendix", "dataset": "mnist"},
            setting={"model": "feddc_fcn(hidden=200)"},
        ),
        Rule(
            when={"part": "appendix", "dataset": "emnist_l"},
            setting={"model": "feddc_fcn(hidden=100)"},
        ),
        # exactly 5 images of each class a client
        Rule(
            when={"part": "appendix", "dataset": "cifar100", "heterogeneity": "iid"},
            setting={"partition": "iid(balanced=true)"},
        ),
        Rule(
            when={"part": "appendix", "dataset": "cifar10", "heterogeneity": "dir_class_prior:0.6"},
            methods={"FedUmf+FedDC": "umf(feddc_code(alpha=0.01), alpha=0.5)"},
        ),
        Rule(
            when={"method": "SCAFFOLD", "heterogeneity": "iid_lognormal:0.3"},
            setting={"training": {"steps": 10}},
        ),
        Rule(
            when={"method": "SCAFFOLD", "heterogeneity": "iid_lognormal:0.3", "dataset": "mnist"},
            setting={"training": {"steps": 12}},
        ),
    ],
    methods={
        "FedAvg": "fedavg",
        "FedProx": "fedprox(mu=0.0001, prox_factor=1.0)",
        "SCAFFOLD": "scaffold_feddc",
        "FedDyn": "feddyn(alpha=0.01)",
        "FedDC": "feddc_code(alpha=0.01)",
        "FedUmf+FedDC": "umf(feddc_code(alpha=0.01), alpha=1)",
    },
    hour=Hour(
        exhibit="fedumf.table-a2",
        limits={"columns": ["MNIST"]},
        can=(
            "all of the table's MNIST cells, with the paper's whole protocol: the order of the "
            "methods and the speed-up that FedUmf brings"
        ),
        cannot="EMNIST-L, CIFAR-10 and CIFAR-100, whose convolutions take days",
    ),
    not_run={"fedumf.figure-1": "a drawing", "fedumf.figure-2": "a drawing"},
    templates=[
        _TABLE_1,
        replace(
            _TABLE_1,
            ids=("fedumf.table-2",),
            shows="rounds to an accuracy, MNIST non-IID",
            numbers="fedumf/2",
        ),
        replace(
            _TABLE_1,
            ids=("fedumf.table-3",),
            shows="rounds to an accuracy, CIFAR-10 IID",
            numbers="fedumf/3",
        ),
        replace(
            _TABLE_1,
            ids=("fedumf.table-4",),
            shows="rounds to an accuracy, CIFAR-10 non-IID",
            numbers="fedumf/4",
        ),
        ExhibitTemplate(
            ids=("fedumf.table-a1",),
            shows="test accuracy beside FedDC and others, 4 data sets",
            numbers="fedumf/A1",
            words={"part": "appendix"},
        ),
        ExhibitTemplate(
            ids=("fedumf.table-a2",),
            shows="rounds to one accuracy a data set",
            numbers="fedumf/A2",
            words={"part": "appendix"},
            cells=[
                CellTemplate(
                    column="{setting} to {target_acc_pct}%",
                    measure="rounds",
                    target="target_acc_pct",
                    printed="rounds",
                ),
                CellTemplate(
                    column="{setting} to {target_acc_pct}% speed-up",
                    measure="speedup",
                    target="target_acc_pct",
                    printed="speedup",
                    baseline="FedAvg",
                ),
            ],
        ),
        _FIGURE_3,
        replace(
            _FIGURE_3,
            ids=("fedumf.figure-4",),
            shows="FedUmf's alpha, MNIST IID, rate 0.05",
            words={"part": "main", "dataset": "mnist", "heterogeneity": "iid", "lr": 0.05},
        ),
        replace(
            _FIGURE_3,
            ids=("fedumf.figure-5",),
            shows="FedUmf's alpha, MNIST non-IID, rate 0.01",
            words={
                "part": "main",
                "dataset": "mnist",
                "heterogeneity": "pathological:2",
                "lr": 0.01,
            },
        ),
        replace(
            _FIGURE_3,
            ids=("fedumf.figure-6",),
            shows="FedUmf's alpha, MNIST non-IID, rate 0.05",
            words={
                "part": "main",
                "dataset": "mnist",
                "heterogeneity": "pathological:2",
                "lr": 0.05,
            },
        ),
        replace(
            _FIGURE_3,
            ids=("fedumf.figure-7",),
            shows="FedUmf's alpha, CIFAR-10 IID, rate 0.01",
            words={"part": "main", "dataset": "cifar10", "heterogeneity": "iid", "lr": 0.01},
        ),
        replace(
            _FIGURE_3,
            ids=("fedumf.figure-8",),
            shows="FedUmf's alpha, CIFAR-10 IID, rate 0.05",
            words={"part": "main", "dataset": "cifar10", "heterogeneity": "iid", "lr": 0.05},
        ),
        replace(
            _FIGURE_3,
            ids=("fedumf.figure-9",),
            shows="FedUmf's alpha, CIFAR-10 non-IID, rate 0.01",
            words={
                "part": "main",
                "dataset": "cifar10",
                "heterogeneity": "pathological:2",
                "lr": 0.01,
            },
        ),
        replace(
            _FIGURE_3,
            ids=("fedumf.figure-10",),
            shows="FedUmf's alpha, CIFAR-10 non-IID, rate 0.05",
            words={
                "part": "main",
                "dataset": "cifar10",
                "heterogeneity": "pathological:2",
                "lr": 0.05,
            },
        ),
        _FIGURE_A1,
        replace(
            _FIGURE_A1,
            ids=("fedumf.figure-a2",),
            shows="curves of all methods, EMNIST-L",
            words={"part": "appendix", "dataset": "emnist_l"},
        ),
        replace(
            _FIGURE_A1,
            ids=("fedumf.figure-a3",),
            shows="curves of all methods, CIFAR-10",
            words={"part": "appendix", "dataset": "cifar10"},
        ),
        replace(
            _FIGURE_A1,
            ids=("fedumf.figure-a4",),
            shows="curves of all methods, CIFAR-100",
            words={"part": "appendix", "dataset": "cifar100"},
        ),
        ExhibitTemplate(
            ids=("fedumf.figure-a5",),
            shows="curves of all methods, synthetic data",
            words={"part": "synthetic"},
            over=[
                {
                    "participation": [0.15, 0.65],
                    "heterogeneity": ["synthetic:0,0", "synthetic:0,1", "synthetic:1,0"],
                }
            ],
        ),
    ],
)
