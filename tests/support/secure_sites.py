"""Sites that exchange layers over Flower's messages, without processes.

Tests can record and change their messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message
from flwr.common.serde import message_to_proto

from fedloom.secure.wire import Letter, PeerMessage
from fedloom.sites.keys import make_keys
from fedloom.sites.messages import PARCEL, parcel_of
from flower_support import CLIENTS, LocalGrid, Node, nodes, travelled, words_of

Change = Callable[[tuple[Letter, ...]], tuple[Letter, ...]]


@dataclass
class PeerNode(Node):
    """A SuperNode that can fail in exchanges.

    `steps` counts the requests of its current exchange, from 0.
    """

    answers: list[Message] = field(default_factory=list)
    # the exchange with the fault, in round `round`, attempt 0
    when: str = "before_upload"
    round: str = "1"
    leaves: int | None = None  # at this step it stops answering, for the remaining round
    drops_upload: bool = False
    change: tuple[int, Change] | None = None  # at this step it receives other letters
    also: tuple[int, Change] | None = None
    steps: int = -1
    attempt: int = 0
    has_left: bool = False

    def answer(self, message: Message, run_config: dict[str, Any], node: int) -> Message:
        self.has_left = self.has_left and message.metadata.group_id == self.round
        if message.metadata.message_type == "query.exchange" and not self.has_left:
            message = self._meddled(message)
        if self.has_left:
            raise Silence
        reply = super().answer(message, run_config, node)
        self.answers.append(travelled(reply))
        return reply

    def _meddled(self, message: Message) -> Message:
        words, parcel = words_of(message), parcel_of(message)
        chosen = words["when"] == self.when and message.metadata.group_id == self.round
        if words.get("upload"):
            self.has_left = chosen and self.drops_upload and not self.has_left
            return message
        request = PeerMessage.decode(parcel)
        self.attempt = self.attempt if request.terms is None else request.terms.attempt
        self.steps = self.steps + 1 if request.terms is None else 0
        if not chosen or self.attempt or request.kind == "abort":
            return message
        self.has_left = self.steps == self.leaves
        for step, change in filter(None, (self.change, self.also)):
            if self.steps == step:
                changed = PeerMessage(request.kind, request.terms, change(request.letters))
                message.content[PARCEL] = ConfigRecord({"bytes": changed.encode()})
        return message


class Silence(Exception):
    """A node that does not answer."""


class ExchangeGrid(LocalGrid):
    """A grid of `PeerNode`s."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent: list[str] = []
        for message in messages:
            try:
                sent += super().push_messages([message])
            except Silence:
                sent.append(f"message-{len(self.sent) - 1}")
        return sent


def on_the_wire(message: Message) -> bytes:
    """Return a message as bytes."""
    return bytes(message_to_proto(message).SerializeToString())


def peers(
    folder: Path, config: dict[str, Any], choices: str = "rehearsed", count: int = CLIENTS
) -> ExchangeGrid:
    """Return a grid of sites that know each other's keys and accept exchanges of two peers."""
    keys = make_keys(folder / "keys", count)
    plain = nodes(count, folder)
    for node in plain.values():
        keys_folder = keys.site(node.config["partition-id"])
        node.config |= {
            "identity": str(keys_folder / "site.key"),
            "peers": str(keys_folder / "peers.pub"),
            "choices": choices,
        }
        node.config["fewest-peers"] = 2
    return ExchangeGrid({number: PeerNode(node.config) for number, node in plain.items()}, config)
