"""A run that is killed between or during its file operations ends like an undisturbed run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.common.errors import CheckpointError
from fedloom.engines.rows import RowsEngine
from fedloom.rounds.checkpoint import Checkpoint, Checkpoints, RoundLog
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from json_lines import json_lines
from kill_support import Killed, disk
from small_task import KeepsClientMemory, small_task

SCHEDULE = Schedule(
    rounds=5,
    participation=0.5,
    seed=3,
    evaluate_every=1,
    checkpoint_every=2,
    personal_every=2,
    new_clients=0.2,
)
BUDGET = 1500
"""About three of the clients' memories: the others spill, and what one round writes outgrows half
of it.
"""


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: only a power failure would lose data that is not yet on the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def federation(directory: Path | None, inline: bool) -> Federation:
    task = small_task()
    engine = RowsEngine(task, memory_budget=10**9 if inline else BUDGET)
    return Federation(KeepsClientMemory(), task, engine, SCHEDULE, directory, "this run")


def outcome(run: Federation) -> tuple[Any, ...]:
    """Return all results that must be equal: model, integer buffers, client memory, figures in
    memory and on disk.
    """
    engine = run.engine
    assert isinstance(engine, RowsEngine)
    remembered = {
        f"{client}/{name}": tensor.tolist()
        for client in engine.store
        for name, tensor in engine.store.read(client).items()
    }
    lines = [
        (run.checkpoints.directory / name).read_bytes()
        for name in ("metrics.jsonl", "clients.jsonl")
    ]  # type: ignore[union-attr]
    return (
        run.model().tolist(),
        run.integers.tolist(),
        remembered,
        run.history,
        run.client_history,
        lines,
    )


def killed(directory: Path, deadly: int, inline: bool) -> bool:
    """Start or continue the run, kill it at file operation `deadly`, and return False if it ends
    earlier.
    """
    with disk(deadly):
        try:
            federation(directory, inline).run()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("inline", [True, False], ids=["in checkpoints", "in files"])
def test_a_kill_anywhere_changes_nothing(tmp_path: Path, inline: bool) -> None:
    uninterrupted = tmp_path / "whole"
    uninterrupted.mkdir()
    with disk() as watched:
        run = federation(uninterrupted, inline)
        run.run()
    expected = outcome(run)
    assert (
        (uninterrupted / "clients").exists()
        and len(list((uninterrupted / "clients").iterdir())) > 0
    ) != inline
    for deadly in range(1, watched.done + 1):
        directory = tmp_path / str(deadly)
        directory.mkdir()
        assert killed(directory, deadly, inline)
        if deadly % 3 == 0:  # kill it again while it continues
            killed(directory, 1 + deadly % 17, inline)
        resumed = federation(directory, inline)
        resumed.run()
        assert outcome(resumed) == expected, f"killed at operation {deadly} of {watched.done}"
        assert not list(directory.rglob("*.writing"))
        # A kill after the last checkpoint leaves the oldest checkpoint in place, because no later
        # checkpoint removes it.
        assert len(resumed.checkpoints.paths()) <= 3  # type: ignore[union-attr]


@pytest.mark.parametrize("inline", [True, False], ids=["in checkpoints", "in files"])
@pytest.mark.parametrize("harm", ["cut", "gone", "not one at all"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, inline: bool, harm: str
) -> None:
    run = federation(tmp_path, inline)
    run.run()
    expected = outcome(run)
    newest, previous = run.checkpoints.paths()  # type: ignore[union-attr]
    if harm == "cut":
        newest.write_bytes(newest.read_bytes()[:-5])
    elif harm == "gone":
        newest.unlink()
    else:
        newest.write_text("hello")
    repeated = federation(tmp_path, inline)
    assert repeated.finished == 4
    assert [line["round"] for line in repeated.client_history] == [2, 4]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    notices = repeated.checkpoints.notices  # type: ignore[union-attr]
    assert len(notices) == (0 if harm == "gone" else 1)
    assert all("continuing after round 4" in notice for notice in notices)
    repeated.run()
    assert outcome(repeated) == expected
    assert previous.exists()


def test_a_damaged_memory_of_one_client_falls_back_too(tmp_path: Path) -> None:
    run = federation(tmp_path, False)
    run.run()
    expected = outcome(run)
    newest = max(
        (tmp_path / "clients").iterdir(), key=lambda path: int(path.name.split(".")[1][1:])
    )
    newest.write_bytes(newest.read_bytes()[:-1])
    repeated = federation(tmp_path, False)
    assert repeated.finished == 4
    (notice,) = repeated.checkpoints.notices  # type: ignore[union-attr]
    assert newest.name in notice
    repeated.run()
    assert outcome(repeated) == expected


def test_without_any_readable_checkpoint_the_run_starts_again_and_says_so(tmp_path: Path) -> None:
    run = federation(tmp_path, False)
    run.run()
    expected = outcome(run)
    for path in run.checkpoints.paths():  # type: ignore[union-attr]
        path.write_bytes(b"")
    repeated = federation(tmp_path, False)
    assert repeated.finished == 0
    assert (tmp_path / "clients.jsonl").read_text() == ""
    assert all("starting again from round 1" in notice for notice in repeated.checkpoints.notices)  # type: ignore[union-attr]
    repeated.run()
    assert outcome(repeated) == expected


def test_missing_times_do_not_stop_a_resume_and_missing_figures_move_it_back(
    tmp_path: Path,
) -> None:
    run = federation(tmp_path, True)
    run.run()
    expected = outcome(run)
    times, metrics = tmp_path / "timings.jsonl", tmp_path / "metrics.jsonl"
    times.write_text("".join(times.read_text().splitlines(keepends=True)[3:]))
    assert federation(tmp_path, True).finished == 5
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]))
    repeated = federation(tmp_path, True)
    assert repeated.finished == 4
    repeated.run()
    assert outcome(repeated) == expected


class InterruptedEngine(RowsEngine):
    """Raises KeyboardInterrupt while the second client of a round trains."""

    interrupt = -1

    def train(self, algorithm, round, jobs):  # type: ignore[no-untyped-def]
        for index, result in enumerate(super().train(algorithm, round, jobs)):
            if index == 1 and round.number == self.interrupt:
                raise KeyboardInterrupt
            yield result


@pytest.mark.parametrize(
    ("budget", "finished"), [(10**9, 3), (0, 2)], ids=["small memories", "memories that spill"]
)
def test_ctrl_c_while_clients_train_loses_little_and_changes_nothing(
    tmp_path: Path, budget: int, finished: int
) -> None:
    """A run that Ctrl-C interrupts ends like an undisturbed run.

    Small client memories are restored, so only the current round is lost. With large ones, the run
    resumes from the previous checkpoint.
    """
    uninterrupted = tmp_path / "whole"
    uninterrupted.mkdir()
    run = federation(uninterrupted, True)
    run.run()
    task = small_task()
    engine = InterruptedEngine(task, memory_budget=budget)
    engine.interrupt = 4
    interrupted = Federation(KeepsClientMemory(), task, engine, SCHEDULE, tmp_path, "this run")
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    if finished < 3:
        with pytest.raises(CheckpointError, match="a round was interrupted"):
            interrupted.run()
    repeated = federation(tmp_path, budget > 0)
    assert repeated.finished == finished
    repeated.run()
    assert outcome(repeated) == outcome(run)


def test_saving_drops_what_was_passed_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "run")
    for number in (10, 20, 30):
        checkpoints.save(Checkpoint(number, {"model": torch.full((3,), float(number))}, {}, {}))
    assert [path.name[16:18] for path in checkpoints.paths()] == ["30", "20"]
    checkpoints.paths()[0].write_bytes(b"damaged")
    latest = checkpoints.latest(99, lambda checkpoint: None)
    assert latest is not None
    assert latest.round == 20
    checkpoints.save(Checkpoint(25, {"model": torch.zeros(3)}, {}, {}))
    assert [path.name[16:18] for path in checkpoints.paths()] == ["25", "20"]


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "lines.jsonl")
    log.path.write_bytes(
        b'{"round": 1}\n\x00\x00\xff\n[2]\n{"round": "3"}\n{"round": 4}\n{"round": 2}\n{"rou'
    )
    assert log.resume(9) == [{"round": 1}, {"round": 4}]
    assert json_lines(log.path) == [{"round": 1}, {"round": 4}]
