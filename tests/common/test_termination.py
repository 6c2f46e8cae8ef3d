"""SIGTERM saves as Ctrl-C does, in every engine and pool.

A full disk gives one line and one exit code.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.cli import main
from fedloom.common.errors import DiskFull
from fedloom.common.termination import Terminated, sigterm_interrupts
from fedloom.engines.rows import RowsEngine
from fedloom.rounds.checkpoint import RoundLog
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.state.files import write_text
from ray_support import gone
from small_task import KeepsClientMemory, other_notices, small_task


@pytest.fixture(autouse=True)
def nobody_waits_for_sigterm() -> Iterator[None]:
    """Reset the handler of SIGTERM: Ray leaves one if another test has started it here."""
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, handler)


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
JOB = """
algorithm = "scaffold"
rounds = 3000
checkpoint_every = 3000
model = "mlp(hidden=[8])"
seed = 2
threads = 1
{settings}

[data]
name = "digits"
clients = 4
partition = "iid"
"""


def start(folder: Path, settings: str, *command: str) -> subprocess.Popen[str]:
    (folder / "job.toml").write_text(JOB.format(settings=settings))
    arguments = [
        sys.executable,
        "-c",
        "import sys; from fedloom.cli import main; sys.exit(main())",
        *command,
    ]
    return subprocess.Popen(
        arguments,
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/**/metrics.jsonl"))


def wait_for_rounds(folder: Path, runs: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while len([path for path in logs(folder) if path.read_bytes().count(b"\n") > 3]) < runs:
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def children(process: int) -> list[int]:
    completed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True, check=False
    )
    processes = [int(word) for word in completed.stdout.split()]
    return [*processes, *(descendant for child in processes for descendant in children(child))]


@pytest.mark.parametrize(
    ("settings", "command", "runs"),
    [
        ('engine = "rows"', ["run", "job.toml"], 1),
        pytest.param('engine = "stacked"', ["run", "job.toml"], 1, marks=pytest.mark.minutes),
        ('engine = "processes(workers=2)"', ["run", "job.toml"], 1),
        ("workers = 2", ["compare", "job.toml", "algorithms=[fedavg, scaffold]"], 2),
        pytest.param(
            'engine = "ray(workers=1)"', ["run", "job.toml"], 1, marks=pytest.mark.minutes
        ),
    ],
    ids=["rows", "stacked", "processes", "compare", "ray"],
)
def test_sigterm_saves_the_last_finished_round(
    settings: str, command: list[str], runs: int, tmp_path: Path
) -> None:
    with start(tmp_path, settings, *command) as process:
        wait_for_rounds(tmp_path, runs, process)
        workers = children(process.pid)
        began = time.monotonic()
        for number in [process.pid, *workers] if "ray" not in settings else [process.pid]:
            os.kill(number, signal.SIGTERM)  # as schedulers do: to all processes
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait() == 130, output
    assert time.monotonic() - began < 15
    assert "to continue: fedloom" in output.splitlines()[-1]
    assert "Traceback" not in output
    assert gone(workers, 10)
    for path in logs(tmp_path):
        finished = path.read_bytes().count(b"\n")
        assert (path.parent / f"checkpoint-{finished:07d}.safetensors").exists()
        assert all(json.loads(line) for line in path.read_text().splitlines())
    assert len(logs(tmp_path)) == runs
    assert not list(tmp_path.rglob("*.writing"))


def saving() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def test_it_is_raised_once_and_leaves_other_handlers_alone() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(Terminated), sigterm_interrupts():
        saving()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with sigterm_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert heard == [signal.SIGTERM]


def test_a_full_disk_is_named_with_the_file_and_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB.format(settings='engine = "rows"').replace("3000", "2"))
    messages = {}
    fsync = os.fsync
    for name in (
        "checkpoint-0000002.safetensors",
        "model.safetensors",
        "configuration.json",
        "result.json",
    ):

        def full(descriptor: int, name: str = name) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(name):
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        assert main(["run", "job.toml", "--quiet", "--fresh"]) == 1
        messages[name] = capsys.readouterr().err
        assert len(messages[name].splitlines()) == 1
        assert f"{name} cannot be written: it needs " in messages[name]
        assert not list(tmp_path.rglob("*.writing")), "what was half written is gone"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["run", "job.toml", "--quiet"]) == 0


def test_a_limit_on_the_size_of_files_is_no_mistake_in_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB.format(settings='engine = "rows"').replace("3000", "2"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert main(["run", "job.toml", "--quiet"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(
        r"cannot be written: it needs [\d,]+ bytes \(File too large\)", capsys.readouterr().err
    )
    assert main(["run", "job.toml", "--quiet"]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_between_a_rounds_figures_and_its_state_waits(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = small_task()
    schedule = Schedule(rounds=9, participation=0.5, checkpoint_every=9)
    append = RoundLog.append

    def interrupted(log: RoundLog, record: Any) -> None:
        append(log, record)
        if record["round"] == 3:
            signal.raise_signal(number)

    monkeypatch.setattr(RoundLog, "append", interrupted)
    federation = Federation(
        KeepsClientMemory(), task, RowsEngine(task), schedule, tmp_path, "this run"
    )
    with pytest.raises(KeyboardInterrupt):
        federation.run()
    monkeypatch.undo()
    repeated = Federation(
        KeepsClientMemory(), task, RowsEngine(task), schedule, tmp_path, "this run"
    )
    assert repeated.finished == 3
    assert other_notices(repeated.notices) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_on_a_full_disk_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskFull, match=r"metrics\.jsonl cannot be written: it needs 13 bytes"):
        RoundLog(tmp_path / "metrics.jsonl").append({"round": 1})
    with pytest.raises(Exception, match="cannot be written"):
        write_text(tmp_path / "missing" / "file", "text")


@pytest.mark.parametrize("options", [[], ["--fresh"]])
def test_what_killed_writers_left_is_gone_with_the_next_start_and_nothing_else(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB.format(settings='engine = "rows"').replace("3000", "2"))
    assert main(["run", "job.toml", "--quiet"]) == 0
    (run_folder,) = tmp_path.glob("runs/job/*/seed-2")
    leftover = run_folder / ".report.html.0123456789abcdef.writing"
    kept_folders = [
        run_folder / ".report.html.writing",
        run_folder / ".tmpAb3dE6",
        run_folder / "notes.0123456789abcdef.writing",
    ]
    for folder in (leftover, *kept_folders):
        folder.mkdir()
        (folder / "report.html").write_text("half")
    # finished: only --fresh would compute again
    assert main(["run", "job.toml", "--quiet", *options]) == 0
    assert not leftover.exists()
    assert all((folder / "report.html").read_text() == "half" for folder in kept_folders)


def test_a_changed_figure_of_a_finished_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB.format(settings='engine = "rows"').replace("3000", "2"))
    assert main(["run", "job.toml", "--quiet"]) == 0
    (path,) = tmp_path.glob("runs/job/*/seed-2/metrics.jsonl")
    path.write_text(path.read_text().replace('"loss": ', '"loss": 1', 1))
    capsys.readouterr()
    assert main(["run", "job.toml", "--quiet"]) == 2
    message = capsys.readouterr().err
    assert "metrics.jsonl has changed since it was written: " in message
    assert len(message.splitlines()) == 1
    assert main(["run", "job.toml", "--quiet", "--fresh"]) == 0
