"""Devices: location of data and models, steps that do not wait for a figure, and half precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from every_method import EVERY_METHOD, EVERYBODY, WRAPPERS
from fedloom.algorithm.records import INTEGERS, Plan, Replies
from fedloom.common.device import find_device, moved, moved_back, present
from fedloom.common.errors import InvalidValue
from fedloom.common.registry import RegistryEntry
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.engines.base import engines
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.flat.module import Batch, FlatModule
from fedloom.flat.stacked_module import StackedModule
from fedloom.local import batches
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.parts.course import Course
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.runs.config_file import configuration
from fedloom.runs.run import run
from fedloom.state.store import ClientStore, Memory
from fedloom.task import Task
from fedloom.task.making import make_task
from small_task import small_task

ENGINES: tuple[Callable[[Task], RowsEngine], ...] = (RowsEngine, StackedEngine)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_devices_are_found_by_name(two_gpus: None) -> None:
    assert present() == ["cpu", "cuda:0", "cuda:1"]
    devices = {name: find_device(name) for name in ("cpu", "cuda", "cuda:1", "auto")}
    cpu, gpu_0, gpu_1 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
    assert devices == {"cpu": cpu, "cuda": gpu_0, "cuda:1": gpu_1, "auto": gpu_0}
    with pytest.raises(
        InvalidValue,
        match=r"^device 'cuda:2' does not exist on this machine \(available: cpu, cuda:0, "
        r"cuda:1\)$",
    ):
        find_device("cuda:2")


def test_a_device_that_is_not_here_is_refused_in_one_line(no_gpu: None) -> None:
    assert find_device("auto") == torch.device("cpu")
    line = r"^device 'cuda' does not exist on this machine \(available: cpu\)$"
    for refused in (
        lambda: find_device("cuda"),
        lambda: make_task("digits", device="cuda"),
        lambda: small_task().to("cuda"),
        lambda: configuration({"device": "cuda"}).task(0),
    ):
        with pytest.raises(InvalidValue, match=line):
            refused()


def test_a_configuration_names_its_device(no_gpu: None) -> None:
    assert configuration({}).resolved("fedavg", 0)["device"] == "cpu"
    assert configuration({"device": "auto"}).resolved("fedavg", 0)["device"] == "auto"
    assert configuration({"device": "auto"}).task(0).initial.device.type == "cpu"
    for table, words in (
        ({"device": "gpu"}, r"device 'gpu' is not allowed:.*\(allowed: cpu, cuda, cuda:1, auto\)"),
        ({"device": "cuda:x"}, r"device 'cuda:x' is not allowed: did you mean 'cuda'"),
        (
            {"device": "cuda", "engine": "processes"},
            r"'processes' needs data on the CPU, not device = 'cuda'",
        ),
        ({"device": "cuda:1", "engine": "ray(workers=2)"}, r"'ray' needs data on the CPU.*gpus=1"),
    ):
        with pytest.raises(InvalidValue, match=words) as caught:
            configuration(table)
        assert "\n" not in str(caught.value)
    for engine in ("rows", "stacked", "auto"):
        assert configuration({"device": "cuda", "engine": engine}).device == "cuda"


def test_autocast_is_a_setting_of_training() -> None:
    settings = configuration({"training": {"autocast": "bfloat16"}}).resolved("fedavg", 0)[
        "training"
    ]
    assert settings["autocast"] == "bfloat16"
    assert configuration({}).resolved("fedavg", 0)["training"]["autocast"] == "none"
    with pytest.raises(
        InvalidValue, match=r"training.autocast must be .*, not 'bfloat': did you mean 'bfloat16'"
    ):
        configuration({"training": {"autocast": "bfloat"}})


class _Pinned:
    """A tensor that records its transfer to a GPU."""

    is_cuda = False

    def __init__(self) -> None:
        self.way: list[Any] = []

    def pin_memory(self) -> _Pinned:
        self.way.append("pinned")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> _Pinned:
        self.way.append((device, non_blocking))
        return self


def test_what_goes_to_a_gpu_goes_without_waiting() -> None:
    tensor: Any = _Pinned()
    moved(tensor, torch.device("cuda"))
    assert tensor.way == ["pinned", (torch.device("cuda"), True)]
    real = torch.arange(3)
    assert moved(real, torch.device("cpu")) is real


def test_checkpoints_come_back_to_where_their_tensors_were() -> None:
    """Restored checkpoints move tensors back to their device; `meta` stands for a GPU."""
    like = {"model": torch.empty(3, device="meta"), "counter": torch.zeros(1)}
    back = moved_back(
        {"model": torch.ones(3), "counter": torch.ones(1), "later": torch.ones(2)},
        like,
        torch.device("meta"),
    )
    assert {name: tensor.device.type for name, tensor in back.items()} == {
        "model": "meta", "counter": "cpu", "later": "meta",
    }  # fmt: skip


def test_clients_samples_are_read_by_indices_that_are_there() -> None:
    task = small_task()
    elsewhere = task.to(torch.device("meta"))
    assert elsewhere.initial.is_meta
    for client in range(task.clients):
        samples, moved = task.samples(client), elsewhere.samples(client)
        assert moved.inputs.is_meta
        assert moved.inputs.shape == samples.inputs.shape
    assert elsewhere._indices.is_meta
    assert elsewhere._indices.shape == task.partition.indices.shape


# --- no step waits for a figure ---

WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten.bincount.default,
}
"""Operations that on a GPU hold up the process until all work before them is done, to learn a
figure or a shape.
"""


class Nowait(TorchDispatchMode):
    """Raises an error if an operation would wait for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = func in WAITING
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        if waits and any(isinstance(argument, Tensor) for argument in args):
            raise AssertionError(f"{func} in a step")
        return func(*args, **(kwargs or {}))


