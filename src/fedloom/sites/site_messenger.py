"""Messages to the sites of clients, and the answer of each site or the reason why there is none."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flwr.app import Message

from fedloom.round import SIMULATED, Round
from fedloom.rounds.engine import ClientTask
from fedloom.sites.known_sites import KnownSites
from fedloom.sites.messages import FOREVER, Kind, Words, encoded, pack

GREETING = 60.0
"""Seconds that new nodes have to say who they are, while a client that is to train is missing."""

ENDING = 15.0
"""Seconds that sites have to acknowledge the end of the run."""

_UNAVAILABLE = (3, 4, 5)
"""Flower's error codes for a message, a reply or a node that is not there (`ErrorCode`)."""


class NoAnswer(NamedTuple):
    """The reason why a site gives no answer; `sent` is False where not even the message went out."""

    reason: str
    sent: bool = True


class SiteMessenger:
    """Sends messages, each with the words of `briefing`, to the sites of one federation, by its name at the sites.

    Sites have `deadline` seconds for one round, 0 for as long as they need; when not one is connected, one is waited for with
    `patience`, in seconds. `numbers` are the partition ids of the task's clients, where those differ from the clients' numbers.
    """

    def __init__(
        self,
        sites: KnownSites,
        federation: str,
        briefing: Words,
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
        """Yield every site's answer as it comes, or why there is none. `parcels`, by client, go beside words and tensors."""
        if not client_tasks:
            return
        end = time.monotonic() + self.deadline
        nodes = self._nodes(client_tasks)
        tensors = {id(tensor): tensor for client_task in client_tasks for tensor in client_task.inbox.values()}
        arrays = {
            key: encoded(tensor) for key, tensor in tensors.items()
        }  # what several sites are sent is encoded once
        waiting: dict[str, ClientTask] = {}
        order = {name: value for name, value in dataclasses.asdict(round).items() if name not in SIMULATED}
        common = {"federation": self.federation, "round": order, **self.briefing}
        for client_task in client_tasks:
            number = self.numbers[client_task.client]
            if number not in nodes:
                yield client_task, NoAnswer("the site is not there", sent=False)
                continue
            content = pack(
                common | {"site": number, "client": client_task.client} | words(client_task),
                {name: arrays[id(tensor)] for name, tensor in client_task.inbox.items()},
                parcel=b"" if parcels is None else parcels[client_task.client],
            )
            message_id = self.sites.mailbox.send(nodes[number], kind, content, f"{round.number}", self.deadline)
            if message_id is None:
                yield client_task, NoAnswer("Flower did not take the message", sent=False)
            else:
                waiting[message_id] = client_task
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
        ids = [mailbox.send(node, "end", pack({}), seconds=seconds) for node in sorted(online)]
        for _ in mailbox.collect([message_id for message_id in ids if message_id is not None], seconds):
            pass

    def _nodes(self, client_tasks: Sequence[ClientTask]) -> dict[int, int]:
        """Return the nodes of those of the sites that are there, by partition id."""
        numbers = [self.numbers[client_task.client] for client_task in client_tasks]
        nodes = self.sites.find(numbers, min(GREETING, self.deadline))
        if not nodes:  # with nobody at all, round after round would pass in no time
            self.sites.wait(1, self.patience, strict=False)
            nodes = self.sites.find(numbers, 0.0)
        return nodes
