"""Data in the classes of other libraries: torch's map-style data sets, Hugging Face's, and tables of pandas and Polars."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch.utils.data import IterableDataset

from fedloom.data.convert import as_inputs
from fedloom.data.dataset import Dataset, Samples, same_names
from fedloom.data.formats.limits import VARIABLE, allowed_bytes
from fedloom.data.lazy import LazyInputs
from fedloom.data.sets.holdout import hold_out
from fedloom.data.sets.table import Columns, table_dataset
from fedloom.errors import InvalidValue, error_text, one_line
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION

_TEST_FRACTION = 0.2


def foreign_dataset(data: Any, target: str = "", group: str = "", objective: Objective | None = None) -> Dataset:
    """The data set of `data`, or of a pair of them, to train and to test on; without the latter a fifth of the samples, of each
    class, is held out.

    A pandas or Polars table, an Arrow table, a Hugging Face `Dataset` or `DatasetDict` has columns, of which `target` and `group`
    are named (see the data set `table`); `Samples`, or a torch data set with a length, whose items are (inputs, label) or
    (inputs, label, client), are read sample by sample into memory. Raises `InvalidValue` or `DataError` for anything else.
    """
    train, test = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    if isinstance(data, Mapping) and "train" in data:  # a DatasetDict
        train, test = data["train"], data.get("test", data.get("validation"))
    name = type(train).__name__
    found = [_arrow(part) for part in (train, test) if part is not None]
    if found[0] is not None:
        learned = "auto" if objective is None else "classification" if objective.classes else "regression"
        columns = Columns(target, group, kind=learned)  # type: ignore[arg-type]
        return table_dataset(name, found[0], found[1] if len(found) > 1 else None, columns, name)
    if target or group:
        raise InvalidValue(f"target and group name columns of a table, and a {name} has none")
    parts = [part if isinstance(part, Samples) else materialised(part) for part in (train, test) if part is not None]
    if len(parts) == 1:
        parts = list(
            hold_out(parts[0], _TEST_FRACTION, 0, within=parts[0].labels if parts[0].labels.dim() == 1 else None)
        )
    one, two = same_names(*parts)
    return Dataset(name, one, two, objective=objective or CLASSIFICATION)


def materialised(data: Any) -> Samples:
    """All items of a torch data set in memory; how much they take is said, and checked, before the second is read. Where that is
    more than data may take, inputs are read where clients train (`LazyInputs`).

    Pictures of Pillow become uint8 `[channels, h, w]`. What a data set draws at random for an item is drawn once.
    """
    name = type(data).__name__
    if isinstance(data, np.ndarray | torch.Tensor):
        raise InvalidValue(f"data: inputs and labels that are {name}s go together: give fl.Samples(inputs, labels)")
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InvalidValue(
            f"data: {name} is no data: give the name of a data set, a Dataset, Samples, a torch data set with a length, a "
            "pandas or Polars table, or a Hugging Face Dataset"
        )
    count = len(data)
    if not count:
        raise InvalidValue(f"{name}: no samples")
    first = _item(data, 0, name)
    size = count * first[0].nbytes
    takes = f"{count:,} samples, {size / 2**20:,.0f} MiB"
    shown = Console(stderr=True)
    if size > allowed_bytes():
        return _lazy(data, name, first, takes, shown)
    inputs = np.empty((count, *first[0].shape), first[0].dtype)
    rest: list[tuple[Any, ...]] = []
    for row in track(range(count), f"{name}: {takes}", console=shown, disable=not sys.stderr.isatty()):
        item = first if row == 0 else _item(data, row, name)
        if item[0].shape != inputs.shape[1:]:
            raise InvalidValue(
                f"{name}: sample {row} has the shape {list(item[0].shape)}, the first {list(first[0].shape)}: resize or pad them"
            )
        inputs[row] = item[0]
        rest.append(item[1:])
    labels, *groups = zip(*rest, strict=True)
    return Samples(inputs, _column(labels), _column(groups[0]) if groups else None)


def _lazy(data: Any, name: str, first: tuple[Any, ...], takes: str, shown: Console) -> Samples:
    """The labels alone in memory: from `data.targets` or `data.labels` where items have them, else by reading all items once."""
    shown.print(
        f"{name}: {takes}, more than the {allowed_bytes() / 2**20:,.0f} MiB that data may take ({VARIABLE}): inputs are read "
        "where clients train",
        soft_wrap=True,
    )
    inputs = LazyInputs(partial(_inputs, data, name), torch.arange(len(data)), as_inputs(first[0][None])[:0])
    for held in (getattr(data, "targets", None), getattr(data, "labels", None)) if len(first) == 2 else ():
        if held is not None and len(held) == len(data) and np.array_equal(np.asarray(held[0]), np.asarray(first[1])):
            return Samples(inputs, held)
    rows = track(range(len(data)), f"{name}: labels", console=shown, disable=not sys.stderr.isatty())
    labels, *groups = zip(*(_item(data, row, name)[1:] for row in rows), strict=True)
    return Samples(inputs, _column(labels), _column(groups[0]) if groups else None)


def _column(values: Sequence[Any]) -> Any:
    return np.asarray([np.asarray(one)[()] for one in values])


def _inputs(data: Any, name: str, row: int) -> Any:
    return _item(data, row, name)[0]


def _item(data: Any, row: int, name: str) -> tuple[Any, ...]:
    """One sample: the inputs as an array, the label, and perhaps the client."""
    try:
        item = data[row]
    except Exception as error:
        raise InvalidValue(f"{name}: sample {row} raised {one_line(error_text(error))}") from error
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        raise InvalidValue(f"{name}: sample {row} is a {type(item).__name__}: wanted (inputs, label[, client])")
    inputs = np.asarray(item[0])
    if type(item[0]).__module__.startswith("PIL."):
        inputs = inputs[None] if inputs.ndim == 2 else inputs.transpose(2, 0, 1)
    if inputs.dtype.kind == "O":
        raise InvalidValue(f"{name}: the inputs of sample {row} are {type(item[0]).__name__}: give tensors or arrays")
    return inputs, *item[1:]


def _arrow(data: Any) -> Any:
    """A table of another library as an Arrow table; None for what is no table."""
    import pyarrow as pa

    library = type(data).__module__.partition(".")[0]
    if isinstance(data, pa.Table):
        return data
    if library == "pandas" and hasattr(data, "columns"):
        return pa.Table.from_pandas(data, preserve_index=False)
    if library == "polars" and hasattr(data, "to_arrow") and hasattr(data, "columns"):
        return data.to_arrow()
    if library == "datasets" and hasattr(data, "with_format"):
        return data.with_format("arrow")[:]
    return None
