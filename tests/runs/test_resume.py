"""Resumption after real kills of real processes.

The final bytes equal the bytes of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.runs.directory import locked
from forking_cli import OPERATIONS, Server, main, serving

if not hasattr(os, "fork"):
    pytest.skip("processes are forked to start them quickly", allow_module_level=True)

JOB = """
algorithm = "stages(scaffold:9, fedmr)"
rounds = 24
participation = 0.5
dropout = 0.2
checkpoint_every = 4
evaluate_every = 1
threads = 1
workers = 1
model = "mlp(hidden=[8])"
[data]
clients = 8
partition = "dirichlet(0.5)"
local_test = 0.25
[training]
learning_rate = 0.1
"""
RUN = Path("runs/job/stages-scaffold_9-fedmr/seed-0")
KEPT = (
    "metrics.jsonl",
    "clients.jsonl",
    "model.safetensors",
    "split.npz",
    "configuration.json",
    "task.json",
)


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(
    process: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """Return the files of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "job.toml").write_text(JOB)
    code, output = Server(process, folder).run("run", "job.toml", "--quiet")
    assert code == 0, output
    return {name: (folder / RUN / name).read_bytes() for name in KEPT}


@pytest.fixture
def server(process: subprocess.Popen[str], tmp_path: Path) -> Server:
    (tmp_path / "job.toml").write_text(JOB)
    return Server(process, tmp_path)


