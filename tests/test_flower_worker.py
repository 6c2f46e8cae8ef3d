"""The worker that a site keeps between messages: it answers what the app's own process would, and nothing depends on it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import recorddict_to_proto

from fedloom.errors import InvalidValue
from fedloom.sites import site_worker
from fedloom.sites.client_app import app
from fedloom.sites.messages import Refusal
from fedloom.sites.node_config import NodeConfig
from flower_support import RUN, LocalGrid, flower, nodes, run_config, site, words_of

PATIENCE = 60
"""Seconds for what takes less than one: no test is about time."""


class Told(NamedTuple):
    """A message to a site, and its answer as bytes."""

    message: Message
    answer: bytes


def content(reply: Message) -> bytes:
    return recorddict_to_proto(reply.content).SerializeToString(deterministic=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalGrid, list[Told]]:
    """Two rounds of a method whose clients remember; what site 0 was told in them, and what it answered without a worker."""
    folder = tmp_path_factory.mktemp("run")
    grid = LocalGrid(nodes(6, folder), run_config("apple", folder / "out", rounds=2))
    one, told = site(grid, 0), []
    answer = one.answer

    def noted(message: Message, config: dict[str, Any], node: int) -> Message:
        reply = answer(message, config, node)
        told.append(Told(message, content(reply)))
        return reply

    one.answer = noted  # type: ignore[method-assign]
    flower(run_config("apple", folder / "out", rounds=2), grid).run()
    assert [one.message.metadata.message_type for one in told][:3] == ["query", "train", "train"]
    return grid, told


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The workers that this process starts, as one that Flower started for a message."""
    processes: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*given, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(site_worker.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["/bin/flwr-clientapp", "--parent-pid", str(os.getpid())])
    yield processes
    for worker in processes:
        worker.kill()
        worker.wait()


def context(grid: LocalGrid, memory: Path, **more: Any) -> Context:
    config = {**site(grid, 0).config, "memory": str(memory), **more}
    return Context(RUN, 1, config, RecordDict(), dict(grid.run_config))


def refused(context: Context) -> None:
    """Bring a message that can be answered without PyTorch."""
    with pytest.raises(Refusal, match="not one of fedloom"):
        words_of(app(Message(RecordDict(), 1, "train"), context))


def place(tmp_path: Path) -> Path:
    (found,) = tmp_path.glob("fedloom-*")
    return found


def test_a_kill_loses_no_bit(
    run: tuple[LocalGrid, list[Told]],
    workers: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid, told = run
    here = context(grid, tmp_path / "memory")
    for one in told[:2]:
        assert content(app(one.message, here)) == one.answer
    (worker,) = workers
    folder = place(tmp_path)
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "socket", folder / "secret")]
    assert modes == [0o700, 0o600, 0o600]
    with pytest.raises(AuthenticationError):
        Client(str(folder / "socket"), "AF_UNIX", authkey=b"guessed")
    # Killed once it is handed the message of the second round: that is answered here, from the memory of the first.
    connected = site_worker._connected

    def killed(folder: Path) -> Connection | None:
        connection = connected(folder)
        worker.kill()
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(site_worker, "_connected", killed)
        assert content(app(told[2].message, here)) == told[2].answer
    assert (len(workers), worker.wait(PATIENCE)) == (1, -signal.SIGKILL)
    # What follows starts another where the killed one left its socket.
    refused(here)
    assert len(workers) == 2
    assert workers[1].poll() is None


def test_it_ends_when_nothing_comes_and_with_its_superexec(
    workers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    parent = subprocess.Popen(["sleep", "600"])
    workers.clear()
    site_worker._started(tmp_path / "idle", os.getpid(), 0.1).close()
    site_worker._started(tmp_path / "left", parent.pid, 600).close()
    parent.kill()
    parent.wait()
    assert [worker.wait(PATIENCE) for worker in workers] == [1, 1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_others_can_open_is_not_used(
    mode: int, workers: list[subprocess.Popen[bytes]], tmp_path: Path, run: tuple[LocalGrid, list[Told]]
) -> None:
    here = context(run[0], tmp_path / "memory")
    folder = site_worker._folder(here, os.getpid())
    folder.mkdir()
    folder.chmod(mode)
    assert site_worker.handed_over(run[1][0].message, here) is None
    assert workers == []
    assert folder.is_dir()
    folder.rmdir()


def test_where_the_temporary_folder_has_a_long_name_the_socket_lies_in_tmp(
    run: tuple[LocalGrid, list[Told]],
    workers: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(site_worker.tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    here = context(run[0], tmp_path / "memory")
    assert content(app(run[1][0].message, here)) == run[1][0].answer
    folder = site_worker._folder(here, os.getpid())
    assert (folder.parent, folder.stat().st_mode & 0o777) == (Path("/tmp"), 0o700)
    shutil.rmtree(folder)  # so its worker ends
    assert [worker.wait(PATIENCE) for worker in workers] == [1]


def test_a_worker_that_does_not_start_is_done_without(
    run: tuple[LocalGrid, list[Told]],
    workers: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    grid, told = run
    assert content(app(told[0].message, context(grid, tmp_path / "memory"))) == told[0].answer
    assert len(workers) == 1


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (["pytest", "--parent-pid", "1"], {}),
        (["flwr-clientapp"], {}),
        (["flwr-clientapp", "--parent-pid", "1", "--allow-runtime-dependency-installation"], {}),
        (["flwr-clientapp", "--parent-pid", "1"], {"worker-minutes": 0}),
    ],
)
def test_only_a_process_for_one_message_has_a_worker(
    arguments: list[str],
    more: dict[str, Any],
    run: tuple[LocalGrid, list[Told]],
    workers: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    assert site_worker.handed_over(run[1][0].message, context(run[0], tmp_path, **more)) is None
    assert workers == []


@pytest.mark.parametrize("minutes", [True, -1, "five", float("inf")])
def test_minutes_that_are_none_get_one_line(minutes: object) -> None:
    with pytest.raises(InvalidValue, match=r"worker-minutes must be .*, not"):
        NodeConfig.read({"partition-id": 0, "worker-minutes": minutes})
