"""Pools with diverging models cause a notice, and healthy pools do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.common.training import Training
from fedloom.engines.stacked import StackedEngine
from fedloom.parts.building import build
from fedloom.report.page import render
from fedloom.rounds import pool_watch
from fedloom.rounds.federation import Federation
from fedloom.rounds.pool_watch import CAME_APART, PoolWatch
from fedloom.rounds.schedule import Schedule
from fedloom.task.making import make_task
from json_lines import json_lines
from small_task import small_task

LABELS = torch.arange(10).repeat(3)


def rounds(
    accuracy: list[float],
    loss: list[float],
    training_loss: float = 0.5,
    similarity: float | None = 0.5,
) -> Iterator[dict[str, Any]]:
    for number, (share, entropy) in enumerate(zip(accuracy, loss, strict=True), 1):
        figures = {
            "round": number,
            "accuracy": share,
            "loss": entropy,
            "training_loss": training_loss,
        }
        yield figures if similarity is None else figures | {"pool_cosine": similarity}


def notices(*phases: Iterator[dict[str, Any]], labels: torch.Tensor = LABELS) -> list[str]:
    watch = PoolWatch(labels, rounds=19)
    for phase in phases:
        for record in phase:
            watch.update(record)
            watch.update({"round": 0, "training_loss": 0.1})  # a round without evaluation
    return watch.notices


GUESSING, LEARNT, FALLEN = [0.1] * 8, [0.8] * 8, [0.4] * 8
FLAT, FALLING, RISING = (
    [2.3] * 8,
    [2.3 - 0.1 * k for k in range(8)],
    [1.0 + 0.1 * k for k in range(8)],
)


def test_a_model_that_stays_at_chance_while_clients_learn() -> None:
    assert notices(rounds(GUESSING, FLAT)) == [CAME_APART]
    assert notices(rounds(GUESSING * 3, FLAT * 3)) == [CAME_APART]  # only one notice
    assert notices(rounds([0.18] * 8, FLAT)) == [CAME_APART]
    assert notices(rounds([0.2] * 8, FLAT)) == []
    assert notices(rounds([0.6] * 8, FLAT), labels=torch.tensor([0, 0, 0, 1, 2])) == [
        CAME_APART
    ]  # the accuracy of the most frequent class


def test_a_model_that_loses_half_of_what_it_had_learned() -> None:
    assert notices(rounds(LEARNT, FALLING), rounds(FALLEN, RISING)) == [CAME_APART]
    # first phase without a pool
    assert notices(rounds(LEARNT, FALLING, similarity=None), rounds(FALLEN, RISING)) == [CAME_APART]
    # (0.1 + 0.8) / 2 is the threshold
    assert notices(rounds(LEARNT, FALLING), rounds([0.5] * 8, RISING)) == []
    assert notices(rounds(FALLEN, RISING)) == []


@pytest.mark.parametrize(
    "records",
    [
        rounds(GUESSING[:7], FLAT[:7]),  # too few evaluations
        rounds(GUESSING, FALLING),  # the loss still decreases
        rounds(GUESSING, FLAT, training_loss=2.1),  # the clients do not learn
        rounds(GUESSING, FLAT, similarity=0.81),
        rounds(GUESSING, FLAT, similarity=None),  # no pool
    ],
)
def test_no_notice_is_given_without_all_of_its_signs(records: Iterator[dict[str, Any]]) -> None:
    assert notices(records) == []


def test_what_json_cannot_express_is_left_out() -> None:
    unknown = {"round": 1, "accuracy": 0.1, "loss": None, "training_loss": 0.5, "pool_cosine": 0.5}
    assert notices(iter([unknown] * 20)) == []


def early(progress: list[float | None], rounds: int = 40, every: int = 1) -> list[str]:
    """Return the notices of a run with these T / S at its evaluations."""
    watch = PoolWatch(LABELS, rounds)
    for k, ratio in enumerate(progress, 1):
        watch.update(
            {"round": k * every, "accuracy": 0.5}
            | ({} if ratio is None else {"pool_progress": ratio})
        )
    return watch.notices


def test_a_pool_with_more_spread_than_common_progress_after_15_percent_of_the_rounds_is_noticed_once() -> (
    None
):
    # the first evaluation that counts is in round 6 of 40
    (notice,) = early([0.2] * 5 + [0.79] + [0.3] * 30)
    assert "T / S = 0.79 after 6 of 40 rounds" in notice
    assert early([0.2] * 5 + [0.8] + [0.3] * 30) == []
    assert early([0.2] * 5) == []
    assert early([None] + [0.3] * 30) == []  # two stages: not covered by the measurements
    assert early([0.3] * 19, rounds=19) == []
    assert len(early([0.3] * 4, every=8)) == 1  # first evaluation at 20 % of the rounds
    assert early([0.3] * 4, every=11) == []  # first evaluation at 28 %


def test_the_ratio_is_the_common_progress_over_the_variance_of_the_pool() -> None:
    run = Federation(
        build("fedmr"),
        task := small_task(),
        StackedEngine(task),
        Schedule(4, 0.5, evaluate_every=2),
    )
    run.run()
    pool, initial = run.algorithm.state["pool"].double(), task.initial.double()
    mean = sum(pool) / len(pool)
    common = sum(float((mean[p] - initial[p]) ** 2) for p in range(task.layout.trainable))
    spread = sum(
        float((row[p] - mean[p]) ** 2) for row in pool for p in range(task.layout.trainable)
    ) / len(pool)
    assert run.history[-1]["pool_progress"] == pytest.approx(common / spread, rel=1e-5)
    assert "pool_progress" not in run.history[0]
    blended = fl.run("fedmr(blend=0.5)", small_task(), rounds=1, evaluate_every=1)
    assert "pool_progress" not in blended.history[-1]  # no measurements
    one_model = fl.run("fedmr", small_task(), rounds=1, participation=0.01, evaluate_every=1)
    assert one_model.history[-1]["pool_progress"] is None  # one model has no spread


def digits(method: str, rate: float, until: int, alpha: float = 0.1) -> Federation:
    """Train twenty clients with different labels, ten per round.

    The run stops when the pool diverges, or after `until` rounds.
    """
    task = make_task(
        "digits", clients=20, partition=f"dirichlet({alpha})", model="mlp(hidden=[64, 64, 64])",
        training=Training(learning_rate=rate, epochs=5, batch_size=50),
    )  # fmt: skip
    run = Federation(
        build(method),
        task,
        StackedEngine(task),
        Schedule(until, 0.5, evaluate_every=1, personal_every=0),
    )
    while run.finished < until and CAME_APART not in run.notices:
        run.step()
    return run


def test_long_steps_drive_a_pool_apart_and_the_run_says_so() -> None:
    run = digits("fedmr", 0.3, 200)
    assert run.notices[1:] == [CAME_APART]
    assert "T / S = 0." in run.notices[0]  # from round 30, long before
    accuracies = [record["accuracy"] for record in run.history]
    # the final models depend on the rounding of the processor
    assert accuracies[-1] < 0.6 * max(accuracies)
    assert run.history[-1]["pool_cosine"] < 0.7


@pytest.mark.parametrize(
    ("method", "rate", "rounds", "alpha"),
    [("fedmr", 0.1, 60, 100.0), ("fedavg", 0.2, 20, 0.1), ("fedmr(blend=auto)", 0.2, 60, 0.1)],
)
def test_a_pool_that_does_well_and_averaging_are_left_in_peace(
    method: str, rate: float, rounds: int, alpha: float
) -> None:
    run = digits(method, rate, rounds, alpha)
    assert run.finished == rounds
    assert run.notices == []


@pytest.mark.parametrize(
    "method",
    [
        "fedmr",
        "indep",
        "stages(fedavg:1, fedmr)",
        "secure(fedmr)",
        "umf(fedmr, simulate_all=true)",
        "ala(fedmr)",
    ],
)
def test_the_terminal_the_record_and_the_report_say_it_once(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_watch, "SIMILARITY", 2.0)
    monkeypatch.setattr(pool_watch, "EVALUATIONS", 2)
    monkeypatch.setattr(PoolWatch, "_has_come_apart", lambda self: True)
    for number in (4, 6):  # the second run continues after round 4
        result = fl.run(
            method,
            small_task(),
            rounds=number,
            participation=0.5,
            evaluate_every=1,
            directory=tmp_path,
        )
    lines = json_lines(tmp_path / "timings.jsonl")
    rounds = [line["round"] for line in lines if CAME_APART in line.get("notices", ())]
    assert rounds == [2]
    # the notice also appears when the run resumes
    assert [record.message for record in caplog.records].count(CAME_APART) == 2
    page = render("A run", [result.summary])
    assert page.count("(seed 0 in round 2): the models of the pool have come apart") == 1


def test_a_method_without_a_pool_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolWatch, "_has_come_apart", lambda self: True)
    monkeypatch.setattr(pool_watch, "EVALUATIONS", 2)
    result = fl.run("fedavg", small_task(norm=False), rounds=4, evaluate_every=1)
    assert result.federation.notices == []
