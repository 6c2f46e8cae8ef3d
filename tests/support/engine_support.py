"""Runs on an engine and their comparison with the rows engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.algorithm.method import Method
from fedloom.algorithm.records import INTEGERS
from fedloom.common.round import Round
from fedloom.data.dataset import Samples
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Engine, Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from process_support import wide_task
from small_task import TRAIN_SIZES

CLIENTS = len(TRAIN_SIZES)
TASK = wide_task()
NAMES = ("Aachen", "Bern", "Cork", "Delft", "Essen", "Faro")

COUNTED = ("round", "clients", "bytes_down", "bytes_up", "faults")
"""Figures that are equal in each engine. All others are measured."""

LARGEST = 1e20
"""Limit of figures: a ratio to a rounding error has no digits."""


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
    """Assert that all figures, the state and the memory of all clients are equal.

    Args:
        actual: A run on any engine.
        expected: The same run on another engine.
        tolerance: Largest difference of tensors, relative and absolute. Without it, tensors and
            figures must be equal bit by bit.
    """
    pairs = (
        (actual.server_state(), expected.server_state()),
        (actual.engine.memory(), expected.engine.memory()),
        ({"integers": actual.integers}, {"integers": expected.integers}),
    )
    for tensors, expected_tensors in pairs:
        assert_close(tensors, expected_tensors, tolerance)
    histories = (
        (actual.history, expected.history),
        (actual.client_history, expected.client_history),
    )
    for records, expected_records in histories:
        for record, expected_record in zip(records, expected_records, strict=True):
            assert_same_figures(record, expected_record, bool(tolerance))


def assert_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    """Assert equal names, types and values of tensors."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name],
            tensor,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_same_figures(actual: Any, expected: Any, rounded: bool, name: str = "") -> None:
    """Assert equal figures of a round. Measured ones may differ in their last digits."""
    rounded = rounded and name not in COUNTED
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_figures(actual[key], value, rounded, key)
    elif isinstance(expected, list):
        assert len(actual) == len(expected), name
        for entry, value in zip(actual, expected, strict=True):
            assert_same_figures(entry, value, rounded, name)
    elif rounded and isinstance(expected, float):
        near = pytest.approx(min(expected, LARGEST), rel=1e-5, abs=1e-6, nan_ok=True)
        assert min(actual, LARGEST) == near, name
    else:
        assert actual == expected, name


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
    schedule = Schedule(rounds=1, participation=1.0)
    return Federation(algorithm, engine.task, engine, schedule).pipeline


def in_precision(task: Task, dtype: torch.dtype) -> Task:
    """Return a task with the model and the samples in this floating-point type."""

    def converted(samples: Samples) -> Samples:
        tensors = {name: getattr(samples, name) for name in ("inputs", "labels")}
        return replace(
            samples,
            **{
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()
            },
        )

    train = converted(task.train)
    test = converted(task.test)
    dataset = replace(task.dataset, train=train, test=test)
    model = copy.deepcopy(task.model).to(dtype)
    return replace(task, dataset=dataset, train=train, test=test, model=model)


def named_task() -> Task:
    """Return `TASK` with a name for each client."""
    groups = torch.zeros(len(TASK.train), dtype=torch.int64)
    for client in range(CLIENTS):
        start, stop = TASK.partition.offsets[client : client + 2].tolist()
        groups[TASK.partition.indices[start:stop]] = client
    return replace(TASK, train=replace(TASK.train, groups=groups, group_names=NAMES))