def test_an_operation_that_waits_is_noticed() -> None:
    tensor = torch.ones(3)
    for waits in (
        lambda: tensor.sum().item(),
        lambda: bool(tensor[0] > 0),
        lambda: tensor[tensor > 0],
        lambda: tensor.nonzero(),
    ):
        with Nowait(), pytest.raises(AssertionError, match="in a step"):
            waits()


@contextmanager
def without_waiting() -> Iterator[list[int]]:
    """Make every step of local training and of batch collection raise an error if it would wait;
    yield the list of steps.
    """
    steps: list[int] = []
    each_batch, gradient = Cohort.each_batch, Cohort.gradient

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def run_step(*arguments: Any) -> Any:
            steps.append(1)
            with Nowait():
                return step(*arguments)

        return run_step

    def gathered(batches: Callable[..., Iterator[Batch]]) -> Callable[..., Iterator[Batch]]:
        def gather(*arguments: Any) -> Iterator[Batch]:
            iterator = batches(*arguments)
            while True:
                with Nowait():
                    batch = next(iterator, None)
                if batch is None:
                    return
                yield batch

        return gather

    def each_watched(self: Cohort, step: Any, *args: Any, **kwargs: Any) -> Tensor:
        return each_batch(self, watched(step), *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatModule, "watch", staticmethod(lambda step, rows, group: watched(step)))
        patch.setattr(Cohort, "each_batch", each_watched)
        patch.setattr(
            Cohort,
            "gradient",
            lambda self, *args, **kwargs: watched(partial(gradient, self, **kwargs))(*args),
        )
        patch.setattr("fedloom.local.batches._batches", gathered(batches._batches))
        yield steps


BRIEF = {"fedala": "fedala(max_epochs=2)", "ala(fedmr)": "ala(fedmr, max_epochs=2)"}
"""Methods that would go on until they converge."""


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_no_step_of_a_local_epoch_waits_for_a_figure(
    method: str, make: Callable[[Task], RowsEngine]
) -> None:
    engine = make(replace(small_task(), training=Training(learning_rate=0.05, batch_size=4)))
    federation = Federation(
        build(BRIEF.get(method, method)), engine.task, engine, Schedule(rounds=2, participation=1.0)
    )
    with without_waiting() as steps:
        federation.run()
    assert steps
    assert not any(record["faults"] for record in federation.history)
    if isinstance(engine, StackedEngine):
        assert all("one client at a time" in notice for notice in engine.notices)


