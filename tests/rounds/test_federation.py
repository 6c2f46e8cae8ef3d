"""A round: its participants, its counts, refusals and records; results do not depend on order or
grouping.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedloom as fl
from fedavg_support import federation, small_task
from fedloom.algorithm.records import Aggregate, Message, Plan, Replies, Selection
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import Diverged, InvalidValue
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.parts.hooks import Inner, Part
from fedloom.rounds.clock import Clock
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.runs.finished_round import FinishedRound
from fedloom.task.making import make_task
from json_lines import json_lines
from shuffled_engine import Shuffled


@pytest.mark.parametrize("method", ["fedavg", "fedmr", "indep", "stages(fedavg:2, fedmr)"])
def test_results_do_not_depend_on_the_order_or_grouping_of_clients(method: str) -> None:
    task = small_task(momentum=0.9)
    expected = federation(build(method), task, 4)
    shuffled = Federation(
        build(method), task, Shuffled(task), Schedule(rounds=4, participation=0.5, seed=4)
    )
    expected.run()
    shuffled.run()
    assert torch.equal(expected.model(), shuffled.model())
    assert expected.history == shuffled.history


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    task = small_task()
    runs = [federation(build("fedmr"), task, 3, seed=seed) for seed in (1, 1, 2)]
    for run in runs:
        run.run()
    assert torch.equal(runs[0].model(), runs[1].model())
    assert runs[0].history == runs[1].history
    assert not torch.equal(runs[0].model(), runs[2].model())


def test_torchs_own_random_state_is_left_alone_and_changes_nothing() -> None:
    task = replace_model(
        nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    )
    torch.manual_seed(0)
    run = federation(build("fedavg"), task, 2)
    run.run()
    state = torch.get_rng_state()
    torch.manual_seed(99)
    repeated = federation(build("fedavg"), task, 2)
    repeated.run()
    assert torch.equal(run.model(), repeated.model())
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())


def replace_model(model: nn.Module):  # type: ignore[no-untyped-def]
    return replace(small_task(), model=model)


@dataclass
class Measuring(FedAvg):
    """FedAvg with a client figure that single precision cannot represent."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        cohort.metrics["third"] = torch.full((len(cohort.clients),), 1 / 3, dtype=torch.float64)
        return super().train(cohort, inbox)


def test_figures_keep_their_precision() -> None:
    run = federation(Measuring(), small_task(), 1)
    run.run()
    assert run.history[0]["third"] == 1 / 3


class Weighing(Part):
    """Sets the client weights and stores the weights of the replies."""

    def select(self, round: Round, inner: Inner) -> Selection:
        return Selection((0, 1, 2), weights=(1 / 3, 0.1, 2.0**25 + 1))

    def observe(self, round: Round, replies: Replies) -> None:
        self.given = replies.weights.tolist()


def test_a_selections_weights_keep_their_precision() -> None:
    method = Weighing(FedAvg())
    federation(method, small_task(), 1).run()
    assert method.given == [1 / 3, 0.1, 2.0**25 + 1]


