"""Tables with named columns, one of them the target: CSV, parquet and folders of Hugging Face's
`save_to_disk`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.data.columns import (
    Columns,
    Missing,
    TableInputs,
    categories,
    doubtful_columns,
    is_text,
)
from fedloom.data.convert import Names, as_groups, as_labels
from fedloom.data.dataset import Dataset, Samples, datasets, hold_out
from fedloom.data.formats.arrow import checked, decode_column, is_pictures, read_any
from fedloom.data.formats.limits import reading
from fedloom.data.formats.pictures import open_picture
from fedloom.data.formats.words import tokens, vocabulary
from fedloom.data.preprocessing import LabelType, Preprocessing, TextInputs, label_type
from fedloom.data.sets.normalisation import image_dataset
from fedloom.errors import DataError, InvalidValue, quoted, shortened, suggestion
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.objectives.regression import Regression

# names of a column of labels, if no target is named
_TARGETS = ("label", "labels", "target", "class", "y")
_TEXTS = ("text", "sentence", "content")
_FEW_VALUES = 20
_LENGTH, _VOCABULARY = 200, 30_000


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
    missing: Missing = "refuse",
    standardise: bool = True,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """A table of your own: `table(path='patients.csv', target='outcome', group='hospital')`.

    Args:
        path: A CSV file with a header (comma, semicolon or tab; UTF-8 or UTF-16), a parquet file,
            or a folder written by Hugging Face's `save_to_disk`.
        test_path: The rows to test on. Without it and a test part in the folder, `test_fraction` of
            the rows, of each class, is held out by `seed`.
        target: The column to learn.
        group: The column, or several, that say whose a row is, for `partition = "natural"`.
        inputs: The columns to learn from, by default all others: numbers as they are; text as one
            column of 0 and 1 for each category of the training rows. A column of pictures, or of
            text called text, sentence or content, is learned from by default without the others,
            which a notice names.
        categorical: Columns of numbers that are encoded as text is.
        kind: By default floats are a regression, whole numbers and text classes.
        missing: Empty cells are refused, filled with the mean of the rows that clients train on (of
            text: a category of their own), or their rows dropped.
        standardise: Bring columns of numbers, and a target of numbers, to mean 0 and deviation 1
            over the rows that clients train on. Figures and predictions are in the target's own
            units.
        test_fraction: The share of rows held out, in (0, 1).
        seed: The seed of the rows held out.

    Raises:
        DataError: For a file that is missing, damaged or too large, with the column.
        InvalidValue: For a column that the table does not have.
    """
    if not path:
        raise InvalidValue(
            "table needs path: a CSV file, a parquet file or a folder, and target: the column to learn (over real sites each "
            "has rows of its own, and path may be left out)"
        )
    groups = [group] if isinstance(group, str) else group
    train, test = read_any(Path(path), [*groups, *categorical])
    if test_path:
        alike = [field.name for field in train.schema if is_text(field.type)]
        test = read_any(Path(test_path), alike)[0]
    columns = Columns(target, group, inputs, categorical, kind, missing, standardise)
    return table_dataset(
        "table", train, test, columns, path, test_fraction=test_fraction, seed=seed
    )


def table_dataset(
    name: str, train: Any, test: Any, columns: Columns, source: str, *, test_fraction: float = 0.2, seed: int = 0,
    agreed: Preprocessing | None = None
) -> Dataset:  # fmt: skip
    """Return the data set of Arrow tables; without `test` (None), `test_fraction` of the rows is
    held out.

    With the preprocessing on which a federation has `agreed`, columns, categories and classes are
    those of all its sites.
    """
    tables = [checked(table, source) for table in ([train] if test is None else [train, test])]
    if agreed is not None and isinstance(agreed.inputs, TableInputs):
        columns = replace(columns, inputs=[column.name for column in agreed.inputs.columns])
    columns, notices = _resolved(tables[0], columns, source)
    tables = [tables[0], *(_with_names_of(tables[0], test, source) for test in tables[1:])]
    tables = [_complete(table, columns, source) for table in tables]
    if not len(tables[0]):
        raise DataError(f"{source}: no rows to learn from")
    with reading(source, "unreadable table"):
        table = _joined(tables, columns)
        rows = _rows(table, columns, source)
    objective: Objective = CLASSIFICATION if rows.labels.dtype == torch.int64 else Regression()
    if columns.kind == "auto" and not objective.classes:
        notices += _whole_floats(rows.labels, columns.target, source)
    class_names = _class_names(table.schema.metadata, columns.target) if objective.classes else None
    if agreed is not None and agreed.outputs.classes and objective.classes:
        class_names = agreed.outputs.classes
        if rows.label_names is None:
            rows = Samples(
                rows.inputs,
                rows.labels.numpy().astype(str),
                rows.groups,
                group_names=rows.group_names,
            )
    kind: LabelType = ""
    if agreed is not None:
        kind = agreed.outputs.label_type or label_type(agreed.outputs.classes)
    cut = len(tables[0])
    splits = hold_out(rows, test_fraction, seed) if test is None else (rows[:cut], rows[cut:])
    training = splits[0].inputs.numpy()
    classes = len(class_names or ())
    cells = table.column(columns.inputs[0])
    if len(columns.inputs) == 1 and is_pictures(cells.type):
        pixels = decode_column(table, _channels(cells, source), source, columns.inputs)
        pictures = [replace(split, inputs=pixels[split.inputs]) for split in splits]
        dataset = image_dataset(
            name, (pictures[0], pictures[1]), classes, "standard", None, class_names
        )
        return replace(dataset, target=columns.target, notices=tuple(notices))
    encoding = None if agreed is None else agreed.inputs
    if len(columns.inputs) == 1 and columns.inputs[0] in _TEXTS and is_text(cells.type):
        texts = [text or "" for text in cells.to_pylist()]
        if not isinstance(encoding, TextInputs):
            words = vocabulary((tokens(texts[row]) for row in training.tolist()), _VOCABULARY)
            encoding = TextInputs(tuple(words), _LENGTH, column=columns.inputs[0])
        inputs = encoding.encode(texts)
    else:
        with reading(source, "unreadable table"):
            if not isinstance(encoding, TableInputs):
                encoding = TableInputs.of(table, columns, source, training)
                notices += doubtful_columns(table, columns, source, training)
            inputs, told = encoding.encode(table, source)
            notices += told if agreed is None else []
    train, test = (replace(split, inputs=inputs[split.inputs]) for split in splits)
    return Dataset(
        name, train, test, classes, vocabulary=len(encoding.words) + 2 if isinstance(encoding, TextInputs) else None,
        class_names=class_names, objective=objective, encoding=encoding, standardise=columns.standardise,
        target=columns.target, label_type=kind, notices=tuple(notices),
    )  # fmt: skip


def _with_names_of(train: Any, test: Any, source: str) -> Any:
    """Return rows to test on whose numbers of Hugging Face's `ClassLabel` stand for the same names
    as those of the rows to train on.
    """
    import pyarrow as pa

    for name in set(train.column_names).intersection(test.column_names):
        names = _class_names(train.schema.metadata, name)
        others = _class_names(test.schema.metadata, name)
        if not names or not others or names == others:
            continue
        if strange := [other for other in others if other not in names]:
            raise DataError(
                f"{source}: column {quoted(name)} of the rows to test on has the class {quoted(strange[0])}, "
                f"which those to train on have not (they have: {shortened(', '.join(names))})"
            )
        place = [names.index(other) for other in others]
        numbers = [
            place[cell] if cell is not None and 0 <= cell < len(place) else cell
            for cell in test.column(name).to_pylist()
        ]
        position = test.column_names.index(name)
        test = test.set_column(position, name, pa.array(numbers, test.schema.field(name).type))
    return test


def _whole_floats(labels: Tensor, target: str, source: str) -> list[str]:
    """Return a notice if a target of floats holds few whole numbers, which may be classes."""
    values = labels.unique()
    if len(values) > _FEW_VALUES or bool((values % 1).any()):
        return []
    return [
        f"{source}: target {quoted(target)} holds {len(values)} whole numbers, stored as floats, and is learned as a "
        "regression: objective='classification' (of a file, table(kind=classification)) takes them as classes"
    ]


def _resolved(table: Any, columns: Columns, source: str) -> tuple[Columns, list[str]]:
    """Return the roles with the columns that were left open, and notices of columns that are not
    used; raises `InvalidValue` for one that the table does not have.
    """
    names = dict.fromkeys(table.column_names)
    target = columns.target or next((name for name in _TARGETS if name in names), "")
    listed = shortened(", ".join(names))
    if not target:
        raise InvalidValue(
            f"{source}: which column is to be learned? Give target, one of: {listed}"
        )
    taken = {target, *columns.groups}
    free = [name for name in names if name not in taken]
    special = [
        name
        for name in free
        if (name in _TEXTS and is_text(table.schema.field(name).type))
        or is_pictures(table.schema.field(name).type)
    ]
    inputs = list(columns.inputs) or special[:1] or free
    roles = {
        "target": [target],
        "group": columns.groups,
        "inputs": inputs,
        "categorical": columns.categorical,
    }
    for role, chosen in roles.items():
        allowed = inputs if role == "categorical" else names
        for name in chosen:
            if name not in allowed:
                near = f"{suggestion(name, allowed)} (there are: {shortened(', '.join(allowed))})"
                raise InvalidValue(f"{source}: {role}: no column {quoted(name)}{near}")
    if clash := taken & set(inputs):
        raise InvalidValue(
            f"{source}: inputs: {quoted(next(iter(clash)))} is the target or a group too"
        )
    if not inputs:
        raise InvalidValue(f"{source}: inputs: no column is left")
    unused = [] if columns.inputs else [name for name in free if name not in inputs]
    notices = []
    if unused:
        choose = ": name the columns to learn from in inputs=[...]" if columns.has_options else ""
        notices = [
            f"{source}: learns from the column {quoted(inputs[0])} only, without "
            f"{shortened(', '.join(map(quoted, unused)))}{choose}"
        ]
    return replace(columns, target=target, inputs=inputs), notices


def _complete(table: Any, columns: Columns, source: str) -> Any:
    """Select columns, without rows that have an empty cell if these are dropped; raises `DataError`
    for other empty cells.
    """
    import pyarrow as pa

    names = [columns.target, *columns.groups, *columns.inputs]
    if missing := sorted(set(names).difference(table.column_names)):
        raise DataError(f"{source}: the rows to test on have no column {quoted(missing[0])}")
    table = table.select(names)
    for position, cells in enumerate(table.columns):
        if pa.types.is_string_view(cells.type):  # Polars' text, of which Arrow takes no rows
            table = table.set_column(position, names[position], cells.cast(pa.large_string()))
    if columns.missing == "drop":
        return table.drop_null()
    full = {*names} if columns.missing == "refuse" else {columns.target, *columns.groups}
    for name, cells in zip(names, table.columns, strict=True):
        if cells.null_count and name in full:
            remedy = "or leave these rows out"
            if columns.has_options:
                fill = " (missing='mean' fills inputs)" if name in columns.inputs else ""
                remedy = f"or set missing='drop'{fill}"
            raise DataError(
                f"{source}: column {quoted(name)} is empty in row {cells.is_null().index(True).as_py()}, and in "
                f"{cells.null_count} in all: fill it, {remedy}"
            )
    return table


def _joined(tables: Sequence[Any], columns: Columns) -> Any:
    """Return the rows of all tables, of the types of those to train on; numbers may be whole in one
    table alone.
    """
    import pyarrow as pa

    train, *tests = tables
    for position, test in enumerate(tests):
        kinds = [
            field
            if is_text(field.type) or field.name == columns.target
            else test.schema.field(field.name)
            for field in train.schema
        ]
        tests[position] = test.cast(pa.schema(kinds))
    return pa.concat_tables([train, *tests], promote_options="permissive")


def _rows(table: Any, columns: Columns, source: str) -> Samples:
    """Return labels and groups of the rows; the inputs are the rows' numbers."""
    import pyarrow as pa

    cells = table.column(columns.target)
    if isinstance(cells.type, pa.DictionaryType):
        cells = cells.cast(cells.type.value_type)
    values = cells.to_numpy()
    target = f"{source}: target {quoted(columns.target)}"
    if columns.kind == "classification" and values.dtype.kind == "f":
        if (values % 1).any() or (np.abs(values) >= 2**63).any():
            raise DataError(
                f"{target} has fractions or numbers beyond 2^63, so they are no classes"
            )
        values = values.astype(np.int64)  # as pandas keeps whole numbers beside empty cells
    if columns.kind == "regression":
        # an infinite one is refused
        with np.errstate(over="ignore"), reading(target, "no numbers"):
            values = values.astype(np.float32)
    labels, names = as_labels(values)
    groups, group_names = _groups([table.column(name) for name in columns.groups])
    return Samples(torch.arange(len(labels)), labels, groups, names, group_names)


def _groups(columns: Sequence[Any]) -> tuple[Tensor | None, Names | None]:
    """Number the combinations of the columns' cells in alphabetical order."""
    if not columns:
        return None, None
    texts, index = categories(columns[0])
    for column in columns[1:]:
        cells, position = categories(column)
        pairs, index = np.unique(index * len(cells) + position, return_inverse=True)
        texts = [
            f"{texts[pair // len(cells)]} / {cells[pair % len(cells)]}" for pair in pairs.tolist()
        ]
    numbers, names = as_groups(texts or np.empty(0, int))
    return numbers[torch.from_numpy(index)], names


def _channels(pictures: Any, source: str) -> int:
    packed = pictures[0].as_py()
    if not packed or not packed.get("bytes"):
        raise DataError(f"{source}: no picture in row 0")
    with reading(source, "unreadable picture in row 0"), open_picture(packed["bytes"]) as picture:
        return 1 if picture.mode in ("1", "L", "I", "F") or picture.mode[:4] == "I;16" else 3


def _class_names(metadata: Any, target: str) -> tuple[str, ...] | None:
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][target]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return tuple(map(str, names)) if isinstance(names, list) else None
