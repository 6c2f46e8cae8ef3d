"""The tiny task that a method is checked on, and its federations."""

import copy
import re
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedloom.algorithm import Algorithm
from fedloom.algorithm.method import Method, components
from fedloom.common.errors import (
    Diverged,
    FedloomError,
    InvalidValue,
    code_location,
    error_location,
    error_text,
)
from fedloom.common.randomness import global_stream, stream
from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition
from fedloom.engines.base import LocalEngine
from fedloom.engines.proof import Proof, prove
from fedloom.engines.rows import RowsEngine
from fedloom.reviews.checker.findings import Finding
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task

ROUNDS = 3
CLIENTS = 4
"""Clients in a round, at most."""

BATCH = 8
BATCHES = 3
TEST = 64
"""Limits of a user's task: samples in a batch, batches of a client, and test samples."""


@cache
def own_task() -> Task:
    """Return a task of six clients with 3 to 12 samples each and local test samples, and a model of
    51 weights.
    """
    sizes = (9, 5, 12, 7, 3, 8)
    tests = (2, 1, 3, 0, 1, 2)
    extra = 20
    generator = stream(0, "check")
    count = sum(sizes) + sum(tests)
    inputs = torch.randn(count + extra, 6, generator=generator)
    labels = (inputs[:, :3] + 0.3 * torch.randn(count + extra, 3, generator=generator)).argmax(1)
    samples = Samples(inputs, labels)
    with global_stream(0, "check"):
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    dataset = Dataset("check", samples[:count], samples[count:], 3)
    return Task(
        dataset,
        dataset.train,
        dataset.test,
        Partition.from_sizes(np.arange(sum(sizes)), sizes),
        model,
        Training(learning_rate=0.05, batch_size=4),
        Partition.from_sizes(np.arange(sum(sizes), count), tests),
    )


def sample_of(task: Task) -> Task:
    """Return the task with one to three small batches for each client, and a small test set."""
    size = min(BATCH, task.training.batch_size or BATCH)
    indices = [
        task.partition[k][: max(1, size * (1 + k % BATCHES) - k % 2)] for k in range(task.clients)
    ]
    local = task.local_test
    return replace(
        task,
        test=task.test[:TEST],
        partition=Partition.of(indices),
        local_test=local and Partition.of([local[k][:size] for k in range(task.clients)]),
        training=replace(task.training, batch_size=size, epochs=1, steps=None),
    )  # fmt: skip


@dataclass(frozen=True)
class CheckTrial:
    """A method and the task that it is checked on."""

    method: Method
    task: Task

    @cached_property
    def proof(self) -> Proof:
        return prove(
            self.task.model, self.task.dataset, self.task.train, self.task.training, stack=True
        )

    @cached_property
    def participation(self) -> float:
        share = min(1.0, CLIENTS / self.task.clients)
        try:
            self.federation(RowsEngine(self.task, self.proof), participation=share)
        except InvalidValue:
            return 1.0  # its setup refuses a part of the clients
        return share

    def federation(
        self,
        engine: LocalEngine,
        folder: Path | None = None,
        rounds: int = ROUNDS,
        participation: float | None = None,
    ) -> Federation:
        personal = 1 if self.task.local_test is not None else None
        schedule = Schedule(
            rounds,
            participation or self.participation,
            evaluate_every=1,
            checkpoint_every=1,
            personal_every=personal,
            personal_clients=CLIENTS,
        )
        return Federation(copy.deepcopy(self.method), self.task, engine, schedule, folder)

    def outcome(self, engine: LocalEngine, rounds: int = ROUNDS) -> Federation:
        """Return a federation after `ROUNDS` of its rounds.

        Args:
            engine: The engine, which is closed at the end.
            rounds: Rounds of the schedule; more than `ROUNDS` shows methods that depend on the
                total.

        Returns:
            The federation, with its state after these rounds.
        """
        with closing(engine):
            federation = self.federation(engine, rounds=rounds)
            for _ in range(ROUNDS):
                federation.step()
        return federation

    def resumed(self) -> Federation:
        """Return a federation that was killed after its first round and has gone on to its last."""
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(RowsEngine(self.task, self.proof)) as rows_engine,
            closing(RowsEngine(self.task, self.proof)) as second,
        ):
            killed = self.federation(rows_engine, Path(folder))
            killed.step()
            killed.save()
            federation = self.federation(second, Path(folder))
            federation.run()
        return federation

    @property
    def server_location(self) -> str:
        kind = self._kind
        return code_location(kind.update) or code_location(kind.receive) or self.location

    @property
    def location(self) -> str:
        return code_location(self._kind.train) or code_location(type(self.method))

    @property
    def _kind(self) -> type[Algorithm]:
        found = (method for method in components(self.method) if isinstance(method, Algorithm))
        return type(next(found))


def failure(error: Exception, location: str, prefix: str = "") -> Finding:
    """Return an error as a finding, with its location out of the text.

    Args:
        error: The error.
        location: Location to use if the error has none, as `file:line`; "" if it is not known.
        prefix: Beginning of the text.

    Returns:
        The finding, without a remedy. A divergence has the given location.
    """
    text = str(error) if isinstance(error, FedloomError) else error_text(error)
    match = re.fullmatch(r"(.*) \(at ([^()]*)\)", text, re.S)
    problem, stated = (match[1], match[2]) if match else (text, "")
    if isinstance(error, Diverged):
        return Finding(f"{prefix}{problem}", location)
    return Finding(f"{prefix}{problem}", error_location(error) or stated or location)
