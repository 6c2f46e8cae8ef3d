"""Compare asynchronous methods with a naive event simulation; check limiting cases and resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from clock_support import STRAGGLERS, task, trained
from fedloom.algorithm.records import uniform
from fedloom.common.errors import InvalidValue
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.fedbuff import FedBuff
from fedloom.rounds.clock import Clock
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.runs.run import run
from small_task import small_task


def federation(
    method: str, rounds: int = 6, clock: Clock = STRAGGLERS, directory: Path | None = None
) -> Federation:
    schedule = Schedule(rounds=rounds, participation=0.5, seed=3, clock=clock, checkpoint_every=1)
    small = task()
    return Federation(build(method), small, RowsEngine(small), schedule, directory)


def naive(rounds: int, k: int, asynchronous: bool) -> tuple[Tensor, list[float]]:
    """Simulate FedBuff, or FedAsync if `asynchronous`, as a loop over events with four clients in
    training.
    """
    learned, clock, times = task(), 0.0, []
    engine = RowsEngine(learned)
    model = learned.initial.clone()
    # end time, client, version, model sent, model returned
    under_way: list[tuple[float, int, int, Tensor, Tensor]] = []
    for number in range(1, rounds + 1):
        round = Round(number, rounds, 3, 8, 4, 0.1, 0.1)
        busy = [entry[1] for entry in under_way]
        started = [client for client in uniform(round) if client not in busy][: 4 - len(busy)]
        for client in started:
            flat = engine.cohort(round, [_ClientTask(client)]).fit(model[None].clone()).model[0]
            device, size = STRAGGLERS.device(3, client), int(learned.partition.sizes[client])
            done = clock + 2600 / device.down + size / device.speed + 2600 / device.up
            under_way.append((done, client, number, model.clone(), flat))
        under_way.sort(key=lambda entry: entry[:2])
        arrived, under_way = under_way[:k], under_way[k:]
        clock = max(clock, arrived[-1][0])
        times.append(clock)
        weights = torch.tensor(
            [float(learned.partition.sizes[client]) for _, client, *_ in arrived]
        )
        moved = []
        for _, _, version, sent, returned in arrived:
            discount = (1 + number - version) ** -0.5
            moved.append(
                0.6 * discount * (returned - model)
                if asynchronous
                else discount * (returned - sent)
            )
        model = model + (torch.stack(moved) * (weights / weights.sum())[:, None]).sum(0)
    return model, times


class _ClientTask:
    """The attributes of a client task that `RowsEngine.cohort` reads."""

    slot = 0

    def __init__(self, client: int) -> None:
        self.client = client


@pytest.mark.parametrize(("method", "k"), [("fedbuff(fedavg, k=2)", 2), ("fedasync(fedavg)", 1)])
def test_order_of_events_and_model_equal_a_naive_simulation(method: str, k: int) -> None:
    """Events and model equal a naive simulation if client speeds differ tenfold."""
    simulation = federation(method)
    simulation.run()
    model, times = naive(6, k, asynchronous=k == 1)
    assert [record["simulated_seconds"] for record in simulation.history] == pytest.approx(
        times, rel=1e-12
    )
    assert torch.allclose(simulation.model(), model, atol=1e-6)
    assert int((6 - simulation.algorithm.state["since"]).max()) >= 2, (
        "nobody was late, so nothing was shown"
    )


@pytest.mark.parametrize(
    ("method", "limit"), [("fedbuff(fedprox, k=4)", "fedprox"), ("fedmr_async(k=4)", "fedmr")]
)
def test_waiting_for_all_is_the_method_itself(method: str, limit: str) -> None:
    """A server that waits for all clients equals the synchronous method bit for bit, with equal
    times.
    """
    waits, plain = trained(method), trained(limit)
    assert waits.history == plain.history
    assert torch.equal(waits.federation.model(), plain.federation.model())


def test_fedmr_recombines_the_returned_models_and_keeps_every_layer() -> None:
    """Only returned models change the mean of the pool; models in training keep their initial
    values.
    """
    simulation = federation("fedmr_async(k=2)", rounds=1)
    original = simulation.server_state()["inner0.pool"].clone()
    simulation.run()
    state, pool = simulation.algorithm.state, simulation.server_state()["inner0.pool"]
    back = (state["client"] < 0).nonzero()[:, 0]
    assert len(back) == 2
    away = [slot for slot in range(4) if slot not in back.tolist()]
    assert torch.equal(pool[away], original[away])
    assert torch.allclose(pool[back].mean(0), state["replies"][back].mean(0), atol=1e-7)


@pytest.mark.parametrize("method", ["fedbuff(fedavg, k=2)", "fedasync(fedavg)", "fedmr_async(k=2)"])
def test_a_stopped_run_resumes_bit_for_bit(method: str, tmp_path: Path) -> None:
    """The checkpoint holds the clients in training, their times and their results."""
    begun = federation(method, directory=tmp_path)
    for _ in range(3):
        begun.step()
    begun.save()
    begun.step()  # no checkpoint of this step is written
    resumed, uninterrupted = federation(method, directory=tmp_path), federation(method)
    assert resumed.finished == 3
    resumed.run()
    uninterrupted.run()
    assert resumed.history == uninterrupted.history
    state, expected = resumed.server_state(), uninterrupted.server_state()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_deadline_ends_a_round_with_fewer_and_late_replies_are_used_later() -> None:
    """A deadline drops no client: later replies count in a later step."""
    clock = Clock(speed="stragglers(100, 10)", deadline=2.0)
    simulation = federation("fedbuff(fedavg, k=4)", rounds=12, clock=clock)
    simulation.run()
    times = [record["simulated_seconds"] for record in simulation.history]
    assert all(end - start <= 2.0 + 1e-9 for start, end in zip([0.0, *times], times, strict=False))
    assert not any(record["faults"] for record in simulation.history)
    assert any(len(record["clients"]) < 4 for record in simulation.history)
    assert not torch.equal(simulation.model(), task().initial)


def test_batch_norm_and_clients_that_drop_out() -> None:
    """Variances stay non-negative, and a client that never replies frees its slot."""
    result = run(
        "fedbuff(fedavg, k=2)",
        small_task(),
        rounds=8,
        participation=0.7,
        dropout=0.4,
        seed=1,
        engine="rows",
    )
    assert isinstance(result.federation.algorithm, FedBuff)
    assert torch.isfinite(result.federation.model()).all()
    assert "simulated_seconds" not in result.history[0]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fedbuff(fedavg)", "k must be at most the 4 clients that train at the same time, not 10"),
        ("fedbuff(scaffold, k=2)", "does more than average whole models"),
        ("fedbuff(fedmr, k=2)", "does more than average whole models"),
        ("private(fedbuff(fedavg, k=2), noise=1.0)", "remove private"),
        ("stages(fedbuff(fedavg, k=2):2, fedavg)", "it cannot be inside or around stages"),
        ("fedmr_async(k=2, blend=auto)", "blend must be a number"),
    ],
)
def test_bad_expressions_are_refused(method: str, message: str) -> None:
    """Bad expressions are refused in one line before any client trains."""
    with pytest.raises(InvalidValue, match=message):
        federation(method)
