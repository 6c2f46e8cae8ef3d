"""A module that trains on rows: its parameters are views of one flat buffer, its gradients of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedloom.flat.compiled import CompiledGradient
from fedloom.flat.layout import Layout, TensorSlice, Unit
from fedloom.flat.precision import autocast, stacked_autocast
from fedloom.models.structure import head_name
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.training import Training

Rows = slice | Tensor
"""Some of the rows of `[k, ...]`."""


class Batch(NamedTuple):
    """One step's samples of one client (`inputs [b, ...]`, `labels [b]`), or of k clients with a leading client axis."""

    inputs: Tensor
    labels: Tensor
    step: int = 0  # which step of this call, from 0; where clients' steps differ, that of the client with the fewest
    clients: Rows | None = None  # whose samples they are, where that is not everybody in the cohort
    share: Tensor | None = None  # `[k, b]`, each sample's share of its client's mean: 0 for padding


class Net(Protocol):
    """One client's model as its loss sees it."""

    objective: Objective
    """What the task's models learn: `objective.loss(outputs, labels)` is the mean loss of a batch."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """What the model puts out, such as logits `[b, classes]`."""

    def both(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The features that enter the classifier, and what the model puts out, from one forward pass."""

    def head(self, features: Tensor) -> Tensor:
        """The classifier alone."""

    def at(self, row: Tensor) -> Net:
        """The same architecture with the weights of `row [P]`, in evaluation mode and without gradients to its weights."""


FILTERS_PER_ACTIVATION = 8
"""Above so many weights of convolutions for each number that they put out for one sample, channels stay first on a CPU: turning
the filters in every step would cost more than the images gain (ResNet-20 on CIFAR: 1.4; VGG-16: 53)."""

LossFn = Callable[[Net, Batch, Mapping[str, Tensor]], Tensor]
"""One client's loss: its net, its batch, what the method gave for it (a row of each `[k, ...]` tensor) -> a scalar."""

FoldedStep = Callable[[Tensor, Tensor | None, Batch], Tensor]
"""(rows `[k, P]`, velocity `[k, T]` where there is momentum, batch) -> loss `[k]`: forward, backward and update at once."""


