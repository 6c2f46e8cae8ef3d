"""Runs on an engine and their comparison with the rows engine, for tests of processes and Ray."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.algorithm.method import Method
from fedloom.algorithm.records import INTEGERS
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import Diverged, InvalidValue
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Engine, Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from process_support import BadlyPersonal, Dividing, Failing, Misconfigured, wide_task
from ray_support import counted
from small_task import TRAIN_SIZES

CLIENTS = len(TRAIN_SIZES)
TASK = wide_task()
NAMES = ("Aachen", "Bern", "Cork", "Delft", "Essen", "Faro")


def named_task() -> Task:
    """Return `TASK` with a name for each client."""
    groups = torch.zeros(len(TASK.train), dtype=torch.int64)
    for client in range(CLIENTS):
        start, stop = TASK.partition.offsets[client : client + 2].tolist()
        groups[TASK.partition.indices[start:stop]] = client
    return replace(TASK, train=replace(TASK.train, groups=groups, group_names=NAMES))


def assert_errors_name_clients(engine: Engine) -> None:
    """Assert that notices and errors of a run name clients as in the data, and the round."""
    task = named_task()
    notices = run(Failing(), engine, task=task, rounds=2).notices
    for name, reason in (
        ("Aachen", r"ZeroDivisionError: .* by zero \(at .*process_support.py:\d+ in train\)"),
        ("Bern", "Private: 1 and 2"),
        ("Cork", "'model' is not finite"),
        ("Delft", "'model' has shape"),
    ):
        start = f"round 1 continues without a reply of client '{name}': "
        found = [text for text in notices if text.startswith(start)]
        assert len(found) == 1, notices
        assert re.search(reason, found[0])
    named = rf"round 1, clients? '({'|'.join(NAMES)})'"
    with pytest.raises(ZeroDivisionError) as caught:
        run(Dividing(), engine, task=task)
    assert re.fullmatch(named, "".join(caught.value.__notes__))
    with pytest.raises(InvalidValue, match=rf"^{named}.*: mu must be at least 0, not -1$"):
        run(Misconfigured(), engine, task=task)
    with pytest.raises(LookupError, match="no personal model") as personal:
        run(BadlyPersonal(), engine, task=task, personal_every=1)
    assert re.fullmatch(named, "".join(personal.value.__notes__))
    diverging = replace(task, training=Training(learning_rate=1e30))
    with pytest.raises(Diverged, match=r"no reply is finite, clients '.*', '.*', '.*' and 3 more;"):
        run(FedAvg(), engine, task=diverging)
    explosive = replace(task, training=Training(learning_rate=1e6))
    with pytest.raises(Diverged, match=r"client '\w+' has the highest training loss, \d"):
        run(FedAvg(), engine, task=explosive, rounds=9)


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
