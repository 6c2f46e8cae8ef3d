"""Four stages of secure model recombination, for envelopes or for any other items per layer.

Peers hold one model of U layers each. One repeat has four stages:

1. Every peer sends n layers, n uniform in [low, high], to peers chosen at random.
2. It stores each received layer in the buffer of the layer's index.
3. It returns a random layer of that buffer for each received one.
4. It stores the returned layers.

Source: Hu et al., arXiv 2208.07677, appendix B, algorithm 2. Its line 9 must empty the buffer of
the layer's index, not of the loop counter.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import require_at_least, require_between

T = TypeVar("T")

Draw = Callable[[int], int]
"""A source of uniform integers: `draw(bound)` is one of 0 .. bound - 1."""

Choices = Callable[[int, str], Draw]
"""(peer, purpose) -> the peer's source of random integers for this purpose.

The same purpose repeats the same numbers.
"""

MOST_REPEATS = 1000
"""Largest number of repeats.

After a few dozen repeats, any layer is equally likely at any peer. Each repeat costs about a
model's traffic per peer, and two messages.
"""


@dataclass(frozen=True)
class Rules:
    """Rules of an exchange, common to all its peers.

    Attributes:
        repeats: Number of repeats, r_s.
        low: Smallest number of layers that each peer sends, n_l.
        high: Largest number, n_u. None: ceil(U / 4) in the first repeat, since only its layers can
            be attributed to their senders, and U in the following ones. The paper advises a small
            first bound and gives no number.
    """

    repeats: int = 2
    low: int = 1
    high: int | None = None

    def __post_init__(self) -> None:
        require_between("repeats", self.repeats, 1, MOST_REPEATS)
        require_at_least("low", self.low, 1)
        if self.high is not None and self.high < self.low:
            raise InvalidValue(f"high must be at least low ({self.low}), not {self.high}")

    def bounds(self, units: int) -> list[tuple[int, int]]:
        """Return n_l and n_u of each repeat for models of U = `units` layers.

        Raises:
            InvalidValue: The models have fewer than n_u layers.
        """
        largest = self.high or self.low
        if largest > units:
            raise InvalidValue(
                f"low and high must be at most {units}, the number of a model's layers, not "
                f"{largest}"
            )
        if self.high is not None:
            return [(self.low, self.high)] * self.repeats
        return [(self.low, max(self.low, math.ceil(units / 4)))] + [(self.low, units)] * (
            self.repeats - 1
        )


def secret_choices(peer: int, purpose: str) -> Draw:
    """Draw from the operating system, for real sites.

    The numbers cannot be repeated and do not depend on a seed.

    Args:
        peer: Number of the peer; it has no effect.
        purpose: Name of the stage; it has no effect.

    Returns:
        A function from a bound to a random integer in [0, bound).
    """
    return secrets.randbelow


def stream_choices(stream: Callable[[str, int], torch.Generator]) -> Choices:
    """Return choices from the streams of a round, as in `Round.stream`.

    A server that knows the seed can undo the exchange.
    """
    return lambda peer, purpose: stream_draw(stream(purpose, peer))


def stream_draw(generator: torch.Generator) -> Draw:
    """Return a source that draws from a torch generator."""
    return lambda bound: int(torch.randint(bound, (), generator=generator))


def sample(items: Sequence[T], count: int, draw: Draw) -> list[T]:
    """Draw distinct items, uniformly and in random order (Fisher and Yates).

    Args:
        items: The items.
        count: Number of items to draw.
        draw: Source of random integers.

    Returns:
        `count` of the items, at different positions.
    """
    shuffled = list(items)
    for index in range(count):
        partner = index + draw(len(shuffled) - index)
        shuffled[index], shuffled[partner] = shuffled[partner], shuffled[index]
    return shuffled[:count]


class Sent(NamedTuple, Generic[T]):
    """A layer in transit: the peer at the other end, the layer's index, and its item."""

    peer: int
    layer: int
    item: T


def purpose(when: str, repeat: int, stage: str) -> str:
    """Return the name of the choices of one stage.

    Args:
        when: The exchange, `before_train` or `before_upload`.
        repeat: Number of the repeat, from 1.
        stage: `send` or `return`.

    Returns:
        The name, such as `secure/before_train/1/send`. Each stage draws from its own stream.
    """
    return f"secure/{when}/{repeat}/{stage}"


