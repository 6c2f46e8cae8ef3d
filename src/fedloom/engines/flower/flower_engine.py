"""The flower engine: clients train at sites of their own, with one message to each site and one back, through Flower's Grid.

Every site is sent its own tensors, and every tensor that comes back is checked against what the method expects, before its
bytes are decoded. A site that is absent, late, or answers anything else loses its turn, never the round.

What clients remember stays at their sites, as versions named by the round that wrote them. The server keeps only which version
each client goes on from: that of the last reply that it took. So a reply that came too late, or that was refused, leaves no
trace, and a server that goes on from a checkpoint finds every site as it was then.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, Message
from torch import Tensor

from fedloom.algorithm import Algorithm, describe
from fedloom.algorithms.secure import Secure, secured
from fedloom.algorithms.stages import Stages
from fedloom.engines.base import INTEGERS, Choice, ClientTask, Exchanging, Fault, Reply, expectations, inspect_reply
from fedloom.engines.flower.known_sites import MOST_SAMPLES, KnownSites
from fedloom.engines.flower.mailbox import FOREVER, Kind, Mailbox
from fedloom.engines.flower.messages import (
    Refusal,
    Shape,
    Words,
    encoded,
    expected_tensors,
    figures_of,
    pack,
    whole,
    words_of,
)
from fedloom.engines.flower.secure_round import SecureRound
from fedloom.errors import DamagedCheckpoint, FedloomError, InvalidValue, NotFinite, RefusedReply
from fedloom.round import Round
from fedloom.rounds.scoring import Tally
from fedloom.task import Task

GREETING = 60.0
"""Seconds that new nodes have to say who they are, while a client that is to train is missing."""

_UNAVAILABLE = (3, 4, 5)
"""Flower's error codes for a message, a reply or a node that is not there (`ErrorCode`)."""

_logger = logging.getLogger("flwr.fedloom")


def require_supported(algorithm: Algorithm) -> None:
    """Raise `InvalidValue` for a method of which a site cannot tell by itself in which rounds its upload must be exchanged."""
    found = list(algorithm.nested())
    if any(isinstance(one, Secure) for one in found) and any(
        isinstance(one, Stages) and one.automatic for one in found
    ):
        raise InvalidValue(
            f"{describe(algorithm)}: sites must know when secure(...) leads: give a last round in place of auto"
        )


