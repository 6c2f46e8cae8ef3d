"""What users have (lists, NumPy, columns of a table, tensors of any type) as the tensors that models learn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import InvalidValue, one_line, quoted, suggestion

Names = tuple[str, ...]


def as_inputs(values: Any) -> Tensor:
    """Inputs `[n, ...]`: bytes stay, other whole numbers become int64 tokens, other numbers float32. A tensor of floats keeps its
    type, which a model of that type may want. Raises `InvalidValue` for anything else, NaN and infinity among it."""
    if isinstance(values, Tensor) and (values.is_floating_point() or values.dtype in (torch.uint8, torch.int64)):
        return values
    found = _array(values, "inputs")
    if found.dtype.kind in "SUO":
        raise InvalidValue(
            f"inputs are text, such as {quoted(found.flat[0], str)}: give numbers, or a table with target=..., which makes "
            "columns of categories numbers"
        )
    if found.dtype == np.uint8 and found.ndim == 3:
        found = found[:, None]  # pictures without channels
    if found.dtype == np.uint8 and found.ndim == 4 and found.shape[1] not in (1, 3, 4) and found.shape[3] in (1, 3, 4):
        raise InvalidValue(
            f"inputs of shape {list(found.shape)} have their channels last: give inputs.transpose(0, 3, 1, 2)"
        )
    if found.dtype == np.uint8:
        return torch.from_numpy(found.copy())
    if found.dtype.kind in "iu":
        return torch.from_numpy(found.astype(np.int64))
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
        made = torch.from_numpy(found.astype(np.float32))
    require_finite(made, "inputs")
    return made


def as_labels(values: Any) -> tuple[Tensor, Names | None]:
    """Labels or other targets `[n, ...]`, and for text what each number stands for: whole numbers and truth values become
    int64, other numbers float32, text its position among the texts in alphabetical order."""
    if isinstance(values, Tensor) and (values.is_floating_point() or values.dtype == torch.int64):
        return values, None
    found = _array(values, "labels")
    if found.dtype.kind in "SUO":
        return _numbered(found, "labels")
    made = torch.from_numpy(found.astype(np.float32 if found.dtype.kind == "f" else np.int64))
    require_finite(made, "labels")
    return made, None


def as_groups(values: Any) -> tuple[Tensor, Names | None]:
    """The client of each sample, `[n]` int64, and for text what each number stands for."""
    found = values if isinstance(values, Tensor) else _array(values, "groups")
    if found.ndim != 1:
        raise InvalidValue(f"groups are one client for each sample, [n], not of shape {list(found.shape)}")
    if isinstance(found, np.ndarray) and found.dtype.kind in "SUO":
        return _numbered(found, "groups")
    whole = torch.as_tensor(found)
    if whole.is_floating_point():
        raise InvalidValue("groups are floats: give whole numbers or text, such as groups.astype(int)")
    return whole.to(torch.int64), None


def require_finite(values: Tensor, name: str) -> None:
    """Raise `InvalidValue`, which names the first sample, where a number is NaN or infinite."""
    whole = torch.isfinite(values).flatten(1).all(1) if values.dim() > 1 else torch.isfinite(values)
    if not bool(whole.all()):
        row = int((~whole).nonzero()[0])
        raise InvalidValue(f"{name} hold a NaN or infinity in row {row}: fill it in, or leave the sample out")


def in_names(numbers: Tensor, names: Names | None, wanted: Sequence[str], field: str) -> Tensor:
    """`numbers`, which stand for `names`, as positions in `wanted`. Raises `InvalidValue` for a name that is not there."""
    if names is None or names == tuple(wanted):
        return numbers
    position = {name: at for at, name in enumerate(wanted)}
    for name in names:
        if name not in position:
            raise InvalidValue(
                f"{field}: {quoted(name)} is none of the {len(position)} names{suggestion(name, list(position))}"
            )
    return torch.tensor([position[name] for name in names], dtype=torch.int64, device=numbers.device)[numbers]


def _array(values: Any, field: str) -> np.ndarray[Any, Any]:
    """Any of these as a NumPy array of numbers or text with at least one dimension."""
    if isinstance(values, Sequence) and values and isinstance(values[0], Tensor):
        values = torch.stack(tuple(values))
    try:
        found = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (ValueError, TypeError) as error:  # lists of different lengths, a type that NumPy does not know
        raise InvalidValue(f"{field} are no array: {one_line(str(error))}") from None
    if found.ndim == 0:
        raise InvalidValue(f"{field} must be an array, a list or a tensor, not {type(values).__name__}")
    if found.dtype.kind == "O":
        odd = next((row for row, one in enumerate(found) if not isinstance(one, str)), None)
        if odd is not None:
            what = "nothing" if found[odd] is None or found[odd] != found[odd] else quoted(found[odd])
            raise InvalidValue(f"{field} hold {what} in row {odd}: give numbers or text for every sample")
    if found.dtype.kind not in "biufUSO":
        raise InvalidValue(f"{field} are {found.dtype}: give whole numbers, floats or text")
    return found


def _numbered(found: np.ndarray[Any, Any], field: str) -> tuple[Tensor, Names]:
    if found.ndim != 1:
        raise InvalidValue(f"{field} of text must be one for each sample, [n], not of shape {list(found.shape)}")
    text = found.astype(str) if found.dtype.kind != "S" else np.char.decode(found, "utf-8")
    names, numbers = np.unique(text, return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64)), tuple(names.tolist())
