"""The data set of an Arrow table: roles of its columns, labels, groups and encoded inputs."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.common.errors import DataError, InvalidValue, quoted, shortened, suggestion
from fedloom.data.columns import CLIENT, Columns, TableInputs
from fedloom.data.convert import Names, as_groups, as_labels
from fedloom.data.dataset import Dataset, Samples, in_two
from fedloom.data.doubts import doubtful_columns, whole_floats
from fedloom.data.formats.arrow import checked, decode_in_own_mode
from fedloom.data.formats.arrow_columns import (
    categories,
    first_empty,
    is_pictures,
    is_text,
    undictionary,
)
from fedloom.data.formats.limits import naming, reading
from fedloom.data.formats.words import tokens, vocabulary
from fedloom.data.identifiers import require_features, row_number_notices
from fedloom.data.preprocessing import Inputs, LabelType, Preprocessing, TextInputs, label_type
from fedloom.data.sets.normalisation import image_dataset
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.objectives.regression import Regression

# names of a column of labels, if no target is named
_TARGETS = ("label", "labels", "target", "class", "y")
_TEXTS = ("text", "sentence", "content")
_LENGTH = 200
_VOCABULARY = 30_000


def table_dataset(
    name: str,
    train: Any,
    test: Any,
    columns: Columns,
    source: str,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    agreed: Preprocessing | None = None,
) -> Dataset:
    """Return the data set of Arrow tables.

    Args:
        name: Name of the data set.
        train: Rows to train on.
        test: Rows to test on; without (None), `test_fraction` of `train` is held out.
        columns: Roles of the columns.
        source: Name of the data in errors and notices.
        test_fraction: Share of the rows held out.
        seed: Seed of the rows held out.
        agreed: Preprocessing of a federation: columns, categories and classes of all its sites.

    Returns:
        The data set, with the encoding of its columns and notices about doubtful columns.

    Raises:
        DataError: A table is damaged or has no rows to learn from.
        InvalidValue: The target is missing, a role names no column, or no input is left.
    """
    if agreed is not None and isinstance(agreed.inputs, TableInputs):
        columns = replace(columns, inputs=[column.name for column in agreed.inputs.columns])
    with naming(source):
        train = checked(train, source)
        columns, notices = _resolved(train, columns)
        tables = [_complete(train, columns)]
        if test is not None:
            tables.append(_complete(_with_names_of(train, checked(test, source)), columns))
        if not len(tables[0]):
            raise DataError("no rows to learn from")
        with reading(source, "unreadable table"):
            table = _joined(tables, columns)
            rows, class_names = _rows(table, columns, agreed)
        cut = len(tables[0])
        parts = [rows] if test is None else [rows[:cut], rows[cut:]]
        splits = in_two(parts, test_fraction, seed)
        objective: Objective = CLASSIFICATION if rows.labels.dtype == torch.int64 else Regression()
        if columns.kind == "auto" and not objective.classes:
            notices += whole_floats(rows.labels, columns.target)
        classes = len(class_names or ())
        if len(columns.inputs) == 1 and is_pictures(table.column(columns.inputs[0]).type):
            split = _with_inputs(splits, decode_in_own_mode(table, columns.inputs[0], source))
            dataset = image_dataset(name, split, classes, "standard", None, class_names)
        else:
            with reading(source, "unreadable table"):
                encoding, inputs, doubts = _encoded(table, columns, splits[0].inputs, agreed)
            notices += doubts
            dataset = Dataset(
                name, *_with_inputs(splits, inputs), classes,
                vocabulary=len(encoding.words) + 2 if isinstance(encoding, TextInputs) else None,
                class_names=class_names, objective=objective, encoding=encoding,
                standardise=columns.standardise, label_type=_label_type(agreed),
            )  # fmt: skip
    told = tuple(f"{source}: {notice}" for notice in notices)
    return replace(dataset, target=columns.target, notices=told)


def _label_type(agreed: Preprocessing | None) -> LabelType:
    """Return the type of the labels of all sites; "" without an agreement."""
    if agreed is None:
        return ""
    return agreed.outputs.label_type or label_type(agreed.outputs.classes)


def _encoded(
    table: Any, columns: Columns, training: Tensor, agreed: Preprocessing | None
) -> tuple[Inputs, Tensor, list[str]]:
    """Encode the inputs of a table, by default with the words or the categories of some rows.

    Args:
        table: Arrow table of `n` rows.
        columns: Roles of its columns.
        training: Numbers of the rows to train on.
        agreed: Preprocessing on which a federation has agreed.

    Returns:
        The encoding, the inputs `[n, ...]` and, without an agreement, notices.
    """
    encoding = None if agreed is None else agreed.inputs
    name, *others = columns.inputs
    cells = table.column(name)
    if not others and name in _TEXTS and is_text(cells.type):
        texts = [text or "" for text in cells.to_pylist()]
        if not isinstance(encoding, TextInputs):
            words = vocabulary((tokens(texts[row]) for row in training.tolist()), _VOCABULARY)
            encoding = TextInputs(tuple(words), _LENGTH, column=name)
        return encoding, encoding.encode(texts), []
    doubts = []
    if not isinstance(encoding, TableInputs):
        require_features(table, columns, training.numpy())
        encoding = TableInputs.of(table, columns, training.numpy())
        doubts = doubtful_columns(table, columns, training.numpy())
        doubts += row_number_notices(table, columns, training.numpy())
    # Notices of categories without an input name rare values; `doubts` count them.
    inputs, _ = encoding.encode(table)
    return encoding, inputs, doubts


def _with_inputs(rows: Iterable[Samples], inputs: Tensor) -> tuple[Samples, Samples]:
    """Return samples with inputs in place of the numbers of rows."""
    train, test = (replace(split, inputs=inputs[split.inputs]) for split in rows)
    return train, test


def _with_names_of(train: Any, test: Any) -> Any:
    """Return the rows to test on with the numbers that Hugging Face's `ClassLabel` has in the rows
    to train on.
    """
    import pyarrow as pa

    for name in set(train.column_names).intersection(test.column_names):
        names = _class_names(train.schema.metadata, name)
        others = _class_names(test.schema.metadata, name)
        if not names or not others or names == others:
            continue
        if strange := [other for other in others if other not in names]:
            raise DataError(
                f"column {quoted(name)} of the rows to test on has the class {quoted(strange[0])}, "
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


def _resolved(table: Any, columns: Columns) -> tuple[Columns, list[str]]:
    """Return the roles with the columns that were left open, and notices of columns that are not
    used; raises `InvalidValue` for one that the table does not have.
    """
    names = table.column_names
    target = columns.target or next((name for name in _TARGETS if name in names), "")
    if not target:
        listed = shortened(", ".join(names))
        raise InvalidValue(f"which column is to be learned? Give target, one of: {listed}")
    taken = {target, *columns.groups, *columns.exclude}
    free = [name for name in names if name not in taken]
    free = [name for name in free if name != CLIENT]
    inputs = list(columns.inputs) or _special(table, free)[:1] or free
    _require_columns("target", [target], names)
    _require_columns("group", columns.groups, names)
    _require_columns("exclude", columns.exclude, names)
    _require_columns("inputs", inputs, names)
    _require_columns("categorical", columns.categorical, inputs)
    if clash := taken & set(inputs):
        role = "excluded" if clash & {*columns.exclude} else "the target or a group"
        raise InvalidValue(f"inputs: {quoted(next(iter(clash)))} is {role} too")
    if not inputs:
        raise InvalidValue("inputs: no column is left")
    unused = [] if columns.inputs else [name for name in free if name not in inputs]
    notices = []
    if unused:
        choose = ": name the columns to learn from in inputs=[...]" if columns.has_options else ""
        notices = [
            f"learns from the column {quoted(inputs[0])} only, without "
            f"{shortened(', '.join(map(quoted, unused)))}{choose}"
        ]
    return replace(columns, target=target, inputs=inputs), notices


def _special(table: Any, names: Iterable[str]) -> list[str]:
    """Return the columns of texts and pictures, from which a model learns without the others."""
    kinds = {name: table.schema.field(name).type for name in names}
    return [
        name
        for name, kind in kinds.items()
        if is_pictures(kind) or (name in _TEXTS and is_text(kind))
    ]


def _require_columns(role: str, chosen: Iterable[str], allowed: Sequence[str]) -> None:
    for name in chosen:
        if name not in allowed:
            near = f"{suggestion(name, allowed)} (there are: {shortened(', '.join(allowed))})"
            raise InvalidValue(f"{role}: no column {quoted(name)}{near}")


def _complete(table: Any, columns: Columns) -> Any:
    """Select columns, without rows that have an empty cell if these are dropped; raises `DataError`
    for other empty cells.
    """
    import pyarrow as pa

    names = [columns.target, *columns.groups, *columns.inputs]
    if missing := sorted(set(names).difference(table.column_names)):
        raise DataError(f"the rows to test on have no column {quoted(missing[0])}")
    table = table.select(names)
    for position, cells in enumerate(table.columns):
        if pa.types.is_string_view(cells.type):  # Polars' text, of which Arrow takes no rows
            table = table.set_column(position, names[position], cells.cast(pa.large_string()))
    if columns.missing == "drop":
        return table.drop_null()
    full = {*names} if columns.missing == "refuse" else {columns.target, *columns.groups}
    for name, cells in zip(names, table.columns, strict=True):
        if name in full and (empty := first_empty(cells)):
            remedy = "or leave these rows out"
            if columns.has_options:
                fill = " (missing='mean' fills inputs)" if name in columns.inputs else ""
                remedy = f"or set missing='drop'{fill}"
            raise DataError(f"column {quoted(name)} {empty}: fill it, {remedy}")
    return table


def _joined(tables: Sequence[Any], columns: Columns) -> Any:
    """Return the rows of all tables, of the types of those to train on; numbers may be whole in one
    of the tables only.
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


