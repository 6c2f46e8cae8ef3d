"""A task of sites with data of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom.data.dataset import make_dataset
from fedloom.data.partition import Partition
from fedloom.task import Task
from fedloom.task.making import make_task
from flower_support import CLIENTS, LocalGrid, site


def own_task(settings: Any) -> Task:
    """Return a task with six clients of unequal sizes and test samples."""
    digits = make_dataset("digits")
    sizes, tests = (
        [40 + 10 * number for number in range(CLIENTS)],
        [5 + number for number in range(CLIENTS)],
    )
    order = np.random.default_rng(1).permutation(len(digits.train))[: sum(sizes) + sum(tests)]
    task = make_task(
        digits,
        partition=Partition.from_sizes(order[: sum(sizes)], sizes),
        model=settings.configuration.model,
        training=settings.configuration.training,
        seed=settings.configuration.seed,
    )
    return replace(task, local_test=Partition.from_sizes(order[sum(sizes) :], tests))


def give_data(grid: LocalGrid, task: Task, folder: Path) -> None:
    """Write the samples of each client to a separate file of its site."""
    assert task.local_test is not None
    for number in range(CLIENTS):
        mine, test = task.samples(number), task.train[torch.from_numpy(task.local_test[number])]
        np.savez(
            folder / f"{number}.npz",
            inputs=mine.inputs.numpy(),
            labels=mine.labels.numpy(),
            test_inputs=test.inputs.numpy(),
            test_labels=test.labels.numpy(),
        )
        site(grid, number).config["data"] = str(folder / f"{number}.npz")
