"""Tables with named columns, one of them the target: CSV, parquet and what Hugging Face's `save_to_disk` wrote."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from fedloom.data.convert import as_groups, as_labels
from fedloom.data.dataset import Dataset, Samples, datasets, same_names
from fedloom.data.formats.arrow import decode_column, is_pictures, read_any
from fedloom.data.formats.limits import reading, require_room
from fedloom.data.formats.words import encode, tokens, vocabulary
from fedloom.data.sets.holdout import hold_out
from fedloom.data.sets.normalisation import image_dataset
from fedloom.errors import DataError, InvalidValue, quoted, shortened, suggestion
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.objectives.regression import Regression

_TARGETS = ("label", "labels", "target", "class", "y")  # what a column of labels is called where nobody says it
_TEXTS = ("text", "sentence", "content")
_LENGTH, _VOCABULARY = 200, 30_000


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are what, and what becomes of cells that are empty; see the data set `table`."""

    target: str = ""
    group: str | Sequence[str] = ()
    inputs: Sequence[str] = ()
    categorical: Sequence[str] = ()
    kind: Literal["auto", "classification", "regression"] = "auto"
    missing: Literal["refuse", "mean", "drop"] = "refuse"

    @property
    def groups(self) -> list[str]:
        return [self.group] if isinstance(self.group, str) and self.group else list(self.group)


