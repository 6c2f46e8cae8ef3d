"""The batches of local training, with a leading client axis: of one client, or of several that advance in lock step.

Clients of unequal sizes have different numbers of batches, and short ones at different steps. Padding never contributes to the
loss: clients advance together while the sizes of their batches are the same, and one that has finished stands still.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat

import torch
from torch import Tensor

from fedloom.data.augmentation import apply_flip_crop, draw_flip_crop
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.lazy import in_memory
from fedloom.flat.device import moved
from fedloom.flat.module import Batch, Rows

AHEAD = 1 << 23
"""How many input values are gathered ahead of the steps that use them (32 MiB as floats): one copy instead of one a step."""

Epochs = Iterable[tuple[Tensor, list[int]]]
"""For each epoch the order of a client's samples and the sizes of its batches (`training.epoch_orders`)."""


@dataclass(frozen=True)
class LockStep:
    """Some of the `count` clients of a cohort (None: all of them) and the batches that these take together, one after another."""

    clients: Rows | None
    batches: Iterator[Batch]
    count: int

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These clients' rows of tensors `[k, ...]`: views where the rows follow one another, else copies to be `put` back."""
        if self.clients is None:
            return dict(tensors)
        return {name: tensor[self.clients] for name, tensor in tensors.items()}

    def put(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        """Write back what `take` had to copy (a row that was expanded to all clients cannot have been changed)."""
        if isinstance(self.clients, Tensor):
            for name, part in parts.items():
                if tensors[name].stride(0):
                    tensors[name][self.clients] = part

    def members(self) -> list[int]:
        """The places of these clients in the cohort."""
        everybody = torch.arange(self.count)
        places: list[int] = (everybody if self.clients is None else everybody[self.clients]).tolist()
        return places


class ClientLoader:
    """The samples of one client, made ready for the model: all at once where they are few, else when they are asked for."""

    def __init__(self, samples: Samples, dataset: Dataset) -> None:
        self.samples, self.dataset = samples, dataset
        self.values = max(1, samples.inputs[:1].numel())
        self._prepared: Tensor | None = None

    def inputs(self, index: Tensor, drawn: Tensor | None, out: Tensor | None = None) -> Tensor:
        """The inputs of some samples, augmented where `drawn` says how; written into `out` where that is given."""
        if drawn is None and self._prepared is None and len(self.samples) * self.values <= AHEAD:
            self._prepared = self.dataset.prepare(self.samples.inputs)
        if drawn is None and self._prepared is not None:
            return torch.index_select(self._prepared, 0, index, out=out)
        chosen = in_memory(self.samples.inputs[index])
        ready = self.dataset.prepare(chosen if drawn is None else apply_flip_crop(chosen, drawn))
        return ready if out is None else out.copy_(ready)

    def empty(self, *size: int) -> Tensor:
        """Room for `[*size, ...]` inputs."""
        like = self.dataset.prepare(self.samples.inputs[:0])
        return like.new_empty(*size, *like.shape[1:])


def alone(loader: ClientLoader, epochs: Epochs, noise: torch.Generator | None) -> Iterator[Batch]:
    """The batches `[1, b, ...]` of one client; with `noise`, augmented by what that draws for each epoch."""
    step = 0
    for order, sizes in epochs:
        device = loader.samples.labels.device
        order = moved(order, device)
        drawn = None if noise is None else moved(draw_flip_crop(len(order), noise), device)
        at_once = max(1, AHEAD // (loader.values * max(1, sizes[0])))
        for first in range(0, len(sizes), at_once):
            chosen = sizes[first : first + at_once]
            start = sum(sizes[:first])
            part = slice(start, start + sum(chosen))
            index = order[part]
            inputs = loader.inputs(index, None if drawn is None else drawn[part]).unsqueeze(0).split(chosen, 1)
            labels = loader.samples.labels[index].unsqueeze(0).split(chosen, 1)
            for one, two in zip(inputs, labels, strict=True):
                yield Batch(one, two, step)
                step += 1


class _ClientPlan:
    """What one client has before it: the order of all of its samples, what augmentation draws for each, the sizes of its batches.
    `send` brings these to where the samples are, once for all steps.

    Batch i holds the samples from `starts[i]` on, and batches up to `until[i]` are as large as it. `share [n]`, where the client
    was `padded`: each sample's share of the mean over its batch, 0 for padding.
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
        self._measure()

    def _measure(self) -> None:
        self.starts = [0, *accumulate(self.sizes)]
        self.until = list(range(1, len(self.sizes) + 1))
        for place in range(len(self.sizes) - 2, -1, -1):
            if self.sizes[place] == self.sizes[place + 1]:
                self.until[place] = self.until[place + 1]

    def padded(self, size: int) -> None:
        """Fill every batch up to `size` with samples that do not count."""
        sizes = torch.tensor(self.sizes)
        first = torch.arange(len(sizes)) * size - (sizes.cumsum(0) - sizes)
        places = torch.arange(len(self.index)) + first.repeat_interleave(sizes)
        index = self.index.new_zeros(size * len(sizes))
        self.share = torch.zeros(len(index), dtype=torch.float64)
        self.share[places] = sizes.double().reciprocal().repeat_interleave(sizes)
        index[places] = self.index
        self.index = index
        self.sizes = [size] * len(sizes)
        self._measure()

    def send(self) -> None:
        device = self.loader.samples.labels.device
        self.index = moved(self.index, device)
        self.drawn = None if self.drawn is None else moved(self.drawn, device)
        self.share = None if self.share is None else moved(self.share, device)

    def write(self, part: slice, inputs: Tensor, labels: Tensor) -> None:
        """Write some of its samples, in its order, into `inputs [n, ...]` and `labels [n, ...]`."""
        index = self.index[part]
        self.loader.inputs(index, None if self.drawn is None else self.drawn[part], inputs)
        torch.index_select(self.loader.samples.labels, 0, index, out=labels)


def together(
    loaders: Sequence[ClientLoader],
    epochs: Sequence[Epochs],
    noises: Sequence[torch.Generator | None],
    *,
    in_step: bool = True,
    pad: bool = False,
) -> Iterator[LockStep]:
    """Several clients in lock step. Each client's batches come in their order and hold the samples that `alone` gives it; the
    batches that clients take together have to be used up before the next ones.

    Clients keep in step where `in_step` says that their steps are counted; else whoever has a short batch before it takes it
    first, and then all go on together. With `pad`, short batches are filled up with samples whose `share` of the mean is 0,
    unless those would be more than the real ones: for steps that heed it.
    """
    plans = [_ClientPlan(*each) for each in zip(loaders, epochs, noises, strict=True)]
    if pad:
        _pad(plans)
    for plan in plans:
        plan.send()
    made = [0] * len(plans)
    while waiting := [k for k, plan in enumerate(plans) if made[k] < len(plan.sizes)]:
        alike: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for k in waiting:
            alike[plans[k].sizes[made[k]], made[k] > 0].append(k)
        left = {k: plans[k].until[made[k]] - made[k] for k in waiting}  # batches as large as the next one
        largest = max(size for size, _ in alike)
        shorter = [] if in_step else [members for (size, _), members in alike.items() if size < largest]
        for members in shorter or list(alike.values()):
            steps = min(left[k] for k in (waiting if in_step else members))
            chosen = [(plans[k], plans[k].starts[made[k]]) for k in members]
            clients, size = _rows(members, len(plans)), plans[members[0]].sizes[made[members[0]]]
            batches = _batches(chosen, clients, size, min(made[k] for k in members), steps)
            yield LockStep(clients, batches, len(plans))
            for k in members:
                made[k] += steps


def _pad(plans: Sequence[_ClientPlan]) -> None:
    """Make all batches as large as the largest, where some are shorter but not so many that it would cost too much."""
    largest = max((size for plan in plans for size in plan.sizes), default=0)
    steps, real = sum(len(plan.sizes) for plan in plans), sum(len(plan.index) for plan in plans)
    if real < steps * largest <= 2 * real and all(plan.drawn is None for plan in plans):
        for plan in plans:
            plan.padded(largest)


def _rows(members: list[int], count: int) -> Rows | None:
    if len(members) == count:
        return None
    if members[-1] - members[0] == len(members) - 1:
        return slice(members[0], members[-1] + 1)
    return torch.tensor(members)


def _batches(
    chosen: list[tuple[_ClientPlan, int]], clients: Rows | None, size: int, first: int, steps: int
) -> Iterator[Batch]:
    """`steps` batches `[g, size, ...]`, numbered from `first`, of g clients, each from its sample number `start` on."""
    loader = chosen[0][0].loader
    at_once = max(1, AHEAD // (loader.values * size * len(chosen)))
    for done in range(0, steps, at_once):
        count = min(at_once, steps - done) * size
        inputs = loader.empty(len(chosen), count)
        held = loader.samples.labels
        labels = held.new_empty(len(chosen), count, *held.shape[1:])
        shares = [plan.share[start + done * size :][:count] for plan, start in chosen if plan.share is not None]
        for row, (plan, start) in enumerate(chosen):
            begin = start + done * size
            plan.write(slice(begin, begin + count), inputs[row], labels[row])
        by_step = torch.stack(shares).split(size, 1) if shares else repeat(None)
        batches = zip(inputs.split(size, 1), labels.split(size, 1), by_step, strict=False)
        for step, (one, two, share) in enumerate(batches, start=first + done):
            yield Batch(one, two, step, clients, share)