def _rows(
    table: Any, columns: Columns, agreed: Preprocessing | None
) -> tuple[Samples, Names | None]:
    """Return labels and groups of the rows, and the names of the classes; the inputs are the rows'
    numbers.
    """
    values = undictionary(table.column(columns.target)).to_numpy()
    title = f"target {quoted(columns.target)}"
    if columns.kind == "classification" and values.dtype.kind == "f":
        if (values % 1).any() or (np.abs(values) >= 2**63).any():
            raise DataError(f"{title} has fractions or numbers beyond 2^63, so they are no classes")
        values = values.astype(np.int64)  # as pandas keeps whole numbers beside empty cells
    if columns.kind == "regression":
        # an infinite one is refused
        with np.errstate(over="ignore"), reading(title, "no numbers"):
            values = values.astype(np.float32)
    labels, texts = as_labels(values)
    groups, group_names = _groups([table.column(name) for name in columns.groups])
    if groups is not None and group_names is not None:
        rows = torch.bincount(groups, minlength=len(group_names)).tolist()
        group_names = tuple(
            name if count >= columns.smallest else f"#{number}"
            for number, (name, count) in enumerate(zip(group_names, rows, strict=True))
        )
    names = None
    if labels.dtype == torch.int64:
        names = _class_names(table.schema.metadata, columns.target)
        if agreed is not None and agreed.outputs.classes:
            names = agreed.outputs.classes
            labels, texts = (labels, texts) if texts else as_labels(labels.numpy().astype(str))
    return Samples(torch.arange(len(labels)), labels, groups, texts, group_names), names


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


def _class_names(metadata: Any, target: str) -> tuple[str, ...] | None:
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][target]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return tuple(map(str, names)) if isinstance(names, list) else None
