"""The stacked engine gives the numbers of the rows engine with every setting of training.

test_conformance.py compares every method.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.common.optimizers import OptimizerName
from fedloom.data import Dataset, Partition, Samples
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.flat.layout import Layout
from fedloom.flat.linear_chain import FoldedSGD, linear_layers
from fedloom.flat.module import Batch, Shortcuts, data_loss, head_loss
from fedloom.flat.population import CACHE_LINE
from fedloom.flat.stacked_module import StackedModule
from fedloom.local.optimizer import _Optimizer
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from naive import World
from small_task import other_notices
from stacked_support import SIZES, TRAINING, assert_same, federated, perceptron, world


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.0, "weight_decay": 0.0},
        {"optimizer_options": {"nesterov": True}},
        {"optimizer_options": {"dampening": 0.3}},
        {"clip": 0.3},
        {"optimizer": "adam", "momentum": 0.0},
        {"optimizer": "adagrad", "momentum": 0.0},
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
    assert_same(
        federated(RowsEngine, task, "fedavg"), federated(StackedEngine, task, "fedavg", chunk=3)
    )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("optimizer", get_args(OptimizerName)[1:])
def test_every_optimiser_gives_the_numbers_of_rows(
    optimizer: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One optimizer moves all rows until short batches separate them, or each row has its own."""
    monkeypatch.setattr("fedloom.local.optimizer.JOINT_WEIGHTS", 10**9 if shared else 0)
    split: list[int] = []
    of_row = _Optimizer.of_row

    def noted(self: _Optimizer, k: int) -> _Optimizer:
        if len(self.tensors[0]) > 2:  # two clients train in the proof of the shortcuts
            split.append(k)
        return of_row(self, k)

    monkeypatch.setattr(_Optimizer, "of_row", noted)
    task = world(False, optimizer=optimizer, momentum=0.0, weight_decay=0.0, learning_rate=0.01)
    assert_same(
        federated(RowsEngine, task, "fedavg"), federated(StackedEngine, task, "fedavg", chunk=4)
    )
    assert bool(split) == shared  # clients have short batches
    alike = World(norm=False, sizes=(8,) * 5, training=task.training).task()
    split.clear()
    assert_same(federated(RowsEngine, alike, "fedavg"), federated(StackedEngine, alike, "fedavg"))
    assert not split


# --- layers that draw, statistics, images ---


class Drawing(nn.Module):
    """Every kind of dropout between two layers, as modules and as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Conv2d(1, 4, 3)
        self.drop = nn.Dropout2d(0.4)
        self.head = nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.relu(self.drop(self.lower(x))), 0.3, self.training)
        logits: Tensor = self.head(x.flatten(1))
        return logits


def image_task(module: nn.Module, **changes: Any) -> Task:
    """Return normalised bytes of five unequal clients."""
    draw = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (sum(SIZES), 1, 8, 8), generator=draw, dtype=torch.uint8)
    samples = Samples(images, torch.randint(10, (sum(SIZES),), generator=draw))
    data = Dataset("bytes", samples, samples, 10, mean=(0.5,), std=(0.3,))
    partition = Partition.from_sizes(np.arange(sum(SIZES)), SIZES)
    training = replace(TRAINING, **changes)
    return Task(data, samples, samples, partition, module, training)


@pytest.mark.parametrize("augmentation", ["none", "flip_crop"])
def test_images_are_prepared_augmented_and_dropped_alike(augmentation: str) -> None:
    task = image_task(Drawing(), augmentation=augmentation)
    on_rows, on_stacks = (
        federated(RowsEngine, task, "fedavg"),
        federated(StackedEngine, task, "fedavg"),
    )
    (notice,) = on_rows.notices
    assert notice.startswith(
        "images keep their layout in memory: with channels last, layers draw different random "
        "numbers"
    )
    assert_same(on_rows, on_stacks, tolerance=1e-5, notices=[notice])


def test_statistics_of_a_stack_move() -> None:
    """Statistics are contiguous blocks under vmap; otherwise batch norm would lose its updates."""
    task = world()
    stack = StackedModule(task.model, task.layout)
    rows = task.initial.repeat(3, 1)
    stack.begin(3, [])
    inputs = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(3, 6, dtype=torch.int64)
    stack.gradient(rows, Batch(inputs, labels), data_loss, {})
    lower = dict(task.model.named_parameters())
    activations = inputs @ lower["lower.weight"].T + lower["lower.bias"]
    slices = {span.name: span.slice for span in task.layout.slices}
    torch.testing.assert_close(
        rows[:, slices["norm.running_mean"]], 0.1 * activations.mean(1).detach()
    )
    torch.testing.assert_close(
        rows[:, slices["norm.running_var"]], 0.9 + 0.1 * activations.var(1).detach()
    )
    assert stack.integers().tolist() == [[1], [1], [1]]


# --- unsupported models and errors ---


class Branching(nn.Module):
    """Branches on its data, so a batched step is impossible."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x if float(x.sum()) > 0 else -x)
        return logits


