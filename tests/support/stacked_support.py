"""Tasks and federations to compare stacks with the rows engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import engine_support
from every_method import EVERYBODY, PRIVATE, WRAPPERS
from fedloom.algorithm import algorithms
from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from naive import World

SIZES = (9, 22, 5, 14, 13, 7)

TRAINING = Training(
    learning_rate=0.05, momentum=0.5, weight_decay=1e-2, decay=0.9, epochs=2, batch_size=4
)

OPTIONS = {"pfedme": "pfedme(regularisation=5.0)"}

METHODS = sorted(
    {
        WRAPPERS.get(entry.name, OPTIONS.get(entry.name, entry.name))
        for entry in algorithms
        if entry.name not in PRIVATE
    }
    | {
        "stages(fedavg:auto, fedmr, patience=1)",
        "umf(moon)",
        "umf(fedmr, simulate_all=true)",
        "ala(fedavg, p=3, window=2, max_epochs=4)",
        "fedala(window=2, max_epochs=3)",
        "scaffold(option=1)",
        "scaffold_feddc",
        "per_fedavg(variant='hessian_free')",
        "fedfomo(models=2, exploration=0.3)",
        "fedphp(transfer=0.5)",
        "fedper(buffers='average')",
    }
)


def federated(
    engine: type[RowsEngine], task: Task, method: str, rounds: int = 3, **options: Any
) -> Federation:
    schedule = Schedule(
        rounds=rounds,
        participation=1.0 if method.startswith(EVERYBODY) else 0.7,
        seed=3,
        evaluate_every=1,
    )
    federation = Federation(build(method), task, engine(task, **options), schedule)
    federation.run()
    return federation


def assert_same(
    expected: Federation, actual: Federation, tolerance: float = 1e-8, notices: Sequence[str] = ()
) -> None:
    """Assert equal state, memory, figures and bytes; engines may issue only these notices."""
    assert actual.engine.notices == list(notices)
    engine_support.assert_same(actual, expected, tolerance)


def world(norm: bool = True, **changes: Any) -> Task:
    return World(norm=norm, sizes=SIZES, training=replace(TRAINING, **changes)).task()


def perceptron(*widths: int) -> nn.Module:
    """Return layers of these widths with ReLU between, in double precision."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1]).double()
