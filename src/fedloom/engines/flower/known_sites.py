"""Which sites there are: each says at its first message which client it is, and how many samples it has.

Flower numbers nodes at random, and anew when one registers again; so nodes that are not known yet are asked, as they come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from flwr.app import Message

from fedloom.engines.flower.mailbox import Mailbox
from fedloom.engines.flower.messages import Words, pack, whole, words_of
from fedloom.errors import FedloomError, InvalidValue, RefusedReply

CHALLENGE = 20.0
"""Seconds that a node has to say that it is still there, when another one comes with its number."""

MOST_SAMPLES = 1 << 48

_logger = logging.getLogger("flwr.fedloom")  # Flower shows and keeps what goes to its own logger


@dataclass(frozen=True)
class KnownSite:
    """A site as it introduced itself: its number, its node, how many samples it trains and tests on, whether they are its own
    (or its share of the configuration's data, in trials)."""

    number: int
    node: int
    samples: int
    tests: int
    own: bool


@dataclass
class _Challenge:
    """A newcomer with the number of a node that seems to be there, which is asked whether it is."""

    newcomer: KnownSite
    until: float


class KnownSites:
    """The sites 0 to `count - 1` of one federation, found by asking nodes.

    `greeting` is what every node is asked with; `same` are the words that a site must answer alike, such as the version.
    A site that cannot take part is named in the log and left alone; before the first round (`wait`) it ends the run.
    `registered` are the samples that each site had when it was first there: it never counts with more.
    """

    def __init__(self, mailbox: Mailbox, count: int, greeting: Words, same: dict[str, Any]) -> None:
        self.mailbox, self.count = mailbox, count
        self.known: dict[int, KnownSite] = {}
        self.registered: dict[int, int] = {}
        self._greeting, self._same = greeting, same
        self._asked: dict[str, int] = {}  # messages without an answer yet, and to which node
        self._left_alone: set[int] = set()
        self._challenges: dict[int, _Challenge] = {}
        self._online: set[int] = set()
        self._strict = False

    def wait(self, wanted: int, seconds: float, strict: bool = True) -> None:
        """Wait until `wanted` sites are there.

        Raises `InvalidValue` when they are not after `seconds`, and, where `strict`, at once when a node says something that
        cannot be: a number that is taken or does not exist, another version of fedloom, another model.
        """
        self._strict = strict
        try:
            self._until(lambda: len(self.present()) >= wanted and not self._challenges, seconds)
        finally:
            self._strict = False
        present = self.present()
        if len(present) < wanted:
            missing = [number for number in range(self.count) if number not in present]
            raise InvalidValue(
                f"{len(present)} of {wanted} sites are there after {seconds:g} s; not there: "
                f"partition-id {', '.join(map(str, missing[:20]))}{' and more' if len(missing) > 20 else ''}"
            )

    def find(self, wanted: Collection[int], seconds: float) -> dict[int, int]:
        """The nodes of those of the wanted sites that are there, by number.

        Nodes that nobody knows yet are asked who they are. Only while a wanted site is missing is their answer waited for, at
        most `seconds`.
        """

        def settled() -> bool:
            missing = set(wanted) - self.present()
            return not (missing and self._asked) and not missing & self._challenges.keys()

        self._until(settled, seconds)
        present = self.present()
        return {number: self.known[number].node for number in wanted if number in present}

    def samples(self, number: int) -> int:
        """With how many training samples a site counts that has introduced itself."""
        return min(self.known[number].samples, self.registered[number])

    def present(self) -> set[int]:
        """The sites that are there and whose number is not in dispute."""
        return {n for n, site in self.known.items() if site.node in self._online and n not in self._challenges}

    def forget(self, number: int) -> None:
        """The node of this site turned out to be another one: it is asked anew."""
        self.known.pop(number, None)

    def _until(self, settled: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            self._look()
            left = end - time.monotonic()
            if settled() or left <= 0:
                return
            time.sleep(min(self.mailbox.pause, left))

    def _look(self) -> None:
        """Ask new nodes, and take the answers that are there."""
        self._online = self.mailbox.nodes()
        self._asked = {sent: node for sent, node in self._asked.items() if node in self._online}
        self._left_alone &= self._online
        known = {site.node for site in self.known.values()} | {c.newcomer.node for c in self._challenges.values()}
        for node in sorted(self._online - known - self._left_alone - set(self._asked.values())):
            self._ask(node)
        for reply in self.mailbox.pull(self._asked):
            sent = reply.metadata.reply_to_message_id
            if sent in self._asked:
                self._take(self._asked.pop(sent), reply)
        self._settle_challenges()

    def _ask(self, node: int) -> None:
        sent = self.mailbox.send(node, "hello", pack(self._greeting))
        if sent is not None:
            self._asked[sent] = node

    def _take(self, node: int, reply: Message) -> None:
        try:
            self._introduce(self._site(node, words_of(reply)))
        except FedloomError as error:
            self._leave_alone(node, str(error))

    def _site(self, node: int, words: Words) -> KnownSite:
        """The site that a node says it is. Raises `RefusedReply` when it cannot take part."""
        number = words.get("site")
        if type(number) is not int or not 0 <= number < self.count:
            raise RefusedReply(f"partition-id {number!r:.40} is not one of 0 to {self.count - 1} (data.clients)")
        for name, value in self._same.items():
            if words.get(name) != value:
                raise RefusedReply(f"site {number}: {name} is {words.get(name)!r:.80} there and {value!r:.80} here")
        samples, tests = whole(words, "samples", 1, MOST_SAMPLES), whole(words, "tests", 0, MOST_SAMPLES)
        return KnownSite(number, node, samples, tests, bool(words.get("own")))

    def _introduce(self, site: KnownSite) -> None:
        self.registered.setdefault(site.number, site.samples)
        for number in [n for n, known in self.known.items() if known.node == site.node and n != site.number]:
            del self.known[number]  # the node was set up anew, with another number
        before = self.known.get(site.number)
        challenge = self._challenges.get(site.number)
        if challenge is not None and before is not None and site.node == before.node:  # it is still there
            del self._challenges[site.number]
            self._leave_alone(challenge.newcomer.node, _taken(site.number, site.node, challenge.newcomer.node))
        elif before is None or before.node == site.node or before.node not in self._online:
            if before is not None and before.node != site.node:
                _logger.info("site %d is back", site.number)
            self.known[site.number] = site
        elif challenge is None:
            self._challenges[site.number] = _Challenge(site, time.monotonic() + CHALLENGE)
            self._ask(before.node)
        else:
            self._leave_alone(site.node, _taken(site.number, challenge.newcomer.node, site.node))

    def _settle_challenges(self) -> None:
        """A node that is gone, or does not answer, loses its number to the newcomer."""
        for number, challenge in list(self._challenges.items()):
            if challenge.newcomer.node not in self._online:
                del self._challenges[number]
            elif (
                (before := self.known.get(number)) is None
                or before.node not in self._online
                or time.monotonic() >= challenge.until
            ):
                if before is not None:
                    self._left_alone.add(before.node)
                del self._challenges[number]
                self.known[number] = challenge.newcomer
                _logger.info("site %d is back", number)

    def _leave_alone(self, node: int, reason: str) -> None:
        self._left_alone.add(node)
        if self._strict:
            raise InvalidValue(reason)
        _logger.warning("node %d takes no part: %s", node, reason)


def _taken(number: int, one: int, other: int) -> str:
    return f"two sites have partition-id {number} (nodes {one} and {other}): give each its own"
