"""Draft of a configuration for a table: roles of its columns, guessed from names and cells."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedloom.common.errors import DataError, InvalidValue, listed, quoted, shortened, suggestion
from fedloom.common.expression import Call
from fedloom.data.columns import CLIENT, SMALLEST
from fedloom.data.formats.arrow_columns import categories, holds_dates, is_text
from fedloom.data.formats.csv_files import CsvOptions
from fedloom.data.formats.table_files import read_tables
from fedloom.data.identifiers import identifies_rows, numbers_rows

TARGETS = (
    "label", "target", "class", "y", "outcome", "diagnosis", "result", "response", "status",
    "default", "churn", "survived", "died", "quality", "price", "score",
)  # fmt: skip
"""Names of columns that are often learned."""

GROUPS = (
    "hospital", "site", "client", "clinic", "center", "centre", "bank", "branch", "institution",
    "region", "device", "machine", "user", "writer", "group",
)  # fmt: skip
"""Names of columns that often name the owner of a row."""

_MOST_CLASSES = 20
_LISTED = 10


@dataclass
class TableDraft:
    """Roles of the columns of a table, with a reason for each.

    Attributes:
        target: The column to learn.
        group: The column that names the client of a row; `CLIENT` for one file per client, or "".
        exclude: Columns to leave out, with the reason.
        options: Further options of `table`.
        notes: Lines about the data.
    """

    target: str
    group: str
    exclude: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def draft_configuration(path: str, name: str, target: str = "", group: str = "") -> str:
    """Return a commented configuration for `fedloom run`.

    Args:
        path: A CSV or parquet file, or a folder or pattern with one file per client.
        name: Name of the configuration.
        target: Column to learn, if not to be guessed.
        group: Column that names the client of a row, if not to be guessed.

    Returns:
        The text of a TOML file. Its comments describe the columns and the reason of each guess.

    Raises:
        DataError: The file cannot be read, or has no column to learn.
        InvalidValue: The table has no column of this name.
    """
    table = read_tables(path, CsvOptions())[0]
    if not len(table):
        raise DataError(f"{path}: no rows")
    return _written(path, name, table_draft(table, target, group))


def table_draft(table: Any, target: str = "", group: str = "") -> TableDraft:
    """Return the roles of the columns of an Arrow table.

    Args:
        table: The table, with a column `CLIENT` if it was read from one file per client.
        target: As in `draft_configuration`.
        group: As in `draft_configuration`.

    Returns:
        The roles, with a reason for each excluded column and notes about the data.

    Raises:
        DataError: No column is left to learn from.
        InvalidValue: The table has no column `target` or `group`.
    """
    names = [name for name in table.column_names if name != CLIENT]
    for role, chosen in (("target", target), ("group", group)):
        if chosen and chosen not in names:
            raise InvalidValue(f"{role}: no column {quoted(chosen)}{suggestion(chosen, names)}")
    if not group and CLIENT in table.column_names:
        group = CLIENT
    group = group or _guess([n for n in names if n != target and _owns(table.column(n))], GROUPS)
    exclude = {
        name: reason
        for name in names
        if name not in (target, group) and (reason := _reason(name, table.column(name)))
    }
    free = [name for name in names if name != group and name not in exclude]
    free = [name for name in free if not holds_dates(table.column(name))] if not target else free
    if not free or free == [target]:
        raise DataError("no column is left to learn from: name the target, and check the columns")
    draft = TableDraft(target or _guess(free, TARGETS) or free[-1], group, exclude)
    if not target:
        origin = "by its name" if _guess(free, TARGETS) else "the last column"
        draft.notes.append(f"target: {draft.target} ({origin})")
    _add_classes(draft, table.column(draft.target))
    _add_inputs(draft, table)
    _add_clients(draft, table)
    return draft


def _guess(names: Sequence[str], known: Sequence[str]) -> str:
    """Return the first column with a known name, or with a known word in its name; "" for none."""
    exact = [name for word in known for name in names if name.lower() == word]
    parts = [name for word in known for name in names if word in _words(name)]
    return [*exact, *parts, ""][0]


def _words(name: str) -> list[str]:
    """Return the words of the name of a column."""
    return name.lower().replace("-", "_").split("_")


def _owns(cells: Any) -> bool:
    """Return True if the cells could name clients: few values, of many rows each."""
    count = len(cells.unique())
    return 2 <= count <= max(2, len(cells) // SMALLEST) and not cells.null_count


def _reason(name: str, cells: Any) -> str:
    """Return why a column should not be learned from; "" for no reason."""
    if cells.null_count == len(cells):
        return "is empty"
    if holds_dates(cells):
        return ""
    if is_text(cells.type):
        return "has nearly as many values as rows" if identifies_rows(cells) else ""
    return "numbers the rows" if numbers_rows(name, cells) else ""


def _add_classes(draft: TableDraft, cells: Any) -> None:
    """Add what is learned: classes with their shares, or numbers."""
    import pyarrow as pa

    distinct = len(cells.unique())
    if cells.null_count:
        draft.options["missing"] = "drop"
        draft.notes.append(
            f"{cells.null_count} rows have no target: all rows with an empty cell are left out"
        )
    if pa.types.is_floating(cells.type) or (not is_text(cells.type) and distinct > _MOST_CLASSES):
        draft.options["kind"] = "regression"
        draft.notes.append(f"learned as numbers, {distinct} different ones")
        return
    texts, index = categories(cells.drop_null())
    counts = np.bincount(index, minlength=len(texts))
    order = np.argsort(-counts, kind="stable").tolist()
    shares = [f"{texts[k]} {counts[k] / counts.sum():.1%}" for k in order]
    draft.notes.append(f"classes: {listed(shares, _LISTED)}")
    if counts.min() < counts.sum() / 10:
        draft.notes.append(
            "the rarest class has few rows: judge models by `fedloom evaluate` (auc, f1), not by "
            "the accuracy"
        )


def _add_inputs(draft: TableDraft, table: Any) -> None:
    """Add the treatment of dates and empty cells, and what is left out."""
    used = {draft.target, draft.group, *draft.exclude}
    inputs = [name for name in table.column_names if name not in used and name != CLIENT]
    if not inputs:
        raise DataError("no column is left to learn from: name the target, and check the columns")
    if dates := [name for name in inputs if holds_dates(table.column(name))]:
        draft.options["dates"] = "ordinal"
        draft.notes.append(f"dates become numbers of days: {', '.join(dates)}")
    empty = {name: table.column(name).null_count for name in inputs}
    counts = ", ".join(f"{name} {count}" for name, count in empty.items() if count)
    if counts:
        draft.options.setdefault("missing", "mean")
        filled = "are left out" if draft.options["missing"] == "drop" else "get the mean"
        draft.notes.append(f"empty cells {filled}: {counts}")
    draft.notes += [f"left out: {name}, which {why}" for name, why in draft.exclude.items()]


def _add_clients(draft: TableDraft, table: Any) -> None:
    """Add the rows of each client."""
    if not draft.group:
        draft.notes.append("no column names the clients: five get equal shares at random")
        return
    texts, index = categories(table.column(draft.group))
    counts = np.bincount(index, minlength=len(texts)).tolist()
    rows = [f"{text} {count}" for text, count in sorted(zip(texts, counts, strict=True))]
    source = "one file each" if draft.group == CLIENT else f"by {draft.group}"
    draft.notes.append(f"{len(texts)} clients, {source}, with their rows: {listed(rows, _LISTED)}")


def _written(path: str, name: str, draft: TableDraft) -> str:
    named: dict[str, Any] = {"path": path, "target": draft.target}
    if draft.group not in ("", CLIENT):
        named["group"] = draft.group
    if draft.exclude:
        named["exclude"] = list(draft.exclude)
    expression = str(Call("table", named=named | draft.options))
    notes = "".join(f"# {shortened(note)}\n" for note in draft.notes)
    clients = 'clients = 0            # all clients of the data\npartition = "natural"\n'
    if not draft.group:
        clients = 'clients = 5\npartition = "iid"\n'
    return (
        "# Written by `fedloom new`. Check the guesses below, then run `fedloom run` on this "
        "file.\n\n"
        f"{tomli_w.dumps({'name': name})}"
        'algorithm = "fedavg"\n'
        "rounds = 20\n"
        "participation = 1.0    # share of the clients in each round\n"
        'model = "logistic"     # or "mlp(hidden=[64])"\n\n'
        "[data]\n"
        f"{notes}"
        f"{tomli_w.dumps({'name': expression})}"
        f"{clients}\n"
        "[training]\n"
        "learning_rate = 0.1\n"
        "epochs = 5\n"
        "batch_size = 20\n"
    )


def default_name(path: str) -> str:
    """Return the name of a configuration for a file, a folder or a pattern of files."""
    given = Path(path)
    stem = given.parent.name if any(mark in given.name for mark in "*?[") else given.stem
    return stem or "table"
