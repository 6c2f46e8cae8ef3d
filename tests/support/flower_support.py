"""Flower without processes: a Grid calls its nodes directly and serialises every message."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn

import fedloom
from every_method import EVERYBODY
from fedloom.algorithm.records import uniform
from fedloom.common.round import Round
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.sites import messages
from fedloom.sites.agreement import Deployment, deployment, layout_digest
from fedloom.sites.client_app import app
from fedloom.sites.flower_engine import FlowerEngine
from fedloom.sites.known_sites import KnownSites
from fedloom.sites.messages import ARRAYS, NUMBERS, PARCEL, PROTOCOL, RECORD, Mailbox, Words
from fedloom.sites.site_data import DataAgreement


class NormNet(nn.Module):
    """A small model for the handwritten digits with statistics, integer buffers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(8, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.out(self.drop(torch.relu(self.norm(self.hidden(inputs.flatten(1))))))
        return logits


class FrozenNet(NormNet):
    """The same model with its first layer frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden.requires_grad_(False)


class PlainNet(nn.Module):
    """A linear model without statistics, as methods with differential privacy need it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.out(inputs.flatten(1))
        return logits


Tamper = Callable[[Message], Message]

RUN = 77

CLIENTS = 6

VERSION = fedloom.__version__

CONFIGURATION = """
algorithm = "{algorithm}"
rounds = {rounds}
participation = {participation}
evaluate_every = 5
personal_every = 5
model = "flower_support:{model}"
seed = 3

[data]
name = "digits"
clients = 6
partition = "dirichlet(0.5)"
local_test = 0.25

[training]
learning_rate = 0.05
momentum = 0.5
steps = 2
batch_size = 8
"""


def run_config(
    algorithm: str, output: Path, rounds: int = 5, model: str = "NormNet", **options: Any
) -> dict[str, Any]:
    participation = 1.0 if algorithm.startswith(EVERYBODY) else 0.5
    text = CONFIGURATION.format(
        algorithm=algorithm, rounds=rounds, participation=participation, model=model
    )
    return {"configuration": text, "output": str(output), **options}


def flower(config: dict[str, Any], grid: LocalGrid) -> Federation:
    """Return the federation of an app, without its directory."""
    settings = deployment(config)
    task = settings.configuration.task(3)
    briefing = {"data": DataAgreement.of(task.dataset).words()}
    fingerprint = {"fedloom": VERSION, "layout": layout_digest(task)}
    sites = KnownSites(Mailbox(grid, 0.01), CLIENTS, briefing, fingerprint, deadline=5)
    sites.wait(CLIENTS, 5)
    sites.federation, sites.numbers = "0123456789abcdef", range(CLIENTS)
    engine = FlowerEngine(sites)
    return Federation(build(settings.algorithm), task, engine, schedule(settings))


def selected(number: int) -> tuple[int, ...]:
    """Return the three of six sites that take part in a round."""
    return uniform(Round(number, 5, 3, CLIENTS, 3, 0.05, 0.05))


def schedule(settings: Deployment) -> Schedule:
    """Return the schedule of a run, with its seed."""
    return replace(settings.configuration.schedule, seed=settings.configuration.seed)


def assert_close(run: Federation, expected: Federation, except_for: Collection[str] = ()) -> None:
    """Assert equal models and figures to tolerance, and exactly equal bytes, clients and faults.

    Figures in `except_for` are not compared.
    """
    torch.testing.assert_close(run.model(), expected.model(), rtol=0, atol=1e-5)
    torch.testing.assert_close(run.integers, expected.integers)
    histories = [
        [{n: v for n, v in record.items() if n not in except_for} for record in f.history]
        for f in (run, expected)
    ]
    for record, reference in zip(*histories, strict=True):
        floats = {name: value for name, value in reference.items() if isinstance(value, float)}
        assert {name: record[name] for name in floats} == pytest.approx(floats, rel=1e-4, abs=1e-6)
        assert {n: v for n, v in record.items() if n not in floats} == {
            n: v for n, v in reference.items() if n not in floats
        }


@dataclass
class Node:
    """A SuperNode with its node-config and its behaviour."""

    config: dict[str, Any]
    online: bool = True
    silent: bool = False  # it takes messages and never answers
    late: bool = False  # it works, but its answer stays on the way until the node is no longer late
    tamper: Tamper | None = None  # tampers with its answers to training
    tamper_all: Tamper | None = None  # tampers with all its answers
    says: dict[str, Any] = field(default_factory=dict)  # changes of its other answers
    # the rounds in which it trained
    trained: list[int] = field(default_factory=list)

    def answer(self, message: Message, run_config: dict[str, Any], node: int) -> Message:
        context = Context(RUN, node, dict(self.config), RecordDict(), dict(run_config))
        reply = app(message, context)
        if message.metadata.message_type.startswith("train"):
            self.trained.append(int(message.metadata.group_id))
            if self.tamper is not None:
                reply = self.tamper(reply)
        elif self.says and message.metadata.message_type in ("query", "evaluate"):
            words = {**words_of(reply), **self.says}
            reply = with_words(json.dumps(words))(reply)
        return reply if self.tamper_all is None else self.tamper_all(reply)


class LocalGrid(Grid):
    """Nodes by their ids. Every node gets a new context with each message, as after a restart."""

    def __init__(self, nodes: dict[int, Node], run_config: dict[str, Any]) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = RUN, 1, 1
        self.nodes, self.run_config = nodes, run_config
        self.sent: list[Message] = []
        self._replies: dict[str, tuple[int, Message]] = {}
        self._waiting: dict[str, int] = {}

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [number for number, node in self.nodes.items() if node.online]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = []
        for message in messages:
            key = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = key
            arrived = travelled(message)
            self.sent.append(arrived)
            self._waiting[key] = arrived.metadata.dst_node_id
            node = self.nodes[arrived.metadata.dst_node_id]
            if node.online and not node.silent:
                reply = node.answer(arrived, self.run_config, arrived.metadata.dst_node_id)
                self._replies[key] = (arrived.metadata.dst_node_id, travelled(reply))
            sent.append(key)
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for key in message_ids:
            number, reply = self._replies.get(key, (self._waiting.get(key, -1), None))
            node = self.nodes.get(number)
            if node is None or (reply is None and not node.online):
                replies.append(_gone(key))
            elif reply is not None and not node.late:
                replies.append(reply)
                del self._replies[key]
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError


def travelled(message: Message) -> Message:
    """Return the message after serialisation and parsing."""
    return message_from_proto(
        ProtoMessage.FromString(message_to_proto(message).SerializeToString())
    )


def _gone(key: str) -> Message:
    template = Message(RecordDict(), 1, "train")
    template.metadata.__dict__["_message_id"] = key
    return Message(Error(5, "the node is not available"), reply_to=template)


def nodes(count: int, memory: Path, **config: Any) -> dict[int, Node]:
    """Return nodes with ids that do not reveal their partition ids."""
    return {
        1000 + 17 * (count - number): Node(
            {
                "partition-id": number,
                "num-partitions": count,
                "memory": str(memory / f"site-{number}"),
                **config,
            }
        )
        for number in range(count)
    }


def site(grid: LocalGrid, number: int) -> Node:
    """Return the node with this partition id."""
    return next(node for node in grid.nodes.values() if node.config["partition-id"] == number)


def with_array(name: str, array: Array | np.ndarray[Any, Any]) -> Tamper:
    """Return a tamper function that replaces one array of an answer."""

    def tamper(reply: Message) -> Message:
        arrays = reply.content.array_records[ARRAYS]
        plain = isinstance(array, Array)
        arrays[name] = (
            array if plain else Array(str(array.dtype), array.shape, NUMBERS, array.tobytes())
        )
        return reply

    return tamper


def words_of(message: Message) -> Words:
    """Return the payload of a message."""
    return messages.words_of(message, ARRAYS, PARCEL)


def with_words(text: str, protocol: int = PROTOCOL) -> Tamper:
    """Return a tamper function that replaces the payload of an answer."""

    def tamper(reply: Message) -> Message:
        reply.content[RECORD] = ConfigRecord({"protocol": protocol, "words": text})
        return reply

    return tamper
