"""Evaluation of a trained model on rows whose answers are known."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from fedloom.common.errors import DataError, InvalidValue, quoted, shortened, suggestion
from fedloom.common.fields import require_at_least, require_one_of
from fedloom.data.formats.arrow import as_arrow
from fedloom.data.formats.arrow_columns import categories, first_empty, is_text, numbers
from fedloom.data.preprocessing import ModelOutputs
from fedloom.serving.row_scores import (
    ClassAnswers,
    NumberAnswers,
    best_f1_threshold,
    scores,
)

if TYPE_CHECKING:
    import pandas

Threshold = float | Literal["best_f1"] | None

ALL_ROWS = "all rows"
"""Name of the first line of the metrics."""

_SHOWN = 40  # lines of the metrics in a terminal


@dataclass(frozen=True)
class RowEvaluation:
    """Metrics of a model on labelled rows.

    Attributes:
        metrics: Rows and metrics (columns) of all rows, and of each client.
        confusion: Rows by true class (index) and predicted class; None for numbers.
        worst: Rows with the highest loss: number of the row from 0, client, true and predicted
            answer, loss.
        notes: The positive class and the threshold, in words.
        threshold: Probability from which on the positive class is predicted; None without one.
    """

    metrics: pandas.DataFrame
    confusion: pandas.DataFrame | None
    worst: pandas.DataFrame
    notes: tuple[str, ...] = ()
    threshold: float | None = None

    def frame(self) -> pandas.DataFrame:
        """Return the metrics: a line for all rows and for each client."""
        return self.metrics

    def save(self, path: str | Path) -> None:
        """Write the metrics as `.csv`, or everything as `.json`."""
        path = Path(path)
        require_one_of("path: ending", path.suffix, (".csv", ".json"))
        if path.suffix == ".csv":
            self.metrics.to_csv(path)
        else:
            path.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values; undefined metrics are null."""
        tables = {"metrics": self.metrics.reset_index(), "worst": self.worst}
        values: dict[str, Any] = {
            name: json.loads(table.to_json(orient="records", double_precision=15))
            for name, table in tables.items()
        }
        if self.confusion is not None:
            values["confusion"] = {
                "classes": list(self.confusion.index),
                "rows": self.confusion.to_numpy().tolist(),
            }
        return {**values, "threshold": self.threshold, "notes": list(self.notes)}

    def __repr__(self) -> str:
        figures = self.metrics.to_string(float_format="{:.4g}".format, na_rep="-", max_rows=_SHOWN)
        blocks = [figures, *self.notes]
        if self.confusion is not None:
            blocks.append(f"true class (lines), predicted class (columns)\n{self.confusion}")
        if len(self.worst):
            worst = self.worst.to_string(index=False, float_format="{:.4g}".format)
            blocks.append(f"rows with the highest loss, counted from 0\n{worst}")
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        tables = [self.metrics.to_html(float_format="{:.4g}".format, na_rep="-", max_rows=_SHOWN)]
        tables += [f"<p>{html.escape(note)}</p>" for note in self.notes]
        if self.confusion is not None:
            tables.append(self.confusion.to_html())
        tables.append(self.worst.to_html(index=False, float_format="{:.4g}".format))
        return "\n".join(tables)


def row_evaluation(
    answers: ClassAnswers | NumberAnswers,
    outputs: ModelOutputs,
    clients: Sequence[str] | None = None,
    *,
    metrics: Sequence[str] = (),
    threshold: Threshold = None,
    worst: int = 10,
) -> RowEvaluation:
    """Return the metrics of answers to n rows, over all rows and by client.

    Args:
        answers: True and predicted answers.
        outputs: Names of the classes.
        clients: Name of the client of each row, `[n]`.
        metrics: Names of metrics; by default all that fit.
        threshold: See `Predictor.evaluate`.
        worst: Number of rows with the highest loss.

    Returns:
        Metrics with a line for all rows and one for each client, the confusion matrix of classes,
        and the `worst` rows by their loss.

    Raises:
        InvalidValue: A name is unknown, or a threshold does not fit the model.
    """
    import pandas

    require_at_least("worst", worst, 0)
    answers, limit, notes = _decided(answers, outputs, threshold)
    names = None if clients is None else np.asarray(clients, dtype=str)
    lines = {ALL_ROWS: {"rows": len(answers.labels), **scores(answers, metrics)}}
    for name in [] if names is None else np.unique(names).tolist():
        own = answers[names == name]
        lines[name] = {"rows": len(own.labels), **scores(own, metrics)}
    figures = pandas.DataFrame.from_dict(lines, orient="index").rename_axis("client")
    figures["rows"] = figures["rows"].astype(int)
    order = np.argsort(-answers.losses, kind="stable")[:worst]
    columns: dict[str, Any] = {"row": order}
    if names is not None:
        columns["client"] = names[order]
    shown: tuple[npt.NDArray[Any], npt.NDArray[Any]] = answers.labels, answers.predicted
    if isinstance(answers, ClassAnswers):
        shown = (np.array(outputs.classes)[shown[0]], np.array(outputs.classes)[shown[1]])
    columns |= {"true": shown[0][order], "predicted": shown[1][order]}
    columns["loss"] = answers.losses[order]
    return RowEvaluation(
        figures, _confusion(answers, outputs), pandas.DataFrame(columns), notes, limit
    )


