"""The stacked engine gives the numbers of the rows engine, with every method and however clients train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.algorithm import algorithms, build
from fedloom.engines.local import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.federation import Federation
from fedloom.schedule import Schedule
from fedloom.task import Task
from fedloom.training import Training
from naive import World

SIZES = (9, 22, 5, 14, 13, 7)
TRAINING = Training(learning_rate=0.05, momentum=0.5, weight_decay=1e-2, decay=0.9, epochs=2, batch_size=4)
NESTED = {
    "stages": "stages(fedavg:1, fedmr)",
    "umf": "umf(feddc)",
    "clustered": "clustered(fedmr)",
    "ala": "ala(fedmr)",
    "secure": "secure(fedmr)",
}
OPTIONS = {"pfedme": "pfedme(regularisation=5.0)"}
METHODS = sorted(
    {NESTED.get(entry.name, OPTIONS.get(entry.name, entry.name)) for entry in algorithms}
    | {
        "stages(fedavg:auto, fedmr, patience=1)",
        "umf(moon)",
        "umf(fedmr, simulate_all=true)",
        "ala(fedavg, p=3, window=2, max_epochs=4)",
        "fedala(frozen=true, eval_point='after_train', window=2, max_epochs=3)",
        "scaffold(option=1)",
        "per_fedavg(variant='hessian_free')",
        "fedasam(statistics_once=true)",
        "fedgen(batch_ratio=true)",
        "fedfomo(models=2, exploration=0.3)",
        "fedphp(transfer=0.5)",
        "fedper(buffers='average')",
    }
)
EVERYBODY = ("apple", "fedamp")


def federated(engine: type[RowsEngine], task: Task, method: str, rounds: int = 3, **options: Any) -> Federation:
    schedule = Schedule(
        rounds=rounds, participation=1.0 if method.startswith(EVERYBODY) else 0.7, seed=3, evaluate_every=1
    )
    federation = Federation(build(method), task, engine(task, **options), schedule)
    federation.run()
    return federation


def assert_same(one: Federation, many: Federation, tolerance: float = 1e-8) -> None:
    """The same server state, memory, figures and bytes."""
    engine = many.engine
    assert isinstance(engine, StackedEngine)
    assert engine.unstackable is None
    assert engine.alone == {}
    pairs = ((one.algorithm.full_state(), many.algorithm.full_state()), (one.engine.memory(), engine.memory()))
    for expected, found in pairs:
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            torch.testing.assert_close(
                found[name], tensor, rtol=tolerance, atol=tolerance, equal_nan=True, msg=f"{name} differs"
            )
    assert torch.equal(one.integers, many.integers)
    for before, after in zip(one.history, many.history, strict=True):
        assert before.keys() == after.keys()
        for name in ("clients", "faults", "bytes_up", "bytes_down"):
            assert before[name] == after[name]
        for name, figure in before.items():
            if isinstance(figure, float):
                assert after[name] == pytest.approx(figure, rel=1e-5, abs=1e-6), name


def world(norm: bool = True, **changes: Any) -> Task:
    return World(norm=norm, sizes=SIZES, training=replace(TRAINING, **changes)).task()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_numbers_of_rows(method: str) -> None:
    task = world()
    assert_same(federated(RowsEngine, task, method), federated(StackedEngine, task, method))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.0, "weight_decay": 0.0},
        {"optimiser_options": {"nesterov": True}},
        {"optimiser_options": {"dampening": 0.3}},
        {"clip": 0.3},
        {"optimiser": "adam", "momentum": 0.0},
        {"optimiser": "adagrad", "momentum": 0.0},
        {"steps": 7},
        {"drop_last": True},
        {"batch_size": None},
        {"batch_size": 1000, "epochs": 3},
    ],
    ids=str,
)
def test_every_way_to_train_gives_the_numbers_of_rows(changes: dict[str, Any], norm: bool) -> None:
    task = world(norm, **changes)
    assert_same(federated(RowsEngine, task, "fedprox"), federated(StackedEngine, task, "fedprox"))
    assert_same(federated(RowsEngine, task, "fedavg"), federated(StackedEngine, task, "fedavg", chunk=3))