@datasets.register("table")
def table(
    *,
    path: str = "",
    test_path: str = "",
    target: str = "",
    group: str | Sequence[str] = (),
    inputs: Sequence[str] = (),
    categorical: Sequence[str] = (),
    kind: Literal["auto", "classification", "regression"] = "auto",
    missing: Literal["refuse", "mean", "drop"] = "refuse",
    standardise: bool = True,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A table of your own: `table(path='patients.csv', target='outcome', group='hospital')`, a CSV file with a header, a
    parquet file, or a folder written by Hugging Face's `save_to_disk`.

    `target` is the column to learn: floats are a regression, whole numbers and text classes, or as `kind` says. `group` is the
    column, or several, that say whose a row is, for `partition = "natural"`. `inputs` are the columns to learn from, by
    default all others: numbers as they are; text, and the `categorical` ones, as one column of 0 and 1 for each category of the
    training rows. Empty cells are refused, filled with the mean of the training rows (of text: a category of their own), or
    their rows dropped. `standardise` brings columns of numbers to mean 0 and deviation 1 over what the clients train on. Without
    `test_path` or a test part in the folder, `test_fraction` of the rows, of each class, is held out by `seed`.
    Raises `DataError` or `InvalidValue` naming the file, the column and what is wrong.
    """
    if not path:
        raise InvalidValue("table needs path: a CSV file, a parquet file or a folder, and target: the column to learn")
    train, test = read_any(Path(path))
    if test_path:
        test = read_any(Path(test_path))[0]
    columns = Columns(target, group, inputs, categorical, kind, missing)
    made = table_dataset("table", train, test, columns, path, test_fraction=test_fraction, seed=seed)
    return made if standardise else replace(made, standardised=())


def table_dataset(
    name: str, train: Any, test: Any, columns: Columns, source: str, *, test_fraction: float = 0.2, seed: int = 0
) -> Dataset:
    """The data set of Arrow tables; without `test` (None), part of the rows is held out."""
    columns = _settled(train, columns, source)
    names = [columns.target, *columns.groups, *columns.inputs]
    parts = [_complete(part, names, columns, source) for part in ([train] if test is None else [train, test])]
    rows = [_rows(part, columns, source) for part in parts]
    if not len(rows[0]):
        raise DataError(f"{source}: no rows to learn from")
    numbered = list(same_names(*rows))
    if test is None:
        whole = numbered[0].labels
        within = whole if whole.dtype == torch.int64 else torch.zeros(len(whole), dtype=torch.int64)
        numbered = list(hold_out(numbered[0], test_fraction, seed, within=within))
        parts = [parts[0].take(part.inputs[:, 0].numpy()) for part in numbered]
    objective: Objective = CLASSIFICATION if numbered[0].labels.dtype == torch.int64 else Regression()
    class_names = _class_names(parts[0].schema.metadata, columns.target) if objective.classes else None
    classes = len(class_names or ())
    first = parts[0].column(columns.inputs[0])
    if len(columns.inputs) == 1 and is_pictures(first.type):
        channels = _channels(first, source)
        one, two = (
            replace(part, inputs=decode_column(cells, channels, source, columns.inputs))
            for part, cells in zip(numbered, parts, strict=True)
        )
        return image_dataset(name, (one, two), classes, "standard", None, class_names)
    if len(columns.inputs) == 1 and columns.inputs[0] in _TEXTS and _is_text(first.type):
        words = [[tokens(text or "") for text in part.column(columns.inputs[0]).to_pylist()] for part in parts]
        known = vocabulary(words[0], _VOCABULARY)
        one, two = (
            replace(part, inputs=encode(some, known, _LENGTH)) for part, some in zip(numbered, words, strict=True)
        )
        size = len(known) + 2
        return Dataset(name, one, two, classes, vocabulary=size, class_names=class_names, objective=objective)
    encoded, numeric = _features(parts, columns, source)
    one, two = (replace(part, inputs=cells) for part, cells in zip(numbered, encoded, strict=True))
    return Dataset(name, one, two, classes, class_names=class_names, objective=objective, standardised=numeric)


def _settled(found: Any, columns: Columns, source: str) -> Columns:
    """The columns with those named that were left open. Raises `InvalidValue` for one that the table does not have."""
    target = columns.target or next((one for one in _TARGETS if one in found.column_names), "")
    listed = shortened(", ".join(found.column_names))
    if not target:
        raise InvalidValue(f"{source}: which column is to be learned? Give target, one of: {listed}")
    taken = {target, *columns.groups}
    rest = [one for one in found.column_names if one not in taken]
    special = [one for one in rest if is_pictures(found.schema.field(one).type) or one in _TEXTS]
    inputs = list(columns.inputs) or special[:1] or rest
    for field, names in (("target", [target]), ("group", columns.groups), ("inputs", inputs)):
        for one in names:
            if one not in found.column_names:
                near = suggestion(one, found.column_names)
                raise InvalidValue(f"{source}: {field}: no column {quoted(one)}{near} (there are: {listed})")
    for one in columns.categorical:
        if one not in inputs:
            raise InvalidValue(f"{source}: categorical: {quoted(one)} is none of the inputs ({', '.join(inputs)})")
    if not inputs or taken & set(inputs):
        what = (
            f"{quoted(next(iter(taken & set(inputs))))} is the target or a group too" if inputs else "no column is left"
        )
        raise InvalidValue(f"{source}: inputs: {what}")
    return replace(columns, target=target, inputs=inputs)


def _complete(found: Any, names: Sequence[str], columns: Columns, source: str) -> Any:
    """The named columns, without rows that have an empty cell if these are to be dropped. Raises `DataError` for a cell that is
    empty where it may not be."""
    for one in names:
        if one not in found.column_names:
            raise DataError(f"{source}: the rows to test on have no column {quoted(one)}")
    found = found.select(names)
    if columns.missing == "drop":
        return found.drop_null()
    for one in names if columns.missing == "refuse" else [columns.target, *columns.groups]:
        if found.column(one).null_count:
            row = found.column(one).is_null().index(True).as_py()
            fill = " (missing='mean' fills inputs)" if one in columns.inputs else ""
            raise DataError(
                f"{source}: column {quoted(one)} is empty in row {row}, and in {found.column(one).null_count} in all: fill it, "
                f"or set missing='drop'{fill}"
            )
    return found


def _rows(found: Any, columns: Columns, source: str) -> Samples:
    """Labels and groups of the rows; the inputs are the rows' numbers."""
    import pyarrow as pa

    given = found.column(columns.target)
    if isinstance(given.type, pa.DictionaryType):
        given = given.cast(given.type.value_type)
    values = given.to_numpy()
    if columns.kind == "classification" and values.dtype.kind == "f" and not (values % 1).any():
        values = values.astype(np.int64)  # as pandas keeps whole numbers beside empty cells
    if columns.kind == "classification" and values.dtype.kind == "f":
        raise InvalidValue(f"{source}: target {quoted(columns.target)} has fractions, so they are no classes")
    if columns.kind == "regression":
        try:
            values = values.astype(np.float32)
        except ValueError:
            raise InvalidValue(f"{source}: target {quoted(columns.target)} is text: no regression") from None
    labels, names = as_labels(values)
    groups, group_names = None, None
    if columns.groups:
        cells = [found.column(one).to_pylist() for one in columns.groups]
        groups, group_names = as_groups(
            [" / ".join(map(str, row)) for row in zip(*cells, strict=True)] or np.empty(0, int)
        )
    numbers = torch.arange(len(labels)).unsqueeze(1)
    return Samples(numbers, labels, groups, names, group_names)


def _features(parts: Sequence[Any], columns: Columns, source: str) -> tuple[list[Tensor], tuple[int, ...]]:
    """The inputs of each part as float64 `[n, features]`, and the positions of those that are numbers."""
    blocks: list[list[npt.NDArray[np.float64]]] = [[] for _ in parts]
    numeric: list[int] = []
    width = 0
    for name in columns.inputs:
        cells = [part.column(name) for part in parts]
        if name in columns.categorical or _is_text(cells[0].type):
            known = sorted({str(one) for one in cells[0].unique().to_pylist()})
            require_room(8 * len(known) * sum(map(len, cells)), f"{source}: {len(known)} categories of {quoted(name)}")
            columns_of = {one: at for at, one in enumerate(known)}
            made = [_one_hot(part.to_pylist(), columns_of) for part in cells]
        else:
            made = _numbers(cells, f"{source}: column {quoted(name)}")
            numeric += range(width, width + made[0].shape[1])
        width += made[0].shape[1]
        for block, values in zip(blocks, made, strict=True):
            block.append(values)
    return [torch.from_numpy(np.concatenate(block, axis=1)) for block in blocks], tuple(numeric)


def _one_hot(cells: Sequence[object], known: dict[str, int]) -> npt.NDArray[np.float64]:
    """1 in the column of each cell's category; all 0 for one that the training rows do not have."""
    made = np.zeros((len(cells), len(known)))
    for row, cell in enumerate(cells):
        if str(cell) in known:
            made[row, known[str(cell)]] = 1
    return made


def _numbers(cells: Sequence[Any], source: str) -> list[npt.NDArray[np.float64]]:
    """One column of numbers for each part, or several where the cells are lists; empty cells get the training rows' mean."""
    import pyarrow as pa

    made = []
    for part in cells:
        kind = part.type
        if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
            try:
                made.append(np.array(part.to_pylist(), dtype=np.float64).reshape(len(part), -1))
            except (ValueError, TypeError):
                raise DataError(f"{source}: lists of different lengths, or not of numbers") from None
            continue
        if not (
            pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_boolean(kind)
            or pa.types.is_decimal(kind)
        ):
            raise DataError(f"{source}: {kind} is neither a number nor text: leave it out with inputs=[...]")
        made.append(
            part.cast(pa.float64() if not pa.types.is_boolean(kind) else pa.uint8()).to_numpy().astype(float)[:, None]
        )
    known = made[0][np.isfinite(made[0]).all(1)]
    mean = known.mean(0) if len(known) else 0.0
    for part, values in zip(cells, made, strict=True):
        empty = np.isnan(values) & np.asarray(part.is_null())[:, None]
        if not np.isfinite(values[~empty]).all():
            raise DataError(f"{source}: a NaN or infinity among the numbers")
    return [np.where(np.isnan(values), mean, values) for values in made]


def _channels(pictures: Any, source: str) -> int:
    """1 where the first of the packed pictures is grey, else 3."""
    packed = pictures[0].as_py()
    if not packed or not packed.get("bytes"):
        raise DataError(f"{source}: no picture in row 0")
    with reading(source, "unreadable picture in row 0"), Image.open(io.BytesIO(packed["bytes"])) as picture:
        return 1 if picture.mode in ("1", "L") else 3


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_dictionary)
    return any(test(kind) for test in tests)


def _class_names(metadata: Any, target: str) -> tuple[str, ...] | None:
    """The names of the classes, where a table of Hugging Face's `datasets` has them."""
    try:
        found = json.loads(metadata[b"huggingface"])["info"]["features"][target]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return tuple(map(str, found)) if isinstance(found, list) else None
