"""The four stages of secure model recombination, for anything that can stand for a layer: an envelope, or just its origin.

Peers hold one model of U layers each. In one repeat every peer sends n layers, n uniform in [low, high], to peers chosen at
random (stage 1), puts what it receives into the buffer of the layer's index (stage 2), returns for each received layer a
random one of that buffer (stage 3) and takes what is returned to it (stage 4). Source: Hu et al., arXiv 2208.07677,
appendix B, algorithm 2; its line 9 must empty the buffer of the layer's index, not of the loop counter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from fedloom.config.checks import require_at_least
from fedloom.errors import InvalidValue
from fedloom.secure.draws import Choices, Draws, sample, shuffled

T = TypeVar("T")


@dataclass(frozen=True)
class Rules:
    """What all peers of an exchange keep to: `repeats` r_s, and how many layers each sends, `low` n_l to `high` n_u.

    Without `high` it is ceil(U / 4) in the first repeat, whose layers alone can be attributed to their senders, and U in
    those that follow (the paper advises a small first bound and gives no number).
    """

    repeats: int = 2
    low: int = 1
    high: int | None = None

    def __post_init__(self) -> None:
        require_at_least("repeats", self.repeats, 1)
        require_at_least("low", self.low, 1)
        if self.high is not None and self.high < self.low:
            raise InvalidValue(f"high must be at least low, which is {self.low}, not {self.high}")

    def bounds(self, units: int) -> list[tuple[int, int]]:
        """n_l and n_u of each repeat for models of U = `units` layers. Raises `InvalidValue` when a model has fewer than n_u."""
        for name, value in (("low", self.low), ("high", self.high)):
            if value is not None and value > units:
                raise InvalidValue(
                    f"{name} must be at most {units}, the number of layers that a model has, not {value}"
                )
        if self.high is not None:
            return [(self.low, self.high)] * self.repeats
        return [(self.low, max(self.low, math.ceil(units / 4)))] + [(self.low, units)] * (self.repeats - 1)

    def expected_share(self, units: int) -> float:
        """Expected traffic of the whole exchange per peer, in sizes of one model: the sum of (n_l + n_u) / U over the repeats
        (equation 27, which is for one)."""
        return sum(low + high for low, high in self.bounds(units)) / units


class Sent(NamedTuple, Generic[T]):
    """One layer on its way: the peer at the other end, the layer's index, and what stands for it."""

    peer: int
    layer: int
    item: T


def purpose(when: str, repeat: int, stage: str) -> str:
    """Name of the choices of one stage (`send` or `return`) of one repeat (from 1) of the exchange `when`."""
    return f"secure/{when}/{repeat}/{stage}"


class Repeat(Generic[T]):
    """One peer in one repeat. The choices depend on what arrived, never on the order in which it did."""

    def __init__(self, me: int, peers: Sequence[int], items: Sequence[T]) -> None:
        self.others = [peer for peer in peers if peer != me]
        self.buffers: list[list[T]] = [[item] for item in items]
        self.sent: list[tuple[int, int]] = []  # (recipient, index), what will come back

    def send(self, low: int, high: int, draws: Draws) -> list[Sent[T]]:
        """Stage 1: n layers, each to another peer, uniformly. A peer on its own keeps all."""
        if not self.others:
            return []
        count = low + draws.below(high - low + 1)
        letters = []
        for index in sample(range(len(self.buffers)), count, draws):
            peer = self.others[draws.below(len(self.others))]
            letters.append(Sent(peer, index, self.buffers[index].pop()))
        self.sent = [(letter.peer, letter.layer) for letter in letters]
        return letters

    def exchange(self, received: Sequence[Sent[T]], draws: Draws) -> list[Sent[T]]:
        """Stages 2 and 3: take in all that was sent here, then return for each layer a random one of its index."""
        ordered = sorted(received, key=lambda letter: (letter.peer, letter.layer))
        for _, index, item in ordered:
            self.buffers[index].append(item)
        letters = []
        for peer, index, _ in shuffled(ordered, draws):
            buffer = self.buffers[index]
            letters.append(Sent(peer, index, buffer.pop(draws.below(len(buffer)))))
        return letters

    def rebuild(self, returned: Sequence[Sent[T]]) -> list[T]:
        """Stage 4: the new model's layers. Raises `InvalidValue` unless exactly what was sent has been replaced."""
        if sorted((letter.peer, letter.layer) for letter in returned) != sorted(self.sent):
            raise InvalidValue("what was returned is not what was sent")
        for _, index, item in returned:
            self.buffers[index].append(item)
        return [item for (item,) in self.buffers]


class Rehearsal(NamedTuple):
    """What an exchange does, without the layers: for each unit u and place k, the place whose layer ends at k
    (`sources[u][k]`); and for each repeat and unit, how many peers sent that layer (`sent[r][u]`)."""

    sources: list[list[int]]
    sent: list[list[int]]

    def bytes(self, sizes: Sequence[int]) -> int:
        """Equation 26 over all repeats, for layers of `sizes[u]` bytes: each layer sent is carried there and another back."""
        return sum(2 * count * size for repeat in self.sent for count, size in zip(repeat, sizes, strict=True))


def rehearse(peers: Sequence[int], units: int, rules: Rules, choices: Choices, when: str) -> Rehearsal:
    """The exchange `when` of `peers` (their numbers, in the order of their models' rows), as those peers would do it.

    Raises `InvalidValue` when a peer is named twice.
    """
    if len(set(peers)) != len(peers):
        raise InvalidValue(f"every peer takes part once, not {list(peers)}")
    held = {peer: [place] * units for place, peer in enumerate(peers)}
    sent: list[list[int]] = []
    for number, (low, high) in enumerate(rules.bounds(units), start=1):
        repeats = {peer: Repeat(peer, peers, held[peer]) for peer in peers}
        going: dict[int, list[Sent[int]]] = {peer: [] for peer in peers}
        counts = [0] * units
        for peer, repeat in repeats.items():
            for letter in repeat.send(low, high, choices(peer, purpose(when, number, "send"))):
                going[letter.peer].append(letter._replace(peer=peer))
                counts[letter.layer] += 1
        coming: dict[int, list[Sent[int]]] = {peer: [] for peer in peers}
        for peer, repeat in repeats.items():
            for letter in repeat.exchange(going[peer], choices(peer, purpose(when, number, "return"))):
                coming[letter.peer].append(letter._replace(peer=peer))
        held = {peer: repeat.rebuild(coming[peer]) for peer, repeat in repeats.items()}
        sent.append(counts)
    return Rehearsal([[held[peer][unit] for peer in peers] for unit in range(units)], sent)
