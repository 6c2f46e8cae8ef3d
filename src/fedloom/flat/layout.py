"""A model is a vector: any module to a row of floats and back without loss, and which slices of it form a layer.

A row holds the trainable parameters first, `[0:T]`, then frozen parameters and floating-point buffers such as batch-norm
statistics, `[T:P]`. Buffers of integers and truth values cannot be averaged; they are kept apart as a row of int64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedloom.errors import InvalidValue, quoted

Unit = tuple[slice, ...]
"""The slices of a row that move together."""

UnitKind = Literal["layer", "tensor", "segment"]


@dataclass(frozen=True)
class TensorSlice:
    """Where one tensor of a module lies in a row."""

    name: str  # as in `named_parameters` and `named_buffers`
    layer: str  # the module that owns it
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
    `integer_slices`, one per other buffer, with offsets into the row of integers; `dtype`, float32, or float64 when the module
    has a tensor of it (half precision fits into float32 without loss; complex numbers are stored as pairs).
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        buffers = dict(module.named_buffers())
        trained = {name: p for name, p in parameters.items() if p.requires_grad and _is_continuous(p)}
        carried = {
            name: t for name, t in {**parameters, **buffers}.items() if name not in trained and _is_continuous(t)
        }
        discrete = {name: t for name, t in {**parameters, **buffers}.items() if not _is_continuous(t)}
        if not trained:
            raise InvalidValue(f"{type(module).__name__} has no trainable parameter")
        self.slices = tuple(_consecutive({**trained, **carried}))
        self.integer_slices = tuple(_consecutive(discrete))
        self.trainable = sum(part.stop - part.start for part in self.slices if part.name in trained)
        self.size = self.slices[-1].stop
        self.integers = self.integer_slices[-1].stop if self.integer_slices else 0
        wide = any(t.dtype in (torch.float64, torch.complex128) for t in (*trained.values(), *carried.values()))
        self.dtype = torch.float64 if wide else torch.float32
        self.layers = _layer_order(module, {part.layer for part in self.slices})

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
        nothing but integer buffers of its own. It must not train before.

        Raises `InvalidValue` where tensors are of several types, or of another than float32 and float64: a row holds numbers of
        one type, and a view of it cannot convert them.
        """
        require_no_tensor_hooks(module)
        tensors = _tensors(module)
        for part in self.slices:
            if part.dtype != self.dtype:
                kind, rows = (str(dtype).removeprefix("torch.") for dtype in (part.dtype, self.dtype))
                raise InvalidValue(
                    f"tensor {part.name!r} of the model is {kind}, and its other numbers are kept as {rows}: "
                    "models train where all of their numbers are float32, or all are float64"
                )
        shared = {id(tensors[part.name]): _alias(tensors[part.name]) for part in self.slices}
        return copy.deepcopy(module, shared)

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

    def under(self, *modules: str) -> Unit:
        """The slices of every tensor owned by the named modules or by modules inside them. Raises `InvalidValue` when a name
        owns nothing."""
        for name in modules:
            if not any(_is_inside(part.layer, name) for part in self.slices):
                raise InvalidValue(f"no module {quoted(name)} with parameters (there are: {', '.join(self.layers)})")
        return self.unit(lambda part: any(_is_inside(part.layer, name) for name in modules))


def require_no_tensor_hooks(module: nn.Module) -> None:
    """Raise `InvalidValue` for a parameter with a hook of its own: a copy of the module would be without."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InvalidValue(
                f"parameter {name!r} of the model has a hook, which copies of the model lose: "
                "put it on its module, with register_full_backward_hook"
            )


def _is_inside(layer: str, module: str) -> bool:
    return layer == module or layer.startswith(f"{module}.") or module == ""


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor of the same numbers, so that binding one leaves the other."""
    return nn.Parameter(tensor.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else tensor.detach()


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _consecutive(tensors: dict[str, Tensor]) -> Iterator[TensorSlice]:
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel() * (2 if tensor.dtype.is_complex else 1)
        yield TensorSlice(name, name.rpartition(".")[0], tensor.shape, tensor.dtype, start, stop)
        start = stop


def _layer_order(module: nn.Module, owners: set[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in module.named_modules() if name in owners)
