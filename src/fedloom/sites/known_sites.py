"""The sites of a federation, and messages to each: at its first it says which client it is, and how
many samples it has.

Flower numbers nodes at random, and anew when one registers again; so unknown nodes are asked as
they come.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import Message, MessageType

from fedloom.errors import FedloomError, InvalidValue, RefusedReply
from fedloom.round import SIMULATED, Round
from fedloom.rounds.engine import Fault, Job
from fedloom.sites.messages import Mailbox, Words, encoded, pack, whole_number, words_of

MOST_SAMPLES = 1 << 48

GREETING = 60.0
"""Seconds that new nodes have to say who they are, while a client that is to train is missing."""

_UNAVAILABLE = (3, 4, 5)
"""Flower's error codes for a message, a reply or a node that is not there (`ErrorCode`)."""

_logger = logging.getLogger("flwr.fedloom")  # Flower shows and keeps what goes to its own logger


@dataclass(frozen=True)
class KnownSite:
    """Site as it introduced itself: its partition id, Flower's number of its node, the training and
    test samples that it claims, and whether these are its own, not its share of the configuration's
    data.
    """

    number: int
    node: int
    samples: int
    tests: int
    has_own_data: bool


Orders = dict[str, tuple[Round, Job]]
"""Work that sites were sent and have not answered, with the round in which it began, by the
message's id.
"""


class KnownSites:
    """The sites 0 to `count - 1` of one federation, and messages to them.

    A site that cannot take part is named in the log and left alone; before the first round (`wait`)
    it ends the run. A node that claims the number of a connected site waits until that site is
    gone, so nobody can replace a busy site.

    Every message has the words `briefing`; a site must introduce itself with the words `agreed`,
    such as the version. `registered` are the samples that each site had at its first introduction:
    it never counts with more. `federation` is its name at the sites, `numbers` are those by the
    task's clients. When nobody is connected, one is waited for `patience` seconds.
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
        self.mailbox, self.count = mailbox, count
        self.deadline, self.patience = deadline or math.inf, patience
        self.known: dict[int, KnownSite] = {}
        self.registered: dict[int, int] = {}
        self.briefing, self._agreed = briefing, agreed
        self._greeted: dict[str, int] = {}  # nodes that have not answered yet, by the message's id
        # nodes, with the number that they claim if another node has it
        self._ignored: dict[int, int | None] = {}
        self._online: set[int] = set()

    def wait(self, count: int, seconds: float, strict: bool = True) -> None:
        """Wait for so many sites. Raises `InvalidValue` after `seconds` or, if `strict`, for a node
        that cannot take part.
        """
        self._until(lambda: len(self.present()) >= count, seconds, strict)
        present = self.present()
        if len(present) < count:
            missing = [number for number in range(self.count) if number not in present]
            names = ", ".join(map(str, missing[:20])) + (" and more" if len(missing) > 20 else "")
            there = f"{len(present)} of {count} sites are there after {seconds:g} s"
            raise InvalidValue(f"{there}; not there: partition-id {names}")

    def find(self, numbers: Collection[int], seconds: float) -> dict[int, int]:
        """Return the nodes of these sites that are there, by number. If one is missing, new nodes
        are waited for (`seconds`).
        """
        self._until(lambda: set(numbers) <= self.present() or not self._greeted, seconds)
        present = self.present()
        return {number: self.known[number].node for number in numbers if number in present}

    def samples(self, number: int) -> int:
        """Return the training samples with which a site counts that has introduced itself."""
        return min(self.known[number].samples, self.registered[number])

    def present(self) -> set[int]:
        """Return the sites that are there."""
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
        """Greet new nodes, and take the answers that are there."""
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
        """Return the site that a node says it is. Raises `RefusedReply` when it cannot take part."""
        number = words.get("site")
        if type(number) is not int or not 0 <= number < self.count:
            raise RefusedReply(
                f"partition-id {number!r:.40} is not one of 0 to {self.count - 1} (data.clients)"
            )
        for name, value in self._agreed.items():
            if words.get(name) != value:
                raise RefusedReply(
                    f"site {number}: {name} is {words.get(name)!r:.80} there and {value!r:.80} here"
                )
        samples, tests = (
            whole_number(words, "samples", 1, MOST_SAMPLES),
            whole_number(words, "tests", 0, MOST_SAMPLES),
        )
        return KnownSite(number, node, samples, tests, bool(words.get("own")))

    def _introduce(self, site: KnownSite) -> None:
        """Add a site. Raises `RefusedReply` when another node has its number."""
        holder = self.known.get(site.number)
        if holder is not None and holder.node != site.node:
            if holder.node in self._online:
                self._ignored[site.node] = site.number
                nodes = f"nodes {holder.node} and {site.node}"
                raise RefusedReply(
                    f"two sites have partition-id {site.number} ({nodes}): give each its own"
                )
            _logger.info("site %d is back", site.number)
        self.known[site.number] = site
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
        """Send a message to every site, and yield the answers as they come, or why there is none.

        `parcels`, by client, go beside words and tensors. `orders` are those of earlier rounds that
        are under way: these join them, and are yielded with the round in which they began; when
        time is up, they stay under way.
        """
        end = time.monotonic() + self.deadline
        under_way: Orders = {} if orders is None else orders
        numbers = [self.numbers[job.client] for job in jobs]
        nodes = self.find(numbers, min(GREETING, self.deadline)) if numbers else {}
        if numbers and not nodes:  # with nobody at all, round after round would pass in no time
            self.wait(1, self.patience, strict=False)
            nodes = self.find(numbers, 0.0)
        tensors = {id(tensor): tensor for job in jobs for tensor in job.inbox.values()}
        # what several are sent is encoded once
        arrays = {key: encoded(tensor) for key, tensor in tensors.items()}
        order = {name: value for name, value in asdict(round).items() if name not in SIMULATED}
        common = {"federation": self.federation, "round": order, **self.briefing}
        for job, number in zip(jobs, numbers, strict=True):
            if number not in nodes:
                yield round, job, Fault(job, "the site is not there", sent=False)
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
            gone = reply.has_error() and reply.error.code in _UNAVAILABLE
            yield began, job, Fault(job, "the site is not there any more") if gone else reply
        if orders is None:
            for _, job in under_way.values():
                yield round, job, Fault(job, f"no reply within {self.deadline:g} s")
