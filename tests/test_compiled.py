"""Compiled steps give the numbers of the others, take only full batches, and say so where they cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.engines import trial
from fedloom.engines.choose import make_engine
from fedloom.engines.rows import RowsEngine, full_batch
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import FedloomError
from fedloom.flat.compiled import CompiledGradient
from fedloom.flat.module import Batch, FlatModule, data_loss, head_loss
from fedloom.task import Task
from ray_support import descendants
from small_task import small_task
from test_stacked import assert_same, federated, world


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the labels of every step that was compiled; what compiling keeps goes to a folder of the test's own, and no
    process is left of it."""
    processes = descendants()
    shapes: list[tuple[int, ...]] = []
    call = CompiledGradient.__call__

    def noted(self: CompiledGradient, trained: Any, held: Any, inputs: Tensor, labels: Tensor, *, stacked: bool) -> Any:
        shapes.append(tuple(labels.shape))
        return call(self, trained, held, inputs, labels, stacked=stacked)

    monkeypatch.setattr(CompiledGradient, "__call__", noted)
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is put back, whatever compiling sets
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    yield shapes
    assert descendants() == processes


def test_compiled_rows_give_the_numbers_of_rows(taken: list[tuple[int, ...]], tmp_path: Path) -> None:
    """Batch norm moves its statistics and its count, and dropout draws what it draws in eager torch."""
    task = small_task(own_test=False)
    compiled = federated(RowsEngine, task, "fedavg", rounds=2, compiled=True)
    assert set(taken) == {(4,)}  # clients of 9, 5, 7 and 3 samples have short batches too
    assert_same(federated(RowsEngine, task, "fedavg", rounds=2), compiled, 1e-5)
    assert any((tmp_path / "compiled").rglob("*")), "the next process finds what was compiled"


def test_compiled_stacks_give_the_numbers_of_rows(taken: list[tuple[int, ...]]) -> None:
    """Clients of 9, 22, 5, 14, 13 and 7 samples, two at a time: with the second batch, short for one client, both go apart."""
    task = world()
    compiled = federated(StackedEngine, task, "fedavg", rounds=2, compiled=True, chunk=2)
    assert set(taken) == {(2, 4)}
    assert_same(federated(RowsEngine, task, "fedavg", rounds=2), compiled)


def test_methods_with_a_loss_of_their_own_train_as_ever(taken: list[tuple[int, ...]]) -> None:
    flat_module = FlatModule(small_task().model, small_task().layout)
    flat_module.compile_for(4, print)
    batch = Batch(torch.randn(1, 4, 5), torch.tensor([[0, 1, 2, 3]]))
    rows = small_task().initial.clone().unsqueeze(0)
    flat_module.gradient(rows, batch._replace(inputs=torch.randn(1, 4, 6)), head_loss, {})
    flat_module.autocast = torch.bfloat16
    flat_module.gradient(rows, batch, data_loss, {})
    assert taken == []


def test_a_full_batch_is_that_of_the_largest_client() -> None:
    task = small_task()
    assert full_batch(task) == 4
    for size, found in ((100, 12), (None, 12), (1, 1)):
        assert full_batch(replace(task, training=replace(task.training, batch_size=size))) == found


class Branching(nn.Module):
    """Looks at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.out(inputs)
        return logits if float(inputs.sum()) > 0 else 2 * logits


def test_a_model_that_cannot_be_compiled_is_named_in_one_line(taken: list[tuple[int, ...]]) -> None:
    task = replace(small_task(own_test=False), model=Branching())
    with pytest.raises(FedloomError, match=r"^compiled=true: torch.compile has no way here: [^\n]+$"):
        federated(RowsEngine, task, "fedavg", rounds=1, compiled=True)


@pytest.mark.parametrize("model", [None, Branching()])
def test_auto_tries_compiled_stacks_where_operations_are_dear_to_start(
    monkeypatch: pytest.MonkeyPatch, taken: list[tuple[int, ...]], model: nn.Module | None
) -> None:
    """As on CUDA; a model that cannot be compiled, and so not stacked either, is no trouble."""
    monkeypatch.setattr(trial, "_launches_kernels", lambda task: True)
    monkeypatch.setattr(trial, "has_cores", lambda task: False)
    task: Task = world(False) if model is None else replace(small_task(), model=model)
    engine = make_engine("auto", task)
    assert engine.chosen is not None
    assert ("stacked(compiled=True)" in engine.chosen.seconds) == (model is None)