def data_loss(net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
    """The loss of the task's objective on the batch."""
    return net.objective.loss(net(batch.inputs), batch.labels)


def head_loss(net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
    """The same for a batch whose inputs are what enters the classifier (`Cohort.for_classifier`)."""
    return net.objective.loss(net.head(batch.inputs), batch.labels)


class BoundNet:
    """`Net` over a module: its own forward, with the input of the classifier caught on the way."""

    def __init__(self, module: nn.Module, layout: Layout, frozen: nn.Module, objective: Objective) -> None:
        self.module, self.layout, self.frozen, self.objective = module, layout, frozen, objective
        self.classifier: nn.Module = module.get_submodule(head_name(module))

    def __call__(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.module(inputs)
        return logits

    def both(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return _features_and_logits(self.classifier, lambda: self.module(inputs))

    def head(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(features)
        return logits

    def at(self, row: Tensor) -> Net:
        return FrozenNet(self.frozen, self.layout, row, self.objective)


class CalledNet:
    """`Net` of a module that is called with tensors of a row; works on one row and under `vmap` alike."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        tensors: Mapping[str, Tensor],
        frozen: nn.Module,
        objective: Objective,
    ) -> None:
        self.module, self.layout, self.tensors, self.frozen, self.objective = module, layout, tensors, frozen, objective
        self.classifier_name = head_name(module)
        self.classifier = module.get_submodule(self.classifier_name)

    def __call__(self, inputs: Tensor) -> Tensor:
        logits: Tensor = functional_call(self.module, dict(self.tensors), (inputs,))
        return logits

    def both(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return _features_and_logits(self.classifier, lambda: self(inputs))

    def head(self, features: Tensor) -> Tensor:
        prefix = f"{self.classifier_name}." if self.classifier_name else ""
        own = {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}
        logits: Tensor = functional_call(self.classifier, own, (features,))
        return logits

    def at(self, row: Tensor) -> Net:
        return FrozenNet(self.frozen, self.layout, row, self.objective)


class FrozenNet(CalledNet):
    """`Net` of a module in evaluation mode with the weights of a row."""

    def __init__(self, module: nn.Module, layout: Layout, row: Tensor, objective: Objective) -> None:
        super().__init__(module, layout, layout.tensors(row.detach()), module, objective)


def _features_and_logits(classifier: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    caught: list[Tensor] = []

    def catch(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        caught.append(arguments[0])

    handle = classifier.register_forward_pre_hook(catch)
    try:
        logits = forward()
    finally:
        handle.remove()
    return caught[0], logits


@dataclass(frozen=True)
class Shortcuts:
    """Faster ways to compute a local step that may be taken, since they were held against the plain way (`local.proof`)."""

    channels_last: bool = False  # images lie with the channels last
    linear: bool = False  # linear layers' gradients are products, into which plain SGD is folded
    joint_optimizer: bool = False  # one optimizer of torch moves all rows of a stack


PLAIN = Shortcuts()
"""None of them."""


class FlatModule:
    """One copy of the task's module, reused for every client that trains in this process, one at a time.

    `weights [1, P]` given to `gradient` is trained in place: parameters and statistics of the module are views of it, while
    frozen parameters are those of the task's module. So loading a client's model costs one copy of its row, and one tensor of
    an optimizer covers every parameter. Forward and loss compute in `autocast`, where there is one and it does no harm.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        shortcuts: Shortcuts = PLAIN,
        autocast: torch.dtype | None = None,
        objective: Objective = CLASSIFICATION,
    ) -> None:
        self.layout, self.shortcuts, self.autocast, self.objective = layout, shortcuts, autocast, objective
        self.original = module
        self.module = layout.shell(module).train()
        self.frozen = layout.shell(module).eval().requires_grad_(False)
        self.net = BoundNet(self.module, layout, self.frozen, objective)
        self.needs_pairs = any(
            isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in self.module.modules()
        )
        self.smallest_batch = 2 if self.needs_pairs else 1
        self._row: Tensor | None = None
        self._gradient = torch.zeros(1, layout.trainable, dtype=layout.dtype, device=next(module.parameters()).device)
        self._compiled: CompiledGradient | None = None
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._slices = layout.slices[: len(self._parameters)]
        self._moving = self._slices  # those of the parameters that train

    @cached_property
    def initial(self) -> Tensor:
        """The model that the task starts from, `[P]`."""
        return self.layout.flatten(self.original)

    @property
    def like(self) -> Tensor:
        """Empty tensor with the rows' dtype and device."""
        return self._gradient[0, :0]

    def bind(self, rows: Tensor) -> None:
        """Make the module a view of `rows [1, P]` (which costs nothing when it is one already)."""
        row = rows[0]
        if self._row is None or self._row.data_ptr() != row.data_ptr():
            self.layout.bind(self.module, row)
        self._row = row

    def gradient(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Loss `[k]` and its gradient `[k, T]` at `rows [k, P]`; the gradient is a buffer that the next call overwrites.
        Statistics in `rows[:, T:]` move as training mode moves them."""
        loss, gradients = self.tensor_gradients(rows, batch, loss_fn, context)
        buffer = self._gradient[: len(rows)]
        if len(gradients) == len(self._slices):
            # One pass. Letting autograd add into views of the buffer would clear, read and write it once more.
            torch.cat(self._as_rows(gradients), 1, out=buffer)
        else:
            buffer.zero_()
            for part, gradient in zip(self._moving, self._as_rows(gradients), strict=True):
                buffer[:, part.slice] = gradient
        return loss, buffer

    def partial_gradient(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Loss `[k]` and the gradient of what `train_only` left, its slices side by side, `[k, n]`."""
        loss, gradients = self.tensor_gradients(rows, batch, loss_fn, context)
        return loss, torch.cat(self._as_rows(gradients), 1)

    def _as_rows(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(gradients, self._moving, strict=True)
        return [gradient.reshape(-1, part.stop - part.start) for gradient, part in pairs]

    def pieces(self, rows: Tensor) -> list[Tensor]:
        """The parameters that train, as views `[k, ...]` of `rows [k, T or more]`; `tensor_gradients` gives one gradient each."""
        return [piece(rows, part) for part in self._moving]

    def folded(self, settings: Training, rate: float) -> FoldedStep | None:
        """A whole step of SGD on the data loss in one function, if there is one for this module and these settings."""
        return None

    def heeds_share(self, loss_fn: LossFn) -> bool:
        """Whether gradients of this loss heed `Batch.share`, so that batches may hold padding."""
        return False

    def tensor_gradients(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Mapping[str, Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Loss `[k]` and the gradient of every tensor of `pieces(rows)`, zero for one that the loss does not use. Gradients may
        share memory: they are not to be changed in place."""
        self.bind(rows)
        one = Batch(self._laid_out(batch.inputs[0]), batch.labels[0], batch.step)
        compiled = self._compiled_for(batch, loss_fn)
        if compiled is not None:
            return self._by_compiled(compiled, one)
        with autocast(self.autocast, rows.device):
            loss = loss_fn(self.net, one, {name: value[0] for name, value in context.items()})
        trained = [p for p in self._parameters if p.requires_grad]
        gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
        return loss.detach().to(rows).unsqueeze(0), [gradient.unsqueeze(0) for gradient in gradients]

    def sample_gradients(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The loss `[b]` of each sample of one client's batch, as if alone in it, and its gradient `[b, n]`. By `vmap`, or
        one after the other where an operation does not take that."""
        held, own = self.layout.tensors(rows[0].detach()), {name: value[0] for name, value in context.items()}

        def loss_of_one(trained: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
            net = CalledNet(self.module, self.layout, {**held, **trained}, self.frozen, self.objective)
            return loss_fn(net, Batch(inputs.unsqueeze(0), labels.unsqueeze(0), batch.step), own)

        trained = {part.name: held[part.name] for part in self._moving}
        try:
            each = vmap(grad_and_value(loss_of_one), (None, 0, 0), randomness="different")
            with stacked_autocast(self.autocast), no_loop_in_vmap():
                found, losses = each(trained, batch.inputs[0], batch.labels[0])
            return losses.to(rows), torch.cat([found[name].flatten(1) for name in trained], 1)
        except RuntimeError:
            singles = zip(batch.inputs.split(1, 1), batch.labels.split(1, 1), strict=True)
            pairs = [
                self.tensor_gradients(rows, Batch(inputs, labels, batch.step), loss_fn, context)
                for inputs, labels in singles
            ]
            gradients = [torch.cat(self._as_rows(gradients), 1) for _, gradients in pairs]
            return torch.cat([loss for loss, _ in pairs]), torch.cat(gradients)

    def compile_for(self, batch_size: int | None, notice: Callable[[str], None]) -> None:
        """Have the data loss and its gradient on batches of so many samples compiled, and others not (None: none at all).
        Which steps are compiled depends on their shape alone, so that a run can be repeated bit for bit. `notice` is told of
        compiled steps that are left out, since they differ from the others."""
        if batch_size is None:
            self._compiled = None
        elif self._compiled is None or self._compiled.batch_size != batch_size:
            module = self.layout.shell(self.original).train()
            self._compiled = CompiledGradient(module, batch_size, self.objective.loss, notice)

    def _compiled_for(self, batch: Batch, loss_fn: LossFn) -> CompiledGradient | None:
        """The compiled loss and gradient for batches of this shape, if there are any."""
        compiled = self._compiled
        if compiled is None or loss_fn is not data_loss or self.autocast is not None:
            return None
        return compiled if batch.labels.shape[1] == compiled.batch_size else None

    def _by_compiled(self, compiled: CompiledGradient, one: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        tensors = self.layout.unfrozen_tensors(self.module)
        trained = {name: tensors.pop(name) for name, p in list(tensors.items()) if p.requires_grad}
        loss, gradients, after = compiled(trained, tensors, one.inputs, one.labels, stacked=False)
        for name, tensor in after.items():
            tensors[name].detach().copy_(tensor)
        return loss.unsqueeze(0), [gradient.unsqueeze(0) for gradient in gradients]

    def _laid_out(self, inputs: Tensor) -> Tensor:
        """Images `[b, c, h, w]` in the memory format in which convolutions are fastest here; filters keep that of the row."""
        return channels_last(inputs) if self.shortcuts.channels_last and inputs.dim() == 4 else inputs

    def train_only(self, units: Unit | None) -> None:
        """Let gradients reach only the parameters inside `units` (None: all), so that backward goes no deeper."""
        pairs = list(zip(self._parameters, self._slices, strict=True))
        for parameter, part in pairs:
            parameter.requires_grad_(units is None or any(u.start <= part.start and part.stop <= u.stop for u in units))
        self._moving = tuple(part for parameter, part in pairs if parameter.requires_grad)

    @torch.no_grad()
    def features(self, rows: Tensor, inputs: Tensor) -> Tensor | None:
        """What enters the classifier in training mode, `[1, n, ...]` for `inputs [1, n, ...]`.

        None where that is not a function of each sample alone: a layer draws, normalises by the batch or keeps statistics; and
        where the classifier is not the model's last operation.
        """
        if self.needs_pairs or self.layout.trainable < self.layout.size or self.layout.integers:
            return None
        self.bind(rows)
        with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
            before = generator_state(rows)
            features, logits = self.net.both(self._laid_out(inputs[0]))
            drawn = not torch.equal(before, generator_state(rows))
        whole = isinstance(logits, Tensor) and not drawn and torch.equal(self.net.head(features), logits)
        return features.unsqueeze(0) if whole else None

    @torch.no_grad()
    def outputs(self, row: Tensor, inputs: Tensor) -> Any:
        """What the model `row [P]` puts out in evaluation mode for `inputs [b, ...]`."""
        self.layout.bind(self.frozen, row)
        return self.frozen(self._laid_out(inputs))

    def load_integers(self, integers: Tensor) -> None:
        """Restore the integer buffers from `[1, Z]`."""
        self.layout.load_integers(self.module, integers[0])

    def integers(self) -> Tensor:
        """The integer buffers, `[1, Z]`."""
        return self.layout.flatten_integers(self.module).unsqueeze(0)


def piece(rows: Tensor, part: TensorSlice) -> Tensor:
    """A view of one tensor of every row, `[k, *shape]`."""
    return rows[:, part.slice].view(len(rows), *part.shape)


@torch.no_grad()
def convolutions_weigh_little(module: nn.Module, image: Tensor) -> bool:
    """Whether the module has 2d convolutions with few weights compared with their outputs for one image `[1, c, h, w]`. On a CPU
    these are faster in channels-last memory format, which each layer hands on to the next."""
    convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    if not convolutions:
        return False
    put_out = 0

    def note(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        nonlocal put_out
        put_out += output.numel()

    handles = [part.register_forward_hook(note) for part in convolutions]
    try:
        with torch.random.fork_rng(devices=[]):
            module(image)
    finally:
        for handle in handles:
            handle.remove()
    return sum(part.weight.numel() for part in convolutions) <= FILTERS_PER_ACTIVATION * put_out


def generator_state(tensor: Tensor) -> Tensor:
    """The state of torch's global generator for the tensor's device."""
    return torch.cuda.get_rng_state(tensor.device) if tensor.is_cuda else torch.get_rng_state()


def channels_last(images: Tensor) -> Tensor:
    """`[b, c, h, w]` in channels-last memory format. For one channel the formats differ in the strides alone, which are set."""
    height, width = images.shape[2:]
    if images.shape[1] == 1 and images.is_contiguous():
        return images.as_strided(images.shape, (height * width, 1, width, 1), images.storage_offset())
    return images.contiguous(memory_format=torch.channels_last)


@contextmanager
def no_loop_in_vmap() -> Iterator[None]:
    """Inside, `vmap` raises where it would take its rows one by one, slower than without it."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)
