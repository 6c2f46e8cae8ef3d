"""Which clients a worker process takes in one go, and which go first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from fedloom.engines.base import ClientTask


def grouped(client_tasks: Sequence[ClientTask], sizes: Tensor, workers: int, chunk: int) -> list[list[ClientTask]]:
    """The orders in groups of at most `chunk`, those with most samples first; `sizes [n]` are their numbers of samples.

    A long piece of work that starts last leaves the other workers idle; short ones fill the gaps at the end. Clients of like
    sizes share a group, so that few stand still; groups have about equally many samples, and their number is a multiple of
    `workers`, so that all end at about the same time.
    """
    falling = sizes.argsort(descending=True, stable=True).tolist()
    if chunk == 1:
        return [[client_tasks[place]] for place in falling]
    count = min(len(client_tasks), workers * math.ceil(len(client_tasks) / (workers * chunk)))
    groups: list[list[ClientTask]] = []
    current: list[ClientTask] = []
    filled, rest = 0, int(sizes.sum())
    for place in falling:
        size = int(sizes[place])
        left = max(1, count - len(groups))
        if len(current) == chunk or (current and left > 1 and filled + size / 2 > rest / left):
            groups.append(current)
            rest, current, filled = rest - filled, [], 0
        current.append(client_tasks[place])
        filled += size
    return [*groups, current] if current else groups
