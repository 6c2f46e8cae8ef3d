"""Atomic files are complete or absent under concurrent writers; the next start removes leftovers of
a killed writer.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from fedloom.common.errors import CheckpointError, DamagedCheckpoint, DiskFull
from fedloom.rounds.checkpoint import RoundLog
from fedloom.runs.directory import read_json
from fedloom.state.client_files import ClientFiles
from fedloom.state.files import (
    read_file,
    remove,
    remove_unfinished,
    replacing,
    write_bytes,
    write_text,
)
from fedloom.state.released import ReleaseLedger
from fedloom.state.tensors import read_tensors, write_tensors

WRITER = """
import pathlib, sys, time
from fedloom.state.files import replacing
with replacing(pathlib.Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(600)
"""


def writer(path: Path) -> subprocess.Popen[str]:
    """Start a process that is in the middle of writing `path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with replacing(path) as outer, replacing(path) as inner:
        outer.write_text("first")
        inner.write_text("second, and longer")
    assert path.read_text() == "first"  # the last writer to end
    assert list(tmp_path.iterdir()) == [path]


def test_many_writers_of_one_file_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def write(number: int) -> None:
        for _ in range(20):
            write_tensors(
                path,
                {"row": torch.full((1000,), float(number))},
                {"by": str(number)},
                durable=False,
            )

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tensors, metadata = read_tensors(path)
    assert tensors["row"].tolist() == [float(metadata["by"])] * 1000
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    write_text(path, "old")

    def interrupted() -> None:
        with replacing(path) as temporary:
            temporary.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_nothing_behind_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    process = writer(path)
    remove_unfinished(tmp_path)  # the writer still runs
    (unfinished,) = tmp_path.iterdir()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert unfinished.exists()
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_files_with_such_names_stay(tmp_path: Path) -> None:
    (tmp_path / ".novel.writing").write_text("mine")
    (tmp_path / ".novel.0123456789abcdef.writing").write_text("mine too")
    (tmp_path / ".chapters.writing").mkdir()
    remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        ".novel.writing",
        ".novel.0123456789abcdef.writing",
        ".chapters.writing",
    }


@pytest.mark.skipif(os.name != "posix", reason="permissions as POSIX has them")
def test_files_have_the_permissions_that_others_expect(tmp_path: Path) -> None:
    """Other users can read the files, although safetensors creates files for the owner only."""
    previous_mask = os.umask(0o022)
    try:
        write_tensors(tmp_path / "model.safetensors", {"a": torch.zeros(3)}, {})
        write_text(tmp_path / "text", "hello")
        write_bytes(tmp_path / "key", b"secret", mode=0o600)
    finally:
        os.umask(previous_mask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"model.safetensors": 0o644, "text": 0o644, "key": 0o600}


def test_an_unwritable_path_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"missing/text cannot be written \(.*No such file or directory"
    ):
        write_text(tmp_path / "missing" / "text", "hello")


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_says_how_many_bytes_a_file_without_tensors_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk error gives the bytes of a checkpoint that holds only names.

    Its only tensor, the pool, is in another file.
    """
    write_tensors(tmp_path / "names", {}, {"pool model": "rows-0000001"})
    monkeypatch.setattr(Path, "mkdir", no_space)
    size = (tmp_path / "names").stat().st_size
    with pytest.raises(DiskFull, match=rf"it needs {size} bytes \(No space left on device\)"):
        write_tensors(tmp_path / "again", {}, {"pool model": "rows-0000001"})


def test_a_folder_in_place_of_a_file_is_refused_in_one_line_and_stays(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="model cannot be written"):
        write_text(tmp_path / "model", "hello")
    with pytest.raises(DamagedCheckpoint, match="model cannot be read"):
        read_tensors(tmp_path / "model")
    remove(tmp_path / "model")
    assert (tmp_path / "model").is_dir()


def test_a_pipe_in_place_of_a_runs_file_is_an_error_not_a_wait(tmp_path: Path) -> None:
    pipe = tmp_path / "metrics.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a file, but"):
        read_file(pipe)
    with pytest.raises(OSError, match="not a file, but"):
        RoundLog(pipe).read()
    with pytest.raises(CheckpointError, match="missing or damaged"):
        read_json(pipe, dict)
    with pytest.raises(DamagedCheckpoint, match="not a file, but"):
        read_tensors(pipe)
    with pytest.raises(CheckpointError):
        ReleaseLedger(pipe, "").resume(0)
    (tmp_path / "plain").write_bytes(b"x" * 100_000)
    assert read_file(tmp_path / "plain") == b"x" * 100_000


def test_only_its_user_can_read_the_memory_of_a_site(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        memory = ClientFiles(tmp_path / "memory", private=True)
        memory.write(3, 1, {"head": torch.ones(2)})
        ClientFiles(tmp_path / "simulated").write(3, 1, {"head": torch.ones(2)})
    finally:
        os.umask(before)
    assert stat.S_IMODE(memory.path(3, 1).stat().st_mode) == 0o600
    assert stat.S_IMODE(memory.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(next((tmp_path / "simulated").iterdir()).stat().st_mode) == 0o644
    assert torch.equal(memory.read(3, 1)["head"], torch.ones(2))
