"""A module that trains rows: its parameters are views of a row, `[P]`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedloom.common.errors import GRAPH_IS_GONE, InvalidValue, error_text
from fedloom.common.randomness import preserved_generator
from fedloom.common.training import Training
from fedloom.flat.intact import IntactInputs
from fedloom.flat.layout import Layout, TensorSlice, Unit
from fedloom.flat.vmap_modes import autocast, stacked_autocast
from fedloom.models.structure import head_name, smallest_batch
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION

Rows = slice | Tensor
"""A selection of the rows of `[k, ...]`."""


class Batch(NamedTuple):
    """The samples of one step, for one client or for k clients with a leading client axis.

    Attributes:
        inputs: Inputs of the model, `[b, ...]` or `[k, b, ...]`.
        labels: Labels, `[b]` or `[k, b]`.
        step: Number of the step in this training. The smallest number if clients differ.
        clients: Rows of the clients in the cohort. None for all clients.
        share: Share of each sample in its client's mean, `[k, b]`. It is 0 for padding.
    """

    inputs: Tensor
    labels: Tensor
    step: int = 0
    clients: Rows | None = None
    share: Tensor | None = None


@dataclass(eq=False)
class Net:
    """The model of one client, for the loss function.

    Attributes:
        module: The module. Its own weights are used unless there are `tensors`.
        layout: Layout of the module.
        frozen: Copy of the module in evaluation mode, without gradients.
        objective: The task's objective: `objective.loss(outputs, labels)` is the mean loss of a
            batch.
        tensors: Weights by name, or None.
        intact: Protects the batch from modules that change their input in place.
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
                key.removeprefix(prefix): tensor
                for key, tensor in self.tensors.items()
                if key.startswith(prefix)
            }
            outputs = functional_call(module, weights, (inputs,))
        return outputs

    def both(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (inputs of the classifier) and the outputs of one forward pass.

        Args:
            inputs: Samples, `[b, ...]`.

        Returns:
            Features, `[b, ..., d]`, and outputs, `[b, ..., Y]`.

        Raises:
            InvalidValue: The model does not call its classifier.
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
                "set its attribute head to the name of the layer that returns the outputs"
            )
        return features[0], outputs

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Net":
        """Return the same model with other weights."""
        return replace(self, tensors=tensors)

    def at(self, row: Tensor) -> "Net":
        """Return the model with the weights `row [P]`, in evaluation mode and without gradients."""
        tensors = self.layout.tensors(row.detach())
        return Net(self.frozen, self.layout, self.frozen, self.objective, tensors, self.intact)


FILTERS_PER_ACTIVATION = 8
"""Largest number of convolution weights per output value for channels last on a CPU.

With more weights, the conversion of the filters in every step costs more than the images save.
ResNet-20 on CIFAR has 1.4, VGG-16 has 53.
"""

Context = Mapping[str, Tensor]
"""Tensors by name that a method passes to its hooks, with one row per client, `[k, ...]`."""

LossFn = Callable[[Net, Batch, Context], Tensor]
"""Loss of one client: (model, batch, the client's rows of the context) -> scalar."""

FoldedStep = Callable[[Tensor, Tensor | None], Callable[[Batch], Tensor]]
"""(rows `[k, P]`, velocity `[k, T]` or None) -> step, and step(batch) -> loss `[k]`.

A step consists of forward pass, backward pass and update of the rows.
"""


