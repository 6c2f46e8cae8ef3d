"""Conversion of modules to rows of floats and back, and the slices of layers in a row.

A row contains all tensors that training may change: first the trainable parameters, `[0:T]`, then
floating-point buffers such as batch-norm statistics, `[T:P]`. Integer and boolean buffers cannot be
averaged. They form a separate row of int64.

All other tensors of a module are frozen and in no row: parameters without `requires_grad`, of any
type; buffers that are not persistent; and the buffers of modules that `model.train()` leaves in
evaluation mode. Copies of the module share its frozen parameters.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from fedloom.common.digest import Digest
from fedloom.common.errors import InvalidValue, quoted
from fedloom.models.structure import copied, layer_finder

Unit = tuple[slice, ...]
"""Slices of a row that belong together, such as the tensors of a layer."""

UnitKind = Literal["layer", "tensor", "segment"]


@dataclass(frozen=True)
class TensorSlice:
    """Position of one tensor of a module in a row.

    Attributes:
        name: Name of the tensor in `named_parameters` or `named_buffers`.
        layer: Name of its layer: the module that owns it, or a module around this one that counts
            as one layer (`models.structure.layer_finder`).
        shape: Shape of the tensor.
        dtype: Type of the tensor in the module.
        start: First position in the row.
        stop: Position after the last one.
    """

    name: str
    layer: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int

    @cached_property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class Layout:
    """Maps modules of one architecture to rows and back.

    Attributes:
        size: P, the length of a row.
        trainable: T, the number of trainable values at the beginning of a row.
        slices: One entry per floating-point tensor, in the order of the row.
        integer_slices: One entry per integer or boolean buffer, with offsets into the integer row.
        integers: Z, the length of the integer row.
        frozen: Names of the tensors that are in neither row.
        layers: Names of the layers, in the order of the module.
        dtype: float32 or float64, the type of all tensors of the row. Frozen parameters may have
            any type.

    Raises:
        InvalidValue: If the module has no trainable parameter, or the tensors of a row have
            several types or a type other than float32 and float64.
    """

    def __init__(self, module: nn.Module) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise InvalidValue(f"{type(module).__name__} has no trainable parameter")
        buffers = _trained_buffers(module)
        discrete = {
            name: buffer
            for name, buffer in buffers.items()
            if not (buffer.is_floating_point() or buffer.is_complex())
        }
        continuous = {
            **trained,
            **{name: buffer for name, buffer in buffers.items() if name not in discrete},
        }
        self.frozen = tuple(
            name for name in _tensors(module) if name not in trained and name not in buffers
        )
        layer = layer_finder(module)
        self.slices = tuple(_consecutive(continuous, layer))
        self.integer_slices = tuple(_consecutive(discrete, layer))
        self.trainable = sum(
            entry.stop - entry.start for entry in self.slices if entry.name in trained
        )
        self.size = self.slices[-1].stop
        self.integers = self.integer_slices[-1].stop if self.integer_slices else 0
        wide = any(tensor.dtype == torch.float64 for tensor in continuous.values())
        self.dtype = torch.float64 if wide else torch.float32
        for entry in self.slices:
            if entry.dtype != self.dtype:
                kind, rows = (
                    str(dtype).removeprefix("torch.") for dtype in (entry.dtype, self.dtype)
                )
                raise InvalidValue(
                    f"tensor {entry.name!r} of the model is {kind}, but the other trained tensors "
                    f"are {rows}: convert them, so that all are float32 or all are float64"
                )
        owners = {entry.layer for entry in self.slices}
        self.layers = tuple(name for name, _ in module.named_modules() if name in owners)

    @property
    def row_bytes(self) -> int:
        return self.size * self.dtype.itemsize

    def flatten(self, module: nn.Module) -> Tensor:
        """Return a new row `[P]` of the module's floating-point tensors, on the module's device."""
        return self._row(module, self.slices, self.size, self.dtype)

    def flatten_integers(self, module: nn.Module) -> Tensor:
        """Return the module's integer and boolean buffers as a new row `[Z]` of int64."""
        return self._row(module, self.integer_slices, self.integers, torch.int64)

    def _row(
        self, module: nn.Module, slices: tuple[TensorSlice, ...], size: int, dtype: torch.dtype
    ) -> Tensor:
        tensors = _tensors(module)
        row = torch.empty(size, dtype=dtype, device=tensors[self.slices[0].name].device)
        for entry in slices:
            row[entry.slice].copy_(tensors[entry.name].detach().reshape(-1))
        return row

    def frozen_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the module's frozen tensors by name."""
        tensors = _tensors(module)
        return {name: tensors[name] for name in self.frozen}

    def frozen_digest(self, module: nn.Module) -> str:
        """Return a digest of the frozen tensors, or "" without frozen tensors."""
        digest = Digest()
        for name, tensor in self.frozen_tensors(module).items():
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
        return digest.hexdigest() if self.frozen else ""

    @torch.no_grad()
    def load(self, module: nn.Module, row: Tensor, integers: Tensor | None = None) -> None:
        """Copy a row into the module.

        Args:
            module: A module of this architecture.
            row: Floating-point tensors, `[P]`.
            integers: Integer and boolean buffers, `[Z]`. None leaves them unchanged.

        Raises:
            InvalidValue: If the row has another length.
        """
        if row.shape != (self.size,):
            raise InvalidValue(
                f"a row of this model must have shape [{self.size}], got {list(row.shape)}"
            )
        tensors = _tensors(module)
        for entry in self.slices:
            tensors[entry.name].copy_(row[entry.slice].view(entry.shape))
        if integers is not None:
            self.load_integers(module, integers)

    @torch.no_grad()
    def load_integers(self, module: nn.Module, integers: Tensor) -> None:
        """Copy an integer row into the module.

        Args:
            module: A module of this architecture.
            integers: Integer and boolean buffers, `[Z]`.
        """
        tensors = _tensors(module)
        for entry in self.integer_slices:
            tensors[entry.name].copy_(integers[entry.slice].view(entry.shape))

    def tensors(self, row: Tensor) -> dict[str, Tensor]:
        """Return the tensors in a row `[P]` as views by name, for `torch.func.functional_call`."""
        return {entry.name: row[entry.slice].view(entry.shape) for entry in self.slices}

    def bind(self, module: nn.Module, row: Tensor) -> None:
        """Make all floating-point tensors of a module views of a row.

        Training of the module then changes the row.

        Args:
            module: Result of `shell`.
            row: The row, `[P]`.
        """
        tensors = _tensors(module)
        for entry in self.slices:
            tensors[entry.name].data = row[entry.slice].view(entry.shape)

    def shell(self, module: nn.Module) -> nn.Module:
        """Return a copy of the module for `bind`.

        Before it is bound, it shares the module's tensors and must not train.
        """
        require_no_tensor_hooks(module)
        tensors = _tensors(module)
        shared = {id(tensors[entry.name]): _alias(tensors[entry.name]) for entry in self.slices}
        return self.copy(module, shared)

    def copy(self, module: nn.Module, shared: dict[int, Tensor] | None = None) -> nn.Module:
        """Return a copy of the module that shares its frozen parameters.

        Args:
            module: The module.
            shared: Tensors of the copy that are not copied, by the ids of the module's tensors.

        Returns:
            The copy, with its own trainable parameters and buffers.
        """
        frozen = {
            id(tensor): tensor
            for tensor in self.frozen_tensors(module).values()
            if isinstance(tensor, nn.Parameter)
        }
        return copied(module, {**frozen, **(shared or {})})

    def units(self, kind: UnitKind = "layer", fraction: float = 1.0) -> list[Unit]:
        """Return the units of a row, for recombination as in FedMR.

        Args:
            kind: `layer` for one unit per layer, `tensor` for one unit per tensor, `segment` for
                units of consecutive layers.
            fraction: Share x of the N layers in a segment, in (0, 1]. Layer j (from 1) belongs to
                segment ceil(j / (x N)).

        Returns:
            Units from the first layer to the last. Together they cover the row.

        Raises:
            InvalidValue: If the kind or the fraction is not allowed.

        Source: FedMR (KDD'24), section 5.
        """
        if kind == "tensor":
            return [(entry.slice,) for entry in self.slices]
        if kind == "layer":
            return [self._layer_unit({layer}) for layer in self.layers]
        if kind != "segment":
            raise InvalidValue(f"unit must be 'layer', 'tensor' or 'segment', got {quoted(kind)}")
        if not 0 < fraction <= 1:
            raise InvalidValue(f"fraction must be in (0, 1], got {fraction}")
        count = len(self.layers)
        # The subtraction corrects rounding: 3 / (0.1 * 30) must give 1, not 1.0000001.
        segments: dict[int, set[str]] = {}
        for j, layer in enumerate(self.layers, start=1):
            segments.setdefault(math.ceil(j / (fraction * count) - 1e-9), set()).add(layer)
        return [self._layer_unit(layers) for layers in segments.values()]

    def _layer_unit(self, layers: set[str]) -> Unit:
        """Return the slices of the tensors of these layers."""
        return self.unit(lambda entry: entry.layer in layers)

    def unit(self, belongs: Callable[[TensorSlice], bool]) -> Unit:
        """Return the slices of tensors for which `belongs` is true. Adjacent slices are merged."""
        merged: list[slice] = []
        for entry in self.slices:
            if not belongs(entry):
                continue
            if merged and merged[-1].stop == entry.start:
                merged[-1] = slice(merged[-1].start, entry.stop)
            else:
                merged.append(entry.slice)
        return tuple(merged)


