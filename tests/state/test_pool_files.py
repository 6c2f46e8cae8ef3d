"""Pools in files equal pools in memory.

Two copies exist between rounds, and interruptions in a round do not damage them.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom.algorithms.fedmr
import fedloom.state.pool_files
from fedloom.algorithm.records import Exchange, Replies, Selection
from fedloom.algorithms.fedmr import FedMR
from fedloom.common.errors import DiskFull
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.engine import Answer, Fault
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from kill_support import Killed, disk
from small_task import other_notices, small_task

ROW = 4 * small_task().layout.size
BUDGET = 2 * ROW
"""Two models. Larger pools are in files, both six models and six models with a mean."""


def federation(
    method: Any, directory: Path | None = None, budget: int | None = BUDGET, **settings: Any
) -> Federation:
    task = small_task()
    options = {"rounds": 4, "seed": 3, "evaluate_every": 2, "personal_every": 2} | settings
    schedule = Schedule(participation=1.0, pool_budget=budget, **options)
    return Federation(build(method), task, RowsEngine(task), schedule, directory, "this run")


def outcome(run: Federation) -> tuple[dict[str, Any], Any, Any]:
    state = {name: tensor.clone() for name, tensor in run.server_state().items()}
    return (
        {name: tensor.numpy().tobytes() for name, tensor in state.items()},
        run.history,
        run.client_history,
    )


def files(directory: Path) -> list[Path]:
    return sorted((directory / "pool").glob("rows-*"))


def in_files(run: Federation) -> set[str]:
    return {name for name, tensor in run.server_state().items() if run._pools.holds([tensor])}


@pytest.mark.parametrize(
    ("method", "settings", "tensors"),
    [
        ("fedmr", {}, {"pool"}),
        ("fedmr(unit=tensor, blend=0.3)", {"dropout": 0.4}, {"pool"}),
        ("fedmr(blend=auto)", {"dropout": 0.4}, {"pool"}),
        ("indep(local=fedprox)", {"dropout": 0.8}, {"pool"}),
        ("stages(fedavg:2, fedmr)", {}, {"inner1.pool"}),
        ("umf(fedmr)", {"dropout": 0.3}, {"inner0.pool"}),
        ("secure(fedmr)", {"dropout": 0.4}, {"inner0.pool"}),
        ("fedmut", {}, set()),
        ("robust(fedavg)", {}, set()),
    ],
)
def test_numbers_are_those_of_a_pool_in_memory(
    method: str, settings: dict[str, Any], tensors: set[str], tmp_path: Path
) -> None:
    in_memory, on_disk = (
        federation(method, budget=None, **settings),
        federation(method, tmp_path, **settings),
    )
    in_memory.run()
    on_disk.run()
    assert outcome(in_memory) == outcome(on_disk)
    assert in_files(on_disk) == tensors
    assert in_files(in_memory) == set()
    assert on_disk._pools._next >= 3  # number of created files
    repeated = federation(method, tmp_path, **settings)
    assert repeated.finished == 4
    assert outcome(repeated)[0] == outcome(in_memory)[0]
    assert in_files(repeated) == tensors


def test_files_are_two_between_rounds_and_three_within_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def counted(self: FedMR, round: Any, replies: Replies) -> None:
        received(self, round, replies)
        sizes.append(sum(path.stat().st_size for path in files(tmp_path)))

    received = FedMR.receive
    monkeypatch.setattr(FedMR, "receive", counted)
    federation("fedmr", tmp_path, dropout=0.4).run()
    assert sizes == [6 * ROW, 12 * ROW, 18 * ROW, 18 * ROW]
    assert len(files(tmp_path)) == 2
    assert max(path.stat().st_size for path in tmp_path.glob("checkpoint-*")) < 6 * ROW + 1500


def test_a_checkpoint_keeps_every_matrix_that_it_moves_to_a_file(tmp_path: Path) -> None:
    """Creating the second file preserves the first file, although no tensor of the run uses it."""
    federation("fedbuff(fedavg, k=2)", tmp_path).run()
    assert len(files(tmp_path)) == 2
    repeated = federation("fedbuff(fedavg, k=2)", tmp_path)
    assert repeated.finished == 4
    assert in_files(repeated) == {"replies", "sent"}


def test_what_has_not_changed_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = federation("fedmr", tmp_path)
    run.run()
    digested = []
    digest = fedloom.state.pool_files._checksum
    monkeypatch.setattr(
        fedloom.state.pool_files, "_checksum", lambda tensor: digested.append(1) or digest(tensor)  # type: ignore[func-returns-value]
    )  # fmt: skip
    original = files(tmp_path)
    run.save()
    assert (digested, files(tmp_path)) == ([], original)
    run.algorithm.state["pool"][0] += 1
    run.save()
    assert digested == [1]


@pytest.mark.parametrize("when", ["training", "recombination", "blend"])
def test_a_killed_round_leaves_the_pool_before_it(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "fedmr(blend=0.3)"
    uninterrupted = federation(method, tmp_path / "whole")
    uninterrupted.run()
    run = federation(method, tmp_path / "killed")
    run.step()
    run.step()
    run.save()
    (name,) = run._pools._newest
    original = (tmp_path / "killed" / "pool" / name).read_bytes()
    with monkeypatch.context() as patch:
        _kill(patch, when)
        with pytest.raises(Killed):
            run.step()
    assert (tmp_path / "killed" / "pool" / name).read_bytes() == original
    assert len(files(tmp_path / "killed")) == 2  # the file of the checkpoint and an incomplete file
    del run
    repeated = federation(method, tmp_path / "killed")
    assert repeated.finished == 2
    repeated.run()
    assert outcome(repeated) == outcome(uninterrupted)


def _kill(patch: pytest.MonkeyPatch, when: str) -> None:
    """Raise `Killed` in this step of a round. Steps on a pool write half of their data first."""

    def half(pool: Tensor, *_: Any) -> None:
        pool[:3, ::2] = 7.0
        raise Killed

    if when == "training":
        training = RowsEngine.train_chunk

        def train_chunk(self: RowsEngine, *about: Any) -> list[Answer | Fault]:
            if about[3][0].slot == 3:
                raise Killed
            return training(self, *about)

        patch.setattr(RowsEngine, "train_chunk", train_chunk)
    elif when == "recombination":
        patch.setattr(fedloom.algorithms.fedmr, "recombine_", half)
    else:
        patch.setattr(Tensor, "lerp_", half)


def test_a_kill_at_any_file_operation_changes_nothing(tmp_path: Path) -> None:
    settings = {"personal_every": 0, "rounds": 3}
    with disk() as counted:
        uninterrupted = federation("fedmr", tmp_path / "whole", **settings)
        uninterrupted.run()
    assert counted.done > 20
    for deadly in range(1, counted.done + 1, 3):
        folder = tmp_path / str(deadly)
        with disk(deadly), pytest.raises(Killed):
            federation("fedmr", folder, **settings).run()
        repeated = federation("fedmr", folder, **settings)
        repeated.run()
        assert outcome(repeated) == outcome(uninterrupted), deadly


def test_a_damaged_file_sends_the_run_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    run = federation("fedmr", tmp_path)
    run.run()
    expected = outcome(run)
    del run
    older, newest = files(tmp_path)
    content = bytearray(newest.read_bytes())
    content[100] ^= 1
    newest.write_bytes(content)
    repeated = federation("fedmr", tmp_path)
    assert repeated.finished == 3
    assert other_notices(repeated.notices) == [
        f"{newest} is damaged: it does not match its digest: continuing after round 3"
    ]
    repeated.run()
    assert outcome(repeated) == expected
    del repeated
    for path in files(tmp_path):
        path.unlink()
    restarted = federation("fedmr", tmp_path)
    notices = other_notices(restarted.notices)
    assert (restarted.finished, len(notices)) == (0, 2)
    assert "cannot be read (No such file or directory): starting again from round 1" in notices[0]
    assert not older.exists()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_kill_in_a_round_leaves_the_pools_of_both_checkpoints(
    resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = federation("fedmr", tmp_path / "whole")
    uninterrupted.run()
    run = federation("fedmr", tmp_path / "killed")
    for _ in range(3):
        run.step()
        run.save()
    for _ in range(2 if resumed else 1):
        if resumed:
            run = federation("fedmr", tmp_path / "killed")
        with monkeypatch.context() as patch:
            _kill(patch, "recombination")
            with pytest.raises(Killed):
                run.step()
    del run
    newest = max((tmp_path / "killed").glob("checkpoint-*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    repeated = federation("fedmr", tmp_path / "killed")
    assert repeated.finished == 2
    repeated.run()
    assert outcome(repeated) == outcome(uninterrupted)
    assert len(files(tmp_path / "killed")) == 2


def test_a_full_disk_is_said_in_one_line_and_leaves_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = federation("fedmr", tmp_path)
    run.step()
    original = outcome(run)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            DiskFull, match=rf"rows-\d+ cannot be written: it needs {6 * ROW:,} bytes"
        ):
            run.step()
    assert outcome(run) == original
    run.run()
    uninterrupted = federation("fedmr", tmp_path / "whole")
    uninterrupted.run()
    assert outcome(run) == outcome(uninterrupted)


def test_replies_by_slot_leave_others_as_they_were() -> None:
    slots, round = torch.tensor([1, 3]), Round(1, 1, 0, 4, 4, 0.1, 0.1, selected=(0, 1, 2, 3))
    for sent in (torch.arange(8.0).view(4, 2), torch.tensor([[7.0, 8.0]])):
        matrix = torch.tensor([[0.0, 0], [10, 10], [0, 0], [30, 30]])
        expected = torch.stack([sent[0], matrix[1], sent[2 % len(sent)], matrix[3]])
        original = sent.clone()
        replies = Replies(
            {"model": matrix},
            slots,
            slots,
            slots,
            Exchange(round, Selection(round.selected), {"model": sent}),
        )
        assert torch.equal(replies["model"], torch.tensor([[10.0, 10], [30, 30]]))
        assert torch.equal(replies.by_slot("model"), expected)
        assert replies.by_slot("model").data_ptr() == matrix.data_ptr()
        assert torch.equal(sent, original)


def test_a_run_that_goes_on_without_a_budget_leaves_no_files(tmp_path: Path) -> None:
    federation("fedmr", tmp_path, rounds=2).run()
    longer = federation("fedmr", tmp_path, budget=None, rounds=6, checkpoint_every=1)
    assert in_files(longer) == {"pool"}
    longer.run()
    uninterrupted = federation("fedmr", budget=None, rounds=6)
    uninterrupted.run()
    assert outcome(longer)[0] == outcome(uninterrupted)[0]
    assert in_files(longer) == set()
    assert files(tmp_path) == []


def test_a_folder_among_the_files_stays_and_disturbs_nothing(tmp_path: Path) -> None:
    (tmp_path / "pool" / "rows-0000002").mkdir(parents=True)
    run, uninterrupted = federation("fedmr", tmp_path), federation("fedmr", tmp_path / "whole")
    run.run()
    uninterrupted.run()
    assert outcome(run) == outcome(uninterrupted)
    assert (tmp_path / "pool" / "rows-0000002").is_dir()
