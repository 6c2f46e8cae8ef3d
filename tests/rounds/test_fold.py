"""Folding replies block by block equals a single aggregation, in any order of arrival, with little
memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from every_method import EVERY_METHOD, WRAPPERS
from fedloom.algorithm.method import Method
from fedloom.algorithm.records import (
    INTEGERS,
    Aggregate,
    Message,
    Plan,
    Replies,
    Selection,
    block_slots,
)
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.parts.course import Course
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.checkpoint import RoundLog
from fedloom.rounds.engine import Answer, Fault, Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.replies import RoundReplies
from fedloom.rounds.schedule import Schedule
from fedloom.task.making import make_task
from shuffled_engine import Shuffled
from small_task import SmallNet, small_task

CLIENTS = 7
VARIANTS = ["fedavg(weighted=false)", "fedexp(epsilon_by_clients=true)", "feddyn",
            "fedadam(weighted=false)", "pfedme(beta=2)", "fedasam(swa=true)", "clustered(fedavg, by=size)", "ala(fedavg)",
            "umf(fednova)", "stages(scaffold:9, fedavg)", "robust(feddc)", "power_of_choice(fedavg, ask=false)"]  # fmt: skip

KEEP_ALL = {
    "fedntd(fedmr)", "fedcross", "fedkdmr", "power_of_choice(fedavg, ask=false)", WRAPPERS["cfl"],
    "gossip(fedavg)", "norm_bound(fedavg, radius=0.5)", WRAPPERS["qfedavg"],
    WRAPPERS["ala"], "apple", "clusamp", "clustered(fedmr)", "fedamp", "fedfomo", "fedpac", WRAPPERS["fedgen"], "fedmr", "indep",
    "fedasync(fedavg)", "fedbuff(fedavg, k=2)", "fedmr_async(k=2)",
    "robust(fedavg)", "robust(feddc)", "secure(fedmr)",
    "ca2fl(k=2)", "cluster_fedvarp(clusters=2)", "fedlaavg", "fedstale", "fedvarp", "fisher_merge(fedmr)", "mifa",
}  # fmt: skip


def begun(name: str) -> Course:
    """Return the course of a method after its setup, with a model in double precision."""
    module = SmallNet().double()
    layout = small_task().layout.__class__(module)
    torch.manual_seed(0)
    initial = torch.randn(layout.size, dtype=torch.float64)
    sizes = torch.tensor([9, 5, 12, 7, 3, 8, 1])
    course = Course(build(name))
    course.setup(
        Plan(layout, initial, CLIENTS, CLIENTS, 20, 0, 4, lambda clients: sizes[clients], module)
    )
    return course


def random_replies(pipeline: Pipeline, round: Round, slots: Sequence[int]) -> Replies:
    """Return random replies of the clients in these slots."""
    torch.manual_seed(round.number)
    tensors = {}
    for name, spec in pipeline.expected(round).items():
        if name != INTEGERS:
            rows = torch.rand(CLIENTS, *spec.shape, dtype=torch.float64) + 0.5
            tensors[name] = rows if spec.dtype is torch.float64 else (9 * rows).to(spec.dtype)
    answered = torch.tensor(slots)
    exchange = pipeline.open(round, Selection(round.selected))
    return Replies(
        tensors, answered, answered, torch.tensor([9, 5, 12, 7, 3, 8, 1])[answered], exchange
    )


@pytest.mark.parametrize("name", sorted({*EVERY_METHOD, *VARIANTS} - KEEP_ALL | {"robust(feddc)"}))
def test_a_method_ends_in_the_same_state_block_by_block(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for slots in (CLIENTS, 3, 1):
        monkeypatch.setattr("fedloom.algorithm.records.LEAST_SLOTS", slots)
        monkeypatch.setattr("fedloom.algorithm.records.MOST_SLOTS", slots)
        course = begun(name)
        for number, present in enumerate([range(CLIENTS), (0, 2, 5, 6)], start=1):
            pipeline = course.at(number)
            round = replace(
                course.plan.opening().at(number),
                selected=tuple(range(CLIENTS)),
                learning_rate=0.1,
                initial_learning_rate=0.2,
            )
            replies = random_replies(pipeline, round, tuple(present))
            assert replies.exchange is not None
            pipeline.close(replies.exchange, replies)
            pipeline.finish(replies.exchange)
            course.next(number)
        states.append(course.state())
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for key, expected in states[0].items():
            torch.testing.assert_close(
                state[key], expected, rtol=1e-12, atol=1e-12, msg=f"{name}: {key}"
            )


def test_the_methods_that_fold() -> None:
    assert {name for name in [*EVERY_METHOD, *VARIANTS] if not begun(name).at(1).folds} == KEEP_ALL
    staged = begun("stages(fedavg:1, fedmr)")
    assert staged.at(1).folds
    staged.next(1)
    assert not staged.at(2).folds
    assert not begun("stages(fedavg:auto, fedmr)").at(1).folds
    assert not Pipeline(type("Own", (FedAvg,), {"receive": lambda *_: None})()).folds


def test_a_block_depends_on_the_model_alone() -> None:
    assert [block_slots(4 * weights) for weights in (100, 50_000, 199_210, 2_000_000)] == [
        128,
        83,
        21,
        16,
    ]


def test_the_mean_of_a_block_that_weighs_nothing_is_left_out() -> None:
    nothing = Aggregate({"a": torch.tensor([torch.nan])}, {}, 0.0, 1)
    something = Aggregate({"a": torch.tensor([2.0])}, {}, 3.0, 2)
    for joined in (nothing.joined(something), something.joined(nothing)):
        assert (joined.mean["a"], joined.weight, joined.count) == (2.0, 3.0, 3)


def federation(method: Method | str, engine: Any = RowsEngine, **settings: Any) -> Federation:
    task = make_task(
        "digits", clients=21, partition="dirichlet(1.0)", model="mlp(hidden=[4])", local_test=0.2
    )
    run = Federation(
        build(method), task, engine(task), Schedule(rounds=2, participation=1.0, seed=1), **settings
    )
    run.run()
    return run


class Watching:
    """An observer, so that the round retains all replies."""

    def begin(self, federation: Federation) -> None:
        self.seen: list[int] = []
        self.log = RoundLog()

    def observe(self, round: Round, jobs: Sequence[Job], replies: Replies) -> None:
        self.seen.append(len(replies["model"]))

    def commit(self, number: int) -> None: ...


@pytest.fixture
def blocks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.algorithm.records.MOST_SLOTS", 4)
    monkeypatch.setattr("fedloom.algorithm.records.LEAST_SLOTS", 4)


@pytest.mark.usefixtures("blocks_of_four")
@pytest.mark.parametrize("method", ["fedavg", "umf(scaffold)"])
def test_bits_depend_neither_on_order_of_arrival_nor_on_observers(method: str) -> None:
    plain, shuffled, observed = (
        federation(method),
        federation(method, Shuffled),
        federation(method, observers=[Watching()]),
    )
    assert observed.observers[0].seen == [21, 21]  # type: ignore[attr-defined]
    for run in (shuffled, observed):
        assert run.history == plain.history
        for name, tensor in plain.server_state().items():
            assert torch.equal(run.server_state()[name], tensor), name


class Held:
    """Counts the live tensors."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Tensor]] = []
        self.most = 0

    def see(self, tensor: Tensor) -> None:
        self.seen.append(weakref.ref(tensor))
        self.seen = [reference for reference in self.seen if reference() is not None]
        self.most = max(self.most, len(self.seen))


