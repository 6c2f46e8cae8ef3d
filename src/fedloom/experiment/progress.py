"""Progress of runs for people: bars on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fedloom.experiment.events import Event, RunName
from fedloom.report.units import time_text

_PAUSE = 10.0
"""Seconds between two lines where there is no terminal, at least."""

_SHARE = 0.1
"""Part of the time since the start that passes between two lines, so that a long run does not fill its log."""

Rounds = int | Mapping[RunName, int]
"""How many rounds each run has: all the same, or each its own."""


class Display:
    """What both ways of showing share: the engines that runs train in, a line when a run ends, and notices.

    `finished` holds the rounds that are done, by run; all of them for a run that is over, whichever way, since it asks for no
    more time. `live` is what is on the screen while runs go on.
    """

    live: AbstractContextManager[Any] = nullcontext()

    def __init__(
        self, console: Console, runs: int, rounds: Rounds, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.runs, self.clock = console, runs, clock
        self.total = runs * rounds if isinstance(rounds, int) else sum(rounds.values())
        self.finished: dict[RunName, int] = {}
        self._rounds = rounds
        self._engines: set[str] = set()

    def rounds(self, run: RunName) -> int:
        """How many rounds a run has."""
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
        """A line that stays."""
        self.console.print(Text(text), soft_wrap=True)


@dataclass
class _UnderWay:
    """A run that goes on: when it began, after how many rounds, how many are done since, and what was measured last."""

    began: float
    first: int
    done: int = 0
    score: str = "not measured yet"

    def left(self, now: float, rounds: int) -> float:
        """Seconds that the rest of `rounds` takes at the run's own pace; 0 while there is none."""
        return (rounds - self.first - self.done) * (now - self.began) / self.done if self.done else 0.0


class Lines(Display):
    """For logs and pipes: a line for each run that ends, and now and then how far all are, with a line for each under way."""

    def __init__(
        self, console: Console, runs: int, rounds: Rounds, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console, runs, rounds, clock)
        self._began = self._spoke = clock()
        self._done = self._over = 0
        self._under_way: dict[RunName, _UnderWay] = {}

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        now = self.clock()
        if event.kind == "started":
            self._under_way[event.run] = _UnderWay(now, event.finished)
            if not self._done:
                self._began = now  # making data and worker processes ready says nothing of the rounds to come
        elif event.kind in ("ended", "skipped", "failed"):
            self._under_way.pop(event.run, None)
            self._over += 1
        elif event.kind == "round":
            self._done += 1
            run = self._under_way[event.run]
            run.done += 1
            if event.score:
                run.score = f"{event.metric.noun} {event.score}"
            if now - self._spoke >= max(_PAUSE, _SHARE * (now - self._began)):
                self._spoke = now
                self._say(now)

    def _say(self, now: float) -> None:
        """Where all runs are and the time that all of them still take, then each run under way; a run alone has one line."""
        left = f"about {time_text(self._left(now))} left"
        if self.runs > 1:
            self.line(f"{self._over} of {self.runs} runs finished; {left} for all")
        for name, run in self._under_way.items():
            text = f"{name}: round {self.finished[name]} of {self.rounds(name)}, {run.score}"
            self.line(f"  {text}" if self.runs > 1 else f"{text}; {left}")

    def _left(self, now: float) -> float:
        """Seconds that all runs still take: at their common pace, but never less than the slowest needs at its own."""
        together = (self.total - sum(self.finished.values())) * (now - self._began) / self._done
        return max(0.0, together, *(run.left(now, self.rounds(name)) for name, run in self._under_way.items()))


class Bars(Display):
    """For terminals: a bar for each run under way, and one for all of them when there are several."""

    def __init__(
        self, console: Console, runs: int, rounds: Rounds, clock: Callable[[], float] = time.monotonic
    ) -> None:
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
        self.live = self._progress
        self._bars: dict[RunName, TaskID] = {}
        self._all = self._progress.add_task("all runs", total=self.total, accuracy="", visible=runs > 1)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if event.kind == "started":
            self._bars[event.run] = self._progress.add_task(
                Text(_short(event.run)).markup,
                total=self.rounds(event.run),
                completed=event.finished,
                accuracy="",
            )
        elif event.kind == "round":
            self._progress.update(self._bars[event.run], completed=event.finished)
            if event.score:
                self._progress.update(self._bars[event.run], accuracy=event.score)
        elif event.kind in ("ended", "failed") and event.run in self._bars:
            self._progress.remove_task(self._bars.pop(event.run))
        self._progress.update(self._all, completed=sum(self.finished.values()))

    def line(self, text: str) -> None:
        self._progress.console.print(Text(text), soft_wrap=True)


@contextmanager
def display(console: Console, runs: int, rounds: Rounds) -> Iterator[Display]:
    """The way of showing that suits the console."""
    shown = Bars(console, runs, rounds) if console.is_terminal else Lines(console, runs, rounds)
    with shown.live:
        yield shown


def _short(run: RunName) -> str:
    """What fits beside a bar; the setting stands last, where it may be cut."""
    return f"seed {run.seed}: {run.algorithm}" + (f", {run.setting}" if run.setting else "")
