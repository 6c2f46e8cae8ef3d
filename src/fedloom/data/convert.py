"""Conversion of users' data (lists, NumPy, columns of a table, tensors of any type) to the tensors
that models learn from.
"""

from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.common.errors import DataError, InvalidValue, one_line, quoted

Names = tuple[str, ...]
BOOLEANS: Names = ("False", "True")
"""The names of the classes of booleans."""
Array = np.ndarray[Any, Any]


def as_inputs(values: Any) -> Tensor:
    """Convert inputs `[n, ...]` to uint8 (bytes, with a channel), int64 (whole numbers) or
    float32.

    Raises:
        InvalidValue: The inputs are text, or pictures have their channels last.
    """
    values = _plain(values)
    if isinstance(values, Tensor) and values.dtype == torch.int64:
        return values
    if isinstance(values, Tensor) and (values.is_floating_point() or values.dtype == torch.uint8):
        _require_channels_first(values, "inputs.permute(0, 3, 1, 2)")
        return values
    array = _array(values, "inputs")
    if array.dtype.kind in "SUO":
        raise InvalidValue(
            f"inputs are text, such as {quoted(array.flat[0], str)}: give numbers, or a table "
            "with target=..., which makes "
            "columns of categories numbers"
        )
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        return _whole(array, "inputs")
    if array.dtype == np.uint8 and array.ndim == 3:
        array = array[:, None]
    _require_channels_first(array, "inputs.transpose(0, 3, 1, 2)")
    return torch.from_numpy(array.copy()) if array.dtype == np.uint8 else _floats(array, "inputs")


def _plain(values: Any) -> Any:
    """Return a tensor as dense, without a gradient, and half precision as float32."""
    if not isinstance(values, Tensor):
        return values
    values = values.detach()
    values = values.to_dense() if values.layout != torch.strided else values
    half = values.dtype in (torch.float16, torch.bfloat16)
    return values.float() if half else values


def _require_channels_first(values: Tensor | Array, remedy: str) -> None:
    """Raise `InvalidValue` for pictures `[n, height, width, channels]`."""
    shape = list(values.shape)
    if len(shape) != 4 or shape[1] in (1, 3, 4):
        return
    # [n, 64, 100, 1] is a row of features with 64 channels, unless they are bytes
    is_bytes = values.dtype in (torch.uint8, np.uint8)
    if shape[3] in (3, 4) or (shape[3] == 1 and (is_bytes or shape[1] == shape[2])):
        raise InvalidValue(f"inputs of shape {shape} have their channels last: give {remedy}")


def as_labels(values: Any) -> tuple[Tensor, Names | None]:
    """Convert targets to numbers: text to its alphabetical rank.

    Args:
        values: Targets `[n, ...]`: numbers, booleans or text.

    Returns:
        Targets `[n, ...]`, int64 or float32, and the texts by rank (None for numbers).
    """
    labels, names, is_boolean = _numbered(values, "labels")
    return labels, BOOLEANS if is_boolean and labels.dim() == 1 else names


def as_groups(values: Any) -> tuple[Tensor, Names | None]:
    """Convert the client of each sample to a number.

    Args:
        values: Clients `[n]`: whole numbers or text.

    Returns:
        Clients `[n]`, int64, and the texts as `as_labels` returns them.

    Raises:
        InvalidValue: There is more than one client for a sample, or the clients are floats.
    """
    groups, names, _ = _numbered(values, "groups")
    if groups.dim() != 1:
        raise InvalidValue(
            f"groups are one client for each sample, [n], not of shape {list(groups.shape)}"
        )
    if groups.is_floating_point():
        raise InvalidValue(
            "groups are floats: give whole numbers or text, such as groups.astype(int)"
        )
    return groups, names


def _numbered(values: Any, field: str) -> tuple[Tensor, Names | None, bool]:
    """Return numbers of values `[n, ...]`, the texts by number, and True for booleans."""
    values = _plain(values)
    if isinstance(values, Tensor) and (values.is_floating_point() or values.dtype == torch.int64):
        return values, None, False
    array = _array(values, field)
    if array.dtype.kind in "SUO":
        return *_ranked(array, field), False
    convert = _floats if array.dtype.kind == "f" else _whole
    return convert(array, field), None, array.dtype.kind == "b"


