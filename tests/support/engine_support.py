"""Runs on an engine and their comparison with the rows engine, for tests of processes and Ray."""

from __future__ import annotations

from typing import Any

import torch

from fedloom.algorithm.method import Method
from fedloom.algorithm.records import INTEGERS
from fedloom.common.round import Round
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Engine, Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from process_support import wide_task
from ray_support import counted
from small_task import TRAIN_SIZES

CLIENTS = len(TRAIN_SIZES)
TASK = wide_task()


def run(
    algorithm: Method,
    engine: Engine,
    *,
    task: Task = TASK,
    rounds: int = 3,
    participation: float = 1.0,
    **options: Any,
) -> Federation:
    """Return the federation after its last round; every round is evaluated."""
    schedule = Schedule(rounds, participation, **{"seed": 3, "evaluate_every": 1, **options})
    federation = Federation(algorithm, task, engine, schedule)
    federation.run()
    return federation


def assert_same(actual: Federation, expected: Federation, tolerance: float = 0.0) -> None:
    """Assert that all counted figures, the state and the memory of all clients are equal.

    Without a tolerance, all measured figures must be equal too.
    """
    assert counted(actual.history) == counted(expected.history)
    if not tolerance:
        assert actual.history == expected.history
        assert actual.client_history == expected.client_history
    states = actual.server_state(), expected.server_state()
    memories = actual.engine.memory(), expected.engine.memory()
    for actual_tensors, expected_tensors in (states, memories):
        assert actual_tensors.keys() == expected_tensors.keys()
        for name, tensor in expected_tensors.items():
            torch.testing.assert_close(
                actual_tensors[name], tensor, rtol=0, atol=tolerance, equal_nan=True, msg=name
            )


def jobs(engine: Engine) -> tuple[Round, list[Job]]:
    """Return a round with all clients, and the message to each of them: the initial model."""
    inbox = {
        "model": engine.task.initial.unsqueeze(0),
        INTEGERS: engine.task.initial_integers.unsqueeze(0),
    }
    selected = tuple(range(CLIENTS))
    return Round(1, 1, 0, CLIENTS, CLIENTS, 0.1, 0.1, selected=selected), [
        Job(k, k, inbox) for k in selected
    ]


def set_up(engine: Engine, algorithm: Method) -> Pipeline:
    """Return the pipeline of the first round of a federation on this engine."""
    return Federation(algorithm, TASK, engine, Schedule(rounds=1, participation=1.0)).pipeline
