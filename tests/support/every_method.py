"""Every registered public method as an expression.

A new method joins automatically; a new wrapper needs one line.
"""

from __future__ import annotations

from fedloom.algorithm import algorithms

# Wrappers need a method to wrap.
WRAPPERS = {
    "stages": "stages(fedavg:1, fedmr)",
    "umf": "umf(feddc)",
    "clustered": "clustered(fedmr)",
    "ala": "ala(fedmr, max_epochs=5)",  # the initial stage takes up to 200 epochs by default
    "fedala": "fedala(max_epochs=5)",
    "fedala_code": "fedala_code(max_epochs=5)",
    "ala_code": "ala_code(fedprox, max_epochs=5)",
    "secure": "secure(fedmr)",
    "robust": "robust(fedavg)",
    "quantised": "quantised(fedavg, bits=4, down=8)",
    "sparse": "sparse(fedavg, share=0.3)",
    "lowrank": "lowrank(fedavg, rank=1)",
    "fedbuff": "fedbuff(fedavg, k=2)",
    "fedasync": "fedasync(fedavg)",
    # no wrapper, but tests have fewer than 10 clients in a round
    "fedmr_async": "fedmr_async(k=2)",
    # no wrapper, but the default takes long
    "fedgen": "fedgen(generator_steps=5, generator_batch=16, hidden=16, noise=8)",
    "fedntd": "fedntd(fedmr)",
    "fedlc": "fedlc(fedavg)",
    "feddecorr": "feddecorr(scaffold)",
    "power_of_choice": "power_of_choice(fedavg)",
    "gossip": "gossip(fedavg)",
    "norm_bound": "norm_bound(fedavg, radius=0.5)",
    "sign_flip": "sign_flip(fedavg)",
    "qfedavg": "qfedavg(q=0.1)",  # larger ones make too small steps for tests
    "cluster_fedvarp": "cluster_fedvarp(clusters=2)",
    "ca2fl": "ca2fl(k=2)",
    "longest_idle": "longest_idle(fedprox)",
    "ema": "ema(fedavg)",
    "fisher_merge": "fisher_merge(fedmr)",
    "last": "last(fedprox, n=2)",
    "partial_work": "partial_work(fednova, stragglers=0.6)",
    # so that it splits in a short test
    "cfl": "cfl(mean_norm=1000.0, client_norm=0.0, first_round=0)",
}
PRIVATE = ("private", "local_private", "dp_sgd")
"""Methods that refuse the batch norm of the tests' models: `test_places` and other tests run
them.
"""
EVERY_METHOD = sorted(
    WRAPPERS.get(entry.name, entry.name) for entry in algorithms if entry.name not in PRIVATE
)
EVERYBODY = ("afl", "apple", "cfl", "fedamp", "gossip")
"""Prefixes of methods that need all clients in every round."""
