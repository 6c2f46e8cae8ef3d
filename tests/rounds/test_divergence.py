"""Diverged training ends with one clear line and the state before that round."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from every_method import EVERY_METHOD
from fedloom.algorithm import Algorithm
from fedloom.algorithm.method import Method, components
from fedloom.algorithm.records import Message, Selection
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import Diverged, InvalidValue, RefusedReply
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.data.dataset import Samples
from fedloom.engines.rows import RowsEngine
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.parts.hooks import Inner, Part
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task.making import make_task
from naive import World
from small_task import small_task

LAST = 2  # number of successful rounds


class Spoilt(Part):
    """A method that fails on the server in the round after `LAST`."""

    failure = "nan"

    def mix(self, round: Round, algorithm: Algorithm) -> None:
        if round.number == LAST + 1:
            if self.failure == "interrupt":
                raise KeyboardInterrupt
            for method in components(self):
                method.state = {name: self.spoil(tensor) for name, tensor in method.state.items()}

    def spoil(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if self.failure == "huge":
            return tensor * 1e9
        return tensor.clone().index_fill_(-1, torch.tensor([0]), float(self.failure))


def federation(
    method: Method, directory: Path | None = None, rounds: int = 9, **training: float
) -> Federation:
    world = World(norm=True)
    if training:
        world.training = Training(batch_size=4, **training)  # type: ignore[arg-type]
    task = world.task()
    schedule = Schedule(rounds=rounds, participation=0.5, seed=3, evaluate_every=1)
    return Federation(method, task, RowsEngine(task), schedule, directory)


def assert_state_of_round(run: Federation, number: int, inner: str) -> None:
    """Assert that server and clients have the state of a run of `number` rounds."""
    reference = federation(Spoilt(build(inner)))
    for _ in range(number):
        reference.step()
    expected, state = reference.server_state(), run.server_state()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    memory, expected_memory = run.engine.memory(), reference.engine.memory()
    assert memory.keys() == expected_memory.keys()
    assert all(torch.equal(memory[name], expected_memory[name]) for name in memory)
    assert torch.equal(run.integers, reference.integers)
    assert run.history == reference.history


@pytest.mark.parametrize(
    "inner", ["fedavg", "fedmr", "scaffold", "umf(feddc)", "stages(moon:2, fedmr)"]
)
@pytest.mark.parametrize("failure", ["nan", "inf", "huge"])
def test_a_diverged_global_model_ends_the_run_in_the_state_of_the_round_before(
    inner: str, failure: str, tmp_path: Path
) -> None:
    method = Spoilt(build(inner))
    method.failure = failure
    run = federation(method, tmp_path)
    with pytest.raises(
        Diverged, match=r"round 3: training diverged .*; the model of round 2 remains"
    ) as caught:
        run.run()
    assert "\n" not in str(caught.value)
    assert_state_of_round(run, LAST, inner)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]
    assert "NaN" not in "".join(lines)
    repeated = federation(Spoilt(build(inner)), tmp_path)
    assert_state_of_round(repeated, LAST, inner)


@pytest.mark.parametrize("inner", ["fedmr", "umf(scaffold)"])
def test_an_interruption_on_the_server_undoes_the_round(inner: str, tmp_path: Path) -> None:
    method = Spoilt(build(inner))
    method.failure = "interrupt"
    run = federation(method, tmp_path, rounds=5)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert_state_of_round(run, LAST, inner)
    repeated = federation(Spoilt(build(inner)), tmp_path, rounds=5)
    assert repeated.finished == LAST


@pytest.mark.parametrize("method", ["fedavg", "fedmr", "umf(feddc)"])
@pytest.mark.parametrize("rate", [10.0, 1e6])
def test_a_learning_rate_that_is_far_too_large_is_named(
    method: str, rate: float, tmp_path: Path
) -> None:
    task = make_task(
        "digits", clients=10, model="mlp", training={"learning_rate": rate, "momentum": 0.9}
    )
    schedule = Schedule(rounds=30, participation=0.5, seed=3, evaluate_every=1)
    run = Federation(build(method), task, RowsEngine(task), schedule, tmp_path)
    with pytest.raises(
        Diverged, match=rf"training diverged \(learning rate {rate:g}".replace("+", r"\+")
    ):
        run.run()
    for record in run.history:
        assert record["loss"] < 1000 * 2.4
    assert (
        Federation(build(method), task, RowsEngine(task), schedule, tmp_path).finished
        == run.finished
    )
    for tensor in run.server_state().values():
        assert bool(torch.isfinite(tensor).all())


def test_a_run_that_diverges_in_round_1_has_no_earlier_model() -> None:
    run = federation(build("fedavg"), learning_rate=1e30)
    with pytest.raises(Diverged, match=r"round 1: .*; there is no earlier model"):
        run.run()
    assert run.history == []
    assert torch.equal(run.model(), run.task.initial)


def test_a_high_loss_is_no_divergence() -> None:
    run = federation(build("fedavg"), rounds=4, learning_rate=5.0)
    run.run()
    assert len(run.history) == 4


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_a_rate_that_has_decayed_to_zero_is_no_divergence(method: str) -> None:
    """A rate that decays to zero is no divergence.

    The rate is 0 in single precision from round 2, and in double precision from round 7.
    """
    settings = Training(learning_rate=0.05, batch_size=4, decay=1e-60)
    task = replace(small_task(), training=settings)
    run = Federation(
        build(method),
        task,
        RowsEngine(task),
        Schedule(rounds=9, participation=1.0, evaluate_every=1),
    )
    run.run()
    assert len(run.history) == 9
    assert not any(record["faults"] for record in run.history)


class Weighing(Part):
    """Selects all clients and gives one of them another weight."""

    weight = 0.0

    def select(self, round: Round, inner: Inner) -> Selection:
        weights = (1.0,) * (round.clients - 1)
        return Selection(tuple(range(round.clients)), weights=(*weights, self.weight))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_without_a_mean_is_refused_and_no_divergence(weight: float) -> None:
    method = Weighing(build("fedavg"))
    method.weight = weight
    with pytest.raises(InvalidValue, match=f"was selected with weight {weight:g}: .* above 0"):
        federation(method).run()


@pytest.mark.parametrize("by", ["prototype", "head"])
def test_a_class_that_no_client_has_is_no_divergence(by: str) -> None:
    """A tenth of the test samples have a class without a prototype, and this is no divergence."""
    task = small_task()
    labels = task.train.labels.clamp(max=2)
    task = replace(task, train=Samples(task.train.inputs, labels))
    assert bool((task.test.labels == 3).any())
    run = Federation(
        build(f"fedproto(by={by})"),
        task,
        RowsEngine(task),
        Schedule(rounds=3, participation=1.0, evaluate_every=1),
    )
    run.run()
    assert run.history[-1]["loss"] < 100


class Misnamed(FedAvg):
    """Clients reply with an extra tensor named "not finite"."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return super().train(cohort, inbox) | {"not finite": torch.zeros(len(cohort.clients), 1)}


def test_the_text_of_a_refusal_does_not_make_it_a_divergence() -> None:
    with pytest.raises(RefusedReply, match="'not finite'"):
        federation(Misnamed()).run()
