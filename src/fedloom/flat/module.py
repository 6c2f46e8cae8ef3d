"""A module that trains on rows: its parameters are views of one flat buffer, its gradients of
another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedloom.errors import GRAPH_IS_GONE, InvalidValue, error_text
from fedloom.flat.intact import IntactInputs
from fedloom.flat.layout import Layout, TensorSlice, Unit
from fedloom.flat.vmap_modes import autocast, stacked_autocast
from fedloom.models.structure import head_name, smallest_batch
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.randomness import preserved_generator
from fedloom.training import Training

Rows = slice | Tensor
"""A selection of the rows of `[k, ...]`."""


class Batch(NamedTuple):
    """One step's samples of one client (`inputs [b, ...]`, `labels [b]`), or of k clients with a
    leading client axis.
    """

    inputs: Tensor
    labels: Tensor
    step: int = 0  # index of the step in this training; if clients' steps differ, the smallest
    # rows of the cohort's clients that the samples belong to; None for all
    clients: Rows | None = None
    share: Tensor | None = None  # `[k, b]`, each sample's share of its client's mean: 0 for padding


@dataclass(eq=False)
class Net:
    """One client's model as its loss sees it: a module that holds the weights, or is called with
    the `tensors` of a row.

    Attributes:
        objective: The task's objective: `objective.loss(outputs, labels)` is the mean loss of a
            batch.
        intact: Keeps the batch as it is where the module changes its input in place.
    """

    module: nn.Module
    layout: Layout
    frozen: nn.Module
    objective: Objective
    tensors: Mapping[str, Tensor] | None = None
    intact: IntactInputs = field(default_factory=IntactInputs)

    def __post_init__(self) -> None:
        self.classifier: nn.Module = self.module.get_submodule(head_name(self.module))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs, such as logits `[b, classes]`."""
        forward = self.module if self.tensors is None else partial(self._outputs, self.module, "")
        outputs: Tensor = self.intact.call(forward, inputs, self.module.training)
        return outputs

    def head(self, features: Tensor) -> Tensor:
        """Return the classifier's outputs for features."""
        return self._outputs(self.classifier, head_name(self.module), features)

    def _outputs(self, module: nn.Module, name: str, inputs: Tensor) -> Tensor:
        outputs: Tensor
        if self.tensors is None:
            outputs = module(inputs)
        else:
            prefix = f"{name}." if name else ""
            weights = {
                key.removeprefix(prefix): t
                for key, t in self.tensors.items()
                if key.startswith(prefix)
            }
            outputs = functional_call(module, weights, (inputs,))
        return outputs

    def both(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features that enter the classifier and the model's outputs, from one forward
        pass.
        """
        features: list[Tensor] = []
        handle = self.classifier.register_forward_pre_hook(
            lambda _, arguments: features.append(arguments[0])
        )
        try:
            outputs = self(inputs)
        finally:
            handle.remove()
        if not features:
            name = head_name(self.module)
            raise InvalidValue(
                f"the model does not call its classifier {name!r}: "
                "set its attribute head to the name of the layer that gives the outputs"
            )
        return features[0], outputs

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Net":
        """Return the same model with other weights."""
        return replace(self, tensors=tensors)

    def at(self, row: Tensor) -> "Net":
        """Return the same architecture with the weights of `row [P]`, in evaluation mode and
        without gradients to its weights.
        """
        tensors = self.layout.tensors(row.detach())
        return Net(self.frozen, self.layout, self.frozen, self.objective, tensors, self.intact)


FILTERS_PER_ACTIVATION = 8
"""Convolution weights per output number of a sample, above which channels stay first on a CPU:
turning the filters in every step would cost more than the images gain (ResNet-20 on CIFAR: 1.4;
VGG-16: 53).
"""

Context = Mapping[str, Tensor]
"""Named tensors that a method passes to its hooks, with one row a client, `[k, ...]`."""

LossFn = Callable[[Net, Batch, Context], Tensor]
"""One client's loss: (net, batch, the client's row of each tensor of the context) -> a scalar."""

FoldedStep = Callable[[Tensor, Tensor | None, Batch], Tensor]
"""(rows `[k, P]`, velocity `[k, T]` with momentum, batch) -> loss `[k]`: forward, backward and
update at once.
"""


def data_loss(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return the loss of the task's objective on the batch."""
    return net.objective.loss(net(batch.inputs), batch.labels)


