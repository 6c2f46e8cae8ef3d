"""The sites of a federation, and messages to each of them.

Flower numbers nodes at random, and anew after a registration. Therefore each new node must
introduce itself with the number and the samples of its site.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import Message, MessageType

from fedloom.common.errors import FedloomError, InvalidValue, RefusedReply
from fedloom.common.round import SIMULATED, Round
from fedloom.rounds.engine import Fault, Job
from fedloom.sites.messages import Mailbox, Words, encoded, pack, whole_number, words_of

MOST_SAMPLES = 1 << 48

GREETING = 60.0
"""Seconds that new nodes have to introduce themselves while the round lacks a client."""

UNAVAILABLE = (3, 4, 5)
"""Flower's error codes for a missing message, reply or node (`ErrorCode`)."""

_logger = logging.getLogger("flwr.fedloom")  # Flower shows and stores only its own loggers


@dataclass(frozen=True)
class KnownSite:
    """A site as it introduced itself.

    Attributes:
        number: Its partition id.
        node: Flower's number of its node.
        samples: Training samples that it claims.
        tests: Test samples that it claims.
        has_own_data: False if its samples are its share of the configuration's data.
    """

    number: int
    node: int
    samples: int
    tests: int
    has_own_data: bool


Orders = dict[str, tuple[Round, Job]]
"""Unanswered requests by the message's id, with the round in which each was sent."""


