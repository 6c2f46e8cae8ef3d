"""Every registered method once, as an expression; a new method joins by itself, a new wrapper with one line here."""

from __future__ import annotations

from fedloom.algorithm import algorithms

# Wrappers need a method to wrap.
WRAPPERS = {
    "stages": "stages(fedavg:1, fedmr)",
    "umf": "umf(feddc)",
    "clustered": "clustered(fedmr)",
    "ala": "ala(fedmr)",
    "secure": "secure(fedmr)",
    "robust": "robust(fedavg)",
    "quantised": "quantised(fedavg, bits=4, down=8)",
    "sparse": "sparse(fedavg, share=0.3)",
    "lowrank": "lowrank(fedavg, rank=1)",
    "fedbuff": "fedbuff(fedavg, k=2)",
    "fedasync": "fedasync(fedavg)",
    "fedmr_async": "fedmr_async(k=2)",  # no wrapper, but tests have fewer than 10 clients in a round
    # Models with batch norm cannot be private: this hides nothing, and passes everything on.
    "private": "private(fedavg, clip=none, noise=0)",
    "local_private": "local_private(fedmr, clip=none, noise=0)",
    "dp_sgd": "dp_sgd(fedavg, clip=none, noise=0)",
    "fedntd": "fedntd(fedmr)",
    "fedlc": "fedlc(fedavg)",
    "feddecorr": "feddecorr(scaffold)",
    "power_of_choice": "power_of_choice(fedavg)",
    "qfedavg": "qfedavg(q=0.1)",  # tests are too short for larger ones, which make smaller steps
    "cfl": "cfl(mean_norm=1000.0, client_norm=0.0, first_round=0)",  # so that it splits in a short test
}
EVERY_METHOD = sorted(WRAPPERS.get(entry.name, entry.name) for entry in algorithms)
EVERYBODY = ("afl", "apple", "cfl", "fedamp")
"""Beginnings of methods that need all clients in every round."""
