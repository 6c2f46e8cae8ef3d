"""Run the harness briefly (`make chaos` runs it longer) and check that it detects errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the sites of a federation need Flower")
if not hasattr(os, "fork"):
    pytest.skip("processes are forked to start them quickly", allow_module_level=True)

import chaos.trials
from chaos.harness import run, table
from chaos.sites import Claims
from chaos.trials import TRIALS, Rounds


@pytest.mark.parametrize(
    "name", sorted(TRIALS.keys() - {"actors", "supernodes", "workers"})
)  # these are slow; test_ray, test_flower_sites and test_processes kill some
def test_nothing_goes_wrong_for_some_seconds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rounds, "rounds", 60)
    tallies = run(seconds=0.3, seed=1, names=[name])
    assert tallies[name].wrong == []
    assert tallies[name].tried > 0
    assert f"| {name} | {tallies[name].tried} | 0 |" in table(tallies)


def test_a_site_that_is_not_refused_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unnoticed(Claims):
        refused = True

    monkeypatch.setattr(chaos.trials, "SITES", (Unnoticed,))
    tally = run(seconds=2, seed=0, names=["strangers"])["strangers"]
    assert set(tally.wrong) == {"Unnoticed was not refused"}


def test_damage_that_is_read_as_something_else_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    read, paths = chaos.trials.read_tensors, []

    def careless(path: Any) -> Any:
        paths.append(path)
        return read(path.with_name("tensors.safetensors"))[0], {"round": "4"}

    monkeypatch.setattr(chaos.trials, "read_tensors", careless)
    wrong = run(seconds=1, seed=0, names=["inputs"])["inputs"].wrong
    assert len(wrong) == len(paths) > 0
    assert set(wrong) == {"tensors.safetensors is read as something else"}


def test_a_raw_exception_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(text: str) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(chaos.trials, "parse", careless)
    wrong = run(seconds=1, seed=0, names=["inputs"])["inputs"].wrong
    assert set(wrong) == {"expression: RecursionError: too deep"}


def test_a_descriptor_that_stays_open_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step, files = Rounds.step, []

    def leaking(trial: Rounds, rounds: int) -> None:
        files.append((tmp_path / "one").open("a"))
        step(trial, rounds)

    monkeypatch.setattr(Rounds, "step", leaking)
    monkeypatch.setattr(Rounds, "rounds", 5)
    (wrong, *_) = run(seconds=0, seed=0, names=["rounds"])["rounds"].wrong
    assert "descriptors: " in wrong
    for file in files:
        file.close()


def test_descriptors_that_a_trial_leaves_open_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = []

    def leaking(trial: object, draw: object) -> str:
        files.append((tmp_path / "one").open("a"))
        return "leaks"

    monkeypatch.setattr(chaos.trials.Inputs, "once", leaking)
    wrong = run(seconds=0.3, seed=0, names=["inputs"])["inputs"].wrong
    assert wrong[0].startswith("descriptors: ")
    for file in files:
        file.close()
