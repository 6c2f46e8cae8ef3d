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


class KnownSites:
    """The sites 0 to `count - 1` of one federation, found by asking nodes.

    `greeting` is what every node is asked with; `same` are the words that a site must answer alike, such as the version.
    A site that cannot take part is named in the log and left alone; before the first round (`wait`) it ends the run. A node that
    says it has the number of one that is connected waits until that one is gone, so nobody can take a busy site's place.
    `registered` are the samples that each site had when it was first there: it never counts with more.
    """

    def __init__(self, mailbox: Mailbox, count: int, greeting: Words, same: dict[str, Any]) -> None:
        self.mailbox, self.count = mailbox, count
        self.known: dict[int, KnownSite] = {}
        self.registered: dict[int, int] = {}
        self._greeting, self._same = greeting, same
        self._asked: dict[str, int] = {}  # messages without an answer yet, and to which node
        self._left_alone: set[int] = set()
        self._claimants: dict[int, int] = {}  # nodes with a number that another node has, and which
        self._online: set[int] = set()
        self._strict = False

    def wait(self, wanted: int, seconds: float, strict: bool = True) -> None:
        """Wait until `wanted` sites are there.

        Raises `InvalidValue` when they are not after `seconds`, and, where `strict`, at once when a node says something that
        cannot be: a number that is taken or does not exist, another version of fedloom, another model.
        """
        self._strict = strict
        try:
            self._until(lambda: len(self.present()) >= wanted, seconds)
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
            return set(wanted) <= self.present() or not self._asked

        self._until(settled, seconds)
        present = self.present()
        return {number: self.known[number].node for number in wanted if number in present}

    def samples(self, number: int) -> int:
        """With how many training samples a site counts that has introduced itself."""
        return min(self.known[number].samples, self.registered[number])

    def present(self) -> set[int]:
        """The sites that are there."""
        return {number for number, site in self.known.items() if site.node in self._online}

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
        present = self.present()
        self._claimants = {node: number for node, number in self._claimants.items() if number in present}
        settled = {site.node for site in self.known.values()} | self._left_alone | self._claimants.keys()
        for node in sorted(self._online - settled - set(self._asked.values())):
            sent = self.mailbox.send(node, "hello", pack(self._greeting))
            if sent is not None:
                self._asked[sent] = node
        for reply in self.mailbox.pull(self._asked):
            sent = reply.metadata.reply_to_message_id
            if sent in self._asked:
                self._take(self._asked.pop(sent), reply)

    def _take(self, node: int, reply: Message) -> None:
        try:
            self._introduce(self._site(node, words_of(reply)))
        except FedloomError as error:
            if node not in self._claimants:
                self._left_alone.add(node)
            if self._strict:
                raise InvalidValue(str(error)) from None
            _logger.warning("node %d takes no part: %s", node, error)

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
        """Raises `RefusedReply` when another node has this site's number."""
        for number in [n for n, known in self.known.items() if known.node == site.node and n != site.number]:
            del self.known[number]  # the node was set up anew, with another number
        holder = self.known.get(site.number)
        if holder is not None and holder.node != site.node:
            if holder.node in self._online:
                self._claimants[site.node] = site.number
                raise RefusedReply(
                    f"two sites have partition-id {site.number} (nodes {holder.node} and {site.node}): give each its own"
                )
            _logger.info("site %d is back", site.number)
        self.known[site.number] = site
        self.registered.setdefault(site.number, site.samples)
