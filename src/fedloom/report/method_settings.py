"""The settings with which each method of a comparison was trained, and how they were tuned."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedloom.report.cells import Cell, Column, score_cell, table_of
from fedloom.report.sheet import Sheet
from fedloom.report.summary import RunSummary, dotted

if TYPE_CHECKING:
    import pandas

_SCHEDULED = ("rounds", "participation", "evaluate_every", "dropout", "personal_every")
"""Keys of the schedule that are shown where methods differ; other keys are of `training`."""


def settings_table(sheet: Sheet) -> "pandas.DataFrame | None":
    """Return the settings in which the methods differ or that were tuned, a row for each method.

    Methods without settings of their own have no table, so the result is None.
    """
    runs = {run.algorithm: run for run in reversed(sheet.runs)}
    methods = list(sheet.rows.index)
    configurations = {name: dotted(runs[name].configuration) for name in methods}
    tuned = sheet.tuning
    keys = dict.fromkeys(key for one in tuned.values() for key in one.values)
    shown = [key for key in keys if not key.startswith("algorithm.")]
    for key in dict.fromkeys(key for table in configurations.values() for key in table):
        values = {str(table.get(key)) for table in configurations.values()}
        own = key.startswith("training.") or key in _SCHEDULED
        if own and len(values) > 1 and key not in shown:
            shown.append(key)
    if not shown and not tuned:
        return None
    columns = {Column("Method", order=""): [Cell(name) for name in methods]}
    if any(_expression(runs[name]) != name for name in methods):
        columns[Column("Algorithm", order="")] = [Cell(_expression(runs[name])) for name in methods]
    for key in shown:
        texts = [Cell(_text(configurations[name].get(key))) for name in methods]
        columns[Column(key.removeprefix("training."), order="")] = texts
    if tuned:
        choices = [tuned.get(name) for name in methods]
        columns[Column("Trials", order="")] = [
            Cell("–" if choice is None else str(choice.trials)) for choice in choices
        ]
        columns[Column("Validation", order="")] = [
            score_cell(None if choice is None else choice.validation, sheet.metric)
            for choice in choices
        ]
    return table_of(columns)


def tuning_notes(sheets: Sequence[Sheet]) -> list[str]:
    """Return the budget of the searches, and each choice at the edge of the values tried."""
    tuned = [(sheet, name, one) for sheet in sheets for name, one in sheet.tuning.items()]
    if not tuned:
        return []
    trials = sorted({one.trials for _, _, one in tuned})
    budget = " to ".join(str(count) for count in dict.fromkeys((trials[0], trials[-1])))
    measure, seeds = tuned[0][2].measure, tuned[0][2].seeds
    noun = "trial" if budget == "1" else "trials"
    count = f"{budget} {noun} of {seeds} {'seed' if seeds == 1 else 'seeds'}"
    texts = [
        f"Settings were tuned before the comparison with {count} for each method, by the {measure} "
        "on samples held out of the clients' training data. The figures here are on the test data."
    ]
    untuned = [name for sheet in sheets for name in sheet.rows.index if name not in sheet.tuning]
    if untuned:
        texts.append(f"Not tuned: {', '.join(dict.fromkeys(untuned))}.")
    for sheet, name, one in tuned:
        for key in one.edges:
            setting = f" ({sheet.setting})" if sheet.setting else ""
            value = _text(one.values[key])
            texts.append(
                f"{name}{setting}: {key} = {value} is at the edge of the values tried; a wider "
                "range may have a better one."
            )
    return texts


def _expression(run: RunSummary) -> str:
    return str(run.configuration.get("algorithm", run.algorithm))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