def test_bytes_are_those_of_the_messages() -> None:
    task = replace_model(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    for method in ("fedavg", "fedmr", "indep"):
        run = federation(build(method), task, 1)
        run.run()
        assert run.history[0]["bytes_down"] == run.history[0]["bytes_up"] == 3 * 4 * (36 * 3 + 3)


def test_integer_buffers_are_counted_too() -> None:
    task = small_task()
    run = federation(build("fedavg"), task, 1)
    run.run()
    assert run.history[0]["bytes_up"] == 3 * (4 * task.layout.size + 8 * task.layout.integers)


def test_clients_that_drop_out_send_nothing_and_the_round_goes_on() -> None:
    task = small_task()
    run = federation(build("fedavg"), task, 12, dropout=0.4)
    run.run()
    absent = sum(len(record["faults"]) for record in run.history)
    assert 4 < absent < 26  # 36 draws of 0.4
    row = 4 * task.layout.size + 8 * task.layout.integers
    for record in run.history:
        assert record["bytes_up"] == record["bytes_down"] == (3 - len(record["faults"])) * row
        assert {fault["reason"] for fault in record["faults"]} <= {"dropped out"}


def test_a_broadcast_reaches_all_but_those_who_dropped_out() -> None:
    task = small_task()
    run = federation(build("umf(fedavg)"), task, 6, dropout=0.4)
    run.run()
    row = 4 * task.layout.size + 8 * task.layout.integers
    assert any(record["faults"] for record in run.history)
    for record in run.history:
        assert record["bytes_down"] == (task.clients - len(record["faults"])) * row


def test_when_nobody_answers_the_model_stays() -> None:
    task = small_task()
    run = federation(build("fedavg"), task, 2, dropout=1 - 1e-12)
    run.run()
    assert torch.equal(run.model(), task.initial)
    assert [len(record["faults"]) for record in run.history] == [3, 3]


@dataclass
class Hostile(FedAvg):
    """FedAvg in which client 2 sends a damaged reply."""

    harm: str = ""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        reply = super().train(cohort, inbox)
        if cohort.clients[0] != 2:
            return reply
        model = reply["model"]
        wrong = {
            "nan": {"model": torch.full_like(model, torch.nan)},
            "infinite": {"model": model.index_fill(1, torch.tensor([3]), torch.inf)},
            "short": {"model": model[:, :-1]},
            "name": {"weights": model},
            "more": {"model": model, "extra": model},
            "complex": {"model": model.to(torch.complex64)},
        }
        if self.harm == "error":
            raise RuntimeError("the disk of this client is full")
        return wrong[self.harm]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("nan", "not finite"),
        ("infinite", "not finite"),
        ("short", "has shape"),
        ("name", "weights"),
        ("more", "extra"),
        ("complex", "complex"),
        ("error", "RuntimeError: the disk of this client is full"),
    ],
)
def test_a_damaged_reply_is_refused_named_and_counted(harm: str, reason: str) -> None:
    task = small_task()
    hostile = federation(Hostile(harm=harm), task, 1, participation=1.0)
    hostile.run()
    (fault,) = hostile.history[0]["faults"]
    assert fault["client"] == 2
    assert reason in fault["reason"]

    class Without(Part):
        def select(self, round: Round, inner: Inner) -> Selection:
            clients = inner.select(round).clients
            return Selection(tuple(client for client in clients if client != 2))

    honest = federation(Without(FedAvg()), task, 1, participation=1.0)
    honest.run()
    assert torch.equal(hostile.model(), honest.model())


def test_a_mistake_in_a_method_is_not_taken_for_a_lost_client() -> None:
    class Broken(FedAvg):
        def train(self, cohort: Cohort, inbox: Message) -> Message:
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        federation(Broken(), small_task(), 1).run()


def test_divergence_is_said_and_keeps_the_last_good_model(tmp_path: Path) -> None:
    task = small_task(learning_rate=1e20, decay=1.0)
    run = Federation(
        build("fedavg"), task, RowsEngine(task), Schedule(rounds=9, participation=0.5), tmp_path
    )
    with pytest.raises(Diverged, match=r"learning rate 1e\+20"):
        run.run()
    repeated = Federation(
        build("fedavg"), task, RowsEngine(task), Schedule(rounds=9, participation=0.5), tmp_path
    )
    assert repeated.finished == run.finished
    assert bool(torch.isfinite(repeated.model()).all())


def test_figures_and_times_are_written_a_line_a_round(tmp_path: Path) -> None:
    task = small_task()
    schedule = Schedule(rounds=3, participation=0.5, evaluate_every=2)
    run = Federation(build("fedavg"), task, RowsEngine(task), schedule, tmp_path)
    run.run()
    lines = json_lines(tmp_path / "metrics.jsonl")
    assert lines == json.loads(json.dumps(run.history))
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert ["accuracy" in line for line in lines] == [False, True, True]
    assert all("second" not in name for line in lines for name in line)
    times = json_lines(tmp_path / "timings.jsonl")
    assert all(0 < t["train_seconds"] <= t["seconds"] for t in times)