def class_labels(values: Any, classes: int, source: Path | str) -> Tensor:
    """Return labels of classes as a tensor.

    Args:
        values: Labels `[n]`.
        classes: Number of classes.
        source: Name of the data in errors.

    Returns:
        Labels `[n]` int64.

    Raises:
        DataError: A label, named with its row, is no integer of 0..classes-1.
    """
    # may unfold to any size
    nested = isinstance(values, list) and any(isinstance(value, Sized) for value in values)
    labels = np.empty(0) if nested else np.asarray(values)
    if labels.ndim != 1 or labels.dtype.kind not in "biu":
        raise DataError(f"{source}: labels must be a list of integers")
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        row = int(outside[0])
        raise DataError(f"{source}: label {labels[row]} in row {row} is outside 0..{classes - 1}")
    return torch.from_numpy(labels.astype(np.int64))


def require_finite(values: Tensor, name: str) -> None:
    """Raise `InvalidValue`, with the first row, if a number is NaN or infinite.

    Args:
        values: Numbers `[n, ...]`.
        name: Noun in the plural, with which the error begins, such as "inputs".
    """
    finite = torch.isfinite(values)
    finite = finite.flatten(1).all(1) if values.dim() > 1 else finite
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise InvalidValue(
            f"{name} hold a NaN or infinity in row {row}: fill it in, or leave the sample out"
        )


def _array(values: Any, field: str) -> Array:
    """Return values as a NumPy array of numbers or text with at least one dimension."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise InvalidValue(f"{field} hold masked cells: fill them, such as by {field}.filled(0)")
    if isinstance(values, Sequence) and values and isinstance(values[0], Tensor):
        values = torch.stack(tuple(values))
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    # lists of different lengths, a type that NumPy does not have
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidValue(f"{field} are no array: {one_line(str(error))}") from None
    if array.ndim == 0:
        raise InvalidValue(
            f"{field} must be an array, a list or a tensor, not {type(values).__name__}"
        )
    if array.dtype.kind == "O":
        array = _numbers_of_objects(array)
    if array.dtype.kind == "O":
        row = next((row for row, item in enumerate(array) if not isinstance(item, str)), None)
        if row is not None:
            raise InvalidValue(
                f"{field} hold {quoted(array[row])} in row {row}: give numbers or text for "
                "every sample"
            )
    if array.dtype.kind not in "biufUSO" or not array.dtype.itemsize:
        raise InvalidValue(f"{field} are {array.dtype}: give whole numbers, floats or text")
    return array


def _numbers_of_objects(array: Array) -> Array:
    """Return Python numbers, such as of pandas' nullable columns, as an array of numbers; others
    unchanged.
    """
    if not all(isinstance(item, int | float | np.number | np.bool_) for item in array.flat):
        return array
    numbers = np.asarray(array.tolist())
    return numbers if numbers.dtype.kind in "biuf" else array


def _floats(array: Array, field: str) -> Tensor:
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, and is refused
        floats = torch.from_numpy(array.astype(np.float32))
    require_finite(floats, field)
    return floats


def _whole(array: Array, field: str) -> Tensor:
    if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise InvalidValue(
            f"{field} hold {array.max()}, more than 2^63 - 1, the most that int64 holds"
        )
    return torch.from_numpy(array.astype(np.int64))


def _ranked(array: Array, field: str) -> tuple[Tensor, Names]:
    """Return each text's rank in alphabetical order, and the texts by rank."""
    if array.ndim != 1:
        raise InvalidValue(
            f"{field} of text must be one for each sample, [n], not of shape {list(array.shape)}"
        )
    try:
        text = array.astype(str) if array.dtype.kind != "S" else np.char.decode(array, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValue(
            f"{field} are bytes that are no text in UTF-8: {quoted(error.object)}"
        ) from None
    names, ranks = np.unique(text, return_inverse=True)
    return torch.from_numpy(ranks.astype(np.int64)), tuple(names.tolist())
