"""Each engine equals a plain PyTorch loop for any module and settings.

Engines omit shortcuts that give other results and report this in a notice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from batch_order import batch_order
from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream
from fedloom.common.training import Training
from fedloom.data import Dataset, Partition, Samples
from fedloom.engines.base import LocalEngine
from fedloom.engines.choose import make_engine
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.flat.linear_chain import FoldedSGD
from fedloom.flat.stacked_module import StackedModule
from fedloom.local.optimizer import TorchOptimizers
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.runs.run import run
from fedloom.task import Task
from json_lines import json_lines
from odd_modules import CLASSES, FEATURES, PARTS, build_module

SIZES = (9, 7, 4)
TRAINING = Training(learning_rate=0.05, momentum=0.9, weight_decay=0.01, batch_size=4, epochs=2)


def task_of(module: nn.Module, training: Training = TRAINING) -> Task:
    dtype = next(module.parameters()).dtype.to_real()
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(sum(SIZES), FEATURES, generator=draw, dtype=torch.float64).to(dtype)
    samples = Samples(inputs, torch.randint(CLASSES, (sum(SIZES),), generator=draw))
    data = Dataset("random", samples, samples, CLASSES)
    return Task(
        data,
        samples,
        samples,
        Partition.from_sizes(torch.arange(sum(SIZES)).numpy(), SIZES),
        module,
        training,
    )


def by_plain_pytorch(task: Task, seed: int) -> dict[str, Tensor]:
    """Train each client by a loop of torch.optim.

    Returns the mean model, weighted by samples.
    """
    models, training = [], task.training
    settled = {
        name: getattr(training, name) for name in ("batch_size", "epochs", "steps", "drop_last")
    }
    for client, size in enumerate(SIZES):
        module, samples = copy.deepcopy(task.model).train(), task.samples(client)
        trained = [p for p in module.parameters() if p.requires_grad]
        for p in trained:
            p.grad = torch.zeros_like(p)
        kind = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim)}[
            training.optimizer
        ]
        options = dict(training.optimizer_options)
        if training.momentum:
            options["momentum"] = training.momentum
        optimizer = kind(
            trained, lr=training.learning_rate, weight_decay=training.weight_decay, **options
        )
        norms = any(isinstance(layer, nn.BatchNorm1d) for layer in module.modules())
        order = batch_order(
            size, stream(seed, "batches", round=1, client=client), smallest=1 + norms, **settled
        )
        with torch.random.fork_rng():
            torch.set_rng_state(stream(seed, "layers", round=1, client=client).get_state())
            for batch in order:
                optimizer.zero_grad(set_to_none=False)
                F.cross_entropy(module(samples.inputs[batch]), samples.labels[batch]).backward()
                if training.clip is not None:
                    nn.utils.clip_grad_norm_(trained, training.clip)
                optimizer.step()
        models.append({**dict(module.named_parameters()), **dict(module.named_buffers())})
    share = [size / sum(SIZES) for size in SIZES]
    return {
        name: sum(
            weight * model[name].detach() for weight, model in zip(share, models, strict=True)
        )
        if tensor.is_floating_point()
        else torch.stack([model[name] for model in models]).amax(0)
        for name, tensor in models[0].items()
    }


def assert_plain(
    task: Task, engine: LocalEngine, seed: int = 0, plain: dict[str, Tensor] | None = None
) -> None:
    """Assert that one round of FedAvg over all clients equals plain PyTorch."""
    schedule = Schedule(rounds=1, participation=1.0, seed=seed)
    federation = Federation(build("fedavg"), task, engine, schedule)
    federation.run()
    module = task.module(federation.model())
    task.layout.load_integers(module, federation.integers)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tolerance = 1e-9 if task.layout.dtype == torch.float64 else 1e-5
    for name, tensor in (plain or by_plain_pytorch(task, seed)).items():
        torch.testing.assert_close(
            state[name].detach(),
            tensor,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessesEngine]:
    """Start worker processes with stacks inside, for any task."""
    engine = ProcessesEngine(task_of(build_module(())), workers=1, inside="stacked")
    yield engine
    engine.close()


@pytest.mark.parametrize("make", [RowsEngine, StackedEngine])
@pytest.mark.parametrize("layer", PARTS)
def test_every_kind_of_layer_trains_as_in_plain_pytorch(layer: str, make: type[RowsEngine]) -> None:
    task = task_of(build_module(("linear", layer, "relu")))
    engine = make(task)
    assert_plain(task, engine)
    # The first two do not support batching, and vmap ignores hooks of a backward pass.
    stacks = layer not in ("spectral norm", "weight norm", "backward hook")
    assert (engine.proof.unstackable is None) == (stacks or make is RowsEngine)
    assert bool(engine.notices) == (engine.proof.unstackable is not None)
    if make is StackedEngine:
        assert engine.proof.shortcuts.linear == (layer in ("linear", "relu"))


SETTINGS = st.one_of(
    st.just({}),
    st.builds(
        dict,
        momentum=st.sampled_from([0.5, 0.9]),
        optimizer_options=st.sampled_from([{}, {"dampening": 0.3}, {"nesterov": True}]),
    ),
    # Use a large eps, because these optimizers divide by the size of the gradient. The gradient of
    # a bias before a norm consists only of rounding errors.
    st.builds(
        dict,
        optimizer=st.sampled_from(["adam", "adamw", "adagrad", "rmsprop", "adamax"]),
        optimizer_options=st.just({"eps": 1e-3}),
    ),
)


@settings(deadline=None, max_examples=40)
@given(
    names=st.lists(st.sampled_from(sorted(PARTS)), max_size=4),
    repeated=st.booleans(),
    wide=st.booleans(),
    optimizer=SETTINGS,
    weight_decay=st.sampled_from([0.0, 0.01]),
    clip=st.sampled_from([None, 0.2]),
    batch_size=st.sampled_from([None, 3, 4]),
    drop_last=st.booleans(),
    seed=st.integers(0, 3),
)
def test_every_engine_trains_as_plain_pytorch(
    workers: ProcessesEngine,
    names: list[str],
    repeated: bool,
    wide: bool,
    optimizer: dict[str, Any],
    weight_decay: float,
    clip: float | None,
    batch_size: int | None,
    drop_last: bool,
    seed: int,
) -> None:
    if not wide and "optimizer" in optimizer:
        optimizer = {}  # in float32, these amplify rounding errors of zero gradients
    training = Training(
        learning_rate=0.02, epochs=2, weight_decay=weight_decay, clip=clip, batch_size=batch_size,
        drop_last=drop_last, **optimizer,
    )  # fmt: skip
    module = build_module(("linear", *names), torch.float64 if wide else torch.float32, repeated)
    task = task_of(module, training)
    plain = by_plain_pytorch(task, seed)
    assume(
        all(
            float(tensor.abs().max()) < 3 for tensor in plain.values() if tensor.is_floating_point()
        )
    )  # no divergence
    assert_plain(task, RowsEngine(task), seed, plain)
    assert_plain(task, StackedEngine(task), seed, plain)
    if {"parametrization", "weight norm"} & set(names):
        with pytest.raises(InvalidValue, match="parametrized modules"):
            workers.begin(task, None)
    else:
        assert_plain(task, workers, seed, plain)


@pytest.mark.parametrize("engine", ["rows", "stacked", "default", "processes"])
def test_complex_parameters_are_refused_in_one_line(engine: str) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wave = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex64))

        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs.to(self.wave.dtype) @ self.wave).abs()

    with pytest.raises(InvalidValue, match=r"^tensor 'wave' of the model is complex64, [^\n]+$"):
        make_engine(engine, task_of(Complex()))


# --- shortcuts that change the numbers are omitted with a notice ---


def spoilt_fold(monkeypatch: pytest.MonkeyPatch) -> Task:
    move = FoldedSGD._move

    def wrong(self: FoldedSGD, *args: Any) -> None:
        self.decay *= 0.99
        move(self, *args)

    monkeypatch.setattr(FoldedSGD, "_move", wrong)
    return task_of(build_module(("linear", "relu")))


def spoilt_joint_optimizer(monkeypatch: pytest.MonkeyPatch) -> Task:
    of = TorchOptimizers.of

    def wrong(self: TorchOptimizers, members: Any, tensors: Any, alike: bool) -> Any:
        if self._joint is not None:
            for group in self._joint.optimizer.param_groups:
                group["betas"] = (0.901, 0.999)
        return of(self, members, tensors, alike)

    monkeypatch.setattr(TorchOptimizers, "of", wrong)
    return task_of(build_module(("linear",)), replace(TRAINING, optimizer="adam", momentum=0.0))


def spoilt_stack(monkeypatch: pytest.MonkeyPatch) -> Task:
    gradients = StackedModule.tensor_gradients

    def wrong(self: StackedModule, *args: Any) -> Any:
        loss, tensors = gradients(self, *args)
        return loss, [gradient + 1e-6 for gradient in tensors]

    monkeypatch.setattr(StackedModule, "tensor_gradients", wrong)
    return task_of(build_module(("batch norm",)))


def spoilt_layout(monkeypatch: pytest.MonkeyPatch) -> Task:
    """Make filters depend on the strides of their images."""

    class Strided(nn.Conv2d):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * (1 + 1e-6 * inputs.is_contiguous())

    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = nn.Linear(2 * FEATURES, CLASSES)
        module = nn.Sequential(Strided(1, 2, 1), Strided(2, 2, 1), nn.Flatten(), head).double()
    task = task_of(module)
    images = Samples(task.train.inputs.view(-1, 1, 1, FEATURES), task.train.labels)
    return replace(
        task, train=images, test=images, dataset=replace(task.dataset, train=images, test=images)
    )


SPOILT: dict[str, tuple[Callable[[pytest.MonkeyPatch], Task], str]] = {
    "folded": (
        spoilt_fold,
        "linear layers train with autograd: without it, results after 3 steps differ by",
    ),
    "joint": (
        spoilt_joint_optimizer,
        "each client has its own optimizer: with a joint one, results after 3 steps differ by",
    ),
    "stacked": (
        spoilt_stack,
        "clients train one by one, because models of this kind cannot be stacked: results "
        "after 3 steps",
    ),
    "layout": (
        spoilt_layout,
        "images keep their layout in memory: with channels last, results after 3 steps differ by",
    ),
}


@pytest.mark.parametrize("shortcut", SPOILT)
def test_a_shortcut_that_gives_other_numbers_is_left_out_and_named(
    shortcut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, expected = SPOILT[shortcut]
    task = spoil(monkeypatch)
    engine = (RowsEngine if shortcut == "layout" else StackedEngine)(task)
    (notice,) = engine.notices
    assert notice.startswith(expected)
    assert_plain(task, engine)


def test_workers_do_not_repeat_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(build_module(("linear",)))
    proof = StackedEngine(task).proof
    monkeypatch.setattr(
        "fedloom.engines.rows.prove", lambda *args, **kwargs: pytest.fail("proven again")
    )
    assert StackedEngine(task, proof).proof is proof


def test_a_notice_reaches_the_terminal_and_the_runs_record_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_of(build_module(("spectral norm",)))
    result = run("fedavg", task, rounds=3, participation=1.0, engine="stacked", directory=tmp_path)
    messages = [record.message for record in caplog.records if "one by one" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith(
        "clients train one by one, because models of this kind cannot be stacked: RuntimeError: "
    )
    lines = json_lines(tmp_path / "timings.jsonl")
    assert [line.get("notices") for line in lines] == [messages, None, None]
    assert result.timings[0]["notices"] == messages
