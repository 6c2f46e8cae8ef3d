"""Label skew at given sizes: every client has a Dirichlet prior over the classes."""

import numpy as np
import numpy.typing as npt

from fedloom.common.errors import InvalidValue, quoted
from fedloom.data.partition import Indices, Partition, partitions
from fedloom.data.partitions.classes import (
    Concentration,
    class_sizes,
    deal,
    partition_stream,
    shuffled_by_class,
)

_CELLS = 4_000_000  # steps x classes at a time: 32 MB


@partitions.register("class_prior")
def class_prior(
    labels: Indices,
    clients: int,
    seed: int,
    groups: Indices | None,
    *,
    alpha: Concentration = 0.6,
    sizes: str = "iid",
) -> Partition:
    """Label skew at given sizes: client i draws its classes from its own prior Dir(alpha) over them
    (inner Dirichlet).

    Sample by sample: a random client that is not yet full draws a class from its prior,
    renormalised over the classes that are not used up, and takes the next unused sample of it. (If
    a prior is zero in double precision on all of these, the client draws among them uniformly.)

    Args:
        alpha: The concentration of the priors, greater than 0: smaller, stronger skew.
        sizes: The partition that gives the sizes of the clients: `iid` (they differ by at most
            one), or such as `lognormal(0.3)`, `quantity(0.5)`, `exponential(0.1)`.

    Returns:
        The partition. Each sample has one client.

    Raises:
        InvalidValue: For fewer than one client or more clients than samples, and for `sizes` that
            leave samples over.

    Source: FedUmf appendix (non-IID, 0.6), after FedDC (Gao et al., CVPR 2022), experimental setup;
    with `sizes`, FedDyn (Acar et al., ICLR 2021), section 4, as Flower's InnerDirichletPartitioner.
    """
    rng = partition_stream(labels, clients, seed)
    available = class_sizes(labels)
    room = partitions.build(sizes, labels, clients, seed, groups).sizes
    if room.sum() != len(labels) or len(room) != clients:
        raise InvalidValue(
            f"class_prior: sizes={quoted(sizes)} must give each of the {len(labels)} samples "
            "to a client"
        )
    priors = rng.dirichlet(np.full(len(available), alpha), size=clients)
    turns = draw_turns(room, rng)
    drawn = draw_classes(priors, turns, rng.random(len(turns)), available)
    # clients that take class 0 in their order, then clients that take class 1 ...
    owners = turns[np.argsort(drawn, kind="stable")]
    return deal(shuffled_by_class(labels, rng), owners, clients, rng)


def draw_turns(room: Indices, rng: np.random.Generator) -> Indices:
    """Draw the client of each step among those that are not full, by rejection.

    Args:
        room: Number of steps of each client, `[clients]`.
        rng: Source of the draws.

    Returns:
        Clients `[steps]`.
    """
    room = room.copy()
    blocks = []
    while (steps := int(room.sum())) > 0:
        waiting = np.flatnonzero(room)
        picks = waiting[rng.integers(len(waiting), size=steps)]
        block = picks[_occurrence(picks) < room[picks]]
        room -= np.bincount(block, minlength=len(room))
        blocks.append(block)
    return np.concatenate(blocks)


def draw_classes(
    priors: npt.NDArray[np.float64],
    turns: Indices,
    uniforms: npt.NDArray[np.float64],
    sizes: Indices,
) -> Indices:
    """Draw the class of each step from its client's prior over the classes that have samples left.

    Args:
        priors: Prior of each client, `[clients, classes]`.
        turns: Client of each step, `[steps]`.
        uniforms: Random numbers in [0, 1), `[steps]`.
        sizes: Samples of each class, `[classes]`.

    Returns:
        Classes `[steps]`.
    """
    remaining = sizes.copy()
    weights = np.maximum(priors, 1e-200)  # so that the sum to divide by is never 0
    drawn = np.empty(len(turns), dtype=np.int64)
    chunk = max(1, _CELLS // len(sizes))
    start = 0
    while start < len(turns):
        steps = slice(start, start + chunk)
        cumulative = np.cumsum(weights[turns[steps]] * (remaining > 0), axis=1)
        levels = uniforms[steps, None] * cumulative[:, -1:]
        # A level that rounds up to the whole sum belongs to the last class that has samples.
        classes = np.minimum((cumulative <= levels).sum(axis=1), np.flatnonzero(remaining)[-1])
        emptying = np.flatnonzero(_occurrence(classes) == remaining[classes] - 1)
        done = int(emptying[0]) + 1 if len(emptying) else len(classes)
        drawn[start : start + done] = classes[:done]
        remaining -= np.bincount(classes[:done], minlength=len(remaining))
        start += done
    return drawn


def _occurrence(values: Indices) -> Indices:
    """Count the equal values before each value, `[n]`."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    rank = np.empty(len(values), dtype=np.int64)
    rank[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered, side="left")
    return rank