def head_loss(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return the same for a batch of features that enter the classifier (`Cohort.for_classifier`)."""
    return net.objective.loss(net.head(batch.inputs), batch.labels)


@dataclass(frozen=True)
class Shortcuts:
    """Faster ways to compute a local step that were compared with the plain way and may be taken
    (`prove`).
    """

    channels_last: bool = False  # channels-last memory format for images
    linear: bool = False  # linear layers' gradients are products, into which plain SGD is folded
    joint_optimizer: bool = False  # one optimizer of torch moves all rows of a stack


PLAIN = Shortcuts()
"""No shortcut."""


class FlatModule:
    """One copy of the task's module, reused for every client that trains in this process, one at a
    time.

    The `rows [1, P]` given to `gradient` are trained in place: the module's parameters and
    statistics are views of them, while frozen parameters are those of the task's module. So a
    client's model costs one copy of its row, and an optimizer one tensor.

    Args:
        module: The task's module, which stays as it is.
        layout: Its layout.
        shortcuts: Faster ways that may be taken.
        autocast: Type of the forward pass and the loss, in operations that tolerate it; None for
            the weights' type.
        objective: What is learned.

    Attributes:
        watch: Takes each local step of SGD, the rows that it moves and its group of clients to the
            step to take instead.
    """

    watch: Callable[[Callable[[Batch], Tensor], Tensor, Any], Callable[[Batch], Tensor]] | None = (
        None
    )

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        shortcuts: Shortcuts = PLAIN,
        autocast: torch.dtype | None = None,
        objective: Objective = CLASSIFICATION,
    ) -> None:
        self.layout, self.shortcuts, self.autocast, self.objective = (
            layout,
            shortcuts,
            autocast,
            objective,
        )
        self.original = module
        self.module = layout.shell(module).train()
        self.frozen = layout.shell(module).eval().requires_grad_(False)
        self.net = Net(self.module, layout, self.frozen, objective)
        trained = (layer for layer in self.module.modules() if layer.training)
        self.needs_pairs = any(
            isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in trained
        )
        self._smallest_batch = 0 if self.needs_pairs else 1  # 0: not known yet
        self._row: Tensor | None = None
        self._head_gives_outputs: bool | None = None
        self._gradient = torch.zeros(
            1, layout.trainable, dtype=layout.dtype, device=next(module.parameters()).device
        )
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._slices = layout.slices[: len(self._parameters)]
        buffers = dict(self.module.named_buffers())
        self._buffers = [
            (*self._owner(entry.name), buffers[entry.name], entry)
            for entry in layout.slices
            if entry.start >= layout.trainable and entry.name in buffers
        ]
        self._moving = self._slices  # of the parameters that train

    @cached_property
    def initial(self) -> Tensor:
        """The model that the task starts from, `[P]`."""
        return self.layout.flatten(self.original)

    def smallest_batch(self, empty: Tensor) -> int:
        """Return the fewest samples with which the module can train.

        Args:
            empty: No inputs, `[0, ...]`, with the shape and type of the module's inputs.
        """
        if not self._smallest_batch:
            sample = empty.new_zeros(1, *empty.shape[1:])
            self._smallest_batch = smallest_batch(self.original, sample)
        return self._smallest_batch

    def bind(self, rows: Tensor) -> None:
        """Make the module a view of `rows [1, P]`, unless it is already."""
        row = rows[0]
        if self._row is None or self._row.data_ptr() != row.data_ptr():
            self.layout.bind(self.module, row)
        self._row = row

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """Return the submodule that owns a tensor, and the tensor's name in it."""
        path, _, attribute = name.rpartition(".")
        return self.module.get_submodule(path), attribute

    @torch.no_grad()
    def _keep_assigned(self, row: Tensor) -> None:
        """Copy buffers that the forward pass assigned anew into `row [P]`, and bind them again."""
        for owner, attribute, bound, entry in self._buffers:
            assigned = owner._buffers[attribute]
            if assigned is not bound and assigned is not None:
                row[entry.slice].copy_(assigned.reshape(-1))
                owner._buffers[attribute] = bound

    def gradient(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Return the loss `[k]` and its gradient `[k, T]`, valid until the next call. Statistics of
        `rows` are updated.
        """
        loss, gradients = self.tensor_gradients(rows, batch, loss_fn, context)
        buffer = self._gradient[: len(rows)]
        if len(gradients) == len(self._slices):
            # One pass. Letting autograd add into views of the buffer would clear, read and write it
            # once more.
            torch.cat(self._as_rows(gradients), 1, out=buffer)
        else:
            buffer.zero_()
            for entry, gradient in zip(self._moving, self._as_rows(gradients), strict=True):
                buffer[:, entry.slice] = gradient
        return loss, buffer

    def partial_gradient(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Return the loss `[k]` and the gradient of the parameters that train, side by side, `[k,
        n]`.
        """
        loss, gradients = self.tensor_gradients(rows, batch, loss_fn, context)
        return loss, torch.cat(self._as_rows(gradients), 1)

    def _as_rows(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(gradients, self._moving, strict=True)
        return [gradient.reshape(-1, entry.stop - entry.start) for gradient, entry in pairs]

    def pieces(self, rows: Tensor) -> list[Tensor]:
        """Return the parameters that train as views `[k, ...]` of `rows [k, T or more]`, in the
        order of `tensor_gradients`.
        """
        return [piece(rows, entry) for entry in self._moving]

    def folded(self, settings: Training, rate: float) -> FoldedStep | None:
        """Return a step of SGD on the data loss as one function, or None for other modules and
        settings.
        """
        return None

    def uses_share(self, loss_fn: LossFn) -> bool:
        """Return True if gradients of this loss respect `Batch.share`, so that batches may be
        padded.
        """
        return False

    def tensor_gradients(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Context
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the loss `[k]` and the gradient of each tensor of `pieces(rows)`, which may share
        memory.
        """
        self.bind(rows)
        client_batch = Batch(self._laid_out(batch.inputs[0]), batch.labels[0], batch.step)
        with autocast(self.autocast, rows.device):
            loss = loss_fn(
                self.net, client_batch, {name: value[0] for name, value in context.items()}
            )
        trained = [p for p in self._parameters if p.requires_grad]
        try:
            gradients = [
                gradient.to_dense() if gradient.is_sparse else gradient
                for gradient in torch.autograd.grad(loss, trained, materialize_grads=True)
            ]
        except RuntimeError as error:
            raise (
                InvalidValue(error_text(error)) if GRAPH_IS_GONE in str(error) else error
            ) from error
        if self._buffers:
            self._keep_assigned(rows[0])
        return loss.detach().to(rows).unsqueeze(0), [
            gradient.unsqueeze(0) for gradient in gradients
        ]

    def sample_gradients(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Return the loss `[b]` of each sample of a client's batch alone, and its gradient `[b,
        n]`, by `vmap` if it can.
        """
        tensors, client_context = (
            self.layout.tensors(rows[0].detach()),
            {n: value[0] for n, value in context.items()},
        )

        def loss_of_one(trained: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
            net = self.net.with_tensors({**tensors, **trained})
            return loss_fn(
                net, Batch(inputs.unsqueeze(0), labels.unsqueeze(0), batch.step), client_context
            )

        trained = {entry.name: tensors[entry.name] for entry in self._moving}
        try:
            of_samples = vmap(grad_and_value(loss_of_one), (None, 0, 0), randomness="different")
            with stacked_autocast(self.autocast), no_loop_in_vmap():
                by_name, losses = of_samples(trained, batch.inputs[0], batch.labels[0])
            return losses.to(rows), torch.cat(
                [by_name[name].reshape(len(losses), -1) for name in trained], 1
            )
        except RuntimeError:
            singles = zip(batch.inputs.split(1, 1), batch.labels.split(1, 1), strict=True)
            pairs = [
                self.tensor_gradients(rows, Batch(inputs, labels, batch.step), loss_fn, context)
                for inputs, labels in singles
            ]
            gradients = [torch.cat(self._as_rows(gradients), 1) for _, gradients in pairs]
            return torch.cat([loss for loss, _ in pairs]), torch.cat(gradients)

    def _laid_out(self, inputs: Tensor) -> Tensor:
        """Return images `[b, c, h, w]` in the memory format in which convolutions are fastest;
        filters keep that of the row.
        """
        return (
            channels_last(inputs) if self.shortcuts.channels_last and inputs.dim() == 4 else inputs
        )

    def train_only(self, units: Unit | None) -> None:
        """Let gradients reach only the parameters inside `units` (None: all), so that backward goes
        no deeper.
        """
        pairs = list(zip(self._parameters, self._slices, strict=True))
        for parameter, entry in pairs:
            inside = units is None or any(
                u.start <= entry.start and entry.stop <= u.stop for u in units
            )
            parameter.requires_grad_(inside)
        self._moving = tuple(entry for parameter, entry in pairs if parameter.requires_grad)

    @torch.no_grad()
    def features(self, rows: Tensor, inputs: Tensor) -> Tensor | None:
        """Return the features that enter the classifier, or None if they depend on more than each
        sample alone.
        """
        if self.needs_pairs or self.layout.trainable < self.layout.size or self.layout.integers:
            return None
        self.bind(rows)
        with preserved_generator(rows.device):
            state = generator_state(rows)
            features, logits = self.net.both(self._laid_out(inputs[0]))
            drawn = not torch.equal(state, generator_state(rows))
        suffice = (
            isinstance(logits, Tensor)
            and not drawn
            and torch.equal(self.net.head(features), logits)
        )
        return features.unsqueeze(0) if suffice else None

    @torch.no_grad()
    def head_gives_outputs(self, inputs: Tensor) -> bool:
        """Return True if the model's outputs are a tensor, and those of its classifier.

        Args:
            inputs: A batch of any numbers, `[b, ...]`. Only the first call computes with it.
        """
        if self._head_gives_outputs is None:
            net = self.net.at(self.initial)
            with preserved_generator(inputs.device):
                features, outputs = net.both(inputs)
                self._head_gives_outputs = isinstance(outputs, Tensor) and torch.allclose(
                    net.head(features), outputs, equal_nan=True
                )
        return self._head_gives_outputs

    @torch.no_grad()
    def outputs(self, row: Tensor, inputs: Tensor) -> Any:
        """Return the outputs of the model `row [P]` in evaluation mode for `inputs [b, ...]`."""
        self.layout.bind(self.frozen, row)
        return self.net.intact.call(self.frozen, self._laid_out(inputs))

    def load_integers(self, integers: Tensor) -> None:
        """Restore the integer buffers from `[1, Z]`."""
        self.layout.load_integers(self.module, integers[0])

    def integers(self) -> Tensor:
        """Return the integer buffers, `[1, Z]`."""
        return self.layout.flatten_integers(self.module).unsqueeze(0)


def piece(rows: Tensor, entry: TensorSlice) -> Tensor:
    """Return a view of one tensor of every row, `[k, *shape]`."""
    return rows[:, entry.slice].view(len(rows), *entry.shape)


@torch.no_grad()
def light_convolutions(module: nn.Module, image: Tensor) -> bool:
    """Return True if 2d convolutions have few weights for their outputs: these are faster with the
    channels last.
    """
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    if not convolutions:
        return False
    outputs = 0

    def count(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        nonlocal outputs
        outputs += output.numel()

    handles = [layer.register_forward_hook(count) for layer in convolutions]
    try:
        with preserved_generator():
            module(image.clone())
    finally:
        for handle in handles:
            handle.remove()
    return sum(layer.weight.numel() for layer in convolutions) <= FILTERS_PER_ACTIVATION * outputs


def generator_state(tensor: Tensor) -> Tensor:
    """Return the state of torch's global generator for the tensor's device."""
    return torch.cuda.get_rng_state(tensor.device) if tensor.is_cuda else torch.get_rng_state()


def channels_last(images: Tensor) -> Tensor:
    """Return `[b, c, h, w]` in channels-last memory format. With one channel the formats differ in
    the strides alone.
    """
    height, width = images.shape[2:]
    if images.shape[1] == 1 and images.is_contiguous():
        return images.as_strided(
            images.shape, (height * width, 1, width, 1), images.storage_offset()
        )
    return images.contiguous(memory_format=torch.channels_last)


@contextmanager
def no_loop_in_vmap() -> Iterator[None]:
    """Make `vmap` raise, inside the block, for operations that it would compute row by row, slower
    than without it.
    """
    functorch: Any = torch._C._functorch
    enabled = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(enabled)
