"""Ledger of private releases.

After a kill, truncation or a flipped bit, a run still counts its spent budget.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from damage import damages
from fedloom.common.errors import CheckpointError
from fedloom.engines.rows import RowsEngine
from fedloom.parts.accounting import epsilon
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.state import files
from fedloom.state.released import CUT_SHORT, Release, ReleaseLedger
from kill_support import Killed
from private_support import task
from released_support import interrupted, sites

RELEASES = [
    Release(1, "dp_sgd", 0.8, 1.0, (0, 2)),
    Release(2, "dp_sgd", 0.8, 1.0, (2,)),
    Release(2, "dp_sgd", 0.8, 1.0, ()),
    Release(2, "dp_sgd", 0.8, 1.0, (1, 2)),
]


def ledger(folder: Path, evidence: int = 0, identity: str = "this run") -> ReleaseLedger:
    opened = ReleaseLedger(folder / "released.jsonl", identity)
    opened.resume(evidence)
    return opened


def filled(folder: Path) -> Path:
    opened = ledger(folder)
    for release in RELEASES:
        opened.append(release)
    return opened.path


def test_a_repeated_round_counts_again(tmp_path: Path) -> None:
    filled(tmp_path)
    opened = ledger(tmp_path, evidence=2)
    assert opened.releases == RELEASES
    assert opened.counts("dp_sgd", 4).tolist() == [1, 1, 3, 0]
    assert opened.counts("private", 4).tolist() == [0, 0, 0, 0]
    opened.append(Release(3, "private", 1.0, 0.5))
    assert ledger(tmp_path, evidence=3).counts("private", 4).tolist() == [1, 1, 1, 1]


def test_a_line_that_was_cut_short_costs_every_client(tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    for _ in range(2):
        opened = ledger(tmp_path, evidence=2)
        assert opened.releases == [*RELEASES[:3], Release(2, CUT_SHORT, 0.0, 0.0)]
        assert opened.counts("dp_sgd", 4).tolist() == [2, 1, 3, 1]


def test_no_damage_makes_a_run_forget_a_release(tmp_path: Path) -> None:
    path = filled(tmp_path)
    content = path.read_bytes()
    refused, messages = 0, set()
    for damage, damaged in damages(content, 200):
        path.write_bytes(damaged)
        try:
            assert bool(
                (
                    ledger(tmp_path, evidence=2).counts("dp_sgd", 4) >= torch.tensor([1, 1, 3, 0])
                ).all()
            ), damage
        except CheckpointError as error:
            refused += 1
            messages.add(str(error))
    assert refused > 150
    assert all("the spent privacy is unknown" in text and "\n" not in text for text in messages)


@pytest.mark.parametrize("damage", ["missing", "shorter", "folder", "of another run", "order"])
def test_a_run_whose_ledger_does_not_reach_its_rounds_is_refused(
    damage: str, tmp_path: Path
) -> None:
    path, identity = filled(tmp_path), "this run"
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "shorter":
        path.write_bytes(lines[0])
    elif damage == "order":
        path.write_bytes(lines[1] + lines[0])
    elif damage == "of another run":
        identity = "another"
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    with pytest.raises(CheckpointError, match=r"released\.jsonl .*the spent privacy is unknown"):
        ledger(tmp_path, evidence=2, identity=identity)


@pytest.mark.parametrize(("target", "name", "code"), [(files, "flush", 28), (Path, "open", 24)])
def test_an_error_of_the_system_leaves_the_ledger_as_it_was(
    target: Any, name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or too many open files do not remove existing lines."""
    path = filled(tmp_path)
    content, opened = path.read_bytes(), ledger(tmp_path, evidence=2)

    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(target, name, fail)
    with pytest.raises(CheckpointError, match=r"released\.jsonl cannot be written"):
        opened.append(RELEASES[0])
    assert (path.read_bytes(), opened.releases) == (content, RELEASES)
    opened.append(RELEASES[0])
    assert ledger(tmp_path, evidence=2).releases == [*RELEASES, RELEASES[0]]