def rounds_written(folder: Path) -> int:
    path = folder / RUN / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_rounds(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 600
    while rounds_written(folder) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def assert_same(folder: Path, undisturbed: dict[str, bytes]) -> None:
    for name, content in undisturbed.items():
        assert (folder / RUN / name).read_bytes() == content, name


def test_a_run_killed_at_random_moments_ends_with_the_same_files(
    server: Server, undisturbed: dict[str, bytes]
) -> None:
    choose = random.Random(1)
    killed = 0
    for at in sorted(choose.sample(range(1, 22), 4)):
        command = server.start("run", "job.toml", "--quiet")
        wait_for_rounds(server.folder, at)
        time.sleep(choose.random() * 0.01)
        command.send(signal.SIGKILL)
        killed += command.wait()[0] == -signal.SIGKILL
    assert killed >= 3
    assert server.run("run", "job.toml", "--quiet")[0] == 0
    assert_same(server.folder, undisturbed)


def test_a_run_killed_in_the_middle_of_writes_ends_with_the_same_files(
    server: Server, undisturbed: dict[str, bytes]
) -> None:
    choose = random.Random(2)
    for _ in range(6):
        code, output = server.run("run", "job.toml", "--quiet", die_at=choose.randint(1, 25))
        assert code == -signal.SIGKILL, output
    code, output = server.run("run", "job.toml", "--quiet")
    assert code == 0, output
    assert_same(server.folder, undisturbed)


@pytest.mark.parametrize(
    ("method", "budget"),
    [("fedavg", 1 << 30), ("fedmr", 1000)],  # the second one saves a checkpoint in every round
)
def test_a_run_killed_at_its_saved_models_ends_with_the_same_models(
    method: str, budget: int, process: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Kill runs in the write and in the rename of a model that `keep_models` saves."""
    job = JOB.replace('"stages(scaffold:9, fedmr)"', f'"{method}"').replace("24", "5")
    job = f"keep_models = 2\npool_budget = {budget}\n{job}"
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "kept.toml").write_text(job)
    code, output = Server(process, whole).run("run", "kept.toml", "--quiet", die_at=-1)
    assert code == 0, output
    expected = saved_models(whole)
    assert list(expected) == ["round-0000002.safetensors", "round-0000004.safetensors"]
    operations = (whole / OPERATIONS).read_text().splitlines()
    places = [k for k, name in enumerate(operations, start=1) if "round-0000004" in name]
    assert len(places) >= 2
    for place in places:
        server = Server(process, tmp_path / str(place))
        server.folder.mkdir()
        (server.folder / "kept.toml").write_text(job)
        code, output = server.run("run", "kept.toml", "--quiet", die_at=place)
        assert code == -signal.SIGKILL, output
        assert saved_models(server.folder) != expected
        code, output = server.run("run", "kept.toml", "--quiet")
        assert code == 0, output
        assert saved_models(server.folder) == expected


def saved_models(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files with models. Unfinished files have no content here."""
    found = sorted(folder.glob("runs/kept/*/*/models/*"))
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in found}


def test_a_run_killed_while_it_is_lengthened_ends_as_a_long_one(
    server: Server, undisturbed: dict[str, bytes]
) -> None:
    assert server.run("run", "job.toml", "--quiet", "rounds=12")[0] == 0
    for at in range(1, 13):
        code, output = server.run("run", "job.toml", "--quiet", die_at=at)
        assert code == -signal.SIGKILL, output
    assert server.run("run", "job.toml", "--quiet")[0] == 0
    texts = (server.folder / RUN / "metrics.jsonl").read_bytes(), undisturbed["metrics.jsonl"]
    actual, expected = ([json.loads(line) for line in text.splitlines()] for text in texts)
    # the last round of the shorter run has additional metrics
    actual[11] = {name: actual[11][name] for name in expected[11]}
    assert actual == expected
    assert_same(
        server.folder, {name: undisturbed[name] for name in KEPT if not name.endswith(".jsonl")}
    )


def test_a_truncated_checkpoint_and_a_broken_line_cost_rounds_but_not_the_run(
    server: Server, undisturbed: dict[str, bytes]
) -> None:
    # Fewer than 20 operations precede round 1, and each round has about 4. Some checkpoints
    # therefore exist.
    assert server.run("run", "job.toml", "--quiet", die_at=50)[0] == -signal.SIGKILL
    folder = server.folder / RUN
    older, newest = sorted(folder.glob("checkpoint-*"))
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2')
    (folder / "timings.jsonl").unlink()
    code, output = server.run("run", "job.toml")
    assert code == 0, output
    assert f"{RUN / newest.name} cannot be read" in output
    assert f"continuing after round {int(older.stem.rpartition('-')[2])}" in output
    assert_same(server.folder, undisturbed)


def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(
    server: Server, undisturbed: dict[str, bytes]
) -> None:
    command = server.start("run", "job.toml", "--fresh")
    wait_for_rounds(server.folder, 6)
    command.send(signal.SIGINT)
    code, output = command.wait()
    assert code == 130
    assert output.splitlines()[-1] == "fedloom: stopped; to continue: fedloom run job.toml"
    assert "Traceback" not in output
    finished = rounds_written(server.folder)
    # the finished run computes no round again
    assert (server.folder / RUN / f"checkpoint-{finished:07d}.safetensors").exists()
    assert server.run("run", "job.toml")[0] == 0
    assert_same(server.folder, undisturbed)


def test_one_process_at_a_time_works_in_a_directory(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = server.start("run", "job.toml", "--quiet")
    wait_for_rounds(server.folder, 1)
    command.send(signal.SIGSTOP)
    monkeypatch.chdir(server.folder)
    code = main(["run", "job.toml", "--quiet"])
    command.send(signal.SIGKILL)
    command.wait()
    assert code == 2
    assert f"{RUN} is in use by another process" in capsys.readouterr().err
    with locked(server.folder / RUN / ".lock"):  # a killed process does not hold the lock
        pass


def test_a_comparison_in_workers_survives_a_kill_and_equals_one_without(server: Server) -> None:
    tmp_path = server.folder
    command = (
        "compare",
        "job.toml",
        "--quiet",
        "algorithms=[fedavg, fedmr]",
        "seeds=[0, 1]",
        "rounds=16",
    )
    methods = [
        Path(f"runs/job/{method}/seed-{seed}") for method in ("fedavg", "fedmr") for seed in (0, 1)
    ]
    workers = subprocess.Popen(
        [sys.executable, "-m", "fedloom", *command, "workers=2"], cwd=tmp_path
    )
    deadline = time.monotonic() + 600
    while not all((tmp_path / path / "metrics.jsonl").exists() for path in methods[::2]):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    workers.kill()
    workers.wait()
    for path in methods[::2]:  # workers end soon after their parent and then release their locks
        while True:
            try:
                with locked(tmp_path / path / ".lock"):
                    break
            except Exception:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    code, output = server.run(*command)
    assert code == 0, output
    assert "fedmr" in output
    code, output = server.run(*command, "directory=alone")
    assert code == 0, output
    for path in methods:
        for name in ("metrics.jsonl", "model.safetensors"):
            undisturbed = tmp_path / "alone" / path.relative_to("runs/job")
            assert (tmp_path / path / name).read_bytes() == (undisturbed / name).read_bytes()
    summary = json.loads((tmp_path / "runs/job/comparison.json").read_text())
    assert len(summary["runs"]) == 4
