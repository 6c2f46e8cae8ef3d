"""Robust aggregation rules compared with plain Python, under attack and around other methods."""

from __future__ import annotations

import math
import statistics
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.algorithm.records import Replies, Selection
from fedloom.common.errors import Diverged, InvalidValue
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.robust import centered_clipping, coordinate_median, krum, trimmed_mean
from fedloom.rounds.engine import Answer
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from small_task import small_task

RULES = ("median", "trimmed_mean", "krum", "multi_krum", "clipping")

Rows = list[list[float]]


@st.composite
def matrices(draw: st.DrawFn, least: int = 1) -> Rows:
    count, size = draw(st.integers(least, 9)), draw(st.integers(1, 4))
    values = st.floats(-100, 100).map(lambda value: round(value, 3))
    return [[draw(values) for _ in range(size)] for _ in range(count)]


def tensor(rows: Rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# --- the rules ---


@given(matrices())
@settings(max_examples=50, deadline=None)
def test_the_median_is_that_of_each_coordinate(rows: Rows) -> None:
    expected = [statistics.median(column) for column in zip(*rows, strict=True)]
    assert coordinate_median(tensor(rows)).tolist() == pytest.approx(expected)


@given(matrices(), st.data())
@settings(max_examples=50, deadline=None)
def test_the_trimmed_mean_leaves_out_the_outermost(rows: Rows, data: st.DataObject) -> None:
    trimmed = data.draw(st.integers(0, (len(rows) - 1) // 2))
    expected = [
        statistics.fmean(sorted(column)[trimmed : len(rows) - trimmed])
        for column in zip(*rows, strict=True)
    ]
    assert trimmed_mean(tensor(rows), trimmed).tolist() == pytest.approx(expected, abs=1e-9)


@given(matrices(3), st.data())
@settings(max_examples=50, deadline=None)
def test_krum_takes_the_rows_nearest_to_others(rows: Rows, data: st.DataObject) -> None:
    count = len(rows)
    malicious, chosen = (
        data.draw(st.integers(0, (count - 3) // 2)),
        data.draw(st.integers(1, count)),
    )
    scores = []
    for row in rows:
        distances = sorted(
            sum((a - b) ** 2 for a, b in zip(row, neighbour, strict=True))
            for neighbour in rows
            if neighbour is not row
        )
        scores.append(sum(distances[: count - malicious - 2]))
    selected = krum(tensor(rows), malicious, chosen).tolist()
    assert len(set(selected)) == chosen
    worst = max(scores[k] for k in selected)
    assert all(scores[k] >= worst - 1e-6 * (1 + worst) for k in range(count) if k not in selected)


@given(matrices(), st.floats(0.1, 50) | st.none(), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_clipping_bounds_the_length_of_each_update(
    rows: Rows, radius: float | None, steps: int
) -> None:
    center = [0.5] * len(rows[0])
    for _ in range(steps):
        updates = [[a - c for a, c in zip(row, center, strict=True)] for row in rows]
        lengths = [math.hypot(*update) for update in updates]
        longest = statistics.median(lengths) if radius is None else radius
        shares = [1 if length == 0 else min(1, longest / length) for length in lengths]
        center = [
            c
            + sum(share * update[i] for share, update in zip(shares, updates, strict=True))
            / len(rows)
            for i, c in enumerate(center)
        ]
    start = torch.full((len(rows[0]),), 0.5, dtype=torch.float64)
    assert centered_clipping(tensor(rows), start, radius, steps).tolist() == pytest.approx(
        center, abs=1e-7
    )


def test_a_minority_moves_no_estimate_far() -> None:
    generator = torch.Generator().manual_seed(0)
    honest = torch.randn(7, 50, generator=generator) * 0.1 + 1
    for lie in (1e6, -1e6, 0.0):
        rows = torch.cat([honest, torch.full((3, 50), lie)])
        far = float((honest - honest.mean(0)).norm(dim=1).max())
        for estimate in (
            coordinate_median(rows),
            trimmed_mean(rows, 3),
            rows[krum(rows, 3)].mean(0),
            rows[krum(rows, 3, 7)].mean(0),
            centered_clipping(rows, torch.ones(50), steps=3),
        ):
            assert float((estimate - honest.mean(0)).norm()) < 2 * far


# --- as methods ---


class Poisoned(RowsEngine):
    """A simulation in which some clients send arbitrary models."""

    liars: tuple[int, ...] = ()

    def train(self, *arguments: Any) -> Any:
        for result in super().train(*arguments):
            if isinstance(result, Answer) and result.job.client in self.liars:
                yield Answer(
                    result.job, {n: torch.full_like(t, 1e4) for n, t in result.tensors.items()}, {}
                )
            else:
                yield result


@cache
def digits() -> Task:
    training = {"learning_rate": 0.1, "epochs": 2, "batch_size": 20}
    return make_task(
        "digits", clients=6, partition="iid", model="mlp(hidden=[32])", training=training
    )


def federation(expression: str, rounds: int = 6, liars: tuple[int, ...] = ()) -> Federation:
    task = small_task()
    engine = Poisoned(task)
    engine.liars = liars
    return Federation(
        build(expression),
        task,
        engine,
        Schedule(rounds=rounds, participation=1.0, evaluate_every=1),
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("inner", ["fedavg", "scaffold", "fedavgm", "fednova"])
def test_it_learns_with_one_malicious_client_of_six(rule: str, inner: str) -> None:
    task = digits()
    engine = Poisoned(task)
    engine.liars = (2,)
    schedule = Schedule(rounds=4, participation=1.0, evaluate_every=4)
    simulation = Federation(
        build(f"robust({inner}, rule={rule}, malicious=0.16)"), task, engine, schedule
    )
    simulation.run()
    assert simulation.history[-1]["accuracy"] > 0.65


def test_without_a_robust_rule_one_malicious_client_decides() -> None:
    with pytest.raises(Diverged):
        federation("fedavg", rounds=1, liars=(2,)).step()


def receive(expression: str, rows: Tensor, **tensors: Tensor) -> Tensor:
    """Return the model that a method computes from these replies in round 1."""
    pipeline = federation(expression).pipeline
    count = len(rows)
    weights = torch.arange(1, count + 1)
    round = Round(1, 6, 0, 6, count, 0.1, 0.1, selected=tuple(range(count)))
    exchange = pipeline.open(round, Selection(round.selected))
    clients = torch.arange(count)
    pipeline.close(
        exchange, Replies({"model": rows, **tensors}, clients, clients, weights, exchange)
    )
    return pipeline.model()


def test_the_inner_method_receives_the_estimate_whatever_clients_weigh() -> None:
    size = federation("fedavg").task.layout.size
    rows = torch.randn(6, size, generator=torch.Generator().manual_seed(1))
    start = federation("fedavg").model()
    for expression, expected in (
        ("rule=median", coordinate_median(rows)),
        ("malicious=0.3", trimmed_mean(rows, 2)),
        ("rule=krum, malicious=0.1", rows[krum(rows, 1)].mean(0)),
        ("rule=multi_krum, malicious=0.1", rows[krum(rows, 1, 5)].mean(0)),
        ("rule=clipping, radius=0.5, steps=2", centered_clipping(rows, start, 0.5, 2)),
    ):
        for inner in ("fedavg", "fedavg(weighted=false)", "fedprox"):
            torch.testing.assert_close(receive(f"robust({inner}, {expression})", rows), expected)
    middle = receive("robust(fedavgm(learning_rate=0.5, momentum=0.0), rule=median)", rows)
    trainable = slice(federation("fedavg").task.layout.trainable)
    halfway = start.lerp(coordinate_median(rows), 0.5)
    torch.testing.assert_close(middle[trainable], halfway[trainable])


def test_krum_takes_all_tensors_from_the_same_clients() -> None:
    layout = federation("fedavg").task.layout
    rows = torch.randn(6, layout.size, generator=torch.Generator().manual_seed(1))
    variates = torch.randn(6, layout.trainable, generator=torch.Generator().manual_seed(2))
    pipeline = federation("robust(scaffold, rule=krum, malicious=0.1)").pipeline
    round = Round(1, 6, 0, 6, 6, 0.1, 0.1, selected=tuple(range(6)))
    exchange = pipeline.open(round, Selection(round.selected))
    everybody = torch.arange(6)
    replies = Replies(
        {"model": rows, "variate": variates}, everybody, everybody, torch.ones(6), exchange
    )
    pipeline.close(exchange, replies)
    (chosen,) = krum(rows, 1).tolist()
    torch.testing.assert_close(pipeline.algorithm.state["variate"], variates[chosen])


@pytest.mark.parametrize(
    "expression",
    [
        "robust(umf(fedavg))",
        "umf(robust(fedavg))",
        "ala(robust(fedprox), percent=50)",
        "robust(ala(fedavg))",
        "stages(robust(fedavg):3, fedmr)",
        "robust(stages(fedavg:3, scaffold))",
        "robust(fedper, rule=krum, malicious=0.1)",
        "clustered(robust(fedavg, rule=median))",
        "robust(feddyn, rule=clipping)",
        "secure(robust(fedavg, rule=median))",
    ],
)
def test_nested_expressions_round_trip(expression: str) -> None:
    simulation = federation(expression)
    simulation.run()
    assert build(str(simulation.algorithm)) == build(expression)
    assert bool(simulation.model().isfinite().all())


@pytest.mark.parametrize("by", ["size", "similarity"])
def test_clients_are_clustered_by_their_uploads_whatever_is_outside(by: str) -> None:
    def run(text: str) -> Federation:
        task = small_task()
        schedule = Schedule(rounds=4, participation=0.5, seed=2, evaluate_every=1)
        made = Federation(build(text), task, RowsEngine(task), schedule)
        made.run()
        return made

    inside = run(f"robust(clustered(fedavg, by={by}), rule=median)")
    around = run(f"clustered(robust(fedavg, rule=median), by={by})")
    assert inside.history == around.history
    assert torch.equal(inside.model(), around.model())
    assert not torch.equal(inside.model(), run(f"clustered(fedavg, by={by})").model())


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_an_exchange_of_layers_changes_no_estimate_by_coordinates(rule: str) -> None:
    plain, secure = (
        federation(text, rounds=3)
        for text in (f"robust(fedavg, rule={rule})", f"secure(robust(fedavg, rule={rule}))")
    )
    for run in (plain, secure):
        run.run()
    assert torch.equal(plain.model(), secure.model())


def test_a_round_with_too_few_replies_to_outvote_the_malicious_is_left_out() -> None:
    start = federation("fedavg").model()
    for rule in RULES:
        for count in range(1, 7):
            rows = torch.randn(count, len(start), generator=torch.Generator().manual_seed(count))
            model = receive(f"robust(fedavg, rule={rule}, malicious=0.16)", rows)
            enough = count >= (5 if "krum" in rule else 3)  # assumes one malicious client
            assert torch.equal(model, start) != enough


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("robust(fedmr)", "robust: fedmr needs each reply, not only an estimate of their mean"),
        ("robust(fedamp)", "fedamp needs each reply"),
        ("robust(fedavg, rule=mean)", "rule"),
        ("robust(fedavg, malicious=0.5)", "malicious must be"),
        ("robust(fedavg, malicious=-0.1)", "malicious must be"),
        (
            "robust(fedavg, radius=3.0)",
            "radius and steps are only for rule=clipping, not for trimmed_mean",
        ),
        ("robust(fedavg, rule=clipping, radius=0)", "radius must be"),
        ("secure(robust(fedavg, rule=krum))", "needs the client of each upload"),
    ],
)
def test_bad_expressions_are_refused_in_one_line(expression: str, text: str) -> None:
    with pytest.raises(InvalidValue, match=text) as caught:
        build(expression)
    assert "\n" not in str(caught.value)


def test_too_few_clients_for_what_is_feared_are_refused() -> None:
    with pytest.raises(
        InvalidValue,
        match=r"rule=krum against 2 malicious clients needs at least 7 replies in a round, not 6",
    ):
        federation("robust(fedavg, rule=krum, malicious=0.3)")
    task = small_task()
    with pytest.raises(
        InvalidValue, match=r"rule=trimmed_mean against 1 malicious clients needs at least 3"
    ):
        Federation(
            build("robust(fedavg)"), task, RowsEngine(task), Schedule(rounds=1, participation=0.34)
        )
