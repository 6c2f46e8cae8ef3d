"""A model as the bytes of its layers, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedloom.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.flat.layout import Unit


def layer_sizes(units: Sequence[Unit], like: Tensor) -> list[int]:
    """Bytes of each layer of rows such as `like`."""
    return [sum(part.stop - part.start for part in unit) * like.element_size() for unit in units]


def to_layers(row: Tensor, units: Sequence[Unit]) -> list[bytes]:
    """The numbers of a row `[P]`, layer by layer, as bytes in the machine's order (little-endian on all that PyTorch runs on)."""
    import torch  # a peer between two messages does without

    flat = row.detach().cpu()
    return [torch.cat([flat[part] for part in unit]).numpy().tobytes() for unit in units]


def from_layers(layers: Sequence[bytes], units: Sequence[Unit], like: Tensor) -> Tensor:
    """The row of these layers, of the type, device and length of `like [P]`. Raises `InvalidValue` for a layer of another size.

    Slices outside all units are those of `like`.
    """
    import torch

    row = like.detach().cpu().clone()
    for number, (layer, unit, size) in enumerate(zip(layers, units, layer_sizes(units, like), strict=True)):
        if len(layer) != size:
            raise InvalidValue(f"layer {number} has {len(layer)} bytes, not {size}")
        numbers = torch.frombuffer(bytearray(layer), dtype=row.dtype)
        start = 0
        for part in unit:
            length = part.stop - part.start
            row[part] = numbers[start : start + length]
            start += length
    return row.to(like.device)
