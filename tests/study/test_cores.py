"""Concurrent runs: their number and threads, which do not change the results."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from fedloom.engines.work import SHARED_STEP, step_multiply_adds, step_threads, using_threads
from fedloom.runs.config_file import configuration
from fedloom.runs.configuration import Configuration
from fedloom.runs.configured import run_configured
from fedloom.runs.events import RunName
from fedloom.study import cores
from fedloom.study.comparison import Comparison
from fedloom.study.cores import RUN_BYTES, runs_side_by_side, threads_each, usable_cores
from fedloom.task.making import make_task


def table(**keys: object) -> Configuration:
    return configuration({"algorithm": "fedavg", **keys})


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    monkeypatch.setattr(cores, "_memory", lambda: 1 << 40)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)


@pytest.mark.usefixtures("eight_cores")
def test_many_runs_take_a_core_each_and_few_share_all_cores() -> None:
    assert [(runs_side_by_side(table(), runs), threads_each(table(), runs)) for runs in (0, 1, 3, 8, 100)] == [
        (1, 8), (1, 8), (3, 2), (8, 1), (8, 1),
    ]  # fmt: skip
    assert runs_side_by_side(table(engine="stacked", pool="ray"), 100) == 8
    assert runs_side_by_side(table(workers=3), 100) == 3
    assert threads_each(table(threads=5), 100) == 5


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize("workers", [1, 2, 50, "auto"])
def test_threads_do_not_depend_on_the_number_of_concurrent_runs(workers: object) -> None:
    assert threads_each(table(workers=workers), 4) == 2
    assert threads_each(table(workers=workers), 9) == 1


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    "keys", [{"engine": "ray"}, {"engine": "processes(workers=2)"}, {"pool": "ray://there:10001"}]
)
def test_runs_that_use_several_cores_are_sequential(keys: dict[str, str]) -> None:
    assert runs_side_by_side(table(**keys), 100) == 1
    assert threads_each(table(**keys), 100) == (8 if "engine" in keys else 1)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("room", "concurrent"), [(0.5, 1), (1, 1), (2.9, 2), (50, 8)])
def test_no_more_runs_are_concurrent_than_memory_holds(
    monkeypatch: pytest.MonkeyPatch, room: float, concurrent: int
) -> None:
    monkeypatch.setattr(cores, "_memory", lambda: int(room * RUN_BYTES))
    assert runs_side_by_side(table(), 100) == concurrent


def test_cores_and_memory_are_those_of_this_machine() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert cores._memory() > 1 << 28


def test_the_previous_number_of_threads_is_restored() -> None:
    threads = torch.get_num_threads()
    with using_threads(threads + 1):
        assert torch.get_num_threads() == threads + 1
        with using_threads(None):
            assert torch.get_num_threads() == threads + 1
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("model", "batch_size", "threads"),
    [
        ("mlp(hidden=[128, 128])", 50, 1),
        ("digits_cnn", 50, 1),
        ("digits_cnn", 1000, 8),
        ("mlp(hidden=[2600])", 400, 8),
    ],
)
def test_steps_that_are_small_take_one_thread(model: str, batch_size: int, threads: int) -> None:
    task = make_task("digits", clients=1, model=model, training={"batch_size": batch_size})
    assert (step_multiply_adds(task) >= SHARED_STEP) == (threads == 8)
    assert step_threads(task) == threads


@pytest.mark.parametrize("threads", [None, 2])
def test_a_run_records_its_number_of_threads(threads: int | None, tmp_path: Path) -> None:
    job = configuration(
        {"algorithm": "fedavg", "rounds": 1, "threads": threads, "data": {"clients": 2}}
    )
    with using_threads(3):
        run_configured(job, RunName("fedavg", 0), lambda event: None, path=tmp_path)
        assert torch.get_num_threads() == 3
    assert json.loads((tmp_path / "environment.json").read_text())["threads"] == (threads or 1)


def test_a_comparison_has_the_same_results_with_one_worker_and_with_two(tmp_path: Path) -> None:
    """A comparison has equal results with one worker and with two.

    The matrices are so large that PyTorch splits their products. The last digits of sums then
    depend on the number of threads.
    """

    def compared(workers: int) -> Path:
        folder = tmp_path / str(workers)
        configured = configuration(
            {
                "algorithms": ["fedavg", "fedmr"], "rounds": 2, "model": "mlp(hidden=[2600])", "workers": workers,
                "directory": str(folder), "data": {"clients": 2, "partition": "iid"}, "training": {"batch_size": 400},
            }
        )  # fmt: skip
        assert Comparison.of(configured).run(lambda event: None) == {}
        return folder

    with using_threads(4):
        sequential, concurrent = compared(1), compared(2)
    for method in ("fedavg", "fedmr"):
        run_of_one, run_of_two = (folder / method / "seed-0" for folder in (sequential, concurrent))
        for name in ("metrics.jsonl", "model.safetensors"):
            assert (run_of_one / name).read_bytes() == (run_of_two / name).read_bytes()
        threads = [
            json.loads((run / "environment.json").read_text())["threads"]
            for run in (run_of_one, run_of_two)
        ]
        assert threads == [2, 2]
