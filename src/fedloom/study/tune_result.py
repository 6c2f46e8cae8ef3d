"""The result of a search."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedloom.algorithm.method import Method
from fedloom.report.cells import Cell, Column, score_cell, table_of
from fedloom.runs.settings import label, plain_text
from fedloom.study.comparison_result import ComparisonResult
from fedloom.study.search import Trial, best_of

if TYPE_CHECKING:
    import pandas

_SHOWN = 20  # trials in a terminal or a notebook


@dataclass(frozen=True, repr=False)
class TuneResult(ComparisonResult):
    """The trials of a search, each a method of `frame`, `curves`, `plot` and `differences`; figures
    are of validation data.

    Attributes:
        trials: All trials, with the measure of each by seed.
        tested: The best choice trained on all training data and scored on the test data, where that
            was asked for.
    """

    trials: Sequence[Trial] = ()
    tested: Trial | None = None

    @property
    def best(self) -> Trial:
        """The trial with the best mean over the seeds; its `changes` are the values."""
        return best_of(self.trials)

    @property
    def method(self) -> Method:
        """The method with the best parameters."""
        return self.best.configuration.method(self.best.algorithm)

    @property
    def shown(self) -> pandas.DataFrame:
        """The best trials with their values, the best first."""
        ranked = sorted(
            self.trials,
            key=lambda trial: (trial.score is None, -(trial.score or 0.0), trial.number),
        )
        shown = ranked[:_SHOWN]
        numbers = [str(trial.number) for trial in shown]
        columns = {Column("Trial"): [Cell(number, number) for number in numbers]}
        for key in self.best.changes:
            values = [plain_text(trial.changes[key]) for trial in shown]
            columns[Column(key)] = [Cell(value, value) for value in values]
        best = "largest" if self.best.metric.higher_is_better else "smallest"
        scores = [score_cell(trial.spread, trial.metric) for trial in shown]
        return table_of(columns | {Column("Validation", best): scores})

    @property
    def notes(self) -> list[str]:
        """The measure, the failures, the files, the best choice and its test."""
        best, tested, count = self.best, self.tested, len(self.trials)
        measure = f"{best.measure} on validation data{', %' if best.metric.share else ''}"
        command = f"fedloom run {shlex.quote(str(self.folder / 'best.toml'))}"
        notes = [
            f"{_SHOWN} best of {count} trials; {measure}" if count > _SHOWN else measure,
            *(
                f"trial {trial.number}: {trial.reason}"
                for trial in self.trials
                if trial.spread is None
            ),
            f"trials: {self.folder / 'trials.csv'}",
            f"best:   {label(best.changes) if best.configuration.objects else command}",
        ]
        if tested is not None:
            score = score_cell(tested.spread, tested.metric).text + tested.metric.unit
            seeds = f" over {len(tested.values)} seeds" if len(tested.values) > 1 else ""
            figure = f"{score}{seeds}" if tested.spread else tested.reason
            notes.append(f"test:   {figure}, {tested.measure}, trained on all training data")
        return notes