READS = {
    WRAPPERS["fedgen"]: "clients count their labels, before the first step",
    "pfedfda": "shares of the Gaussians are validated, after the last step",
    "umf(feddc)": "clients that do not upload look whether their update is finite, after the "
    "last step",
}
"""Methods that read what lies on the device, outside of all steps."""


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("method", [name for name in EVERY_METHOD if name not in READS])
def test_a_client_trains_on_another_device_and_reads_nothing_back(
    method: str, stacked: bool
) -> None:
    """A client trains on another device and reads nothing back.

    Tensors on `meta` have a device and no values. They raise an error if an operation mixes them
    with the CPU or needs a value.
    """
    settings = Training(learning_rate=0.05, momentum=0.5, batch_size=4)
    task = replace(small_task(), training=settings).to(torch.device("meta"))
    count, clients = task.clients, [0, 1, 2] if stacked else [1]
    classes = task.dataset.classes
    plan = Plan(task.layout, task.initial, count, count, 5, 0, classes, task.sizes, task.model)
    course = Course(build(method))
    course.setup(plan)
    pipeline = course.at(1)
    round = Round(1, 5, 0, count, count, 0.05, 0.05)
    selection = pipeline.select(round)
    round = replace(round, selected=selection.clients)
    message = pipeline.open(round, selection).wire
    inbox = {
        name: rows[clients] if len(rows) > 1 else rows.expand(len(clients), *rows.shape[1:])
        for name, rows in message.items()
    }
    flat_module = (
        StackedModule(task.model, task.layout) if stacked else FlatModule(task.model, task.layout)
    )
    flat_module._head_gives_outputs = True  # read once per module, before the first step
    if isinstance(flat_module, StackedModule):
        flat_module.begin(len(clients), [round.stream("layers", client) for client in clients])
    samples = [task.samples(client) for client in clients]
    cohort = Cohort(
        clients, samples, task.dataset, flat_module, settings, round, Memory(ClientStore(), clients)
    )
    replies = pipeline.work(cohort, inbox)
    assert replies.keys() == pipeline.expected(round).keys() - {INTEGERS}
    assert all(tensor.is_meta and len(tensor) == len(clients) for tensor in replies.values())


SERVER_READS = {
    "clusamp": "distances between clients are clustered on the CPU",
    WRAPPERS["cfl"]: "updates of clients are clustered on the CPU",
    "clustered(fedmr)": "distances between clients are clustered on the CPU",
    "fedas": "what replies weigh is kept on the CPU",
    "fedfomo": "what clients think of each other's models is kept on the CPU",
    "fedpac": "shares of heads are solved for on the CPU",
    WRAPPERS["norm_bound"]: "the number of bounded updates is kept on the CPU",
    WRAPPERS["fedgen"]: "labels that some client holds are looked up before the generator trains",
}
"""Methods whose server half reads what lies on the device."""

SERVER_VARIANTS = ["fedmr(blend=0.5)"]


@pytest.mark.parametrize(
    "method", [name for name in EVERY_METHOD if name not in SERVER_READS] + SERVER_VARIANTS
)
def test_a_server_works_on_another_device_and_reads_nothing_back(method: str) -> None:
    task = small_task().to(torch.device("meta"))
    clients = task.clients
    participants = clients if method.startswith(EVERYBODY) else 3
    classes = task.dataset.classes
    plan = Plan(
        task.layout, task.initial, clients, participants, 5, 0, classes, task.sizes, task.model
    )
    course = Course(build(method))
    course.setup(plan)
    replied = participants - 1  # one client drops out
    for number in (1, 2):
        round = Round(number, 5, 0, clients, participants, 0.05, 0.05)
        pipeline = course.at(number)
        selection = pipeline.select(round)
        selected = selection.clients
        round = replace(round, selected=selected)
        exchange = pipeline.open(round, selection)
        expected = pipeline.expected(round)
        tensors = {
            name: torch.empty(participants, *spec.shape, dtype=spec.dtype, device="meta")
            for name, spec in expected.items()
            if name != INTEGERS
        }
        numbers = torch.tensor(selected[:replied])
        slots = torch.arange(replied)
        replies = Replies(tensors, numbers, slots, task.sizes(numbers), exchange)
        pipeline.close(exchange, replies)
        pipeline.finish(exchange)
        course.next(number)
        following = course.at(number + 1)
        assert following.model().is_meta
        assert all(tensor.is_meta for tensor in following.deploy(round, selected).values())