class KnownSites:
    """The sites 0 to `count - 1` of one federation, and messages to them.

    A site that cannot take part is named in the log and ignored; before the first round (`wait`) it
    ends the run. A node that claims the number of a connected site is ignored until that site has
    disconnected, so no node can replace a busy site.

    Args:
        mailbox: Sends and collects messages.
        count: Number of sites.
        briefing: Words in every message.
        agreed: Words that the introduction of a site must contain, such as the version.
        deadline: Seconds that sites have for a round; 0 for no limit.
        patience: Seconds to wait for a site if none is connected.

    Attributes:
        federation: Name of the federation at the sites.
        numbers: Site numbers by the task's clients.
        known: Sites that have introduced themselves, by number.
        registered: Samples of each site at its first introduction; it never counts with more.
        lost: Sites that were lost before the first round and are not back, with the reason.
    """

    federation: str
    numbers: Sequence[int]

    def __init__(
        self,
        mailbox: Mailbox,
        count: int,
        briefing: Words,
        agreed: dict[str, Any],
        deadline: float = 0.0,
        patience: float = 600.0,
    ) -> None:
        self.mailbox = mailbox
        self.count = count
        self.deadline = deadline or math.inf
        self.patience = patience
        self.known: dict[int, KnownSite] = {}
        self.registered: dict[int, int] = {}
        self.lost: dict[int, str] = {}
        self.briefing = briefing
        self._agreed = agreed
        self._greeted: dict[str, int] = {}  # nodes that have not answered yet, by message id
        # ignored nodes, with the number that they claim if another node has it
        self._ignored: dict[int, int | None] = {}
        self._online: set[int] = set()

    def wait(
        self, count: int, seconds: float, strict: bool = True, least: int | None = None
    ) -> None:
        """Wait until `count` sites are connected.

        Args:
            count: Number of sites.
            seconds: Longest time to wait.
            strict: Raise an error for a node that cannot take part, instead of ignoring it.
            least: Smallest number of sites after `seconds`; None for `count`.

        Raises:
            InvalidValue: Sites are missing after `seconds`, or a node cannot take part.
        """
        self._until(lambda: len(self.present()) >= count, seconds, strict)
        present = self.present()
        if len(present) < (count if least is None else least):
            missing = [number for number in range(self.count) if number not in present]
            names = ", ".join(map(str, missing[:20])) + (" and more" if len(missing) > 20 else "")
            connected = f"{len(present)} of {count} sites are connected after {seconds:g} s"
            raise InvalidValue(f"{connected}; missing: partition-id {names}")

    def lose(self, number: int, reason: str) -> None:
        """Note that a site was lost before the first round; it takes part when it is back.

        Args:
            number: Number of the site, from 0.
            reason: One line for the log and the record of the run.
        """
        _logger.warning("site %d was lost before round 1: %s", number, reason)
        self.known.pop(number, None)
        self.lost[number] = f"lost before round 1: {reason}"

    def find(self, numbers: Collection[int], seconds: float) -> dict[int, int]:
        """Return the nodes of connected sites.

        Args:
            numbers: Numbers of sites.
            seconds: Longest time to wait for new nodes if a site is missing.

        Returns:
            Flower's node of each connected site, by the site's number.
        """
        self._until(lambda: set(numbers) <= self.present() or not self._greeted, seconds)
        present = self.present()
        return {number: self.known[number].node for number in numbers if number in present}

    def samples(self, number: int) -> int:
        """Return the number of training samples that a site counts with."""
        return min(self.known[number].samples, self.registered[number])

    def present(self) -> set[int]:
        """Return the connected sites."""
        return {number for number, site in self.known.items() if site.node in self._online}

    def _until(self, settled: Callable[[], bool], seconds: float, strict: bool = False) -> None:
        end = time.monotonic() + seconds
        while True:
            self._look(strict)
            remaining = end - time.monotonic()
            if settled() or remaining <= 0:
                return
            time.sleep(min(self.mailbox.pause, remaining))

    def _look(self, strict: bool) -> None:
        """Greet new nodes, and process the answers that have arrived."""
        self._online = set(self.mailbox.grid.get_node_ids())
        self._greeted = {
            message_id: node for message_id, node in self._greeted.items() if node in self._online
        }
        waiting = self.present() | {None}
        self._ignored = {
            n: number
            for n, number in self._ignored.items()
            if n in self._online and number in waiting
        }
        settled = {site.node for site in self.known.values()} | self._ignored.keys()
        for node in sorted(self._online - settled - set(self._greeted.values())):
            message_id = self.mailbox.send(node, MessageType.QUERY, pack(self.briefing))
            if message_id is not None:
                self._greeted[message_id] = node
        for message_id, reply in self.mailbox.collect(self._greeted, 0.0):
            node = self._greeted.pop(message_id)
            try:
                self._introduce(self._site(node, words_of(reply)))
            except FedloomError as error:
                self._ignored.setdefault(node, None)
                if strict:
                    raise InvalidValue(str(error)) from None
                _logger.warning("node %d takes no part: %s", node, error)

    def _site(self, node: int, words: Words) -> KnownSite:
        """Return the site that a node introduces.

        Raises:
            RefusedReply: The site cannot take part.
        """
        number = words.get("site")
        if type(number) is not int or not 0 <= number < self.count:
            raise RefusedReply(
                f"partition-id {number!r:.40} is not one of 0 to {self.count - 1} (data.clients)"
            )
        for name, value in self._agreed.items():
            if words.get(name) != value:
                raise RefusedReply(
                    f"site {number}: {name} is {words.get(name)!r:.80} there, but "
                    f"{value!r:.80} here"
                )
        samples = whole_number(words, "samples", 1, MOST_SAMPLES)
        tests = whole_number(words, "tests", 0, MOST_SAMPLES)
        return KnownSite(number, node, samples, tests, bool(words.get("own")))

    def _introduce(self, site: KnownSite) -> None:
        """Add a site.

        Raises:
            RefusedReply: Another node has its number.
        """
        holder = self.known.get(site.number)
        if holder is not None and holder.node != site.node:
            if holder.node in self._online:
                self._ignored[site.node] = site.number
                nodes = f"nodes {holder.node} and {site.node}"
                raise RefusedReply(
                    f"two sites have partition-id {site.number} ({nodes}): give each a "
                    "different one"
                )
            _logger.info("site %d is back", site.number)
        self.known[site.number] = site
        self.lost.pop(site.number, None)
        self.registered.setdefault(site.number, site.samples)

    def answers(
        self,
        kind: str,
        round: Round,
        jobs: Sequence[Job],
        words: Callable[[Job], Words],
        parcels: Mapping[int, bytes] | None = None,
        orders: Orders | None = None,
    ) -> Iterator[tuple[Round, Job, Message | Fault]]:
        """Send a message to every client's site, and yield the answers in the order of arrival.

        Args:
            kind: Flower's message type.
            round: The round.
            jobs: The clients, with the tensors of their messages.
            words: Returns the words of a client's message.
            parcels: Bytes for each client, beside words and tensors.
            orders: Unanswered requests of earlier rounds, which the new ones join. They stay in it
                when the time is up.

        Yields:
            The round of the request, its job, and the answer or a fault with the reason.
        """
        end = time.monotonic() + self.deadline
        under_way: Orders = {} if orders is None else orders
        numbers = [self.numbers[job.client] for job in jobs]
        nodes = self.find(numbers, min(GREETING, self.deadline)) if numbers else {}
        if numbers and not nodes:  # without any site, all rounds would pass immediately
            self.wait(1, self.patience, strict=False)
            nodes = self.find(numbers, 0.0)
        tensors = {id(tensor): tensor for job in jobs for tensor in job.inbox.values()}
        # a tensor for several sites is encoded once
        arrays = {key: encoded(tensor) for key, tensor in tensors.items()}
        order = {name: value for name, value in asdict(round).items() if name not in SIMULATED}
        common = {"federation": self.federation, "round": order, **self.briefing}
        for job, number in zip(jobs, numbers, strict=True):
            if number not in nodes:
                reason = self.lost.get(number, "the site is not connected")
                yield round, job, Fault(job, reason, sent=False)
                continue
            content = pack(
                common | {"site": number, "client": job.client} | words(job),
                {name: arrays[id(tensor)] for name, tensor in job.inbox.items()},
                parcel=b"" if parcels is None else parcels[job.client],
            )
            message_id = self.mailbox.send(
                nodes[number], kind, content, f"{round.number}", self.deadline
            )
            if message_id is None:
                yield round, job, Fault(job, "Flower did not take the message", sent=False)
            else:
                under_way[message_id] = round, job
        ids = sorted(under_way, key=lambda message_id: under_way[message_id][1].client)
        for message_id, reply in self.mailbox.collect(ids, max(0.0, end - time.monotonic())):
            began, job = under_way.pop(message_id)
            gone = reply.has_error() and reply.error.code in UNAVAILABLE
            yield began, job, Fault(job, "the site has disconnected") if gone else reply
        if orders is None:
            for _, job in under_way.values():
                yield round, job, Fault(job, f"no reply within {self.deadline:g} s")
