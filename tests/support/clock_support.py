"""A task, and runs on the simulated clock."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedloom.common.training import Training
from fedloom.rounds.clock import Clock
from fedloom.runs.result import Result
from fedloom.runs.run import run
from fedloom.task import Task
from fedloom.task.making import make_task

STRAGGLERS = Clock(speed="stragglers(100, 10)", down=10_000, up="lognormal(5000, 0.5)")


def task(**options: Any) -> Task:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    training = Training(**{"learning_rate": 0.1, "batch_size": 20, **options})
    return make_task(
        "digits", clients=8, partition="dirichlet(1.0)", model=model, training=training
    )


def trained(method: str = "fedavg", clock: Clock = STRAGGLERS, **options: Any) -> Result:
    return run(
        method,
        task(),
        clock=clock,
        engine="rows",
        **{"rounds": 3, "participation": 0.5, "seed": 3, **options},
    )
