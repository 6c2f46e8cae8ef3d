"""A model is a vector: any module to a row of floats and back without loss, and which slices of it form a layer.

A row holds what training may change: the trainable parameters first, `[0:T]`, then floating-point buffers such as batch-norm
statistics, `[T:P]`. Buffers of integers and truth values cannot be averaged; they are kept apart as a row of int64.

The rest of a module is frozen and in no row: parameters without `requires_grad`, of any type; buffers that are not persistent;
and the buffers of modules that `model.train()` leaves in evaluation mode. Copies of the module share its frozen parameters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedloom.errors import InvalidValue, quoted
from fedloom.models.structure import copied, layer_finder

Unit = tuple[slice, ...]
"""The slices of a row that move together."""

UnitKind = Literal["layer", "tensor", "segment"]


@dataclass(frozen=True)
class TensorSlice:
    """Where one tensor of a module lies in a row."""

    name: str  # as in `named_parameters` and `named_buffers`
    layer: str  # the module that owns it, or the one around that which is one layer (`models.structure.layer_finder`)
    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class Layout:
    """Maps modules of one architecture to rows and back.

    Attributes: `size` = P and `trainable` = T, in numbers; `slices`, one per floating-point tensor in the order of the row;
    `integer_slices`, one per other buffer, with offsets into the row of integers; `frozen`, the names of what is in neither;
    `dtype`, float32, or float64 when a tensor of the row has it (half precision fits into float32 without loss; complex numbers
    are stored as pairs).
    """

    def __init__(self, module: nn.Module) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise InvalidValue(f"{type(module).__name__} has no trainable parameter")
        moved = _moved_buffers(module)
        carried = {name: tensor for name, tensor in moved.items() if _is_continuous(tensor)}
        discrete = {name: tensor for name, tensor in moved.items() if not _is_continuous(tensor)}
        self.frozen = tuple(name for name in _tensors(module) if name not in trained and name not in moved)
        layer = layer_finder(module)
        self.slices = tuple(_consecutive({**trained, **carried}, layer))
        self.integer_slices = tuple(_consecutive(discrete, layer))
        self.trainable = sum(part.stop - part.start for part in self.slices if part.name in trained)
        self.size = self.slices[-1].stop
        self.integers = self.integer_slices[-1].stop if self.integer_slices else 0
        wide = any(t.dtype in (torch.float64, torch.complex128) for t in (*trained.values(), *carried.values()))
        self.dtype = torch.float64 if wide else torch.float32
        self.layers = _layer_order(module, {part.layer for part in self.slices})

    @property
    def row_bytes(self) -> int:
        return self.size * self.dtype.itemsize

    def flatten(self, module: nn.Module) -> Tensor:
        """The module's floating-point tensors as a new row `[P]`, on the device of its first parameter."""
        tensors = _tensors(module)
        first = tensors[self.slices[0].name]
        row = torch.empty(self.size, dtype=self.dtype, device=first.device)
        for part in self.slices:
            row[part.slice].copy_(_as_real(tensors[part.name].detach()).reshape(-1))
        return row

    def flatten_integers(self, module: nn.Module) -> Tensor:
        """The module's integer and boolean buffers as a new int64 row."""
        tensors = _tensors(module)
        row = torch.empty(self.integers, dtype=torch.int64, device=tensors[self.slices[0].name].device)
        for part in self.integer_slices:
            row[part.slice].copy_(tensors[part.name].reshape(-1))
        return row

    def frozen_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """The module's tensors that are in no row, by name."""
        tensors = _tensors(module)
        return {name: tensors[name] for name in self.frozen}

    def unfrozen_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """The module's tensors that are in a row, by name."""
        tensors = _tensors(module)
        return {part.name: tensors[part.name] for part in (*self.slices, *self.integer_slices)}

    def frozen_digest(self, module: nn.Module) -> str:
        """A digest of all that is frozen; empty where nothing is."""
        digest = hashlib.sha256()
        for name, tensor in self.frozen_tensors(module).items():
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest() if self.frozen else ""

    @torch.no_grad()
    def load(self, module: nn.Module, row: Tensor, integers: Tensor | None = None) -> None:
        """Copy a row (and a row of integers) into the module. Raises `InvalidValue` when the length does not fit."""
        if row.shape != (self.size,):
            raise InvalidValue(f"a row of this model has {self.size} numbers, not shape {list(row.shape)}")
        tensors = _tensors(module)
        for part in self.slices:
            target = _as_real(tensors[part.name])
            target.copy_(row[part.slice].view(target.shape))
        if integers is not None:
            self.load_integers(module, integers)

    @torch.no_grad()
    def load_integers(self, module: nn.Module, integers: Tensor) -> None:
        """Copy a row of integers into the module's integer and boolean buffers."""
        tensors = _tensors(module)
        for part in self.integer_slices:
            tensors[part.name].copy_(integers[part.slice].view(part.shape))

    def tensors(self, row: Tensor) -> dict[str, Tensor]:
        """Views into a row `[P]`, by name, in each tensor's own shape and type: what `torch.func.functional_call` takes."""
        found = {}
        for part in self.slices:
            numbers = row[part.slice]
            if part.dtype.is_complex:
                numbers = torch.view_as_complex(numbers.reshape(*part.shape, 2))
            found[part.name] = numbers.view(part.shape).to(part.dtype)
        return found

    def bind(self, module: nn.Module, row: Tensor) -> None:
        """Make every floating-point tensor of the module a view of `row [P]`, so that training moves the row itself. The module
        is a `shell`."""
        tensors = _tensors(module)
        for part in self.slices:
            tensors[part.name].data = row[part.slice].view(part.shape)

    def shell(self, module: nn.Module) -> nn.Module:
        """A copy of the module to be bound to rows: until then it shares the module's floating-point tensors, so that it holds
        nothing but integer and frozen buffers of its own. It must not train before.

        Raises `InvalidValue` where tensors of the row are of several types, or of another than float32 and float64: a row holds
        numbers of one type, and a view of it cannot convert them. Frozen parameters may be of any type.
        """
        require_no_tensor_hooks(module)
        tensors = _tensors(module)
        for part in self.slices:
            if part.dtype != self.dtype:
                kind, rows = (str(dtype).removeprefix("torch.") for dtype in (part.dtype, self.dtype))
                raise InvalidValue(
                    f"tensor {part.name!r} of the model is {kind}, and its other numbers are kept as {rows}: "
                    "models train where all numbers that move are float32, or all are float64"
                )
        shared = {id(tensors[part.name]): _alias(tensors[part.name]) for part in self.slices}
        return self.copy(module, shared)

    def copy(self, module: nn.Module, shared: dict[int, Tensor] | None = None) -> nn.Module:
        """A copy of the module with the same frozen parameters, not copies of them. `shared`: what else takes the place of the
        module's own tensors, by their ids."""
        frozen = {id(t): t for t in self.frozen_tensors(module).values() if isinstance(t, nn.Parameter)}
        return copied(module, {**frozen, **(shared or {})})

    def units(self, kind: UnitKind = "layer", fraction: float = 1.0) -> list[Unit]:
        """The slices that move together: each layer's tensors, each single tensor, or segments of layers.

        With N layers and `fraction` x, layer j (from 1) belongs to segment ceil(j / (x N)) (FedMR KDD'24, section 5).
        """
        if kind == "tensor":
            return [(part.slice,) for part in self.slices]
        if kind == "layer":
            return [self._owned({layer}) for layer in self.layers]
        if kind != "segment":
            raise InvalidValue(f"unit {quoted(kind)} is not one of 'layer', 'tensor', 'segment'")
        if not 0 < fraction <= 1:
            raise InvalidValue(f"fraction {fraction} is not in (0, 1]")
        count = len(self.layers)
        # The subtrahend keeps a quotient that is whole in decimal notation whole in binary: 3 / (0.1 * 30) is 1, not 1.0000001.
        segments: dict[int, set[str]] = {}
        for j, layer in enumerate(self.layers, start=1):
            segments.setdefault(math.ceil(j / (fraction * count) - 1e-9), set()).add(layer)
        return [self._owned(layers) for layers in segments.values()]

    def _owned(self, layers: set[str]) -> Unit:
        """The slices of all tensors that these layers own themselves."""
        return self.unit(lambda part: part.layer in layers)

    def unit(self, wanted: Callable[[TensorSlice], bool]) -> Unit:
        """The slices of all wanted tensors, neighbours merged."""
        merged: list[slice] = []
        for part in self.slices:
            if not wanted(part):
                continue
            if merged and merged[-1].stop == part.start:
                merged[-1] = slice(merged[-1].start, part.stop)
            else:
                merged.append(part.slice)
        return tuple(merged)


def require_no_tensor_hooks(module: nn.Module) -> None:
    """Raise `InvalidValue` for a parameter with a hook of its own: a copy of the module would be without."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InvalidValue(
                f"parameter {name!r} of the model has a hook, which copies of the model lose: "
                "put it on its module, with register_full_backward_hook"
            )


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor of the same numbers, so that binding one leaves the other."""
    return nn.Parameter(tensor.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else tensor.detach()


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _moved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that training may change: those that are persistent, of modules that are in training mode then."""
    modes = {part: part.training for part in module.modules()}
    module.train()
    resting = {name for name, part in module.named_modules() if not part.training}
    for part, mode in modes.items():
        part.training = mode
    passing = {
        f"{name}.{own}".lstrip(".") for name, part in module.named_modules() for own in part._non_persistent_buffers_set
    }
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if name not in passing and name.rpartition(".")[0] not in resting
    }


def _consecutive(tensors: dict[str, Tensor], layer: Callable[[str], str]) -> Iterator[TensorSlice]:
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel() * (2 if tensor.dtype.is_complex else 1)
        yield TensorSlice(name, layer(name), tensor.shape, tensor.dtype, start, stop)
        start = stop


def _layer_order(module: nn.Module, owners: set[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in module.named_modules() if name in owners)