class FlowerEngine(Exchanging):
    """Lets sites train. `federation` names this federation at the sites, `briefing` is told with every message.

    `numbers` are the partition ids of the task's clients where those differ. Sites have `deadline` seconds for one round, or as
    long as they need where that is 0; when not one site is connected, `patience` seconds are waited for one.
    """

    chosen: Choice | None = None

    def __init__(
        self,
        sites: KnownSites,
        federation: str,
        briefing: Words,
        *,
        deadline: float = 0.0,
        patience: float = 600.0,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.sites, self.federation, self.briefing = sites, federation, briefing
        self.mailbox: Mailbox = sites.mailbox
        self.deadline = deadline or FOREVER
        self.patience = patience
        self.numbers = range(sites.count) if numbers is None else numbers

    def begin(self, task: Task, directory: Path | None) -> None:
        self.task = task
        self._versions = torch.zeros(
            task.clients, dtype=torch.int64
        )  # which memory each client goes on from; 0 is none
        self._written: dict[int, int] = {}  # the versions of this round
        self._saved = [self._versions, self._versions]  # those of the two newest checkpoints
        self._saving = self._versions

    # --- the work of a round ---

    def train(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Reply | Fault]:
        method = secured(algorithm, round.number)
        if method is not None:
            yield from SecureRound(self, method, algorithm, round).train(client_tasks)
        else:
            yield from self.trained(algorithm, round, client_tasks)

    def trained(
        self,
        algorithm: Algorithm,
        round: Round,
        client_tasks: Sequence[ClientTask],
        exchanged: bool = False,
        withheld: bool = False,
    ) -> Iterator[Reply | Fault]:
        """What the sites that train answer. Their models are those that they `exchanged` before, where they did; models that
        are `withheld` are no part of the answers."""
        whole_reply = expectations(algorithm, round, self.task.layout)
        expected = {name: shape for name, shape in whole_reply.items() if not (withheld and name == "model")}
        types = {"model": self.task.layout.dtype, INTEGERS: torch.int64}

        def words(client_task: ClientTask) -> Words:
            kept = sorted({int(saved[client_task.client]) for saved in self._saved} - {0})
            shapes = None if client_task.slot is None else {name: list(shape) for name, shape in whole_reply.items()}
            return {"expected": shapes, "keep": kept, "exchanged": exchanged and client_task.slot is not None}

        for client_task, answer in self.answers("train", round, client_tasks, words):
            if isinstance(answer, str):
                yield Fault(client_task, answer)
                continue
            try:
                yield self._reply(round, client_task, answer, {} if client_task.slot is None else expected, types)
            except FedloomError as error:
                if isinstance(error, Refusal) and error.words.get("diverged"):
                    error = NotFinite(str(error))
                yield Fault(client_task, str(error), error)

    def _reply(
        self,
        round: Round,
        client_task: ClientTask,
        message: Message,
        expected: Mapping[str, Shape],
        types: dict[str, torch.dtype],
    ) -> Reply:
        """What one site sends. Raises `FedloomError` when it says why it did not train, or when it is refused."""
        number = self.numbers[client_task.client]
        before = self._version(client_task.client)
        try:
            words = words_of(message)
        except Refusal as refusal:
            if refusal.words.get("lost"):
                self._written[client_task.client] = 0  # from the next time on it is a client that remembers nothing
            if refusal.words.get("stranger"):
                self.sites.forget(number)
            raise
        if (whole(words, "round", 0, round.number), whole(words, "site", 0, MOST_SAMPLES)) != (round.number, number):
            raise RefusedReply("the reply is to another order")
        version = whole(words, "memory", 0, round.number)
        if version not in (before, round.number):
            raise RefusedReply(f"memory {version} was neither sent nor written in this round")
        tensors = expected_tensors(message, expected)
        for name, tensor in tensors.items():
            if types.get(name, tensor.dtype) != tensor.dtype:
                raise RefusedReply(f"{name!r} is {tensor.dtype}, not {types[name]}")
        inspect_reply(tensors, expected)
        figures = figures_of(message)
        types |= {name: tensor.dtype for name, tensor in tensors.items()}
        self._written[client_task.client] = version
        samples = self.sites.samples(number) if self.task.elsewhere else None
        return Reply(client_task, tensors, figures, samples=samples)

    def evaluate(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Tally]:
        given = type(algorithm) is Algorithm  # every client judges what it is sent

        def words(client_task: ClientTask) -> Words:
            return {"given": given}

        for client_task, answer in self.answers("evaluate", round, client_tasks, words):
            try:
                if isinstance(answer, str):
                    raise FedloomError(answer)
                yield _tally(client_task.client, words_of(answer))
            except FedloomError as error:
                _logger.warning("site %d is not evaluated: %s", self.numbers[client_task.client], error)

    def answers(
        self,
        kind: Kind,
        round: Round,
        client_tasks: Sequence[ClientTask],
        words: Callable[[ClientTask], Words],
        parcels: Mapping[int, bytes] | None = None,
    ) -> Iterator[tuple[ClientTask, Message | str]]:
        """Every site's message as it comes, or why there is none. `parcels` go to those clients beside words and tensors."""
        if not client_tasks:
            return
        end = time.monotonic() + self.deadline
        nodes = self._nodes(client_tasks)
        arrays: dict[int, Array] = {}  # what several sites are sent is encoded once
        waiting: dict[str, ClientTask] = {}
        told = {"federation": self.federation, "round": dataclasses.asdict(round), **self.briefing}
        for client_task in client_tasks:
            number = self.numbers[client_task.client]
            if number not in nodes:
                yield client_task, "the site is not there"
                continue
            addressed = {"site": number, "client": client_task.client, "memory": self._version(client_task.client)}
            content = pack(
                told | addressed | words(client_task),
                _encoded_once(client_task.inbox, arrays),
                parcel=b"" if parcels is None else parcels[client_task.client],
            )
            sent = self.mailbox.send(nodes[number], kind, content, f"{round.number}", self.deadline)
            if sent is None:
                yield client_task, "Flower did not take the message"
            else:
                waiting[sent] = client_task
        for reply in self.mailbox.collect(waiting, max(0.0, end - time.monotonic())):
            client_task = waiting.pop(reply.metadata.reply_to_message_id)
            gone = reply.has_error() and reply.error.code in _UNAVAILABLE
            yield client_task, "the site is not there any more" if gone else reply
        for client_task in waiting.values():
            yield client_task, f"no reply within {self.deadline:g} s"

    def _nodes(self, client_tasks: Sequence[ClientTask]) -> dict[int, int]:
        """Where those of the sites are that are there."""
        wanted = [self.numbers[client_task.client] for client_task in client_tasks]
        found = self.sites.find(wanted, min(GREETING, self.deadline))
        if not found:
            self.sites.wait(
                1, self.patience, strict=False
            )  # with nobody at all, round after round would pass in no time
            found = self.sites.find(wanted, 0.0)
        return found

    # --- what clients remember ---

    def _version(self, client: int) -> int:
        """Which memory a client goes on from, after what it wrote in this round."""
        return self._written.get(client, int(self._versions[client]))

    def commit(self) -> None:
        versions = self._versions.clone()
        for client, version in self._written.items():
            versions[client] = version
        self._versions, self._written = versions, {}

    def forget(self, client: int) -> None:
        """What this client did in this round is not taken: it goes on from the memory that it had."""
        self._written.pop(client, None)

    def rollback(self) -> bool:
        self._written = {}
        return True

    def memory(self) -> dict[str, Tensor]:
        """Which version of its memory each client goes on from, and which it did at the checkpoint before."""
        self._saving = self._versions
        return {"versions": self._versions, "before": self._saved[-1]}

    def release_memory(self) -> None:
        self._saved = [self._saved[-1], self._saving]

    def restore_memory(self, memory: dict[str, Tensor]) -> None:
        shape = self._versions.shape
        if any(name not in memory or memory[name].shape != shape for name in ("versions", "before")):
            raise DamagedCheckpoint("the checkpoint does not say which memory the sites go on from")
        self._versions, self._written = memory["versions"], {}
        self._saved = [memory["before"], memory["versions"]]

    def close(self) -> None:
        """Nothing is held here: Flower ends its own connections."""


def _encoded_once(inbox: Mapping[str, Tensor], arrays: dict[int, Array]) -> dict[str, Array]:
    """The inbox as it travels; `arrays` holds what was encoded before, by the identity of the tensor."""
    for tensor in inbox.values():
        if id(tensor) not in arrays:
            arrays[id(tensor)] = encoded(tensor)
    return {name: arrays[id(tensor)] for name, tensor in inbox.items()}


def _tally(client: int, words: Mapping[str, Any]) -> Tally:
    """What one site counted. Raises `RefusedReply` for what cannot be."""
    samples = whole(dict(words), "samples", 1, MOST_SAMPLES)
    correct = whole(dict(words), "correct", 0, samples)
    loss = words.get("loss")
    if not isinstance(loss, (int, float)):
        raise RefusedReply("the reply has no loss")
    return Tally(
        torch.tensor([client]),
        torch.tensor([correct]),
        torch.tensor([loss], dtype=torch.float64),
        torch.tensor([samples]),
    )