def data_loss(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return the loss of the task's objective on the batch.

    Args:
        net: The model of one client.
        batch: Samples, `[b, ...]`, and their targets.
        context: Not used; loss functions of methods get their tensors here.

    Returns:
        The mean loss of the batch, a scalar.
    """
    return net.objective.loss(net(batch.inputs), batch.labels)


def head_loss(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return the loss on a batch of features (`Cohort.for_classifier`).

    Args:
        net: The model of one client. Only its classifier is used.
        batch: Features, `[b, ..., d]`, and targets.
        context: Not used; loss functions of methods get their tensors here.

    Returns:
        The mean loss of the batch, a scalar.
    """
    return net.objective.loss(net.head(batch.inputs), batch.labels)


@dataclass(frozen=True)
class Shortcuts:
    """Faster ways to compute local steps. `prove` compares them with plain PyTorch.

    Attributes:
        channels_last: True to use the channels-last memory format for images.
        linear: True to train chains of linear layers without autograd.
        joint_optimizer: True if one optimizer of torch updates all rows of a stack.
    """

    channels_last: bool = False
    linear: bool = False
    joint_optimizer: bool = False


PLAIN = Shortcuts()
"""No shortcut."""


class FlatModule:
    """A copy of the task's module that trains all clients of this process, one after another.

    The module's parameters and statistics are views of `rows [1, P]`, so training changes the rows
    in place. Frozen parameters are shared with the task's module. Therefore the model of a client
    needs only the memory of its row, and an optimizer only one tensor.

    Args:
        module: The task's module. It is not changed.
        layout: Layout of the module.
        shortcuts: Faster ways that are allowed.
        autocast: Type of the forward pass and the loss, in operations that allow it. None for the
            type of the weights.
        objective: The task's objective.

    Attributes:
        watch: (local step, rows that it changes, group of clients) -> replacement of the step. None
            for no replacement.
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
        self.layout = layout
        self.shortcuts = shortcuts
        self.autocast = autocast
        self.objective = objective
        self.original = module
        self.module = layout.shell(module).train()
        self.frozen = layout.shell(module).eval().requires_grad_(False)
        self.net = Net(self.module, layout, self.frozen, objective)
        self.needs_pairs = any(
            isinstance(layer, nn.modules.batchnorm._BatchNorm)
            for layer in self.module.modules()
            if layer.training
        )
        self._smallest_batch = 0 if self.needs_pairs else 1  # 0: unknown
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
        self._trained_slices = self._slices

    @cached_property
    def initial(self) -> Tensor:
        """The initial model of the task, `[P]`."""
        return self.layout.flatten(self.original)

    def smallest_batch(self, empty: Tensor) -> int:
        """Return the smallest number of samples with which the module can train.

        Args:
            empty: Empty tensor with shape and type of the module's inputs, `[0, ...]`.
        """
        if not self._smallest_batch:
            sample = empty.new_zeros(1, *empty.shape[1:])
            self._smallest_batch = smallest_batch(self.original, sample)
        return self._smallest_batch

    def bind(self, rows: Tensor) -> None:
        """Make the tensors of the module views of `rows [1, P]`."""
        row = rows[0]
        if self._row is None or self._row.data_ptr() != row.data_ptr():
            self.layout.bind(self.module, row)
        self._row = row

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """Return the submodule of a tensor, and the tensor's name in the submodule."""
        path, _, attribute = name.rpartition(".")
        return self.module.get_submodule(path), attribute

    @torch.no_grad()
    def _store_assigned(self, row: Tensor) -> None:
        """Copy buffers that the forward pass has replaced into `row [P]`, and bind them again."""
        for owner, attribute, bound, entry in self._buffers:
            assigned = owner._buffers[attribute]
            if assigned is not bound and assigned is not None:
                row[entry.slice].copy_(assigned.reshape(-1))
                owner._buffers[attribute] = bound

    def gradient(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and its gradient, which the next call overwrites.

        Args:
            rows: Models, `[k, P]`. Their statistics are updated.
            batch: Samples, `[k, b, ...]`.
            loss_fn: Loss of one client.
            context: Tensors for the loss by name, `[k, ...]`.

        Returns:
            Losses `[k]` and gradients `[k, T]`.
        """
        loss, gradients = self.tensor_gradients(rows, batch, loss_fn, context)
        buffer = self._gradient[: len(rows)]
        if len(gradients) == len(self._slices):
            # One pass over the buffer. If autograd added into views of it, the buffer would be
            # cleared, read and written once more.
            torch.cat(self._as_rows(gradients), 1, out=buffer)
        else:
            buffer.zero_()
            for entry, gradient in zip(self._trained_slices, self._as_rows(gradients), strict=True):
                buffer[:, entry.slice] = gradient
        return loss, buffer

    def partial_gradient(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient of the trained parameters only.

        Args:
            rows: Models, `[k, P]`. Their statistics are updated.
            batch: Samples, `[k, b, ...]`.
            loss_fn: Loss of one client.
            context: Tensors for the loss by name, `[k, ...]`.

        Returns:
            Losses `[k]`, and gradients of the n trained values, `[k, n]`.
        """
        loss, gradients = self.tensor_gradients(rows, batch, loss_fn, context)
        return loss, torch.cat(self._as_rows(gradients), 1)

    def _as_rows(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(gradients, self._trained_slices, strict=True)
        return [gradient.reshape(-1, entry.stop - entry.start) for gradient, entry in pairs]

    def pieces(self, rows: Tensor) -> list[Tensor]:
        """Return the trained parameters as views `[k, ...]` of `rows [k, T or more]`.

        They have the order of `tensor_gradients`.
        """
        return [piece(rows, entry) for entry in self._trained_slices]

    def folded(self, settings: Training, rate: float) -> FoldedStep | None:
        """Return a step of SGD on the data loss as one function, if there is one.

        Args:
            settings: Settings of local training.
            rate: Learning rate.

        Returns:
            The step, or None for modules and settings without such a function.
        """
        return None

    def uses_share(self, loss_fn: LossFn) -> bool:
        """Return True if gradients of this loss use `Batch.share`, so that padding is allowed."""
        return False

    def tensor_gradients(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Context
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the loss and the gradient of each trained tensor.

        Args:
            rows: Models, `[k, P]`. Their statistics are updated.
            batch: Samples, `[k, b, ...]`.
            loss_fn: Loss of one client.
            context: Tensors for the loss by name, `[k, ...]`.

        Returns:
            Losses `[k]`, and the gradient of each tensor of `pieces(rows)`, `[k, ...]`. Gradients
            may share memory.

        Raises:
            InvalidValue: The loss uses the graph of an earlier step.
        """
        self.bind(rows)
        client_batch = Batch(self._in_fastest_layout(batch.inputs[0]), batch.labels[0], batch.step)
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
            if GRAPH_IS_GONE in str(error):
                raise InvalidValue(error_text(error)) from error
            raise
        if self._buffers:
            self._store_assigned(rows[0])
        gradients = [gradient.unsqueeze(0) for gradient in gradients]
        return loss.detach().to(rows).unsqueeze(0), gradients

    def sample_gradients(
        self, rows: Tensor, batch: Batch, loss_fn: LossFn, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient of each sample of a client's batch.

        It uses `vmap` if the model supports it. Otherwise it computes sample by sample.

        Args:
            rows: Model of the client, `[1, P]`.
            batch: Samples, `[1, b, ...]`.
            loss_fn: Loss of one client.
            context: Tensors for the loss by name, `[1, ...]`.

        Returns:
            Losses `[b]`, and gradients of the n trained values, `[b, n]`.
        """
        tensors = self.layout.tensors(rows[0].detach())
        client_context = {name: value[0] for name, value in context.items()}

        def sample_loss(trained: Mapping[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
            net = self.net.with_tensors({**tensors, **trained})
            sample = Batch(inputs.unsqueeze(0), labels.unsqueeze(0), batch.step)
            return loss_fn(net, sample, client_context)

        trained = {entry.name: tensors[entry.name] for entry in self._trained_slices}
        try:
            differentiate = vmap(grad_and_value(sample_loss), (None, 0, 0), randomness="different")
            with stacked_autocast(self.autocast), no_loop_in_vmap():
                by_name, losses = differentiate(trained, batch.inputs[0], batch.labels[0])
            columns = [by_name[name].reshape(len(losses), -1) for name in trained]
            return losses.to(rows), torch.cat(columns, 1)
        except RuntimeError:
            samples = zip(batch.inputs.split(1, 1), batch.labels.split(1, 1), strict=True)
            pairs = [
                self.tensor_gradients(rows, Batch(inputs, labels, batch.step), loss_fn, context)
                for inputs, labels in samples
            ]
            gradients = [torch.cat(self._as_rows(gradients), 1) for _, gradients in pairs]
            return torch.cat([loss for loss, _ in pairs]), torch.cat(gradients)

    def _in_fastest_layout(self, inputs: Tensor) -> Tensor:
        """Return images `[b, c, h, w]` in channels-last format if this shortcut is allowed.

        Filters stay in the memory format of the row.
        """
        if self.shortcuts.channels_last and inputs.dim() == 4:
            return channels_last(inputs)
        return inputs

    def train_only(self, units: Unit | None) -> None:
        """Train only the parameters inside `units`, or all with None.

        The backward pass ends at the first of these parameters.
        """
        pairs = list(zip(self._parameters, self._slices, strict=True))
        for parameter, entry in pairs:
            inside = units is None or any(
                u.start <= entry.start and entry.stop <= u.stop for u in units
            )
            parameter.requires_grad_(inside)
        self._trained_slices = tuple(entry for parameter, entry in pairs if parameter.requires_grad)

    @torch.no_grad()
    def features(self, rows: Tensor, inputs: Tensor) -> Tensor | None:
        """Return the features (inputs of the classifier) of samples.

        Args:
            rows: Model, `[1, P]`.
            inputs: Samples, `[1, b, ...]`.

        Returns:
            Features, `[1, b, ...]`. None if the features of a sample depend on other values than
            the sample and the model, or if they are not enough to compute the outputs.
        """
        if self.needs_pairs or self.layout.trainable < self.layout.size or self.layout.integers:
            return None
        self.bind(rows)
        with preserved_generator(rows.device):
            state = generator_state(rows)
            features, logits = self.net.both(self._in_fastest_layout(inputs[0]))
            drawn = not torch.equal(state, generator_state(rows))
        sufficient = (
            isinstance(logits, Tensor)
            and not drawn
            and torch.equal(self.net.head(features), logits)
        )
        return features.unsqueeze(0) if sufficient else None

    @torch.no_grad()
    def head_gives_outputs(self, inputs: Tensor) -> bool:
        """Return True if the model returns the tensor of its classifier.

        Args:
            inputs: Batch of any values, `[b, ...]`. Only the first call uses it.
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
        """Return outputs in evaluation mode.

        Args:
            row: Model, `[P]`.
            inputs: Samples, `[b, ...]`.

        Returns:
            The model's outputs, usually `[b, Y]`, without gradients.
        """
        self.layout.bind(self.frozen, row)
        return self.net.intact.call(self.frozen, self._in_fastest_layout(inputs))

    def load_integers(self, integers: Tensor) -> None:
        """Restore the integer buffers from `[1, Z]`."""
        self.layout.load_integers(self.module, integers[0])

    def integers(self) -> Tensor:
        """Return the integer buffers, `[1, Z]`."""
        return self.layout.flatten_integers(self.module).unsqueeze(0)


def piece(rows: Tensor, entry: TensorSlice) -> Tensor:
    """Return a view of one tensor in all rows.

    Args:
        rows: The models, `[k, T or more]`.
        entry: Position of the tensor.

    Returns:
        The tensors, `[k, *shape]`.
    """
    return rows[:, entry.slice].view(len(rows), *entry.shape)


@torch.no_grad()
def light_convolutions(module: nn.Module, image: Tensor) -> bool:
    """Return True if 2d convolutions are faster with channels last.

    Their number of weights must be small compared with their outputs (`FILTERS_PER_ACTIVATION`).

    Args:
        module: The model.
        image: One sample, `[1, c, h, w]`.

    Returns:
        False also for models without 2d convolutions.
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
    """Return images `[b, c, h, w]` in channels-last memory format."""
    height, width = images.shape[2:]
    # With one channel only the strides differ.
    if images.shape[1] == 1 and images.is_contiguous():
        return images.as_strided(
            images.shape, (height * width, 1, width, 1), images.storage_offset()
        )
    return images.contiguous(memory_format=torch.channels_last)


@contextmanager
def no_loop_in_vmap() -> Iterator[None]:
    """Raise errors for operations that `vmap` would compute row by row, inside the block.

    Such loops are slower than training without `vmap`.
    """
    functorch: Any = torch._C._functorch
    enabled = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(enabled)
