"""Worker processes that train stacks give the numbers of the rows engine, with every method.

This holds also if workers die.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from every_method import EVERYBODY
from fedloom.algorithm import Algorithm
from fedloom.common.errors import InvalidValue
from fedloom.engines.dispatch import grouped
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from process_support import Deadly, Failing, OneByOne
from small_task import KeepsClientMemory, other_notices
from stacked_support import METHODS, SIZES, assert_same, world

TASK = world()


@pytest.fixture(scope="module")
def engine(worker_processes: ProcessesEngine) -> Iterator[ProcessesEngine]:
    """Configure the shared workers as `processes(inside=stacked, chunk=3)` does."""
    worker_processes.inside, worker_processes.wanted_chunk = "stacked", 3
    worker_processes.begin(TASK, None)
    yield worker_processes
    worker_processes.inside, worker_processes.wanted_chunk = "rows", None


def run(
    algorithm: Algorithm, engine: ProcessesEngine | RowsEngine, participation: float = 1.0
) -> Federation:
    federation = Federation(
        algorithm, TASK, engine, Schedule(3, participation, seed=3, evaluate_every=1)
    )
    federation.run()
    return federation


QUICK = (
    "ala",
    "dp_sgd",
    "fedavg",
    "fedmr",
    "fedrep",
    "moon",
    "quantised",
    "scaffold",
    "stages",
    "umf",
)
"""Prefixes of one method of each kind; `test_stacked` and `test_processes` run every method."""


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name.startswith(QUICK) else pytest.mark.minutes)
        for name in METHODS
    ],
)
def test_every_method_gives_the_numbers_of_rows(engine: ProcessesEngine, method: str) -> None:
    participation = 1.0 if method.startswith(EVERYBODY) else 0.7
    expected = run(build(method), RowsEngine(TASK), participation)
    assert_same(expected, run(build(method), engine, participation))


def test_clients_share_groups_and_a_method_that_cannot_be_stacked_does_not(
    engine: ProcessesEngine,
) -> None:
    jobs = [Job(client, client, {}) for client in range(len(SIZES))]
    groups = engine._groups(Pipeline(build("fedavg")), jobs)
    assert engine.chunk == 3
    assert sorted(job.client for group in groups for job in group) == list(range(len(SIZES)))
    assert [[job.client for job in group] for group in groups] == [[1, 3], [4, 0, 5], [2]]
    assert [len(group) for group in engine._groups(Pipeline(OneByOne()), jobs)] == [1] * len(SIZES)
    federation = run(OneByOne(), engine)
    notice = "onebyone: OneByOne trains one client at a time"
    assert_same(run(OneByOne(), RowsEngine(TASK)), federation, notices=[notice])
    notices = [other_notices(timing.get("notices", ())) for timing in federation.timings]
    assert notices == [[notice], [], []]


@pytest.mark.parametrize(("chunk", "workers"), [(1, 2), (3, 1), (10, 2), (4, 3), (64, 2)])
def test_groups_hold_everybody_once_and_are_even(chunk: int, workers: int) -> None:
    jobs = [Job(client, client, {}) for client in range(30)]
    count = workers * math.ceil(30 / (workers * chunk))
    groups = grouped(jobs, torch.full((30,), 7), count, chunk)
    assert [job.client for group in groups for job in group] == list(range(30))
    lengths = [len(group) for group in groups]
    assert max(lengths) <= chunk
    assert max(lengths) - min(lengths) <= 1
    assert len(groups) % workers == 0
    falling = grouped(jobs, torch.arange(30), count, chunk)
    assert [job.client for group in falling for job in group] == list(range(29, -1, -1))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8))
def test_groups_of_any_length_hold_about_equally_many_samples(sizes: list[int], count: int) -> None:
    jobs = [Job(client, client, {}) for client in range(len(sizes))]
    groups = grouped(jobs, torch.tensor(sizes), count, len(sizes))
    assert len(groups) <= count
    assert sorted(job.client for group in groups for job in group) == list(range(len(sizes)))
    sums = [sum(sizes[job.client] for job in group) for group in groups]
    assert max(sums) <= sum(sizes) / min(count, len(sizes)) + max(sizes)


def test_clients_of_a_dead_worker_train_again_one_by_one(
    engine: ProcessesEngine, tmp_path: Path
) -> None:
    federation = run(Deadly(victim=2, times=2, directory=str(tmp_path)), engine)
    assert len(list(tmp_path.iterdir())) == 2
    assert_same(run(KeepsClientMemory(), RowsEngine(TASK)), federation)


def test_a_client_that_kills_its_worker_each_time_harms_no_other(
    engine: ProcessesEngine, tmp_path: Path
) -> None:
    method = Deadly(victim=2, times=3, directory=str(tmp_path))
    federation = Federation(method, TASK, engine, Schedule(1, 1.0, seed=3))
    federation.run()
    reason = "its worker process died 3 times (killed by SIGKILL)"
    assert federation.history[0]["faults"] == [{"client": 2, "reason": reason}]


def test_clients_that_fail_in_a_stack_are_named(engine: ProcessesEngine) -> None:
    federation = run(Failing(), engine)
    prefix = "failing: clients that fail in lock step train one by one:"
    notices = [
        f"{prefix} {reason}"
        for reason in ("ZeroDivisionError: integer division or modulo by zero", "Private: 1 and 2")
    ]
    assert (
        sorted(federation.engine.notices)
        == sorted(other_notices(federation.timings[0]["notices"]))
        == sorted(notices)
    )
    assert federation.timings[1].get("notices") is None
    assert_same(run(Failing(), RowsEngine(TASK)), federation, notices=federation.engine.notices)


def test_wrong_options_are_refused_in_one_line() -> None:
    with pytest.raises(InvalidValue, match=r"^inside must be 'rows' or 'stacked', not 'stacks'"):
        ProcessesEngine(TASK, inside="stacks")
    with pytest.raises(InvalidValue, match=r"^chunk must be at least 1, not 0$"):
        ProcessesEngine(TASK, inside="stacked", chunk=0)
