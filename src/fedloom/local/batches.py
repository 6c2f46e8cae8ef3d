"""Batches of local training, with a leading client axis, for one client or several in lock step.

Clients of different sizes have different numbers of batches, and short batches at different steps.
Clients train in lock step while their batches have the same size. A client that has finished waits
for the others. Padding never contributes to the loss.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat

import torch
from torch import Tensor

from fedloom.common.device import moved
from fedloom.data.augmentation import apply_flip_crop, draw_flip_crop
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.lazy import in_memory
from fedloom.flat.module import Batch, Rows

AHEAD = 1 << 23
"""Number of input values that are gathered at once for several steps (32 MiB as floats)."""

Epochs = Iterable[tuple[Tensor, list[int]]]
"""Order of a client's samples and sizes of its batches for each epoch (`training.Passes`)."""


@dataclass(frozen=True)
class LockStep:
    """Consecutive batches of a group of clients in lock step.

    Attributes:
        clients: Rows of the g clients in the cohort. None for all clients.
        members: Numbers of these rows.
        batches: The batches, `[g, b, ...]`.
        orders: Order of the samples of each client.
    """

    clients: Rows | None
    members: list[int]
    batches: Iterator[Batch]
    orders: Sequence[Tensor]

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of these clients, `[g, ...]`, of tensors `[k, ...]`.

        Consecutive rows are views, others are copies. `put` writes changed copies back.
        """
        if self.clients is None:
            return dict(tensors)
        return {name: tensor[self.clients] for name, tensor in tensors.items()}

    def put(self, tensors: Mapping[str, Tensor], taken: Mapping[str, Tensor]) -> None:
        """Write the copies of `take` back.

        Args:
            tensors: Tensors of all clients, `[k, ...]`.
            taken: Result of `take`, `[g, ...]`.
        """
        if isinstance(self.clients, Tensor):
            for name, rows in taken.items():
                if tensors[name].stride(0):  # rows that are expanded to all clients never change
                    tensors[name][self.clients] = rows


class ClientLoader:
    """The samples of one client, prepared for the model.

    Small sets are prepared once, larger ones batch by batch.
    """

    def __init__(self, samples: Samples, dataset: Dataset) -> None:
        self.samples = samples
        self.dataset = dataset
        self.values = max(1, samples.inputs.shape[1:].numel())
        self._prepared: Tensor | None = None

    def write(self, index: Tensor, drawn: Tensor | None, inputs: Tensor, labels: Tensor) -> None:
        """Write n prepared samples into existing tensors.

        Args:
            index: Numbers of the samples, `[n]`.
            drawn: Random numbers of the augmentation, or None without augmentation.
            inputs: Filled with inputs, `[n, ...]`.
            labels: Filled with labels, `[n, ...]`.
        """
        torch.index_select(self.samples.labels, 0, index, out=labels)
        if drawn is None and self._prepared is None and len(self.samples) * self.values <= AHEAD:
            self._prepared = self.dataset.prepare(self.samples.inputs)
        if drawn is None and self._prepared is not None:
            torch.index_select(self._prepared, 0, index, out=inputs)
            return
        raw = in_memory(self.samples.inputs[index])
        inputs.copy_(self.dataset.prepare(raw if drawn is None else apply_flip_crop(raw, drawn)))

    @cached_property
    def empty_inputs(self) -> Tensor:
        """An empty tensor, `[0, ...]`, with shape and type of prepared inputs."""
        return self.dataset.prepare(self.samples.inputs[:0])


class _ClientPlan:
    """Order, augmentation and batches of one client.

    Attributes:
        sizes: Size of each batch.
        starts: Offset of each batch in the order of the samples.
        until: For each batch the number of the next batch with another size.
        index: Order of the samples over all epochs.
        drawn: Random numbers of the augmentation, or None.
        share: Share of each sample in the mean of its batch, if batches are padded.
    """

    def __init__(self, loader: ClientLoader, epochs: Epochs, noise: torch.Generator | None) -> None:
        self.loader = loader
        orders: list[Tensor] = []
        drawn: list[Tensor] = []
        self.sizes: list[int] = []
        for order, sizes in epochs:
            orders.append(order)
            self.sizes += sizes
            if noise is not None:
                drawn.append(draw_flip_crop(len(order), noise))
        self.index = torch.cat(orders) if orders else torch.empty(0, dtype=torch.int64)
        self.drawn = torch.cat(drawn) if drawn else None
        self.share: Tensor | None = None
        self._find_starts()

    def _find_starts(self) -> None:
        self.starts = [0, *accumulate(self.sizes)]
        self.until = list(range(1, len(self.sizes) + 1))
        for batch in range(len(self.sizes) - 2, -1, -1):
            if self.sizes[batch] == self.sizes[batch + 1]:
                self.until[batch] = self.until[batch + 1]

    def set_padded(self, index: Tensor, share: Tensor, size: int) -> None:
        """Replace the order by one whose batches all have `size` samples."""
        self.index = index
        self.share = share
        self.sizes = [size] * len(self.sizes)
        self._find_starts()

    def to_device(self) -> None:
        device = self.loader.samples.labels.device
        self.index = moved(self.index, device)
        self.drawn = None if self.drawn is None else moved(self.drawn, device)
        self.share = None if self.share is None else moved(self.share, device)


def lock_steps(
    loaders: Sequence[ClientLoader],
    epochs: Sequence[Epochs],
    noises: Sequence[torch.Generator | None],
    *,
    in_step: bool = True,
    pad: bool = False,
) -> Iterator[LockStep]:
    """Yield the batches of clients in lock step.

    Use all batches of a `LockStep` before you request the next one.

    Args:
        loaders: Samples of each client.
        epochs: Epochs of each client.
        noises: Random stream of each client's augmentation, or None.
        in_step: True to keep all clients at the same step. Otherwise clients with a short batch
            train on it separately, and then all continue in lock step.
        pad: True to pad short batches with samples that have a `share` of 0, unless padding more
            than doubles the work.

    Yields:
        Groups of clients with their next batches, each of the same size for all clients of the
        group.
    """
    plans = [_ClientPlan(*client) for client in zip(loaders, epochs, noises, strict=True)]
    if pad:
        _pad_all(plans)
    for plan in plans:
        plan.to_device()
    done = [0] * len(plans)
    while waiting := [k for k, plan in enumerate(plans) if done[k] < len(plan.sizes)]:
        groups: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for k in waiting:
            groups[plans[k].sizes[done[k]], done[k] > 0].append(k)
        # Number of consecutive batches with the size of the next one.
        equal = {k: plans[k].until[done[k]] - done[k] for k in waiting}
        largest = max(size for size, _ in groups)
        shorter = (
            [] if in_step else [members for (size, _), members in groups.items() if size < largest]
        )
        for members in shorter or list(groups.values()):
            steps = min(equal[k] for k in (waiting if in_step else members))
            sources = [(plans[k], plans[k].starts[done[k]]) for k in members]
            clients = _rows(members, len(plans))
            size = plans[members[0]].sizes[done[members[0]]]
            batches = _batches(sources, clients, size, min(done[k] for k in members), steps)
            orders = [plan.index[start:] for plan, start in sources]
            yield LockStep(clients, members, batches, orders)
            for k in members:
                done[k] += steps


def _pad_all(plans: Sequence[_ClientPlan]) -> None:
    """Pad all batches to the size of the largest, unless this more than doubles the samples.

    Padding repeats a sample, with a share of 0.
    """
    largest = max((size for plan in plans for size in plan.sizes), default=0)
    counts = [len(plan.sizes) * largest for plan in plans]
    real = sum(len(plan.index) for plan in plans)
    if not real < sum(counts) <= 2 * real or any(plan.drawn is not None for plan in plans):
        return
    sizes = torch.tensor([size for plan in plans for size in plan.sizes]).unsqueeze(1)
    given = torch.arange(largest) < sizes  # [batches, largest]
    order = torch.cat([plan.index for plan in plans])
    index = order.new_zeros(given.shape).masked_scatter_(given, order).flatten()
    share = (given / sizes.double()).flatten()
    parts = zip(plans, index.split(counts), share.split(counts), strict=True)
    for plan, plan_index, plan_share in parts:
        plan.set_padded(plan_index, plan_share, largest)


def _rows(members: list[int], count: int) -> Rows | None:
    if len(members) == count:
        return None
    if members[-1] - members[0] == len(members) - 1:
        return slice(members[0], members[-1] + 1)
    return torch.tensor(members)


def _batches(
    sources: list[tuple[_ClientPlan, int]], clients: Rows | None, size: int, number: int, steps: int
) -> Iterator[Batch]:
    """Yield batches of g clients, `[g, size, ...]`.

    Args:
        sources: Plan of each client, and the offset of its first batch.
        clients: Rows of the clients in the cohort.
        size: Number of samples in each batch.
        number: Number of the first step.
        steps: Number of batches.
    """
    loader = sources[0][0].loader
    at_once = max(1, AHEAD // max(1, loader.values * size * len(sources)))
    for done in range(0, steps, at_once):
        # A list of sizes, because `split(0)` returns one part for any number of empty batches.
        sizes = [size] * min(at_once, steps - done)
        count = sum(sizes)
        empty = loader.empty_inputs
        targets = loader.samples.labels
        inputs = empty.new_empty(len(sources), count, *empty.shape[1:])
        labels = targets.new_empty(len(sources), count, *targets.shape[1:])
        shares = [
            plan.share[start + done * size :][:count]
            for plan, start in sources
            if plan.share is not None
        ]
        for row, (plan, start) in enumerate(sources):
            span = slice(start + done * size, start + done * size + count)
            drawn = None if plan.drawn is None else plan.drawn[span]
            plan.loader.write(plan.index[span], drawn, inputs[row], labels[row])
        by_step = torch.stack(shares).split(sizes, 1) if shares else repeat(None)
        batches = zip(inputs.split(sizes, 1), labels.split(sizes, 1), by_step, strict=False)
        for step, (batch_inputs, batch_labels, share) in enumerate(batches, start=number + done):
            yield Batch(batch_inputs, batch_labels, step, clients, share)
