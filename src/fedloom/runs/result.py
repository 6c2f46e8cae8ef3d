"""The result of a run in Python."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedloom.common.errors import InvalidValue
from fedloom.engines.base import Choice
from fedloom.recording.run_recording import Recording
from fedloom.report import summary as figures
from fedloom.report.clients import client_figures
from fedloom.report.frames import data_frame, result_lines
from fedloom.report.sheet import Sheet
from fedloom.report.summary import RunSummary
from fedloom.rounds.evaluation import Record
from fedloom.rounds.federation import Federation
from fedloom.runs.finished_round import trained_module
from fedloom.runs.identity import environment
from fedloom.runs.run_figures import RunFigures, costs, scores
from fedloom.task import Task

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Result(RunFigures):
    """A finished run. Its engine is closed, so it trains no more.

    Attributes:
        federation: The federation after its last round.
        task: The task that it was trained on.
        configuration: Everything that the figures depend on, as plain values.
        engine: The engine that trained, with the reason where a rule chose it.
        recording: The recorders, or None where nothing was recorded.
    """

    federation: Federation
    task: Task
    configuration: dict[str, Any]
    engine: Choice
    recording: Recording | None = None

    @property
    def shown(self) -> pandas.DataFrame:
        """The table of this run."""
        return Sheet([self.summary]).table

    @property
    def notes(self) -> list[str]:
        """The engine that trained."""
        return [f"engine: {self.engine}"]

    def _named_runs(self) -> list[tuple[dict[str, Any], RunSummary]]:
        return [({}, self.summary)]

    def __repr__(self) -> str:
        run = self.summary
        members = ".model  .curves()  .plot()  .report('report.html')"
        title = f"{run.algorithm} on {self.task.dataset.name}, {self.task.clients} clients"
        return "\n".join([f"{title}, seed {run.seed}", *result_lines(run), *self.notes, members])

    @cached_property
    def model(self) -> nn.Module:
        """The global model as a new module in evaluation mode."""
        return trained_module(self.task, self.federation.model(), self.federation.integers)

    @cached_property
    def history(self) -> list[Record]:
        """The figures of each round."""
        return self.federation.history

    def client_metrics(self) -> pandas.DataFrame:
        """Return the clients' figures that a method has written to `cohort.metrics`.

        Returns:
            A row for each round and client, with a column for each figure.
        """
        rows = []
        for line in self.federation.client_metrics:
            names = line.keys() - {"round", "clients"}
            for row, client in enumerate(line["clients"]):
                values = {name: line[name][row] for name in sorted(names)}
                rows.append({"round": line["round"], "client": client, **values})
        return data_frame(rows)

    @cached_property
    def timings(self) -> list[Record]:
        """The seconds of each round."""
        return self.federation.timings

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last round, a share in [0, 1].

        Raises:
            InvalidValue: The test set is empty, or the task has another metric.
        """
        return self._scores("accuracy")[-1]

    @property
    def best_accuracy(self) -> float:
        """Best test accuracy of any round; chosen on the test set, so it flatters. Raises as
        `accuracy`.
        """
        return max(self._scores("accuracy"))

    @property
    def score(self) -> float:
        """The task's metric on the test set after the last round; of a classification the accuracy.
        Raises as `accuracy`.
        """
        return self._scores(self.task.objective.metric.name)[-1]

    @property
    def best_score(self) -> float:
        """The best value of the metric in any round; chosen on the test set, so it flatters. Raises
        as `accuracy`.
        """
        metric = self.task.objective.metric
        return (max if metric.higher_is_better else min)(self._scores(metric.name))

    def _scores(self, name: str) -> list[float]:
        scores = [float(record[name]) for record in self.history if record.get(name) is not None]
        if scores:
            return scores
        if len(self.task.test):
            metric = self.task.objective.metric.name
            raise InvalidValue(f"this task measures {metric}, not {name}")
        raise InvalidValue(
            f"the test set of {self.task.dataset.name!r} is empty: it gives no test {name}"
        )

    def rounds_to(self, target: figures.TargetValue) -> int | None:
        """Return the first round that reaches a target.

        Args:
            target: A value of the metric, such as an accuracy in (0, 1], or a limit of any figure,
                such as `loss <= 0.2`.

        Returns:
            The round's number, from 1, or None if no round reaches it.
        """
        return figures.rounds_to(self.summary, target)

    @cached_property
    def summary(self) -> RunSummary:
        """The figures as tables and reports take them."""
        about = described_data(self.task)
        return RunSummary(
            str(self.configuration["algorithm"]),
            self.federation.schedule.seed,
            self.history,
            self.timings,
            about["label_counts"],
            about["class_names"],
            self.configuration,
            environment() | ({} if self.engine.named else {"engine": str(self.engine)}),
            self.recorded,
            self.federation.client_history,
            about["wrong_labels"],
            self.task.objective.metric,
            self.task.client_names,
        )

    @cached_property
    def recorded(self) -> list[dict[str, Any]]:
        """The recorders' results, one entry each."""
        return [] if self.recording is None else self.recording.results()

    @property
    def final_metrics(self) -> dict[str, Any]:
        """The scores and the costs of the run."""
        return {**scores(self.summary), **costs(self.summary)}

    def clients(self) -> pandas.DataFrame:
        """Return the latest figures of each client on its own test data.

        Returns:
            A row for each evaluated client, by its name in the data or its number, and model:
            `client` is the global model, `personal` the model that the client would use.
        """
        return client_figures(self.summary)

    def report(self, path: str | Path) -> None:
        """Write a page of figures and tables that needs no other file.

        Args:
            path: The HTML file to write.
        """
        from fedloom.report.page import render, write_page

        write_page(
            Path(path),
            render(f"{self.summary.algorithm}, seed {self.summary.seed}", [self.summary]),
        )


def described_data(task: Task) -> dict[str, Any]:
    """Return the facts about a task's data that reports show, as plain values."""
    names = task.dataset.class_names
    labels = task.train.labels.cpu().numpy()
    counts = task.partition.sizes[:0, None] if task.elsewhere else task.partition.sizes[:, None]
    if task.objective.classes and not task.elsewhere:
        counts = task.partition.histogram(labels, task.dataset.classes)
    index = torch.from_numpy(task.partition.indices).to(task.train.labels.device)
    wrong = None if task.true_labels is None else (task.train.labels != task.true_labels)[index]
    return {
        "label_counts": counts.tolist(),
        "wrong_labels": 0 if wrong is None else int(wrong.sum()),
        "class_names": None if names is None else list(names),
        **({} if task.client_names is None else {"client_names": list(task.client_names)}),
        "train_samples": int(task.partition.sizes.sum()),
        "test_samples": len(task.test),
        "parameters": task.layout.trainable,
        "metric": dataclasses.asdict(task.objective.metric),
    }