# --- half precision ---


class Listening(nn.Module):
    """A small network that records the dtype of each layer's computation."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)
        self.heard: list[torch.dtype] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.hidden(inputs.flatten(1))
        self.heard.append(hidden.dtype)
        logits: Tensor = self.out(torch.relu(self.norm(hidden)))
        return logits


def digits(autocast: str, model: str | nn.Module = "mlp(hidden=[32])") -> Task:
    settings = Training(learning_rate=0.05, momentum=0.9, batch_size=20, autocast=autocast)
    return make_task("digits", clients=6, partition="iid", model=model, training=settings)


def trained(task: Task, engine: str, rounds: int = 4) -> Any:
    return run("fedavg", task, rounds=rounds, participation=1.0, engine=engine)


@pytest.mark.parametrize("engine", ["rows", "stacked"])
@pytest.mark.parametrize("model", ["mlp(hidden=[32])", "digits_cnn"])
def test_half_precision_learns_nearly_what_single_precision_does(engine: str, model: str) -> None:
    half, single = (trained(digits(kind, model), engine, rounds=8) for kind in ("bfloat16", "none"))
    ours, reference = (outcome.federation.model() for outcome in (half, single))
    assert ours.dtype == torch.float32
    start = half.task.initial
    away, way = float((ours - reference).norm()), float((reference - start).norm())
    assert 0 < away < 0.2 * way
    assert half.accuracy > single.accuracy - 0.04
    assert half.accuracy > 0.5
    assert not torch.equal(ours, ours.bfloat16().float())  # weights are not rounded


@pytest.mark.parametrize("make", ENGINES)
def test_layers_compute_in_half_precision_and_only_while_clients_train(
    make: Callable[[Task], RowsEngine],
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Listening()
    for kind, expected in (("bfloat16", torch.bfloat16), ("none", torch.float32)):
        task = digits(kind, model)
        engine = make(task)
        assert engine.flat_module.module.heard is not None
        heard = [
            engine.flat_module.module,
            *([engine.stack.module] if isinstance(engine, StackedEngine) else []),
        ]
        federation = Federation(
            build("fedavg"), task, engine, Schedule(rounds=1, participation=1.0)
        )
        for module in heard:
            module.heard.clear()  # type: ignore[union-attr, operator]
        federation.run()
        types = {dtype for module in heard for dtype in module.heard}  # type: ignore[union-attr]
        assert types == {expected}
        assert federation.model().dtype == torch.float32
        assert set(federation.evaluation.evaluator.module.heard) == {torch.float32}  # type: ignore[arg-type]


def test_statistics_move_alike_in_half_precision() -> None:
    """Stacks and rows move statistics alike, and both stay close to single precision."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Listening()
    names = [("bfloat16", "rows"), ("bfloat16", "stacked"), ("none", "rows")]
    rows, stacked, single = (
        trained(digits(kind, model), engine, rounds=1) for kind, engine in names
    )
    behind = rows.task.layout.trainable
    moved_by = [
        outcome.federation.model()[behind:] - outcome.task.initial[behind:]
        for outcome in (rows, stacked, single)
    ]
    assert float(moved_by[2].norm()) > 0.1
    for ours in moved_by[:2]:
        assert float((ours - moved_by[2]).norm()) < 0.05 * float(moved_by[2].norm())
    assert rows.federation.integers.tolist() == stacked.federation.integers.tolist() != [0]


@pytest.mark.parametrize(
    "method", ["fedmr", "fedprox(mu=0.01)", "scaffold", "moon", "feddc", "fedala"]
)
def test_stacks_in_half_precision_are_near_rows(method: str) -> None:
    task = digits("bfloat16")
    task = replace(task, training=replace(task.training, momentum=0.0))
    rows, stacked = (
        run(method, task, rounds=2, participation=0.5, engine=name) for name in ("rows", "stacked")
    )
    assert isinstance(stacked.federation.engine, StackedEngine)
    assert stacked.federation.notices == []
    ours, reference = stacked.federation.model(), rows.federation.model()
    assert float((ours - reference).norm()) < 0.1 * float((reference - task.initial).norm())


