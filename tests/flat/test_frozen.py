"""Frozen parameters are not in rows: they are not sent, are stored once, and identify a run and its
model.

engines/test_conformance.py compares other engines with the rows engine for a model with a frozen layer.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.algorithm.records import Message, Replies
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import CheckpointError, InvalidValue
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.engines.pickling import dump
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.flat.layout import Layout
from fedloom.local.cohort import Cohort
from fedloom.models.structure import block_parameters, head_name
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from small_task import SmallNet, small_task

FEATURES, CLASSES = 5, 4


@dataclass
class HeldFixed(FedAvg):
    """FedAvg over full rows with a fixed layer `hidden`: the reference for a frozen layer."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        moving = cohort.layout.unit(lambda entry: entry.layer != "hidden")
        return {"model": cohort.fit(inbox["model"], only=moving).model}

    def receive(self, round: Round, replies: Replies) -> None:
        super().receive(round, replies)
        (fixed,) = self.plan.layout.unit(lambda entry: entry.layer == "hidden")
        self.state["model"][fixed] = replies["model"][0, fixed]  # a mean of equal numbers may round


def tasks(optimizer: str = "sgd") -> tuple[Task, Task]:
    """Return the small task with its first layer frozen, and unfrozen."""
    momentum = {"momentum": 0.5} if optimizer == "sgd" else {}
    unfrozen = replace(
        small_task(),
        training=Training(0.1, batch_size=4, epochs=2, optimizer=optimizer, **momentum),
    )
    frozen = replace(unfrozen, model=copy.deepcopy(unfrozen.model))
    frozen.model.hidden.requires_grad_(False)
    return frozen, unfrozen


def run(algorithm: FedAvg, task: Task, stacked: bool = False) -> Federation:
    engine = StackedEngine(task) if stacked else RowsEngine(task)
    federation = Federation(algorithm, task, engine, Schedule(2, 1.0, 3, evaluate_every=1))
    federation.run()
    return federation


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_frozen_layer_gives_the_bits_of_one_that_never_moves_and_is_not_sent(
    optimizer: str, stacked: bool
) -> None:
    frozen, unfrozen = tasks(optimizer)
    result, expected = run(FedAvg(), frozen, stacked), run(HeldFixed(), unfrozen, stacked)
    # A stack computes the shared layer in one product for all clients, so its last digits differ.
    tolerance = {"rtol": 0, "atol": 1e-6 if stacked else 0}
    state = unfrozen.module(expected.model()).state_dict()
    for name, tensor in frozen.module(result.model()).state_dict().items():
        if name != "norm.num_batches_tracked":  # rows of integers hold it
            torch.testing.assert_close(tensor, state[name], **tolerance)
    assert torch.equal(result.integers, expected.integers)
    hidden = FEATURES * 6 + 6
    assert frozen.layout.size == unfrozen.layout.size - hidden
    for record, reference in zip(result.history, expected.history, strict=True):
        assert record["loss"] == pytest.approx(reference["loss"], rel=1e-6 if stacked else 0)
        for direction in ("bytes_up", "bytes_down"):
            assert record[direction] == reference[direction] - 4 * hidden * len(record["clients"])


def test_frozen_tensors_are_stored_once() -> None:
    frozen, _ = tasks()
    engine = StackedEngine(frozen)
    weight = frozen.model.hidden.weight
    for module in (
        engine.flat_module.module,
        engine.flat_module.frozen,
        engine.stack.module,
        engine.evaluator.module,
    ):
        assert module.hidden.weight is weight
    _, buffers = dump(frozen)  # the task as sent to workers and actors
    addresses = [np.frombuffer(buffer.raw(), np.uint8).ctypes.data for buffer in buffers]
    assert addresses.count(weight.data_ptr()) == 1


def test_other_frozen_values_are_another_run_and_the_saved_model_holds_all_tensors(
    tmp_path: Path,
) -> None:
    frozen, _ = tasks()

    def go_on(task: Task, rounds: int) -> fl.Result:
        return fl.run(
            "fedavg",
            task,
            rounds=rounds,
            participation=1.0,
            seed=3,
            directory=tmp_path,
            engine="rows",
        )

    go_on(frozen, 1)
    longer = go_on(frozen, 2)
    assert torch.equal(longer.federation.model(), run(FedAvg(), frozen).model())
    saved = fl.load_model(tmp_path, SmallNet()).state_dict()
    assert torch.equal(saved["hidden.weight"], frozen.model.hidden.weight)
    for name, tensor in longer.model.state_dict().items():
        assert torch.equal(saved[name], tensor)
    changed = replace(frozen, model=copy.deepcopy(frozen.model))
    with torch.no_grad():
        changed.model.hidden.bias[0] += 1
    assert torch.equal(changed.initial, frozen.initial)
    with pytest.raises(CheckpointError, match="a run with another initial model"):
        go_on(changed, 3)


