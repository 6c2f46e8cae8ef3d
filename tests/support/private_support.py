"""A task and federations with differential privacy."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task


@cache
def task(clients: int = 12) -> Task:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return make_task(
        "digits", clients=clients, model=model, training=Training(learning_rate=0.1, batch_size=20)
    )


def federation(
    expression: Any,
    rounds: int = 4,
    participation: float = 0.5,
    mode: Any = "poisson",
    **options: Any,
) -> Federation:
    schedule = Schedule(
        rounds=rounds,
        participation=participation,
        participation_mode=mode,
        evaluate_every=1,
        seed=2,
        **options,
    )
    return Federation(build(expression), task(), RowsEngine(task()), schedule)