def test_steps_in_half_precision_are_not_folded() -> None:
    task = digits("bfloat16")
    assert not StackedEngine(task).proof.shortcuts.linear
    assert StackedEngine(digits("none")).proof.shortcuts.linear


def test_precision_is_that_of_the_task_that_begins() -> None:
    task = digits("bfloat16")
    engine = RowsEngine(task)
    federation = Federation(build("fedavg"), task, engine, Schedule(rounds=1, participation=0.2))
    federation.step()
    assert engine.flat_module.autocast is torch.bfloat16
    engine.begin(digits("none"), None)
    Federation(build("fedavg"), engine.task, engine, Schedule(rounds=1, participation=0.2)).step()
    assert engine.flat_module.autocast is None


# --- recorders ---


def test_the_rule_is_told_that_recorders_hook_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine rule receives whether a recorder hooks client training and so needs this process.

    This depends on the recorder and the method.
    """
    requests: list[bool] = []

    def by_rule(task: Task, schedule: Schedule, in_process: bool, *_: Any) -> RowsEngine:
        requests.append(in_process)
        return RowsEngine(task)

    monkeypatch.setattr("fedloom.engines.choose.by_rule", by_rule)
    monkeypatch.setitem(engines._entries, "default", RegistryEntry("default", by_rule))
    task = make_task("digits", clients=4, partition="iid", model="logistic", local_test=0.25)
    cases: tuple[tuple[list[str], str, bool], ...] = (
        (["ala(client=3)"], "fedala", True),
        (["objective(every=1)"], "fedala", False),
        ([], "fedala", False),
    )
    for record, method, _ in cases:
        run(method, task, rounds=1, participation=0.5, record=record)
    run("fedala", task, rounds=1, participation=0.5, record=["ala(client=3)"], directory=tmp_path)
    assert requests == [*(expected for _, _, expected in cases), True]


# --- on a GPU ---

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("engine", ["rows", "stacked"])
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_a_gpu_gives_the_numbers_of_the_cpu(method: str, engine: str) -> None:
    training = Training(learning_rate=0.05, momentum=0.5, batch_size=7, epochs=2)
    task = make_task(
        "digits", clients=6, partition="dirichlet(0.5)", model="mlp(hidden=[16])", training=training
    )
    on_cpu = run(method, task, rounds=2, participation=1.0).federation
    on_gpu = run(method, task.to("cuda"), rounds=2, participation=1.0, engine=engine).federation
    model = on_gpu.model()
    assert model.is_cuda
    assert not any(record["faults"] for record in on_gpu.history)
    assert torch.allclose(model.cpu(), on_cpu.model(), atol=2e-3)


@needs_gpu
@pytest.mark.parametrize("make", ENGINES)
def test_steps_on_a_gpu_do_not_wait(make: Callable[[Task], RowsEngine]) -> None:
    task = make_task("digits", clients=6, partition="iid", model="digits_cnn").to("cuda")
    federation = Federation(
        build("fedavg"), task, make(task), Schedule(rounds=2, participation=1.0)
    )
    federation.step()

    def watched(step: Callable[[Batch], Tensor], *_: Any) -> Callable[[Batch], Tensor]:
        def strict(batch: Batch) -> Tensor:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return strict

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatModule, "watch", staticmethod(watched))
        federation.step()
    assert federation.history[-1]["faults"] == []


@needs_gpu
def test_a_run_on_a_gpu_goes_on_there(tmp_path: Path) -> None:
    task = make_task("digits", clients=4, partition="iid", model="logistic").to("cuda")

    def federation() -> Federation:
        return Federation(
            build("scaffold"),
            task,
            RowsEngine(task),
            Schedule(rounds=4, participation=0.5),
            tmp_path,
        )

    interrupted = federation()
    interrupted.step()
    interrupted.save()
    resumed = federation()
    assert resumed.finished == 1
    resumed.run()
    assert resumed.model().is_cuda