@pytest.mark.usefixtures("blocks_of_four")
@pytest.mark.parametrize(
    ("kind", "options", "replies"), [(RowsEngine, {}, 2), (StackedEngine, {"chunk": 3}, 8)]
)
def test_no_more_than_a_block_of_replies_is_held(
    kind: Any, options: dict[str, int], replies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices, rows, train, fold = Held(), Held(), kind.train, FedAvg.fold

    def counting_train(self: Any, *arguments: Any) -> Iterator[Answer | Fault]:
        for result in train(self, *arguments):
            rows.see(result.tensors["model"])
            yield result
            del result

    def folded(self: FedAvg, round: Round, replies: Replies) -> Aggregate:
        assert len(replies) in (4, 1)
        matrices.see(replies["model"])
        return fold(self, round, replies)

    monkeypatch.setattr(kind, "train", counting_train)
    monkeypatch.setattr(FedAvg, "fold", folded)
    gc.disable()
    try:
        federation("fedavg", partial(kind, **options))
    finally:
        gc.enable()
    assert matrices.most == 1
    assert 1 <= rows.most <= replies


@dataclass
class Broken(FedAvg):
    """FedAvg with NaN replies of some clients and one reply of the wrong shape."""

    broken: tuple[int, ...] = ()

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        reply = super().train(cohort, inbox)
        if cohort.clients[0] == self.broken[-1]:
            return {"model": reply["model"][:, 1:]}
        return {"model": reply["model"] * torch.nan} if cohort.clients[0] in self.broken else reply


@pytest.mark.usefixtures("blocks_of_four")
def test_refused_replies_leave_their_block() -> None:
    run = federation(Broken(broken=(3, 5, 11)))
    selected = run.history[0]["clients"]
    faulty = {fault["client"]: fault["reason"] for fault in run.history[0]["faults"]}
    assert list(faulty) == [client for client in selected if client in (3, 5, 11)]
    assert faulty[3] == "'model' is not finite"
    assert "has shape" in faulty[11]
    uninterrupted = federation("fedavg")
    assert run.history[0]["bytes_up"] == 18 / 21 * uninterrupted.history[0]["bytes_up"]
    assert not torch.equal(run.model(), uninterrupted.model())


def replies_of(
    answers: Sequence[int], size: int, lost: Sequence[int] = (), unheard: Sequence[int] = ()
) -> RoundReplies:
    """Make answers in this order of slots; each is a row filled with the slot's number."""
    slots = 9
    tasks = [Job(100 + slot, slot, {}) for slot in range(slots) if slot not in lost]

    def weights(replies: Sequence[Answer]) -> Tensor:
        return torch.tensor([1 + (reply.job.slot or 0) for reply in replies])

    round_replies = RoundReplies(tasks, slots, size, weights, lambda replies: replies.aggregate())
    row = {slot: {"model": torch.full((2,), float(slot)).double()} for slot in range(slots)}
    faulty = [
        Fault(task, "late")
        for task in tasks
        if task.slot not in answers and task.slot not in unheard
    ]
    by_slot = {task.slot: task for task in tasks}
    round_replies.collect(
        [*faulty, *(Answer(by_slot[slot], row[slot], {"loss": float(slot)}) for slot in answers)]
    )
    return round_replies


@pytest.mark.parametrize("size", [1, 2, 4, 9, 100])
def test_absent_clients_and_whole_blocks_that_fail_are_left_out(size: int) -> None:
    present = [8, 0, 7, 3, 1]
    round_replies = replies_of(present, size, lost=(4, 5))
    aggregate = round_replies.aggregate
    assert aggregate is not None
    expected = sum(slot * (1 + slot) for slot in present) / sum(1 + slot for slot in present)
    assert aggregate.mean["model"].tolist() == pytest.approx([expected] * 2, rel=1e-14)
    assert (aggregate.count, aggregate.weight) == (5, 24.0)
    assert [fault.job.slot for fault in round_replies.faults] == [2, 6]
    assert round_replies.metrics["loss"].tolist() == sorted(present)
    assert round_replies.bytes == 5 * 16
    first_to_last = replies_of(sorted(present), size, lost=(4, 5), unheard=(2,)).aggregate
    assert first_to_last is not None
    assert torch.equal(first_to_last.mean["model"], aggregate.mean["model"])


def test_a_round_without_replies_has_no_aggregate() -> None:
    assert replies_of([], 4).aggregate is None


def test_means_of_tensors_of_any_shape() -> None:
    rows = {
        "counts": torch.tensor([[1, 2], [3, 5]]),
        "table": torch.arange(12.0).view(2, 2, 3),
        "figure": torch.tensor([1.0, 2.0]),
    }
    every = torch.arange(2)
    aggregate = Replies(rows, every, every, torch.tensor([1, 3])).aggregate(
        total={"figure": rows["figure"]}
    )
    assert aggregate.mean["counts"].tolist() == [2.5, 4.25]
    assert torch.equal(aggregate.mean["table"], rows["table"][0] * 0.25 + rows["table"][1] * 0.75)
    assert aggregate.total["figure"] == 3
    assert aggregate.mean.keys() == {"counts", "table"}
