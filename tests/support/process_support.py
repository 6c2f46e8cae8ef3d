"""Methods for tests of the processes engine; its workers import this module by name."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.algorithm import Facts
from fedloom.algorithm.records import Message
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import InvalidValue
from fedloom.common.training import Training
from fedloom.flat.layout import Layout
from fedloom.local.cohort import Cohort
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task
from small_task import CLASSES, KeepsClientMemory, small_task


class WideNet(nn.Module):
    """Batch norm and dropout again, with too many weights for a message."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 48)
        self.norm = nn.BatchNorm1d(48)
        self.middle = nn.Linear(48, 32)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.out(
            self.drop(torch.tanh(self.middle(torch.relu(self.norm(self.hidden(inputs))))))
        )
        return logits


def wide_task() -> Task:
    """Return the small task's six unequal clients with the wide model."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return replace(
            small_task(), model=WideNet(), training=Training(learning_rate=0.05, batch_size=4)
        )


@dataclass
class Deadly(KeepsClientMemory):
    """A method with a client that kills its own process.

    The client `victim` does so after a write to its memory, the first `times` times.
    """

    victim: int = 0
    times: int = 1
    directory: str = ""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        reply = super().train(cohort, inbox)
        marks = Path(self.directory)
        if self.victim in cohort.clients and len(list(marks.iterdir())) < self.times:
            (marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return reply


class Private(Exception):
    """An error that does not survive pickling."""

    def __init__(self, numerator: int, denominator: int) -> None:
        super().__init__(f"{numerator} and {denominator}")


@dataclass
class Failing(FedAvg):
    """Client 0 divides by zero, 1 raises a custom error, 2 sends NaN, 3 a short row."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        reply = super().train(cohort, inbox)
        if 0 in cohort.clients:
            _ = 1 // 0
        if 1 in cohort.clients:
            raise Private(1, 2)
        reply["model"][torch.tensor(cohort.clients) == 2, 0] = torch.nan
        if 3 in cohort.clients:
            reply["model"] = reply["model"][:, 1:]
        return reply


@dataclass
class OneByOne(FedAvg):
    """Trains one client at a time and depends on it."""

    facts = Facts(stackable=False)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        assert len(cohort.clients) == 1
        return super().train(cohort, inbox)


@dataclass
class Misconfigured(FedAvg):
    """A method with invalid settings."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        raise InvalidValue("mu must be at least 0, not -1")


@dataclass
class Dividing(FedAvg):
    """Every client divides by zero."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return {"model": inbox["model"] / (1 // 0)}


@dataclass
class BadlyPersonal(FedAvg):
    """Clients cannot create their own models."""

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        raise LookupError("no personal model")


@dataclass
class Peeking(FedAvg):
    """A client half that reads the server's state."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return {"model": self.state["model"].unsqueeze(0)}


@dataclass
class Reporting(FedAvg):
    """A client half that stores the plan and the round in its memory."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        seen = {"plan": described(self.plan), "round": described(cohort.round)}
        text = torch.tensor(list(json.dumps(seen).encode()), dtype=torch.uint8)
        cohort.memory["seen"] = text.repeat(len(cohort.clients), 1)
        return super().train(cohort, inbox)


def described(record: Any) -> dict[str, str]:
    """Return the fields of a plan or of a round as text; equal values give equal text."""
    return {field.name: _text(getattr(record, field.name)) for field in fields(record)}


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, Layout):
        return repr((value.size, value.slices, value.integer_slices))
    if isinstance(value, PoolFiles):
        return f"at most {value.budget} bytes"
    if callable(value) and not isinstance(value, nn.Module):  # the sizes of clients
        return str(value(torch.arange(6)).tolist())
    return repr(value)
