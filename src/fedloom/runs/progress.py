"""Progress of runs: bars on a terminal and in a notebook, otherwise regular lines."""

import importlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from fedloom.common.errors import printable
from fedloom.report.units import time_text
from fedloom.runs.events import Event, RunName, Watch

_PAUSE = 10.0
_SHARE = 0.1
"""Pause between two lines without a terminal: seconds, and a share of the time so far."""

# of the bars in a notebook: their width, and the seconds between two drawings
_COLUMNS = 100
_REDRAW = 0.2

Rounds = int | Mapping[RunName, int]
"""The number of rounds of every run, or of each."""


Show = Callable[[int], AbstractContextManager[tuple[Watch, Callable[[], bool]]]]
"""Shows the progress of a number of runs: yields a watch, and a function that returns True to
stop.
"""


class Display:
    """A bar for each run in progress and one for all, and a line when a run ends; `brief` shows
    only bars.
    """

    def __init__(
        self,
        console: Console,
        runs: int,
        rounds: Rounds,
        brief: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.console = console
        self.runs = runs
        self.brief = brief
        self.clock = clock
        self.finished: dict[RunName, int] = {}  # rounds done
        self.bars: dict[RunName, TaskID] = {}
        self.progress = Progress(
            TextColumn(
                "{task.description}",
                table_column=Column(ratio=3, no_wrap=True, overflow="ellipsis"),
            ),
            BarColumn(bar_width=None, table_column=Column(ratio=2)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}", justify="right"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            expand=True,
            speed_estimate_period=120,
            get_time=clock,
        )
        total = runs * rounds if isinstance(rounds, int) else sum(rounds.values())
        self._all = self.progress.add_task("all runs", total=total, score="", visible=runs > 1)
        self._rounds = rounds
        self._engines: set[str] = set()

    def __call__(self, event: Event) -> None:
        run = event.run
        over = event.kind in ("ended", "failed")
        rounds = self._rounds if isinstance(self._rounds, int) else self._rounds[run]
        self.finished[run] = rounds if over else event.finished or self.finished.get(run, 0)
        score = f"{event.metric.noun} {event.score or 'not measured'}"
        texts = {
            "notice": event.text,
            "failed": f"failed: {event.text}",
            "skipped": "finished before",
            "ended": f"{score} after {event.finished} rounds, {time_text(event.seconds)}",
        }
        if event.finished:
            texts["started"] = f"going on from round {event.finished} of {rounds}"
        if event.kind in texts:
            self.line(f"{run}: {texts[event.kind]}")
        if event.kind == "started":
            if event.text not in {"", *self._engines}:
                self._engines.add(event.text)
                self.line(f"engine: {event.text}")
            setting = f", {run.setting}" if run.setting else ""  # at the end, where it may be cut
            text = Text(f"seed {run.seed}: {run.algorithm}{setting}").markup
            self.bars[run] = self.progress.add_task(
                text, total=rounds, completed=event.finished, score="", run=run
            )
        elif event.kind == "round":
            self.progress.update(self.bars[run], completed=event.finished)
            if event.score:
                self.progress.update(self.bars[run], score=score)
        elif over and run in self.bars:
            self.progress.remove_task(self.bars.pop(run))
        done = sum(self.finished.values())
        if event.kind in ("started", "skipped") and event.finished:  # rounds that took no time now
            self.progress.reset(self._all, completed=done)
        self.progress.update(self._all, completed=done)

    def line(self, text: str) -> None:
        if not self.brief:
            self.console.print(Text(printable(text)), soft_wrap=True)


class Lines(Display):
    """Display for logs and pipes: a line for each run that ends, and regularly the progress of
    all.
    """

    def __call__(self, event: Event) -> None:
        if not self.finished:
            self._began = self._spoke = self.clock()
        super().__call__(event)
        time = self.clock()
        if event.kind != "round" or time - self._spoke < max(_PAUSE, _SHARE * (time - self._began)):
            return
        self._spoke = time
        # All take at least as long as the slowest at its own pace.
        seconds = [
            task.time_remaining for task in self.progress.tasks if task.time_remaining is not None
        ]
        remaining = f"about {time_text(max(seconds))} left" if seconds else "no pace yet"
        if self.runs > 1:
            self.line(
                f"{len(self.finished) - len(self.bars)} of {self.runs} runs finished; "
                f"{remaining} for all"
            )
        for task in self.progress.tasks[1:]:
            score = task.fields["score"] or "not measured yet"
            text = f"{task.fields['run']}: round {task.completed:.0f} of {task.total:.0f}, {score}"
            self.line(f"  {text}" if self.runs > 1 else f"{text}; {remaining}")


class NotebookBars(Display):
    """Display for notebooks: one output with the bars as text, updated in place."""

    def __init__(
        self, runs: int, rounds: Rounds, brief: bool = False, clock: Callable[[], float] = monotonic
    ) -> None:
        console = Console(file=io.StringIO(), width=_COLUMNS, force_jupyter=False)
        super().__init__(console, runs, rounds, brief, clock)
        self._handle = importlib.import_module("IPython.display").display(
            {"text/plain": ""}, raw=True, display_id=True
        )
        self._drawn = 0.0

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if self.clock() - self._drawn >= _REDRAW:
            with self.console.capture() as bars:
                self.console.print(self.progress.get_renderable())
            self._handle.update({"text/plain": bars.get()}, raw=True)
            self._drawn = self.clock()

    def line(self, text: str) -> None:
        if not self.brief:
            print(printable(text))

    def clear(self) -> None:
        self._handle.update({"text/plain": ""}, raw=True)


@contextmanager
def display(console: Console, runs: int, rounds: Rounds, brief: bool = False) -> Iterator[Display]:
    """Show progress on a terminal, in a notebook or as lines. `brief` shows bars or nothing.

    Args:
        console: The output. A quiet console shows nothing.
        runs: Number of runs.
        rounds: Number of rounds of a run.
        brief: Show only bars, or nothing if the output cannot show bars.

    Yields:
        A function that is called with the events of the runs.
    """
    if console.is_jupyter and not console.quiet:
        notebook = NotebookBars(runs, rounds, brief)
        try:
            yield notebook
        finally:
            notebook.clear()
    elif console.is_terminal:
        bars = Display(console, runs, rounds, brief)
        with bars.progress:
            yield bars
    else:
        yield Lines(console, runs, rounds, brief)


def progress(
    runs: int, rounds: Rounds, quiet: bool = False, brief: bool = False
) -> AbstractContextManager[Display]:
    """Show progress beside the output of a script or below the cell of a notebook.

    Args:
        runs: Number of runs.
        rounds: Number of rounds of a run.
        quiet: Show nothing.
        brief: Show only bars, or nothing if the output cannot show bars.

    Returns:
        A context manager with the display.
    """
    return display(Console(stderr=True, quiet=quiet, highlight=False), runs, rounds, brief)


def bars(rounds: Rounds, quiet: bool) -> Show:
    """Return the progress of runs in a script or a notebook, which nothing stops.

    Args:
        rounds: Number of rounds of a run.
        quiet: Show nothing.

    Returns:
        A function from the number of runs to the context in which they are shown.
    """

    @contextmanager
    def show(runs: int) -> Iterator[tuple[Watch, Callable[[], bool]]]:
        with progress(runs, rounds, quiet) as watch:
            yield watch, lambda: False

    return show
