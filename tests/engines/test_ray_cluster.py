"""Runs on an external Ray cluster of several nodes.

One node dies in a round, and then the head dies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.cli import main

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.minutes

Runs = list[subprocess.Popen[str]]

JOB = """
algorithm = "fedavg"
model = "mlp(hidden=[16])"
rounds = 9
participation = 1.0
checkpoint_every = 1

[data]
name = "digits"
clients = 6

[training]
learning_rate = 0.1
epochs = 5
batch_size = 5
"""


def start(nodes: int) -> Any:
    """Start a cluster of one head without cores and nodes with one core each.

    The nodes are processes of this machine.
    """
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    for _ in range(nodes):
        cluster.add_node(num_cpus=1)
    return cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    nodes = start(3)
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the model of a run without Ray."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "job.toml").write_text(JOB)
    assert (
        main(
            [
                "run",
                str(folder / "job.toml"),
                "engine=rows",
                f"directory={folder / 'runs'}",
                "--quiet",
            ]
        )
        == 0
    )
    return model(folder)


def model(folder: Path) -> bytes:
    return next(folder.glob("**/model.safetensors")).read_bytes()


@pytest.fixture
def runs() -> Iterator[Runs]:
    """Collect the runs of a test, and kill all active runs at its end."""
    runs: Runs = []
    yield runs
    for run in runs:
        with run:
            run.kill()


def begin(runs: Runs, folder: Path, cluster: Any, workers: int) -> subprocess.Popen[str]:
    """Start `fedloom run` on the cluster in a separate process."""
    (folder / "job.toml").write_text(JOB)
    engine = f'engine=ray(address="{cluster.address}", workers={workers})'
    command = [
        sys.executable,
        "-m",
        "fedloom",
        "run",
        "job.toml",
        engine,
        "directory=runs",
        "--quiet",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    runs.append(
        subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    )
    return runs[-1]


def rounds_saved(folder: Path) -> list[int]:
    """Return the rounds of all checkpoints below a folder.

    Unlike `Path.glob`, this skips files that disappear during the listing, such as temporary files.
    """
    names = [
        name for _, _, names in os.walk(folder) for name in names if name.startswith("checkpoint-")
    ]
    return [
        int(Path(name).stem.rpartition("-")[2]) for name in names if name.endswith(".safetensors")
    ]


def at_round(number: int, folder: Path, run: subprocess.Popen[str]) -> None:
    """Wait until the run has finished this round. Assert that the run is still active."""
    while max(rounds_saved(folder), default=0) < number:
        assert run.poll() is None
        time.sleep(0.01)
    assert not list(folder.glob("*/*/*/model.safetensors"))


def test_a_node_killed_in_a_round_changes_no_bit(
    runs: Runs, cluster: Any, expected: bytes, tmp_path: Path
) -> None:
    run = begin(runs, tmp_path, cluster, workers=3)
    at_round(2, tmp_path, run)
    cluster.remove_node(sorted(cluster.worker_nodes, key=id)[0], allow_graceful=False)
    _, output = run.communicate(timeout=600)
    assert run.returncode == 0, output
    assert model(tmp_path) == expected


def test_after_the_loss_of_the_head_the_same_command_goes_on(
    runs: Runs, cluster: Any, expected: bytes, tmp_path: Path
) -> None:
    run = begin(runs, tmp_path, cluster, workers=2)
    at_round(2, tmp_path, run)
    cluster.remove_node(cluster.head_node, allow_graceful=False)
    run.communicate(timeout=600)
    assert run.returncode == 1
    reached = max(rounds_saved(tmp_path))
    assert 2 <= reached < 9
    another = start(1)
    try:
        run = begin(runs, tmp_path, another, workers=1)
        _, output = run.communicate(timeout=600)
    finally:
        another.shutdown()
    assert run.returncode == 0, output
    assert model(tmp_path) == expected