def _decided(
    answers: ClassAnswers | NumberAnswers, outputs: ModelOutputs, threshold: Threshold
) -> tuple[ClassAnswers | NumberAnswers, float | None, tuple[str, ...]]:
    """Return the answers with classes predicted by a threshold, the threshold, and notes."""
    two = isinstance(answers, ClassAnswers) and answers.classes == 2
    if not two and threshold is not None:
        raise InvalidValue("threshold is for models of two classes")
    if not isinstance(answers, ClassAnswers) or answers.classes != 2:
        return answers, None, ()
    positive = quoted(outputs.classes[answers.positive])
    notes = [f"auc and f1 are of the class {positive}"]
    if threshold is None:
        return answers, None, tuple(notes)
    origin = "as given"
    if threshold == "best_f1":
        threshold = best_f1_threshold(answers)
        origin = "best F1 on these rows, so f1 is too good for new rows"
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise InvalidValue(f"threshold must be a number or 'best_f1', not {quoted(threshold)}")
    if not 0 <= threshold <= 1:
        raise InvalidValue(f"threshold must be between 0 and 1, not {threshold:g}")
    is_positive = answers.probabilities[:, answers.positive] >= threshold
    predicted = np.where(is_positive, answers.positive, 1 - answers.positive)
    notes.append(f"{positive} is predicted from a probability of {threshold:.4g} on ({origin})")
    return replace(answers, predicted=predicted), float(threshold), tuple(notes)


def _confusion(
    answers: ClassAnswers | NumberAnswers, outputs: ModelOutputs
) -> pandas.DataFrame | None:
    import pandas
    from sklearn.metrics import confusion_matrix

    if not isinstance(answers, ClassAnswers):
        return None
    counts = confusion_matrix(answers.labels, answers.predicted, labels=range(answers.classes))
    names = list(outputs.classes)
    return pandas.DataFrame(counts, index=names, columns=names)


def labelled(
    data: Any, labels: Any, by: str | Sequence[str], target: str
) -> tuple[Any, Any, list[str] | None]:
    """Return rows without labels, the Arrow column of their labels, and the client of each row.

    Args:
        data: A table, or other data.
        labels: Labels `[n]`; None if they are a column of the table.
        by: Column with the client of each row, or the clients `[n]`; empty for none.
        target: Column of the labels.

    Returns:
        The rows without the columns of labels and clients, the column of labels `[n]`, and the
        names of the clients `[n]` or None.
    """
    import pyarrow as pa

    table = as_arrow(data)
    names = [] if table is None else table.column_names
    clients = None if isinstance(by, str) else [str(name) for name in by]
    if isinstance(by, str) and by:
        clients = _texts(_column(table, names, by, "by"))
    cells = None if labels is None else pa.chunked_array([pa.array(np.asarray(labels))])
    if cells is None:
        cells = _column(table, names, target, "the target")
    if table is None:
        return data, cells, clients
    dropped = {target, by} if isinstance(by, str) else {target}
    return table.select([name for name in names if name not in dropped]), cells, clients


def require_lengths(rows: int, cells: Any, clients: Sequence[str] | None) -> None:
    """Raise `InvalidValue` unless each row has a label and, if clients are named, a client.

    Args:
        rows: Number of rows.
        cells: The column of labels.
        clients: Names of the clients by row; None for no names.

    Raises:
        InvalidValue: A length differs from the number of rows.
    """
    for found, kind in ((cells, "labels"), (clients, "clients")):
        if found is not None and len(found) != rows:
            raise InvalidValue(f"{rows} rows, but {len(found)} {kind}: give one for each row")


def _column(table: Any, names: Sequence[str], name: str, role: str) -> Any:
    if table is None:
        raise InvalidValue(f"{role} is a column, and the data are no table: give labels or names")
    if name not in names:
        raise DataError(f"{role}: no column {quoted(name)}{suggestion(name, names)}")
    return table.column(name)


def _texts(cells: Any) -> list[str]:
    texts, index = categories(cells)
    return [texts[place] for place in index.tolist()]


def _filled(cells: Any, outputs: ModelOutputs) -> str:
    """Return the name of the column of labels in errors; raise `DataError` for an empty cell."""
    title = f"column {quoted(outputs.name or 'labels')}"
    if empty := first_empty(cells):
        raise DataError(f"{title} {empty}: leave these rows out")
    return title


def class_numbers(cells: Any, outputs: ModelOutputs) -> npt.NDArray[np.int64]:
    """Return the class of each cell of a column of labels, `[n]`.

    Args:
        cells: Arrow column of labels, `[n]`, as names of classes.
        outputs: Names of the model's classes in their order.

    Returns:
        The numbers of the classes, `[n]`, in [0, classes).

    Raises:
        DataError: A cell is empty or no class of the model.
    """
    title = _filled(cells, outputs)
    places = {name: number for number, name in enumerate(outputs.classes)}
    texts, index = categories(cells)
    for position, text in enumerate(texts):
        if text not in places:
            row = int(np.argmax(index == position))
            known = shortened(", ".join(map(quoted, outputs.classes)))
            raise DataError(
                f"{title} is {quoted(text)} in row {row}, and the model predicts: {known}"
            )
    numbered: npt.NDArray[np.int64] = np.array([places[text] for text in texts], np.int64)[index]
    return numbered


def true_numbers(cells: Any, outputs: ModelOutputs) -> npt.NDArray[np.float64]:
    """Return the number of each cell of a column of labels, `[n]`.

    Args:
        cells: Arrow column of labels, `[n]`.
        outputs: Name of the target, for errors.

    Returns:
        The numbers `[n]`, in the units of the target.

    Raises:
        DataError: A cell is empty or no number.
    """
    title = _filled(cells, outputs)
    if is_text(cells.type):
        raise DataError(f"{title} is text, and the model predicts numbers")
    return numbers(cells, title)[:, 0]
