"""The worker of a site between messages gives the same answers as the app process, and the site
also works without it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import recorddict_to_proto

from fedloom.common.errors import InvalidValue
from fedloom.sites import site_worker
from fedloom.sites.client_app import app
from fedloom.sites.messages import Refusal
from fedloom.sites.node_config import NodeConfig
from flower_support import RUN, LocalGrid, flower, nodes, run_config, site, words_of

PATIENCE = 60
"""Seconds for what takes less than one: no test is about time."""


class Exchange(NamedTuple):
    """A message to a site, and the bytes of the site's answer."""

    message: Message
    answer: bytes


def content(reply: Message) -> bytes:
    return recorddict_to_proto(reply.content).SerializeToString(deterministic=True)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalGrid, list[Exchange]]:
    """Run two rounds of a method with client memory and return the answers of site 0 without a
    worker.
    """
    folder = tmp_path_factory.mktemp("run")
    grid = LocalGrid(nodes(6, folder), run_config("apple", folder / "out", rounds=2))
    node, exchanges = site(grid, 0), []
    answer = node.answer

    def recording(message: Message, config: dict[str, Any], number: int) -> Message:
        reply = answer(message, config, number)
        exchanges.append(Exchange(message, content(reply)))
        return reply

    node.answer = recording  # type: ignore[method-assign]
    flower(run_config("apple", folder / "out", rounds=2), grid).run()
    assert [exchange.message.metadata.message_type for exchange in exchanges][:3] == [
        "query",
        "train",
        "train",
    ]
    return grid, exchanges


@pytest.fixture
def workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Record the workers that this process starts; it acts as a Flower process for one message."""
    processes: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def recording(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", recording)
    monkeypatch.setattr(site_worker.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["/bin/flwr-clientapp", "--parent-pid", str(os.getpid())])
    yield processes
    for worker in processes:
        worker.kill()
        worker.wait()


@dataclass
class Trial:
    """Site 0 with recorded messages, its workers and its temporary folder."""

    grid: LocalGrid
    exchanges: list[Exchange]
    workers: list[subprocess.Popen[bytes]]
    folder: Path
    patch: pytest.MonkeyPatch

    def context(self, **node_config: Any) -> Context:
        """Return the context of a message to the site; the memory is empty at first."""
        config = {**site(self.grid, 0).config, "memory": str(self.folder / "memory"), **node_config}
        return Context(RUN, 1, config, RecordDict(), dict(self.grid.run_config))


@pytest.fixture
def trial(
    recorded: tuple[LocalGrid, list[Exchange]],
    workers: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Trial:
    return Trial(*recorded, workers, tmp_path, monkeypatch)


def test_a_kill_loses_no_bit(trial: Trial) -> None:
    context = trial.context()
    for exchange in trial.exchanges[:2]:
        assert content(app(exchange.message, context)) == exchange.answer
    (worker,) = trial.workers
    (folder,) = trial.folder.glob("fedloom-*")
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "socket", folder / "secret")]
    assert modes == [0o700, 0o600, 0o600]
    with pytest.raises(AuthenticationError):
        Client(str(folder / "socket"), "AF_UNIX", authkey=b"guessed")
    # Kill the worker at the message of the second round. This process then answers it from the
    # memory of the first round.
    connected = site_worker._connected

    def killed(folder: Path) -> Connection | None:
        connection = connected(folder)
        worker.kill()
        return connection

    with trial.patch.context() as patch:
        patch.setattr(site_worker, "_connected", killed)
        assert content(app(trial.exchanges[2].message, context)) == trial.exchanges[2].answer
    assert (len(trial.workers), worker.wait(PATIENCE)) == (1, -signal.SIGKILL)
    # The next message needs no PyTorch. It starts a new worker at the socket of the killed one.
    with pytest.raises(Refusal, match="not one of fedloom"):
        words_of(app(Message(RecordDict(), 1, "train"), context))
    assert len(trial.workers) == 2
    assert trial.workers[1].poll() is None


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
def test_a_folder_that_others_can_open_is_not_used(mode: int, trial: Trial) -> None:
    context = trial.context()
    folder = site_worker._folder(context, os.getpid())
    folder.mkdir()
    folder.chmod(mode)
    assert site_worker.handed_over(trial.exchanges[0].message, context) is None
    assert trial.workers == []
    assert folder.is_dir()
    folder.rmdir()


def test_where_the_temporary_folder_has_a_long_name_the_socket_lies_in_tmp(trial: Trial) -> None:
    trial.patch.setattr(site_worker.tempfile, "tempdir", str(trial.folder / ("long" * 30)))
    context = trial.context()
    assert content(app(trial.exchanges[0].message, context)) == trial.exchanges[0].answer
    folder = site_worker._folder(context, os.getpid())
    assert (folder.parent, folder.stat().st_mode & 0o777) == (Path("/tmp"), 0o700)
    shutil.rmtree(folder)  # ends the worker
    assert [worker.wait(PATIENCE) for worker in trial.workers] == [1]


def test_a_worker_that_does_not_start_is_done_without(trial: Trial) -> None:
    trial.patch.setattr(sys, "executable", "/bin/false")
    exchange = trial.exchanges[0]
    assert content(app(exchange.message, trial.context())) == exchange.answer
    assert len(trial.workers) == 1


@pytest.mark.parametrize(
    ("arguments", "node_config"),
    [
        (["pytest", "--parent-pid", "1"], {}),
        (["flwr-clientapp"], {}),
        (["flwr-clientapp", "--parent-pid", "1", "--allow-runtime-dependency-installation"], {}),
        (["flwr-clientapp", "--parent-pid", "1"], {"worker-minutes": 0}),
    ],
)
def test_only_a_process_for_one_message_has_a_worker(
    arguments: list[str], node_config: dict[str, Any], trial: Trial
) -> None:
    trial.patch.setattr(sys, "argv", arguments)
    assert site_worker.handed_over(trial.exchanges[0].message, trial.context(**node_config)) is None
    assert trial.workers == []


@pytest.mark.parametrize("minutes", [True, -1, "five", float("inf")])
def test_minutes_that_are_none_get_one_line(minutes: object) -> None:
    with pytest.raises(InvalidValue, match=r"worker-minutes must be .*, not"):
        NodeConfig.read({"partition-id": 0, "worker-minutes": minutes})
