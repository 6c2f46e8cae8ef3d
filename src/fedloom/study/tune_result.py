"""The result of a search."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedloom.common.training import Training
from fedloom.report.cells import Cell, Column, score_cell, table_of
from fedloom.runs.entry import Entry, Own
from fedloom.runs.result import Result
from fedloom.runs.run import run
from fedloom.runs.settings import Changes, label, plain_text
from fedloom.study.comparison_result import ComparisonResult
from fedloom.study.search import Trial, best_of
from fedloom.task import Task

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
        own: Settings of the best trial that are not parameters of the method.
    """

    trials: Sequence[Trial] = ()
    tested: Trial | None = None
    own: Own = field(default_factory=dict)

    @property
    def best(self) -> Trial:
        """The trial with the best mean over the seeds; its `changes` are the values."""
        return best_of(self.trials)

    @property
    def method(self) -> Entry:
        """The method with the best parameters and its settings of training and schedule.

        `fl.run` and `fl.compare` apply all of them; `method.algorithm` is the method only.
        """
        best = self.best
        return Entry(best.configuration.method(best.algorithm), **self.own)

    @property
    def settings(self) -> Changes:
        """The chosen values by key: of the method, the training and the schedule."""
        return self.best.changes

    @property
    def training(self) -> Training:
        """The settings of local training of the best trial."""
        best = self.best.configuration
        return best.training if best.objects is None else best.objects.task(best.seed).training

    def run(self, task: Task, **options: Any) -> Result:
        """Train with all chosen settings.

        Args:
            task: The task.
            **options: As for `fl.run`, such as `seed=1`. The schedule is by default that of the
                search.

        Returns:
            The model and the figures of each round.

        Raises:
            InvalidValue: An option contradicts a chosen value.
        """
        return run(self, task, **{"schedule": self.best.configuration.schedule, **options})

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
