"""Messages to the sites of clients, and what each of them answers, or why there is no answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flwr.app import Array, Message
from torch import Tensor

from fedloom.engines.flower.known_sites import KnownSites
from fedloom.engines.flower.mailbox import FOREVER, Kind
from fedloom.engines.flower.messages import Words, encoded, pack
from fedloom.round import SIMULATED, Round
from fedloom.rounds.engine import ClientTask

GREETING = 60.0
"""Seconds that new nodes have to say who they are, while a client that is to train is missing."""

ENDING = 15.0
"""Seconds that sites have to say that they know of the end of the run."""

_UNAVAILABLE = (3, 4, 5)
"""Flower's error codes for a message, a reply or a node that is not there (`ErrorCode`)."""


class NoAnswer(NamedTuple):
    """Why a site gives no answer, and whether the message went out to it."""

    reason: str
    sent: bool = True


class SiteMessenger:
    """Sends messages to the sites of one federation, whose name there is `federation`; `briefing` is told with every message.

    `numbers` are the partition ids of the task's clients where those differ. Sites have `deadline` seconds for one round, or as
    long as they need where that is 0; when not one site is connected, `patience` seconds are waited for one.
    """

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
        self.deadline, self.patience = deadline or FOREVER, patience
        self.numbers = range(sites.count) if numbers is None else numbers

    def answers(
        self,
        kind: Kind,
        round: Round,
        client_tasks: Sequence[ClientTask],
        words: Callable[[ClientTask], Words],
        parcels: Mapping[int, bytes] | None = None,
    ) -> Iterator[tuple[ClientTask, Message | NoAnswer]]:
        """Every site's message as it comes, or why there is none. `parcels` go to those clients beside words and tensors."""
        if not client_tasks:
            return
        end = time.monotonic() + self.deadline
        nodes = self._nodes(client_tasks)
        arrays: dict[int, Array] = {}  # what several sites are sent is encoded once
        waiting: dict[str, ClientTask] = {}
        told_round = {name: value for name, value in dataclasses.asdict(round).items() if name not in SIMULATED}
        told = {"federation": self.federation, "round": told_round, **self.briefing}
        for client_task in client_tasks:
            number = self.numbers[client_task.client]
            if number not in nodes:
                yield client_task, NoAnswer("the site is not there", sent=False)
                continue
            content = pack(
                told | {"site": number, "client": client_task.client} | words(client_task),
                _encoded_once(client_task.inbox, arrays),
                parcel=b"" if parcels is None else parcels[client_task.client],
            )
            sent = self.sites.mailbox.send(nodes[number], kind, content, f"{round.number}", self.deadline)
            if sent is None:
                yield client_task, NoAnswer("Flower did not take the message", sent=False)
            else:
                waiting[sent] = client_task
        for reply in self.sites.mailbox.collect(waiting, max(0.0, end - time.monotonic())):
            client_task = waiting.pop(reply.metadata.reply_to_message_id)
            gone = reply.has_error() and reply.error.code in _UNAVAILABLE
            yield client_task, NoAnswer("the site is not there any more") if gone else reply
        for client_task in waiting.values():
            yield client_task, NoAnswer(f"no reply within {self.deadline:g} s")

    def end(self) -> None:
        """Tell the sites that are there that the run is over, and wait a little until they know."""
        mailbox, seconds = self.sites.mailbox, min(ENDING, self.deadline)
        online = mailbox.nodes() & {site.node for site in self.sites.known.values()}
        sent = [mailbox.send(node, "end", pack({}), seconds=seconds) for node in sorted(online)]
        for _ in mailbox.collect([one for one in sent if one is not None], seconds):
            pass

    def _nodes(self, client_tasks: Sequence[ClientTask]) -> dict[int, int]:
        """Where those of the sites are that are there."""
        wanted = [self.numbers[client_task.client] for client_task in client_tasks]
        found = self.sites.find(wanted, min(GREETING, self.deadline))
        if not found:  # with nobody at all, round after round would pass in no time
            self.sites.wait(1, self.patience, strict=False)
            found = self.sites.find(wanted, 0.0)
        return found


def _encoded_once(inbox: Mapping[str, Tensor], arrays: dict[int, Array]) -> dict[str, Array]:
    """The inbox as it travels; `arrays` holds what was encoded before, by the identity of the tensor."""
    for tensor in inbox.values():
        if id(tensor) not in arrays:
            arrays[id(tensor)] = encoded(tensor)
    return {name: arrays[id(tensor)] for name, tensor in inbox.items()}
