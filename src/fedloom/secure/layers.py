"""Conversion of a model to the bytes of its layers, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.common.errors import InvalidValue
from fedloom.flat.layout import Unit


def layer_sizes(units: Sequence[Unit], like: Tensor) -> list[int]:
    """Return the bytes of each layer.

    Args:
        units: Slices of a row that form a layer.
        like: A row `[P]` of the model's type.

    Returns:
        The size of each layer in bytes, `[U]`.
    """
    return [sum(span.stop - span.start for span in unit) * like.element_size() for unit in units]


def to_layers(row: Tensor, units: Sequence[Unit]) -> list[bytes]:
    """Convert a row to the bytes of its layers.

    Args:
        row: The model, `[P]`.
        units: Slices of a row that form a layer.

    Returns:
        The numbers of each layer in the machine's byte order (little-endian with PyTorch).
    """
    flat = row.detach().cpu()
    return [torch.cat([flat[span] for span in unit]).numpy().tobytes() for unit in units]


def from_layers(layers: Sequence[bytes | None], units: Sequence[Unit], like: Tensor) -> Tensor:
    """Return a row with these layers.

    Args:
        layers: Bytes of each layer; None leaves the layer unchanged.
        units: Slices of a row that form a layer.
        like: The row to copy, `[P]`.

    Returns:
        A copy of `like`, `[P]`, on its device.

    Raises:
        InvalidValue: A layer has another size.
    """
    row = like.detach().cpu().clone()
    for number, (layer, unit, size) in enumerate(
        zip(layers, units, layer_sizes(units, like), strict=True)
    ):
        if layer is None:
            continue
        if len(layer) != size:
            raise InvalidValue(f"layer {number} has {len(layer)} bytes, expected {size}")
        numbers = torch.frombuffer(bytearray(layer), dtype=row.dtype).split(
            [span.stop - span.start for span in unit]
        )
        for span, values in zip(unit, numbers, strict=True):
            row[span] = values
    return row.to(like.device)
