"""Likely mistakes are answered in one line with the right form, and resumed runs are named."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.common.errors import CheckpointError
from fedloom.report.page import render, usual_sheet
from fedloom.runs.directory import RunDirectory
from fedloom.runs.finished_round import FinishedRound
from fedloom.study.watch.live import Watched
from small_task import small_task


@pytest.fixture
def interrupted(tmp_path: Path) -> Callable[[int], None]:
    """Return a function that stops a run of four rounds after some of them."""

    def run(rounds: int) -> None:
        def stop(round: FinishedRound) -> None:
            if round.number == rounds:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fl.run(
                "fedavg",
                small_task(),
                rounds=4,
                evaluate_every=1,
                directory=tmp_path,
                on_round=stop,
            )

    return run


def test_a_resumed_run_in_python_says_so_and_a_fresh_one_does_not(
    tmp_path: Path, interrupted: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fedloom")
    interrupted(2)
    caplog.clear()
    resumed = fl.run("fedavg", small_task(), rounds=4, evaluate_every=1, directory=tmp_path)
    assert f"{tmp_path}: going on from round" in caplog.text
    caplog.clear()
    fl.run("fedavg", small_task(), rounds=4, evaluate_every=1, directory=tmp_path)
    assert "going on" not in caplog.text, "a finished run is only read"
    numbers: list[int] = []
    fresh = fl.run(
        "fedavg",
        small_task(),
        rounds=4,
        evaluate_every=1,
        directory=tmp_path,
        fresh=True,
        on_round=lambda round: numbers.append(round.number),
    )
    assert numbers == [1, 2, 3, 4]
    assert "going on" not in caplog.text
    assert [r["loss"] for r in fresh.history] == [r["loss"] for r in resumed.history]


def test_a_folder_of_another_split_suggests_a_fresh_start(tmp_path: Path) -> None:
    def task(seed: int) -> fl.Task:
        return fl.make_task("digits", clients=4, model="logistic", seed=seed)

    fl.run("fedavg", task(0), rounds=1, directory=tmp_path)
    expected = r"another split: .*start again with --fresh \(in Python fresh=True\)"
    with pytest.raises(CheckpointError, match=expected):
        fl.run("fedavg", task(1), rounds=1, directory=tmp_path)
    fl.run("fedavg", task(1), rounds=1, directory=tmp_path, fresh=True)


def test_watch_compares_only_equal_rounds(tmp_path: Path) -> None:
    def run(method: str, rounds: int, stopped: int = 0) -> None:
        def stop(round: FinishedRound) -> None:
            if round.number == stopped:
                raise KeyboardInterrupt

        path = tmp_path / method / "seed-0"
        options = {"rounds": rounds, "evaluate_every": 1, "directory": path, "on_round": stop}
        try:
            fl.run(method, small_task(), **options)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            return

    run("fedavg", 4)
    run("fedmr", 4, stopped=2)
    page = Watched(tmp_path).page(None)
    assert page is not None
    assert "Tables and tests leave out the runs that have not all their rounds." in page
    table = re.findall(r'<tr data-method="(\w+)"', page)
    assert set(table) == {"fedavg"}
    runs = [RunDirectory(tmp_path / name / "seed-0").summary() for name in ("fedavg", "fedmr")]
    cut = [replace(summary, records=summary.records[:2]) for summary in runs]
    text = render("all", runs, sheet=usual_sheet(cut))
    assert "Tables and tests compare the first 2 rounds, which all runs have." in text
    assert "Tables and tests" not in render("all", cut)
