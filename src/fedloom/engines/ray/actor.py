"""What runs in a Ray actor: it trains the clients of a share and remembers nothing between two shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Plan
from fedloom.engines.base import ClientTask, Fault, Reply
from fedloom.engines.processes.worker import Broken, Failed, Setup
from fedloom.engines.processes.worker import _portable as portable
from fedloom.engines.ray.parcel import Parcel, pack, unpack
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import FedloomError
from fedloom.flat.allocator import keep_pages
from fedloom.round import Round
from fedloom.rounds.scoring import Tally
from fedloom.task import Task

Tensors = dict[str, Tensor]

INSIDE = {"rows": RowsEngine, "stacked": StackedEngine}
"""The engines that an actor can train its share with."""


@dataclass(frozen=True)
class Briefing:
    """What all shares of a round need: the method, and the rows that several clients are sent."""

    algorithm: Algorithm
    round: Round
    expected: dict[str, tuple[int, ...]]
    common: tuple[Tensor, ...]


@dataclass(frozen=True)
class Piece:
    """One client of a share: the rows sent to it alone, the places of the others in `Briefing.common`, what it remembers."""

    client: int
    slot: int | None
    own: Tensors
    common: Mapping[str, int]
    memory: Tensors


@dataclass(frozen=True)
class Share:
    """Some clients of a round."""

    kind: Literal["train", "evaluate"]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Trained:
    """What a client uploads (nothing without a slot), figures of its work, and what it wrote to its memory."""

    tensors: Tensors
    metrics: Mapping[str, float]
    written: Tensors


Answer = list[Trained | Failed] | list[Tally] | Failed | Broken
"""One entry for each client that trained; what the clients scored; or why there is nothing of either."""


class TrainingActor:
    """Lives in a process of its own, on whatever node Ray has room. Its answers depend on what it is given alone."""

    def __init__(self, paths: Sequence[str], setup: Parcel, threads: int, inside: str, gpu: bool) -> None:
        sys.path += [path for path in paths if path not in sys.path and os.path.exists(path)]
        torch.set_num_threads(threads)
        keep_pages()
        settings: Setup = unpack(setup)
        settings.apply()
        self.inside, self.device = INSIDE[inside], torch.device("cuda" if gpu else "cpu")
        self.engine: RowsEngine | None = None
        self.trouble: Parcel | None = None
        self.number = -1
        self.briefing: Briefing | None = None

    def process(self) -> int:
        """The number of its process."""
        return os.getpid()

    def begin(self, task: Parcel) -> Parcel:
        """Take up a task. The answer is None, or what is broken; so are all answers then until the next task."""
        self.trouble = None
        try:
            if self.device.type == "cuda" and not torch.cuda.is_available():
                raise FedloomError("Ray gave an actor a GPU, but PyTorch finds none there")
            received: Task = unpack(task)
            if self.device.type == "cuda":
                received = received.to(self.device)
            self.engine = self.inside(received, memory_budget=sys.maxsize)
        except Exception as error:
            self.trouble = pack(_broken(error))
        return self.trouble or pack(None)

    def work(self, number: int, briefing: Parcel, share: Parcel) -> Parcel:
        """The `Answer` to a share; `number` tells briefings apart."""
        if self.trouble is not None:
            return self.trouble
        try:
            if number != self.number:
                self.briefing = None  # the one before may go
                self.briefing, self.number = unpack(briefing, self._plan), number
            return pack(self._answer(unpack(share)))
        except Exception as error:
            return pack(_broken(error))

    def _answer(self, share: Share) -> Answer:
        assert self.engine is not None
        assert self.briefing is not None
        engine, briefing = self.engine, self.briefing
        engine.store.begin(None)
        for piece in share.pieces:
            if piece.memory:
                engine.store.write(piece.client, piece.memory)
        engine.store.commit()
        client_tasks = [ClientTask(piece.client, piece.slot, self._inbox(piece)) for piece in share.pieces]
        if share.kind == "evaluate":
            try:
                return list(engine.evaluate(briefing.algorithm, briefing.round, client_tasks))
            except Exception as error:
                return Failed(str(error), portable(error))
        results = engine.train_expecting(briefing.algorithm, briefing.round, client_tasks, briefing.expected)
        found = {result.client_task.client: result for result in results}
        return [self._outcome(piece, found[piece.client]) for piece in share.pieces]

    def _outcome(self, piece: Piece, result: Reply | Fault) -> Trained | Failed:
        assert self.engine is not None
        if isinstance(result, Fault):
            return Failed(result.reason, None if result.error is None else portable(result.error))
        remembered = self.engine.store.read(piece.client)
        written = {name: tensor for name, tensor in remembered.items() if tensor is not piece.memory.get(name)}
        return Trained({} if piece.slot is None else dict(result.tensors), result.metrics, written)

    def _inbox(self, piece: Piece) -> Tensors:
        """A client's inbox, as a copy that may be written to: the object store ends a process that writes to it."""
        assert self.briefing is not None
        rows = {**piece.own, **{name: self.briefing.common[place] for name, place in piece.common.items()}}
        return {name: tensor.to(self.device, copy=True) for name, tensor in rows.items()}

    def _plan(self, values: list[Any]) -> Plan:
        assert self.engine is not None
        task = self.engine.task
        clients, participants, rounds, seed, classes = values
        return Plan(
            task.layout, task.initial, clients, participants, rounds, seed, classes, task.sizes, task.model
        )  # fmt: skip


def _broken(error: Exception) -> Broken:
    if not isinstance(error, FedloomError):
        text = " ".join(f"{type(error).__name__}: {error}".split())
        error = FedloomError(f"a Ray actor cannot take part: {text}")
    return Broken(portable(error))
