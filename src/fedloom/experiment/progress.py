"""Progress of runs for people: bars on a terminal and in a notebook, a line now and then anywhere else."""

import importlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fedloom.experiment.events import Event, RunName
from fedloom.report.units import time_text

_PAUSE = 10.0
"""Seconds between two lines where there is no terminal, at least."""

_SHARE = 0.1
"""Share of the time since the start between two lines, so that a long run does not fill its log."""

Rounds = int | Mapping[RunName, int]
"""The number of rounds of every run, or of each."""


class Display:
    """Base of both displays. It prints a line when a run ends; `finished` are the rounds done, by run."""

    brief = False  # shows bars alone

    def __init__(self, console: Console, runs: int, rounds: Rounds) -> None:
        self.console, self.runs = console, runs
        self.total = runs * rounds if isinstance(rounds, int) else sum(rounds.values())
        self.finished: dict[RunName, int] = {}
        self._rounds = rounds
        self._engines: set[str] = set()

    def rounds(self, run: RunName) -> int:
        """Return the number of rounds of a run."""
        return self._rounds if isinstance(self._rounds, int) else self._rounds[run]

    def __call__(self, event: Event) -> None:
        """Show one event."""
        over = event.kind in ("ended", "failed")
        done = self.rounds(event.run) if over else event.finished
        self.finished[event.run] = done or self.finished.get(event.run, 0)
        measured = f"{event.metric.noun} {event.score or 'not measured'}"
        texts = {
            "notice": event.text,
            "failed": f"failed: {event.text}",
            "skipped": "finished before",
            "ended": f"{measured} after {event.finished} rounds, {time_text(event.seconds)}",
        }
        if event.finished:
            texts["started"] = f"going on from round {event.finished} of {self.rounds(event.run)}"
        if event.kind in texts:
            self.line(f"{event.run}: {texts[event.kind]}")
        if event.kind == "started" and event.text not in {"", *self._engines}:
            self._engines.add(event.text)
            self.line(f"engine: {event.text}")

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if not self.brief:
            self.write(text)

    def write(self, text: str) -> None:
        """Print a line."""
        self.console.print(Text(text), soft_wrap=True)


@dataclass
class _RunUnderWay:
    """A run under way: its start, the rounds done until then and since, and its latest score."""

    began: float
    resumed_at: int
    done: int = 0
    score: str = "not measured yet"

    def remaining(self, time: float, rounds: int) -> float:
        """Return the seconds until round `rounds` at the run's pace; 0 while it has none."""
        return (rounds - self.resumed_at - self.done) * (time - self.began) / self.done if self.done else 0.0


class Lines(Display):
    """Display for logs and pipes: a line for each run that ends, and now and then the progress of all and each under way."""

    def __init__(self, console: Console, runs: int, rounds: Rounds, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(console, runs, rounds)
        self._clock, self._began, self._spoke = clock, clock(), clock()
        self._done = self._over = 0
        self._under_way: dict[RunName, _RunUnderWay] = {}

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        time = self._clock()
        if event.kind == "started":
            self._under_way[event.run] = _RunUnderWay(time, event.finished)
            if not self._done:
                self._began = time  # making data and worker processes ready says nothing of the rounds to come
        elif event.kind in ("ended", "skipped", "failed"):
            self._under_way.pop(event.run, None)
            self._over += 1
        elif event.kind == "round":
            self._done += 1
            run = self._under_way[event.run]
            run.done += 1
            if event.score:
                run.score = f"{event.metric.noun} {event.score}"
            if time - self._spoke >= max(_PAUSE, _SHARE * (time - self._began)):
                self._spoke = time
                self._print_progress(time)

    def _print_progress(self, time: float) -> None:
        """Print the progress of all runs, then of each under way; a single run has one line."""
        remaining = f"about {time_text(self._remaining(time))} left"
        if self.runs > 1:
            self.line(f"{self._over} of {self.runs} runs finished; {remaining} for all")
        for name, run in self._under_way.items():
            text = f"{name}: round {self.finished[name]} of {self.rounds(name)}, {run.score}"
            self.line(f"  {text}" if self.runs > 1 else f"{text}; {remaining}")

    def _remaining(self, time: float) -> float:
        """Return the seconds that all runs still take: at their common pace, but at least those of the slowest at its own."""
        joint = (self.total - sum(self.finished.values())) * (time - self._began) / self._done
        return max(0.0, joint, *(run.remaining(time, self.rounds(name)) for name, run in self._under_way.items()))


class Bars(Display):
    """Display for terminals: a bar for each run under way, and one for all of them when there are several."""

    def __init__(self, console: Console, runs: int, rounds: Rounds) -> None:
        super().__init__(console, runs, rounds)
        self.progress = Progress(
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
        self._all = self.progress.add_task("all runs", total=self.total, accuracy="", visible=runs > 1)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if event.kind == "started":
            setting = f", {event.run.setting}" if event.run.setting else ""  # at the end, where it may be cut
            self._bars[event.run] = self.progress.add_task(
                Text(f"seed {event.run.seed}: {event.run.algorithm}{setting}").markup,
                total=self.rounds(event.run),
                completed=event.finished,
                accuracy="",
            )
        elif event.kind == "round":
            self.progress.update(self._bars[event.run], completed=event.finished)
            if event.score:
                self.progress.update(self._bars[event.run], accuracy=event.score)
        elif event.kind in ("ended", "failed") and event.run in self._bars:
            self.progress.remove_task(self._bars.pop(event.run))
        self.progress.update(self._all, completed=sum(self.finished.values()))


class NotebookBars(Bars):
    """Display for notebooks: the bars as text in one output, which is updated."""

    def __init__(self, runs: int, rounds: Rounds, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(Console(file=io.StringIO(), width=_COLUMNS, force_jupyter=False), runs, rounds)
        self._handle = importlib.import_module("IPython.display").display({"text/plain": ""}, raw=True, display_id=True)
        self._clock, self._drawn = clock, 0.0

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if self._clock() - self._drawn >= _REDRAW:
            with self.console.capture() as bars:
                self.console.print(self.progress.get_renderable())
            self._handle.update({"text/plain": bars.get()}, raw=True)
            self._drawn = self._clock()

    def write(self, text: str) -> None:
        print(text)

    def clear(self) -> None:
        """Remove the bars."""
        self._handle.update({"text/plain": ""}, raw=True)


_COLUMNS, _REDRAW = 100, 0.2  # of the bars in a notebook: their width, and the seconds between two drawings


@contextmanager
def display(console: Console, runs: int, rounds: Rounds, brief: bool = False) -> Iterator[Display]:
    """Show progress as the console allows; `brief` shows bars alone, and nothing where there can be none."""
    if console.is_jupyter and not console.quiet:
        notebook = NotebookBars(runs, rounds)
        notebook.brief = brief
        try:
            yield notebook
        finally:
            notebook.clear()
    elif console.is_terminal:
        bars = Bars(console, runs, rounds)
        bars.brief = brief
        with bars.progress:
            yield bars
    else:
        yield Lines(Console(quiet=True) if brief else console, runs, rounds)


def progress(runs: int, rounds: Rounds, quiet: bool = False, brief: bool = False) -> AbstractContextManager[Display]:
    """Show progress beside the output of a script or below the cell of a notebook."""
    return display(Console(stderr=True, quiet=quiet, highlight=False), runs, rounds, brief)
