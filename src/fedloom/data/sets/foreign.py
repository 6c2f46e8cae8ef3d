"""Data of other libraries: torch's map-style data sets, Hugging Face's, and tables of pandas and
Polars.
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch.utils.data import IterableDataset

from fedloom.common.errors import InvalidValue, error_text, one_line
from fedloom.data.columns import Columns
from fedloom.data.convert import as_inputs
from fedloom.data.dataset import Dataset, Samples, in_two
from fedloom.data.formats.arrow import as_arrow
from fedloom.data.formats.limits import VARIABLE, allowed_bytes, reading
from fedloom.data.lazy import LazyInputs
from fedloom.data.table_rows import table_dataset
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION

_TEST_FRACTION = 0.2


def foreign_dataset(
    data: Any,
    target: str = "",
    group: str = "",
    objective: Objective | None = None,
    **options: Any,
) -> Dataset:
    """Return the data set of objects in memory.

    Args:
        data: `Samples`, a torch data set or a table, or a pair of them to train and test on.
        target: Column of a table to learn.
        group: Column of a table, or several, that name the client of a row.
        objective: Objective, which decides whether a target of numbers is of classes.
        options: Further roles of a table's columns, fields of `Columns`.

    Returns:
        The data set. Without test data, a share of the samples is held out.

    Raises:
        InvalidValue: Roles of columns are given for data without columns.
    """
    train, test = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    if isinstance(data, Mapping) and "train" in data:  # a DatasetDict
        train = data["train"]
        test = data.get("test", data.get("validation"))
    name = type(train).__name__
    splits = [train] if test is None else [train, test]
    with reading(name, "no table that Arrow can hold"):
        table, *tests = map(as_arrow, splits)
    if table is not None:
        names = group if isinstance(group, list | tuple) else str(group)
        columns = Columns(str(target), names, kind=_kind(objective), has_options=False, **options)
        return table_dataset(name, table, tests[0] if tests else None, columns, name)
    if target != "" or group != "" or options:
        given = " and ".join(["target and group", *options])
        raise InvalidValue(f"{given} name columns of a table, and a {name} has none")
    samples = [split if isinstance(split, Samples) else materialised(split) for split in splits]
    return Dataset(name, *in_two(samples, _TEST_FRACTION, 0), objective=objective or CLASSIFICATION)


def _kind(objective: Objective | None) -> Literal["auto", "classification", "regression"]:
    if objective is None:
        return "auto"
    return "classification" if objective.classes else "regression"


def materialised(data: Any) -> Samples:
    """Read all items of a torch data set into memory, after a line on the terminal about their
    size.

    Where that is too much, memory holds only the labels, from `data.targets` or `data.labels` or
    one pass over all items.

    Raises:
        InvalidValue: Two items have inputs of different shapes.
    """
    name = type(data).__name__
    _require_items(data, name)
    count = len(data)
    sample = _item(data, name, 0)
    size = count * sample[0].nbytes
    most = allowed_bytes()
    takes = f"{name}: {count:,} samples, {size / 2**20:,.0f} MiB"
    console = Console(stderr=True)
    fits = size <= most
    inputs: Any = np.empty((count if fits else 0, *sample[0].shape), sample[0].dtype)
    if not fits:
        excess = f"{takes}, more than the {most / 2**20:,.0f} MiB that data may take ({VARIABLE})"
        console.print(f"{excess}: inputs are read where clients train", soft_wrap=True)
        inputs = LazyInputs(partial(_item, data, name), torch.arange(count), as_inputs(inputs))
        for field in ("targets", "labels"):
            labels: Any = getattr(data, field, None)
            is_known = len(sample) == 2 and labels is not None and len(labels) == count
            if is_known and np.array_equal(labels[0], sample[-1]):
                return Samples(inputs, labels)
    targets: list[tuple[Any, ...]] = []
    for row in track(range(count), takes, console=console, disable=not sys.stderr.isatty()):
        item = sample if row == 0 else _item(data, name, row)
        if item[0].shape != sample[0].shape:
            shapes = f"the shape {list(item[0].shape)}, the first {list(sample[0].shape)}"
            raise InvalidValue(f"{name}: sample {row} has {shapes}: resize or pad them")
        if fits:
            inputs[row] = item[0]
        targets.append(item[1:])
    columns = [
        np.asarray([np.asarray(cell)[()] for cell in cells]) for cells in zip(*targets, strict=True)
    ]
    return Samples(inputs, columns[0], columns[1] if len(columns) > 1 else None)


def _require_items(data: Any, name: str) -> None:
    """Raise `InvalidValue` unless the data are a torch data set with samples and a length."""
    if isinstance(data, np.ndarray | torch.Tensor):
        raise InvalidValue(
            f"data: inputs and labels that are {name}s go together: give fl.Samples(inputs, labels)"
        )
    has_items = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, IterableDataset) or not has_items:
        raise InvalidValue(
            f"data: {name} is no data: give the name of a data set, a Dataset, Samples, a "
            "torch data set with a length, a "
            "pandas or Polars table, or a Hugging Face Dataset"
        )
    if not len(data):
        raise InvalidValue(f"{name}: no samples")


def _item(data: Any, name: str, row: int) -> tuple[Any, ...]:
    """Read one sample: the inputs as an array, the label, and perhaps the client."""
    try:
        item = data[row]
    except Exception as error:
        raise InvalidValue(f"{name}: sample {row} raised {one_line(error_text(error))}") from error
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        raise InvalidValue(
            f"{name}: sample {row} is a {type(item).__name__}: wanted (inputs, label[, client])"
        )
    inputs = np.asarray(item[0])
    if type(item[0]).__module__.startswith("PIL."):
        inputs = inputs[None] if inputs.ndim == 2 else inputs.transpose(2, 0, 1)
    if inputs.dtype.kind == "O":
        raise InvalidValue(
            f"{name}: the inputs of sample {row} are {type(item[0]).__name__}: give tensors or "
            "arrays"
        )
    return inputs, *item[1:]