def require_copyable(module: nn.Module) -> None:
    """Raise `InvalidValue` for a module that cannot be copied for clients."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise InvalidValue(f"{kind} is compiled by TorchScript: pass the original module instead")
    if torch.is_inference_mode_enabled():
        raise InvalidValue(
            "models cannot train inside torch.inference_mode(): leave the block first"
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        remedy = "leave the block, and set autocast = 'bfloat16' in the training settings"
        raise InvalidValue(f"models cannot train inside torch.autocast(): {remedy}")
    for name, tensor in _tensors(module).items():
        if nn.parameter.is_lazy(tensor):
            raise InvalidValue(
                f"{name!r} of the model has no shape yet: pass a batch through it first"
            )
        if tensor.is_meta:
            raise InvalidValue(
                f"{name!r} of the model is on the device meta: load its weights first"
            )
        if tensor.is_inference():
            remedy = "build the model outside torch.inference_mode()"
            raise InvalidValue(f"{name!r} of the model is an inference tensor: {remedy}")
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                remedy = "use torch.nn.utils.parametrizations, or prune.remove"
                computed = f"{path}.{name}".lstrip(".")
                raise InvalidValue(
                    f"{computed!r} of the model is computed from its parameters, such as by "
                    f"torch.nn.utils.weight_norm or prune: {remedy}"
                )
    require_no_tensor_hooks(module)


def require_no_tensor_hooks(module: nn.Module) -> None:
    """Raise `InvalidValue` for a parameter with a hook, because copies of the module lose hooks."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InvalidValue(
                f"parameter {name!r} of the model has a hook, but copies of the model lose hooks "
                "of parameters: use register_full_backward_hook of its module"
            )


def _alias(tensor: Tensor) -> Tensor:
    """Return another tensor with the same storage. Binding it does not change the original."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _trained_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that training may change.

    They are persistent, and belong to modules that `train()` puts into training mode.
    """
    modes = {submodule: submodule.training for submodule in module.modules()}
    module.train()
    frozen = {name for name, submodule in module.named_modules() if not submodule.training}
    for submodule, mode in modes.items():
        submodule.training = mode
    transient = {
        f"{name}.{buffer}".lstrip(".")
        for name, submodule in module.named_modules()
        for buffer in submodule._non_persistent_buffers_set
    }
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name not in transient and name.rpartition(".")[0] not in frozen
    }


def _consecutive(tensors: dict[str, Tensor], layer: Callable[[str], str]) -> Iterator[TensorSlice]:
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel()
        yield TensorSlice(name, layer(name), tensor.shape, tensor.dtype, start, stop)
        start = stop
