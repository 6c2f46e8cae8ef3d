"""FedBench's row of MNIST: nine methods with label skew, in the setting of NIID-Bench.

Ten clients, all in every round, ten local epochs of SGD with momentum, pixels with mean 0 and
deviation 1. The page prints neither the number of local epochs (its script runs 10, 20 and 30) nor
the round of the accuracy; here it is the best of 50 rounds with 10 epochs. FedBN's model has no
batch norm, so it is FedAvg. MOON's model there has a projection head. FedAdam and FedYogi have
Flower's defaults.

In the public code (fedbench 0.1.3) a client's control variate of SCAFFOLD is c_i - c + (w_i - w_t)
/ (K eta), with the opposite sign of the displacement, and each round begins with zero variates of
the clients. This is a likely reason for 62 % where NIID-Bench prints 99 %.
"""

from fedloom.reviews.papers.paper import ExhibitTemplate, Hour, Paper
from fedloom.reviews.papers.published.niid_bench_paper import NIID_BENCH

MNIST = NIID_BENCH.changes["dataset"]["mnist"]

FEDBENCH = Paper(
    titles={"fedbench": "FedBench (Nechba et al. 2025), its page of results"},
    words={"measure": "best", "dataset": "mnist"},
    setting={**NIID_BENCH.setting, "data": "mnist(normalise='standard')"},
    changes={"heterogeneity": NIID_BENCH.changes["heterogeneity"]},
    methods={
        "FedAvg": "fedavg",
        "FedProx": "fedprox(mu=0.01)",
        "SCAFFOLD": "scaffold",
        "FedNova": "fednova",
        "FedAdagrad": "fedadagrad(learning_rate=0.1, adaptivity=0.2)",
        "FedYogi": "fedyogi(learning_rate=0.01, adaptivity=0.001)",
        "FedAdam": "fedadam(learning_rate=0.1, adaptivity=1e-9)",
        "MOON": "moon(mu=5)",
        "FedBN": "fedavg",
    },
    hour=Hour(
        exhibit="fedbench.table-mnist",
        limits={"columns": ["2 labels"], "rounds": 5, "seeds": [0]},
        can="all methods with two labels a client, five of fifty rounds, one seed",
        cannot="the printed numbers (fifty rounds, three seeds)",
    ),
    templates=[
        ExhibitTemplate(
            ids=("fedbench.table-mnist",),
            shows="best test accuracy, MNIST, nine methods",
            numbers="fedbench/MNIST",
        ),
    ],
)
