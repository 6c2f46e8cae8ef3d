"""How clients are divided over workers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.engines.dispatch import grouped
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.parts.building import build
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Job
from process_support import OneByOne
from stacked_support import SIZES, world

TASK = world()


@pytest.fixture(scope="module")
def engine(worker_processes: ProcessesEngine) -> Iterator[ProcessesEngine]:
    """Configure the shared workers as `processes(inside=stacked, chunk=3)` does."""
    worker_processes.inside, worker_processes.wanted_chunk = "stacked", 3
    worker_processes.begin(TASK, None)
    yield worker_processes
    worker_processes.inside, worker_processes.wanted_chunk = "rows", None


def test_clients_share_groups_and_a_method_that_cannot_be_stacked_does_not(
    engine: ProcessesEngine,
) -> None:
    jobs = [Job(client, client, {}) for client in range(len(SIZES))]
    groups = engine._groups(Pipeline(build("fedavg")), jobs)
    assert engine.chunk == 3
    assert sorted(job.client for group in groups for job in group) == list(range(len(SIZES)))
    assert [[job.client for job in group] for group in groups] == [[1, 3], [4, 0, 5], [2]]
    assert [len(group) for group in engine._groups(Pipeline(OneByOne()), jobs)] == [1] * len(SIZES)


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
