"""A model is a vector: any module to a row of floats and back without loss, and which slices of it
form a layer.

A row holds what training may change: the trainable parameters first, `[0:T]`, then floating-point
buffers such as batch-norm statistics, `[T:P]`. Buffers of integers and truth values cannot be
averaged; they form a separate row of int64.

The rest of a module is frozen and in no row: parameters without `requires_grad`, of any type;
buffers that are not persistent; and the buffers of modules that `model.train()` leaves in
evaluation mode. Copies of the module share its frozen parameters.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from fedloom.errors import InvalidValue, quoted
from fedloom.models.structure import copied, layer_finder
from fedloom.state.digest import Digest

Unit = tuple[slice, ...]
"""Slices of a row that are moved as one."""

UnitKind = Literal["layer", "tensor", "segment"]


@dataclass(frozen=True)
class TensorSlice:
    """Position of one tensor of a module in a row."""

    name: str  # as in `named_parameters` and `named_buffers`
    # the module that owns it, or the one around that if it counts as one layer
    # (`models.structure.layer_finder`)
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
        trainable: T, the count of trainable numbers, with which a row begins.
        slices: One entry per floating-point tensor, in the order of the row.
        integer_slices: One entry per other buffer, with offsets into the row of integers.
        integers: Z, the length of the row of integers.
        frozen: Names of the tensors that are in neither row.
        layers: Names of the layers, in the order of the module.
        dtype: float32 or float64, the type of every tensor of the row. Frozen parameters may be of
            any type.

    Raises:
        InvalidValue: The module has no trainable parameter, or tensors of a row are of several
            types or of another.
    """

    def __init__(self, module: nn.Module) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise InvalidValue(f"{type(module).__name__} has no trainable parameter")
        moved = _moved_buffers(module)
        discrete = {
            name: t for name, t in moved.items() if not (t.is_floating_point() or t.is_complex())
        }
        continuous = {
            **trained,
            **{name: tensor for name, tensor in moved.items() if name not in discrete},
        }
        self.frozen = tuple(
            name for name in _tensors(module) if name not in trained and name not in moved
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
                fault = f"tensor {entry.name!r} of the model is {kind}, and its other numbers are kept as {rows}"
                raise InvalidValue(
                    f"{fault}: models train where all numbers that move are float32, or all are float64"
                )
        owners = {entry.layer for entry in self.slices}
        self.layers = tuple(name for name, _ in module.named_modules() if name in owners)

    @property
    def row_bytes(self) -> int:
        return self.size * self.dtype.itemsize

    def flatten(self, module: nn.Module) -> Tensor:
        """Return the module's floating-point tensors as a new row `[P]`, on the device of its first
        parameter.
        """
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
        """Return the module's tensors that are in no row, by name."""
        tensors = _tensors(module)
        return {name: tensors[name] for name in self.frozen}

    def frozen_digest(self, module: nn.Module) -> str:
        """Return a digest of the frozen tensors; empty if there are none."""
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
            row: Its floating-point tensors, `[P]`.
            integers: Its other buffers, `[Z]`; left as they are without.

        Raises:
            InvalidValue: The row has another length.
        """
        if row.shape != (self.size,):
            raise InvalidValue(
                f"a row of this model has {self.size} numbers, not shape {list(row.shape)}"
            )
        tensors = _tensors(module)
        for entry in self.slices:
            tensors[entry.name].copy_(row[entry.slice].view(entry.shape))
        if integers is not None:
            self.load_integers(module, integers)

    @torch.no_grad()
    def load_integers(self, module: nn.Module, integers: Tensor) -> None:
        """Copy a row of integers into the module's integer and boolean buffers."""
        tensors = _tensors(module)
        for entry in self.integer_slices:
            tensors[entry.name].copy_(integers[entry.slice].view(entry.shape))

    def tensors(self, row: Tensor) -> dict[str, Tensor]:
        """Return views into a row `[P]`, by name, in each tensor's shape, for
        `torch.func.functional_call`.
        """
        return {entry.name: row[entry.slice].view(entry.shape) for entry in self.slices}

    def bind(self, module: nn.Module, row: Tensor) -> None:
        """Make every floating-point tensor of a `shell` a view of `row [P]`, so that training moves
        the row itself.
        """
        tensors = _tensors(module)
        for entry in self.slices:
            tensors[entry.name].data = row[entry.slice].view(entry.shape)

    def shell(self, module: nn.Module) -> nn.Module:
        """Return a copy of the module to be bound to rows; until then it shares the module's
        tensors, and must not train.
        """
        require_no_tensor_hooks(module)
        tensors = _tensors(module)
        shared = {id(tensors[entry.name]): _alias(tensors[entry.name]) for entry in self.slices}
        return self.copy(module, shared)

    def copy(self, module: nn.Module, shared: dict[int, Tensor] | None = None) -> nn.Module:
        """Return a copy that shares the frozen parameters, and the tensors that `shared` gives by
        ids of those they replace.
        """
        frozen = {
            id(t): t for t in self.frozen_tensors(module).values() if isinstance(t, nn.Parameter)
        }
        return copied(module, {**frozen, **(shared or {})})

    def units(self, kind: UnitKind = "layer", fraction: float = 1.0) -> list[Unit]:
        """Return the units of a row, such as FedMR recombines.

        Args:
            kind: `layer` for each layer's tensors, `tensor` for each tensor, `segment` for runs of
                layers.
            fraction: Share x of the N layers in a segment, in (0, 1]: layer j (from 1) belongs to
                segment ceil(j / (x N)).

        Raises:
            InvalidValue: The kind or the fraction is not allowed.

        Source: FedMR (KDD'24), section 5.
        """
        if kind == "tensor":
            return [(entry.slice,) for entry in self.slices]
        if kind == "layer":
            return [self._owned({layer}) for layer in self.layers]
        if kind != "segment":
            raise InvalidValue(f"unit {quoted(kind)} is not one of 'layer', 'tensor', 'segment'")
        if not 0 < fraction <= 1:
            raise InvalidValue(f"fraction {fraction} is not in (0, 1]")
        count = len(self.layers)
        # The subtrahend keeps a quotient that is whole in decimal notation whole in binary: 3 /
        # (0.1 * 30) is 1, not 1.0000001.
        segments: dict[int, set[str]] = {}
        for j, layer in enumerate(self.layers, start=1):
            segments.setdefault(math.ceil(j / (fraction * count) - 1e-9), set()).add(layer)
        return [self._owned(layers) for layers in segments.values()]

    def _owned(self, layers: set[str]) -> Unit:
        """Return the slices of the tensors of these layers."""
        return self.unit(lambda entry: entry.layer in layers)

    def unit(self, belongs: Callable[[TensorSlice], bool]) -> Unit:
        """Return the slices of all tensors for which `belongs` is true, neighbours merged."""
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
    """Raise `InvalidValue` for a module of which clients cannot have copies."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise InvalidValue(
            f"{kind} is compiled by TorchScript: give the module that it was made of"
        )
    if torch.is_inference_mode_enabled():
        raise InvalidValue(
            "models cannot train inside torch.inference_mode(): leave the block first"
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        remedy = "leave the block, and set autocast = 'bfloat16' in the settings of training"
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
                    f"{computed!r} of the model is computed from its parameters, "
                    f"as by torch.nn.utils.weight_norm or prune: {remedy}"
                )
    require_no_tensor_hooks(module)


def require_no_tensor_hooks(module: nn.Module) -> None:
    """Raise `InvalidValue` for a parameter with a hook, which a copy of the module would lack."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            remedy = "put it on its module, with register_full_backward_hook"
            raise InvalidValue(
                f"parameter {name!r} of the model has a hook, which copies of the model lose: {remedy}"
            )


def _alias(tensor: Tensor) -> Tensor:
    """Return another tensor with the same storage, so that binding one does not move the other."""
    return (
        nn.Parameter(tensor.detach(), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.detach()
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _moved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that training may change: the persistent ones of modules that `train()`
    puts into training mode.
    """
    modes = {submodule: submodule.training for submodule in module.modules()}
    module.train()
    resting = {name for name, submodule in module.named_modules() if not submodule.training}
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
        if name not in transient and name.rpartition(".")[0] not in resting
    }


def _consecutive(tensors: dict[str, Tensor], layer: Callable[[str], str]) -> Iterator[TensorSlice]:
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel()
        yield TensorSlice(name, layer(name), tensor.shape, tensor.dtype, start, stop)
        start = stop
