"""The batches of local training, with a leading client axis: of one client, or of several that
advance in lock step.

Clients of unequal sizes have different numbers of batches, and short ones at different steps.
Clients advance together while their batches have the same size, and one that has finished stands
still. Padding never contributes to the loss.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat

import torch
from torch import Tensor

from fedloom.data.augmentation import apply_flip_crop, draw_flip_crop
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.lazy import in_memory
from fedloom.flat.device import moved
from fedloom.flat.module import Batch, Rows

AHEAD = 1 << 23
"""Input values that are gathered ahead of the steps that use them (32 MiB as floats): one copy
instead of one a step.
"""

Epochs = Iterable[tuple[Tensor, list[int]]]
"""Order of a client's samples and sizes of its batches, for each epoch (`training.Passes`)."""


@dataclass(frozen=True)
class LockStep:
    """Batches that some clients of a cohort take together.

    Attributes:
        clients: Their rows in the cohort; None for all.
        members: The numbers of these rows.
        batches: The batches.
        orders: The samples of each of these clients in their order.
    """

    clients: Rows | None
    members: list[int]
    batches: Iterator[Batch]
    orders: Sequence[Tensor]

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return these clients' rows of tensors `[k, ...]`: views of consecutive rows, else copies
        to be `put` back.
        """
        if self.clients is None:
            return dict(tensors)
        return {name: tensor[self.clients] for name, tensor in tensors.items()}

    def put(self, tensors: Mapping[str, Tensor], taken: Mapping[str, Tensor]) -> None:
        """Write back what `take` copied (a row that was expanded to all clients cannot have been
        changed).
        """
        if isinstance(self.clients, Tensor):
            for name, rows in taken.items():
                if tensors[name].stride(0):
                    tensors[name][self.clients] = rows


class ClientLoader:
    """The samples of one client, prepared for the model: all at once if they are few, else on
    demand.
    """

    def __init__(self, samples: Samples, dataset: Dataset) -> None:
        self.samples, self.dataset = samples, dataset
        self.values = max(1, samples.inputs.shape[1:].numel())
        self._prepared: Tensor | None = None

    def write(self, index: Tensor, drawn: Tensor | None, inputs: Tensor, labels: Tensor) -> None:
        """Write n samples, augmented by the draws in `drawn` if any, into `inputs [n, ...]` and
        `labels [n, ...]`.
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
    def like(self) -> Tensor:
        """No inputs, `[0, ...]`, with the shape and type of prepared ones."""
        return self.dataset.prepare(self.samples.inputs[:0])


class _ClientPlan:
    """Order, augmentation and batches of a client: `starts` of batches, and `until` which they are
    equally large.
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
        for batch in range(len(self.sizes) - 2, -1, -1):
            if self.sizes[batch] == self.sizes[batch + 1]:
                self.until[batch] = self.until[batch + 1]

    def padded(self, size: int) -> None:
        """Fill every batch up to `size` with samples that do not count."""
        sizes = torch.tensor(self.sizes)
        shift = torch.arange(len(sizes)) * size - (sizes.cumsum(0) - sizes)
        positions = torch.arange(len(self.index)) + shift.repeat_interleave(sizes)
        index = self.index.new_zeros(size * len(sizes))
        self.share = torch.zeros(len(index), dtype=torch.float64)
        self.share[positions] = sizes.double().reciprocal().repeat_interleave(sizes)
        index[positions] = self.index
        self.index = index
        self.sizes = [size] * len(sizes)
        self._measure()

    def send(self) -> None:
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
    """Yield the batches of one client or several in lock step. Use up those of one `LockStep`
    before the next.

    Each client's batches come in its order. With `in_step`, clients stay at the same step;
    otherwise a client with a short batch takes it by itself, and then all continue together. With
    `pad`, short batches are filled up with samples whose `share` of the mean is 0, unless that more
    than doubles the work.
    """
    plans = [_ClientPlan(*client) for client in zip(loaders, epochs, noises, strict=True)]
    if pad:
        _pad(plans)
    for plan in plans:
        plan.send()
    done = [0] * len(plans)
    while waiting := [k for k, plan in enumerate(plans) if done[k] < len(plan.sizes)]:
        alike: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for k in waiting:
            alike[plans[k].sizes[done[k]], done[k] > 0].append(k)
        # batches as large as the next one
        equal = {k: plans[k].until[done[k]] - done[k] for k in waiting}
        largest = max(size for size, _ in alike)
        shorter = (
            [] if in_step else [members for (size, _), members in alike.items() if size < largest]
        )
        for members in shorter or list(alike.values()):
            steps = min(equal[k] for k in (waiting if in_step else members))
            sources = [(plans[k], plans[k].starts[done[k]]) for k in members]
            clients, size = _rows(members, len(plans)), plans[members[0]].sizes[done[members[0]]]
            batches = _batches(sources, clients, size, min(done[k] for k in members), steps)
            orders = [plan.index[start:] for plan, start in sources]
            yield LockStep(clients, members, batches, orders)
            for k in members:
                done[k] += steps


def _pad(plans: Sequence[_ClientPlan]) -> None:
    """Make all batches as large as the largest, if some are shorter and the padding is no more than
    the samples.
    """
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
    sources: list[tuple[_ClientPlan, int]], clients: Rows | None, size: int, number: int, steps: int
) -> Iterator[Batch]:
    """Yield `steps` batches `[g, size, ...]`, numbered from `number`, of g clients, each from an
    offset in its order.
    """
    loader = sources[0][0].loader
    at_once = max(1, AHEAD // max(1, loader.values * size * len(sources)))
    for done in range(0, steps, at_once):
        # A list of sizes, since `split(0)` gives one part, however many batches are empty.
        sizes = [size] * min(at_once, steps - done)
        count = sum(sizes)
        like, targets = loader.like, loader.samples.labels
        inputs = like.new_empty(len(sources), count, *like.shape[1:])
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