# --- in a federation ---


METHODS = (
    "private(fedavg, noise=1.0)",
    "local_private(fedavg, noise=1.0)",
    "dp_sgd(fedavg, noise=1.0)",
)


@pytest.mark.parametrize("expression", METHODS)
@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_rounds_that_are_repeated_over_sites_are_counted_again(
    expression: str, damaged: int, tmp_path: Path
) -> None:
    costs = [
        record["epsilon"]
        for record in _finished(sites(expression, tmp_path / "whole", rounds=8)).history
    ]
    interrupted(expression, tmp_path / "run")
    for path in sorted((tmp_path / "run").glob("checkpoint-*"), reverse=True)[:damaged]:
        path.write_bytes(path.read_bytes()[:-1])
    resumed = sites(expression, tmp_path / "run")
    assert resumed.finished == 2 - damaged
    assert len(_finished(resumed).history) == 4
    # four rounds, the killed round and the repeated rounds
    assert resumed.history[-1]["epsilon"] == costs[4 + damaged]
    assert (
        _finished(sites(expression, tmp_path / "run", rounds=5)).history[-1]["epsilon"]
        == costs[5 + damaged]
    )


@pytest.mark.parametrize("expression", METHODS)
def test_a_run_whose_ledger_is_gone_is_refused(expression: str, tmp_path: Path) -> None:
    interrupted(expression, tmp_path / "run")
    path = tmp_path / "run" / "released.jsonl"
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(
        CheckpointError,
        match=r"released\.jsonl is missing, but the run has reached round 2: the spent privacy",
    ):
        sites(expression, tmp_path / "run")
    path.write_bytes(content.replace(b'"round": 2', b'"round": 3'))
    with pytest.raises(CheckpointError, match=r"released\.jsonl is damaged in line 2"):
        sites(expression, tmp_path / "run")
    path.write_bytes(content)
    assert sites(expression, tmp_path / "run").finished == 2


def test_a_failed_round_counts_when_the_run_resumes(tmp_path: Path) -> None:
    federation = sites(METHODS[0], tmp_path)
    federation.engine.fails = True  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        federation.step()
    federation.engine.fails = False  # type: ignore[attr-defined]
    assert _finished(federation).history[-1]["epsilon"] == epsilon(1.0, 1.0, 5, 1e-5)


def test_lost_rounds_may_have_spent_the_budget(tmp_path: Path) -> None:
    expression = f"private(fedavg, noise=1.0, target_epsilon={epsilon(1.0, 1.0, 3, 1e-5) + 0.01})"
    interrupted(expression, tmp_path / "run")
    for path in (tmp_path / "run").glob("checkpoint-*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="lost rounds or statistics spent the budget"):
        sites(expression, tmp_path / "run").run()


def test_noise_that_was_chosen_for_all_rounds_does_not_last_for_repeated_ones(
    tmp_path: Path,
) -> None:
    expression = "private(fedavg, target_epsilon=20)"
    assert len(_finished(sites(expression, tmp_path / "whole")).history) == 4
    interrupted(expression, tmp_path / "run")
    history = _finished(sites(expression, tmp_path / "run")).history
    assert len(history) == 3
    assert history[-1]["epsilon"] <= 20


def test_a_simulation_needs_no_ledger(tmp_path: Path) -> None:
    """The noise comes from the run's streams, so a repeated round releases the same numbers."""
    _finished(
        Federation(
            build(METHODS[0]),
            task(),
            RowsEngine(task()),
            Schedule(rounds=2, participation=1.0),
            tmp_path,
        )
    )
    assert not (tmp_path / "released.jsonl").exists()


def _finished(federation: Federation) -> Federation:
    folder = None if federation.checkpoints is None else federation.checkpoints.directory
    assert folder is not None
    folder.mkdir(exist_ok=True)
    federation.run()
    return federation