class Noisy(Branching):
    """Draws random numbers from torch's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x + torch.randn_like(x))
        return logits


@pytest.mark.parametrize(("module", "reason"), [(Branching, "item()"), (Noisy, "random")])
def test_a_model_that_cannot_be_stacked_trains_client_by_client(
    module: type[nn.Module], reason: str
) -> None:
    task = replace(world(False), model=module())
    runs = [federated(engine, task, "fedavg") for engine in (RowsEngine, StackedEngine)]
    engine = runs[1].engine
    assert isinstance(engine, StackedEngine)
    assert reason in str(engine.proof.unstackable)
    (notice,) = runs[1].timings[0]["notices"]
    assert (
        notice == "clients train one by one, because models of this kind cannot be stacked: "
        f"{engine.proof.unstackable}"
    )
    assert torch.equal(runs[0].model(), runs[1].model())


def test_a_stack_that_does_not_fit_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    task = world()
    expected = federated(RowsEngine, task, "fedavg")
    gradient, sizes = StackedModule.tensor_gradients, []
    lost: list[weakref.ref[Tensor]] = []

    def scarce(self: StackedModule, rows: Tensor, *arguments: Any) -> Any:
        assert all(activations() is None for activations in lost), (
            "while others try again, failed steps hold no memory"
        )
        sizes.append(len(rows))
        if self._counts is not None and len(self._counts) > 2:
            computed = torch.zeros(1000)
            lost.append(weakref.ref(computed))
            raise torch.OutOfMemoryError("no memory is left")
        return gradient(self, rows, *arguments)

    engine = StackedEngine(task, chunk=6)
    monkeypatch.setattr(StackedModule, "tensor_gradients", scarce)
    schedule = Schedule(rounds=3, participation=0.7, seed=3, evaluate_every=1)
    run = Federation(build("fedavg"), task, engine, schedule)
    run.run()
    notice = "a stack of 4 models does not fit in memory: from now on, stacks have 2 models"
    assert_same(expected, run, notices=[notice])
    assert engine.chunk == 2
    assert max(sizes) > 2
    assert lost
    notices = [other_notices(timing.get("notices", [])) for timing in run.timings]
    assert notices == [[notice], [], []]


# --- linear layers without autograd ---


@pytest.mark.parametrize("widths", [(5, 7, 6, 4), (5, 4)], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_chain_folds_its_update_into_the_products(
    widths: tuple[int, ...], momentum: float, weight_decay: float
) -> None:
    task = replace(world(momentum=momentum, weight_decay=weight_decay), model=perceptron(*widths))
    assert StackedEngine(task).proof.shortcuts.linear
    assert_same(federated(RowsEngine, task, "fedavg"), federated(StackedEngine, task, "fedavg"))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_rows_of_a_stack_are_aligned(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that update slices of other rows take twice as long."""
    task = replace(world(momentum=momentum), model=perceptron(5, 7, 4))
    seen: list[Tensor] = []
    call = FoldedSGD.__call__

    def noted(self: FoldedSGD, rows: Tensor, velocity: Tensor | None) -> Any:
        seen.extend([rows] if velocity is None else [rows, velocity])
        return call(self, rows, velocity)

    monkeypatch.setattr(FoldedSGD, "__call__", noted)
    federated(StackedEngine, task, "fedavg")
    stacks = [rows for rows in seen if len(rows) > 2]  # the proof trains two models
    assert stacks
    assert all(row.data_ptr() % CACHE_LINE == 0 for rows in stacks for row in rows)