class Adapted(nn.Module):
    """A base in half precision and 8-bit integers, with adapters in float32."""

    def __init__(self, kind: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, CLASSES, dtype=kind).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(CLASSES, dtype=torch.int8), requires_grad=False)
        self.a = nn.Parameter(0.3 * torch.ones(FEATURES, 2))
        self.b = nn.Parameter(torch.zeros(2, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        return (
            self.scale * self.base(inputs.to(self.base.weight.dtype)).float()
            + inputs @ self.a @ self.b
        )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_the_base_may_have_any_type_and_the_row_has_that_of_what_trains(kind: torch.dtype) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        task = replace(small_task(), model=Adapted(kind))
    tolerance = 1e-5 if kind == torch.float64 else 1e-3
    assert (task.layout.dtype, task.layout.size, task.layout.integers) == (torch.float32, 18, 0)
    federation = run(FedAvg(), task)
    assert federation.history[-1]["loss"] < federation.history[0]["loss"]
    torch.testing.assert_close(
        run(FedAvg(), task, stacked=True).model(), federation.model(), rtol=0, atol=tolerance
    )


class Rested(SmallNet):
    """Batch norm that stays in evaluation mode."""

    def train(self, mode: bool = True) -> Rested:
        super().train(mode)
        self.norm.requires_grad_(False).eval()
        return self


def test_batch_norm_of_frozen_weights_moves_unless_the_model_keeps_it_in_evaluation_mode() -> None:
    moving, rested = SmallNet(), Rested()
    moving.norm.requires_grad_(False)
    rested.norm.requires_grad_(False)
    assert "norm.running_mean" not in Layout(moving).frozen
    assert Layout(rested).frozen == ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
                                     "norm.num_batches_tracked")  # fmt: skip
    assert (rested.training, rested.norm.training) == (True, True), "the model is left as it is"
    task = replace(small_task(), model=rested)
    engine = RowsEngine(task)
    assert not engine.flat_module.needs_pairs
    federation = Federation(FedAvg(), task, engine, Schedule(2, 1.0))
    federation.run()
    assert torch.equal(engine.flat_module.module.norm.running_mean, torch.zeros(6))


class Passing(nn.Module):
    """Counts in a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return self.out(inputs)


def test_training_that_changes_tensors_outside_the_row_is_refused() -> None:
    with pytest.raises(
        InvalidValue,
        match=r"^training changes the buffer 'calls' of the model[^\n]+persistent=True$",
    ):
        RowsEngine(replace(small_task(), model=Passing()))


class Pair(nn.Module):
    """A layer of the two factors of a low-rank update."""

    one_layer = True

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)


def test_factors_move_together_and_blocks_are_those_that_train() -> None:
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), Pair(), Pair())
    layout = Layout(model)
    assert layout.layers == ("1", "2")
    assert layout.units("layer") == [(slice(0, 24),), (slice(24, 48),)]
    assert [len(names) for names in block_parameters(model)] == [2, 2]
    assert head_name(model) == "2"


@pytest.mark.parametrize("algorithm", ["fedrep", "fedgen", "fedbn"])
def test_methods_that_train_frozen_layers_are_refused_in_one_line(algorithm: str) -> None:
    _, unfrozen = tasks()
    model = copy.deepcopy(unfrozen.model)
    model.out.requires_grad_(False)
    model.train = lambda mode=True: train_without_norm(model, mode)  # type: ignore[method-assign]
    model.norm.requires_grad_(False)
    with pytest.raises(InvalidValue, match=rf"^{algorithm}[^\n]*frozen[^\n]*$"):
        fl.run(
            algorithm, replace(unfrozen, model=model), rounds=1, participation=1.0, engine="rows"
        )


def train_without_norm(model: SmallNet, mode: bool) -> SmallNet:
    nn.Module.train(model, mode)
    model.norm.eval()
    return model