def test_learning_reaches_a_useful_model() -> None:
    task = make_task(
        "digits",
        clients=10,
        partition="iid",
        model="logistic",
        training={"learning_rate": 0.5, "batch_size": 10},
    )
    run = Federation(
        build("fedavg"), task, RowsEngine(task), Schedule(rounds=15, participation=0.5)
    )
    run.run()
    assert run.history[-1]["accuracy"] > 0.9


def test_the_figures_of_rounds_do_not_stay_in_memory(tmp_path: Path) -> None:
    task, counts = small_task(), []

    def count(round: FinishedRound) -> None:
        names = {"bytes_down", "train_seconds", "values"}
        if round.number in (2, 6):
            counts.append(
                sum(
                    not names.isdisjoint(candidate)
                    for candidate in gc.get_objects()
                    if type(candidate) is dict
                )
            )

    result = fl.run(
        "fedavg",
        task,
        rounds=6,
        participation=1.0,
        directory=tmp_path,
        record=["similarity"],
        on_round=count,
    )
    assert counts[1] <= counts[0] + 2  # the replies of the current round
    federation = result.federation
    assert len(federation.history) == len(federation.timings) == federation.finished == 6
    assert len(result.recorded) == 1


# --- checks of the tensors of a method ---


@dataclass
class KeepsTheGraph(FedAvg):
    """Returns and stores tensors that are not detached."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        weights = super().train(cohort, inbox)["model"].clone().requires_grad_() * 1.0
        cohort.memory["weights"] = weights
        return {"model": weights}


def test_no_reply_keeps_the_graph_of_its_training() -> None:
    task = small_task()
    run = federation(KeepsTheGraph(), task, 2)
    run.run()
    assert not run.model().requires_grad
    assert all(not tensor.requires_grad for tensor in run.engine.memory().values())


@dataclass
class LearnsItsRate(FedAvg):
    """A server with a trainable rate, so that its model has an autograd graph."""

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["rate"] = torch.ones((), dtype=plan.initial.dtype, requires_grad=True)

    def update(self, round: Round, aggregate: Aggregate) -> None:
        super().update(round, aggregate)
        self.state["model"] = self.state["model"] * self.state["rate"]


def test_no_graph_of_the_server_outlives_its_round() -> None:
    task = small_task()
    run = federation(LearnsItsRate(), task, 2)
    run.run()
    assert run.algorithm.state["model"].grad_fn is None
    assert run.algorithm.state["rate"].requires_grad


@dataclass
class NamesWithAt(FedAvg):
    """Uses a reserved tensor name of the library."""

    def send(self, round: Round) -> Message:
        return {**super().send(round), "@integers": torch.zeros(1, 1)}


def test_names_of_the_library_are_refused() -> None:
    with pytest.raises(
        InvalidValue,
        match=r"NamesWithAt names a tensor '@integers': names that begin with @ are reserved",
    ):
        federation(NamesWithAt(), small_task(), 1).run()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_a_reply_of_another_type_is_refused_by_client(dtype: torch.dtype) -> None:
    class Converted(FedAvg):
        def train(self, cohort: Cohort, inbox: Message) -> Message:
            reply = super().train(cohort, inbox)
            return {"model": reply["model"].to(dtype)} if cohort.clients[0] == 1 else reply

    task = small_task()
    run = Federation(Converted(), task, RowsEngine(task), Schedule(rounds=1, participation=1.0))
    run.run()
    (fault,) = run.history[0]["faults"]
    assert fault["client"] == 1
    assert (
        f"Converted.train returned 'model' as {str(dtype).removeprefix('torch.')}, not float32"
        in fault["reason"]
    )


def test_rounds_that_take_the_first_replies_are_refused_where_epsilon_counts_on_all() -> None:
    task = small_task()
    schedule = Schedule(rounds=1, participation=0.5, clock=Clock(speed=100.0, over_selection=1.0))
    with pytest.raises(
        InvalidValue, match=r"clock.over_selection takes the first replies of a round"
    ):
        Federation(build("private(fedavg, noise=1.0)"), task, RowsEngine(task), schedule)