@pytest.mark.parametrize(
    ("method", "training"),
    [
        ("fedprox(mu=0.3)", {}),
        ("scaffold(option=1)", {"clip": 0.5}),
        ("fedasam", {"optimizer": "adam", "momentum": 0.0}),
        ("per_fedavg(variant='hessian_free')", {}),
        ("pfedme(regularisation=5.0)", {}),
        ("partialfed", {}),
        ("apple", {}),
        ("fedrep", {"local_schedule": "cosine"}),
        ("fedala", {}),
        ("ala(fedprox, p=2)", {}),
        ("ditto", {"optimizer": "adam", "momentum": 0.0}),
    ],
)
def test_every_kind_of_step_takes_the_gradients_of_a_chain(
    method: str, training: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = replace(world(**training), model=perceptron(5, 7, 4))
    begin = StackedEngine.begin

    def without_autograd(self: StackedEngine, task: Task, directory: Path | None) -> None:
        monkeypatch.setattr("fedloom.flat.stacked_module.vmap", None)
        begin(self, task, directory)

    monkeypatch.setattr(StackedEngine, "begin", without_autograd)
    assert_same(federated(RowsEngine, task, method), federated(StackedEngine, task, method))


@pytest.mark.parametrize(
    "only",
    [None, (slice(0, 35), slice(42, 70)), (slice(42, 74),), (slice(0, 5),)],
    ids=["all", "both weights", "last layer", "nothing"],
)
def test_the_gradient_of_a_chain_is_that_of_autograd_without_its_padding(
    only: tuple[slice, ...] | None,
) -> None:
    module = perceptron(5, 7, 4)
    layout, draw = Layout(module), torch.Generator().manual_seed(0)
    rows = torch.randn(2, layout.size, generator=draw, dtype=torch.float64)
    inputs, labels = (
        torch.randn(2, 3, 5, generator=draw, dtype=torch.float64),
        torch.tensor([[0, 3, 1], [2, 2, 0]]),
    )
    share = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [1 / 2, 1 / 2, 0]], dtype=torch.float64)
    stack = StackedModule(module, layout, Shortcuts(linear=True))
    stack.begin(2, [])
    stack.train_only(only)
    loss, gradient = stack.gradient(rows, Batch(inputs, labels, share=share), data_loss, {})
    trained = torch.ones(layout.size, dtype=torch.bool)
    for start, stop in ((0, 35), (35, 42), (42, 70), (70, 74)):
        trained[start:stop] = only is None or any(s.start <= start and stop <= s.stop for s in only)
    for k, count in enumerate((3, 2)):
        copy = layout.copy(module)
        layout.load(copy, rows[k], layout.flatten_integers(module))
        expected = F.cross_entropy(copy(inputs[k, :count]), labels[k, :count])
        gradients = torch.autograd.grad(expected, list(copy.parameters()))
        torch.testing.assert_close(loss[k], expected.detach())
        torch.testing.assert_close(
            gradient[k], torch.cat([tensor.flatten() for tensor in gradients]) * trained
        )


def test_a_loss_on_features_takes_the_gradient_of_the_classifier_alone() -> None:
    module = perceptron(5, 7, 4)
    layout, draw = Layout(module), torch.Generator().manual_seed(0)
    rows = torch.randn(2, layout.size, generator=draw, dtype=torch.float64)
    features = torch.randn(2, 3, 7, generator=draw, dtype=torch.float64)
    labels = torch.tensor([[0, 3, 1], [2, 2, 0]])
    stack = StackedModule(module, layout, Shortcuts(linear=True))
    stack.begin(2, [])
    stack.train_only((slice(42, 74),))
    assert stack.uses_share(head_loss)
    loss, gradient = stack.partial_gradient(rows, Batch(features, labels), head_loss, {})
    for k in range(2):
        weight = rows[k, 42:70].view(4, 7).clone().requires_grad_()
        bias = rows[k, 70:].clone().requires_grad_()
        expected = F.cross_entropy(features[k] @ weight.T + bias, labels[k])
        gradients = torch.autograd.grad(expected, [weight, bias])
        torch.testing.assert_close(loss[k], expected.detach())
        torch.testing.assert_close(gradient[k], torch.cat([g.flatten() for g in gradients]))


def test_a_classifier_of_two_layers_is_trained_through_the_whole_chain() -> None:
    module = nn.Sequential()
    module.add_module("base", nn.Linear(5, 7))
    module.add_module("head", perceptron(7, 6, 4)[1:].float())
    stack = StackedModule(module, Layout(module), Shortcuts(linear=True))
    assert stack.uses_share(data_loss)
    assert not stack.uses_share(head_loss)


def test_the_projects_own_models_of_linear_layers_are_chains() -> None:
    for model in ("mlp", "logistic"):
        task = make_task("digits", clients=2, model=model)
        assert linear_layers(task.model, task.layout)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4)),
        nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)),
        nn.Sequential(nn.ReLU(), nn.Linear(5, 4)),
        nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(5, 4)),
        Branching(),
    ],
    ids=str,
)
def test_no_other_model_is_taken_for_a_chain(module: nn.Module) -> None:
    assert linear_layers(module, Layout(module)) == []


def test_a_layer_used_twice_or_around_another_is_no_chain() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower, self.head = nn.Linear(5, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(x + self.lower(x))
            return logits

    class Twice(Residual):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.lower(self.lower(x)))
            return logits

    for module in (Residual(), Twice()):
        assert linear_layers(module, Layout(module)) == []
    plain = nn.Sequential(
        nn.Flatten(), nn.Linear(5, 5, bias=False), nn.ReLU(), nn.Identity(), nn.Linear(5, 4)
    )
    assert linear_layers(plain, Layout(plain))