class LayerBuffers(Generic[T]):
    """Items of one peer by the layer's index, one for each between repeats.

    The order in which items arrive has no effect.
    """

    def __init__(self, others: Sequence[int], buffers: list[list[T]]) -> None:
        self.others = others
        self.buffers = buffers
        self.sent: list[tuple[int, int]] = []  # (recipient, index) of the layers to be returned

    @property
    def items(self) -> list[T]:
        """The model's layers, between repeats."""
        return [item for (item,) in self.buffers]

    def send(self, low: int, high: int, draw: Draw) -> list[Sent[T]]:
        """Send n layers, each to a peer drawn uniformly (stage 1).

        Args:
            low: Smallest n.
            high: Largest n.
            draw: Source of random integers.

        Returns:
            The sent layers; none if the peer has no others to send to.
        """
        if not self.others:
            return []
        count = low + draw(high - low + 1)
        going = []
        for index in sample(range(len(self.buffers)), count, draw):
            peer = self.others[draw(len(self.others))]
            going.append(Sent(peer, index, self.buffers[index].pop()))
        self.sent = [(sent.peer, sent.layer) for sent in going]
        return going

    def exchange(self, received: Sequence[Sent[T]], draw: Draw) -> list[Sent[T]]:
        """Store all received layers, then return a random one of each index (stages 2 and 3).

        Args:
            received: Received layers, with their senders.
            draw: Source of random integers.

        Returns:
            A layer for each received one, with the peer that gets it.
        """
        ordered = sorted(received, key=lambda sent: (sent.peer, sent.layer))
        for _, index, item in ordered:
            self.buffers[index].append(item)
        returned = []
        for peer, index, _ in sample(ordered, len(ordered), draw):
            buffer = self.buffers[index]
            returned.append(Sent(peer, index, buffer.pop(draw(len(buffer)))))
        return returned

    def rebuild(self, returned: Sequence[Sent[T]]) -> None:
        """Store the returned layers, one for each sent layer (stage 4)."""
        for _, index, item in returned:
            self.buffers[index].append(item)
        self.sent = []


class Rehearsal(NamedTuple):
    """Outcome of an exchange.

    Attributes:
        sources: `sources[u][k]` is the row from which row k has its layer u.
        sent: `sent[r][u]` is the number of peers that sent layer u in repeat r.
    """

    sources: list[list[int]]
    sent: list[list[int]]

    def bytes(self, sizes: Sequence[int]) -> int:
        """Return the bytes carried in both directions, for layers of `sizes[u]` bytes.

        Source: equation 26, summed over all repeats.
        """
        return sum(
            2 * count * size
            for repeat in self.sent
            for count, size in zip(repeat, sizes, strict=True)
        )


def rehearse(
    peers: Sequence[int], units: int, rules: Rules, choices: Choices, when: str
) -> Rehearsal:
    """Compute the outcome of an exchange.

    Args:
        peers: Numbers of the peers, in the order of the models' rows.
        units: Number of layers, U.
        rules: Rules of the exchange.
        choices: Sources of random integers.
        when: `before_train` or `before_upload`.

    Returns:
        The origin of each layer, `[U, peers]`, and the numbers of sent layers, `[repeats, U]`.
    """
    holders = {
        peer: LayerBuffers(
            [recipient for recipient in peers if recipient != peer], [[row] for _ in range(units)]
        )
        for row, peer in enumerate(peers)
    }
    sent: list[list[int]] = []
    for number, (low, high) in enumerate(rules.bounds(units), start=1):
        going: dict[int, list[Sent[int]]] = {peer: [] for peer in peers}
        counts = [0] * units
        for peer, buffers in holders.items():
            for layer in buffers.send(low, high, choices(peer, purpose(when, number, "send"))):
                going[layer.peer].append(layer._replace(peer=peer))
                counts[layer.layer] += 1
        coming: dict[int, list[Sent[int]]] = {peer: [] for peer in peers}
        for peer, buffers in holders.items():
            for layer in buffers.exchange(
                going[peer], choices(peer, purpose(when, number, "return"))
            ):
                coming[layer.peer].append(layer._replace(peer=peer))
        for peer, buffers in holders.items():
            buffers.rebuild(coming[peer])
        sent.append(counts)
    ends = [buffers.items for buffers in holders.values()]
    return Rehearsal([[items[unit] for items in ends] for unit in range(units)], sent)
