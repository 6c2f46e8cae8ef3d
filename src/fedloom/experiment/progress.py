"""Progress of runs for people: bars on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fedloom.experiment.events import Event, RunName
from fedloom.report.tables import time_text

_PAUSE = 10.0
"""Seconds between two lines where there is no terminal, at least."""

_SHARE = 0.1
"""Part of the time since the start that passes between two lines, so that a long run does not fill its log."""


class Display:
    """What both ways of showing share: one line when a run ends, and notices."""

    def __init__(self, console: Console, runs: int, rounds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.runs, self.rounds, self.clock = console, runs, rounds, clock
        self.finished: dict[RunName, int] = {}

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to put away."""

    def __call__(self, event: Event) -> None:
        """Show one event."""
        self.finished[event.run] = event.finished or self.finished.get(event.run, 0)
        if event.kind == "notice":
            self.line(f"{event.run}: {event.text}")
        elif event.kind == "failed":
            self.line(f"{event.run}: failed: {event.text}")
        elif event.kind == "skipped":
            self.line(f"{event.run}: finished before")
        elif event.kind == "ended":
            self.line(
                f"{event.run}: accuracy {_percent(event)} after {event.finished} rounds, {time_text(event.seconds)}"
            )
        elif event.kind == "started" and event.finished:
            self.line(f"{event.run}: going on after round {event.finished}")

    def line(self, text: str) -> None:
        """A line that stays."""
        self.console.print(Text(text), soft_wrap=True)


class Lines(Display):
    """For logs and pipes: a line for each run that ends, and now and then one about where the others are."""

    def __init__(self, console: Console, runs: int, rounds: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, runs, rounds, clock)
        self._began = self._spoke = clock()
        self._done = 0

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        now = self.clock()
        if event.kind == "started" and not self._done:
            self._began = now  # making data and worker processes ready says nothing of the rounds to come
        if event.kind != "round":
            return
        self._done += 1
        if now - self._spoke < max(_PAUSE, _SHARE * (now - self._began)):
            return
        self._spoke = now
        left = (self.runs * self.rounds - sum(self.finished.values())) * (now - self._began) / self._done
        self.line(
            f"{event.run}: round {event.finished} of {self.rounds}, accuracy {_percent(event)}; about {time_text(left)} left"
        )


class Bars(Display):
    """For terminals: a bar for each run under way, and one for all of them when there are several."""

    def __init__(self, console: Console, runs: int, rounds: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, runs, rounds, clock)
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(ratio=3, no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=None, table_column=Column(ratio=2)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}", justify="right"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            expand=True,
            speed_estimate_period=120,
        )
        self._bars: dict[RunName, TaskID] = {}
        self._all = self._progress.add_task("all runs", total=runs * rounds, accuracy="", visible=runs > 1)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if event.kind == "started":
            self._bars[event.run] = self._progress.add_task(
                Text(_short(event.run)).markup,
                total=self.rounds,
                completed=event.finished,
                accuracy="",
            )
        elif event.kind == "round":
            self._progress.update(self._bars[event.run], completed=event.finished)
            if "accuracy" in event.record:
                self._progress.update(self._bars[event.run], accuracy=_percent(event))
        elif event.kind in ("ended", "failed") and event.run in self._bars:
            self._progress.remove_task(self._bars.pop(event.run))
            self.finished[event.run] = self.rounds  # a failed run asks for no more time
        self._progress.update(self._all, completed=sum(self.finished.values()))

    def line(self, text: str) -> None:
        self._progress.console.print(Text(text), soft_wrap=True)


def display(console: Console, runs: int, rounds: int) -> Display:
    """The way of showing that suits the console."""
    return Bars(console, runs, rounds) if console.is_terminal else Lines(console, runs, rounds)


def _short(run: RunName) -> str:
    """What fits beside a bar; the setting stands last, where it may be cut."""
    return f"seed {run.seed}: {run.algorithm}" + (f", {run.setting}" if run.setting else "")


def _percent(event: Event) -> str:
    accuracy = event.record.get("accuracy")
    return "not measured" if accuracy is None else f"{100 * accuracy:.1f} %"
