"""The figures of one or several runs in Python and in notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from fedloom.common.fields import require_one_of
from fedloom.engines.work import training_speed
from fedloom.report import summary as figures
from fedloom.report.frames import data_frame, html_table, plain_records, text_table, texts
from fedloom.report.summary import RunSummary
from fedloom.report.units import time_text
from fedloom.task import Task

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go


class RunFigures(ABC):
    """Base of the results of a run, a comparison and a search: their frames, figures and tables."""

    @property
    @abstractmethod
    def shown(self) -> pandas.DataFrame:
        """The table as a terminal shows it."""

    @property
    @abstractmethod
    def notes(self) -> list[str]:
        """Sentences below the table."""

    @abstractmethod
    def _named_runs(self) -> list[tuple[dict[str, Any], RunSummary]]:
        """Return the columns that name each run in frames, and its figures."""

    def table(self) -> pandas.DataFrame:
        """Return the figures as the terminal shows them: a row for each method, mean ± deviation
        over seeds as text.

        `frame` has numbers. With several settings, the columns are the settings.
        """
        shown = texts(self.shown)
        return shown.set_index(shown.columns[0])

    def curves(self) -> pandas.DataFrame:
        """Return a row for each round of each run, with every figure that was recorded.

        A figure that a round does not have is NaN.
        """
        return data_frame(
            {**name, **record} for name, run in self._named_runs() for record in plain_records(run)
        )

    def plot(self, figure: str = "", x: str = "round") -> go.Figure:
        """Draw a figure of the records.

        Args:
            figure: Name of the figure, such as `loss`; by default the metric.
            x: `round`, `bytes` or `seconds`.

        Returns:
            The drawing.

        Raises:
            InvalidValue: No round has the figure.
        """
        from fedloom.report.curves import learning_curves

        runs = [run for _, run in self._named_runs()]
        if figure:
            records = [record for run in runs for record in run.records]
            names = {
                name
                for record in records
                for name, value in record.items()
                if isinstance(value, float)
            }
            require_one_of("figure", figure, tuple(sorted(names)))
        return learning_curves(runs, figure, x)

    def __repr__(self) -> str:
        return "\n".join([text_table(self.shown), *self.notes])

    def _repr_html_(self) -> str:
        return html_table(self.shown, self.notes)


def scores(run: RunSummary) -> dict[str, Any]:
    """Return the number of rounds, and the metric after the last round and at its best."""
    metric = run.metric.name
    return {
        "rounds": len(run.records),
        metric: figures.final(run),
        f"best_{metric}": figures.best(run),
    }


def costs(run: RunSummary) -> dict[str, Any]:
    """Return the bytes that were sent and the seconds of a run."""
    return {
        "bytes_down": figures.bytes_down(run),
        "bytes_up": figures.bytes_up(run),
        "seconds": figures.seconds(run),
    }


def fastest_round(run: RunSummary, task: Task) -> str:
    """Return the speed of training in the fastest round, and the speed of a large matrix product.

    Args:
        run: The run.
        task: Its data, model and local training.

    Returns:
        A sentence with the number of clients, the time, and the speed in GFLOP/s.
    """
    pairs = [
        (timing["train_seconds"], len(record["clients"]))
        for record, timing in zip(run.records, run.timings, strict=False)
    ]
    seconds, clients = min(pairs, key=lambda pair: pair[0] / max(1, pair[1]))
    speed, product = training_speed(task, clients, seconds)
    share = f"{speed / product:.0%} of a large matrix product here ({product:,.0f} GFLOP/s)"
    return (
        f"fastest round: {clients} clients trained in {time_text(seconds)}, {speed:,.1f} GFLOP/s, "
        f"{share}"
    )
