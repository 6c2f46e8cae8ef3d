"""Which engine of this machine is fastest on a task: a short round of plain averaging in each."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from fedloom.algorithm import Algorithm, Plan
from fedloom.engines.base import Choice, engines
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.engines.trial_result import EngineName, TrialResult, deciding, kept, now
from fedloom.engines.work import has_cores, mean_steps, most_workers, step_threads, using_threads
from fedloom.errors import FedloomError
from fedloom.local.proof import Proof, prove
from fedloom.round import Round
from fedloom.rounds.engine import ClientTask
from fedloom.rounds.schedule import Schedule
from fedloom.state.store import BUDGET
from fedloom.task import Task

CLIENTS = 10
"""Clients in a trial, where there are so many; `FEW` where a step takes longer than `LONG_STEP` seconds."""

FEW = 4
LONG_STEP = 0.05

SECONDS = 0.3
"""What a trial round of the rows engine should take: half as long at least, where the task's own takes longer."""

CLOSE = 1.5
"""What takes more than so many times as long as the fastest so far is not timed twice, and is not how workers train."""

START = 6.0
"""Seconds that starting worker processes may cost; they are tried where the rounds to come take twice as long."""

COMPILING = 60.0
"""Seconds that compiling a step may cost; it is tried on CUDA, where the rounds to come take ten times as long. On a CPU compiled
steps took 0.83 to 1.23 of the others' time."""


@engines.register("auto")
def fastest(
    task: Task,
    schedule: Schedule | None = None,
    in_process: bool = False,
    *,
    memory_budget: int = BUDGET,
    fresh: bool = False,
) -> RowsEngine | ProcessesEngine:
    """The engine, ready for the task, whose trial round was shortest. `memory_budget` is each one's.

    What was found is kept in the cache folder. A task with the same model and sizes takes it from there on the same machine, but
    for a `fresh` trial, and where it is long enough for engines that were not tried.
    Worker processes start once, to be kept where they win, and only where the rounds to come are worth it; without a `schedule`
    they are taken to be many. Compiled steps are tried likewise, and on CUDA alone. With `in_process`, clients learn in this
    process, where a recorder can listen.
    """
    proof = prove(task.model, task.dataset, task.train, task.training, stack=True)
    candidates = Candidates(task, schedule, in_process, proof, memory_budget)
    of = deciding(task, schedule)
    earlier = None if fresh else recalled(candidates, of)
    seconds = (earlier or measured(task, candidates, of)).measured()
    taken = min(seconds, key=lambda name: seconds[name])
    best = candidates.engine(taken)
    candidates.close_others(best)
    best.begin(task, None)
    best.chosen = Choice(taken, seconds, kept_from=earlier.when if earlier else "")
    return best


def recalled(candidates: Candidates, of: dict[str, Any]) -> TrialResult | None:
    """What an earlier trial found, of the engines that are worth one here; None where one of these was not tried."""
    if (found := kept(of)) is None:
        return None
    names = set(candidates.worth_trying(found))
    tried = {name: seconds for name, seconds in found.seconds.items() if name in names}
    return replace(found, seconds=tried) if len(tried) == len(names) else None


def measured(task: Task, candidates: Candidates, of: dict[str, Any]) -> TrialResult:
    """What a trial round takes in each engine that is worth one, kept for the next run."""
    rows = candidates.engine("rows")
    assert isinstance(rows, RowsEngine)
    trial = TrialRound(task, rows)
    found = TrialResult(of, trial.clients, trial.steps, {"rows": trial.fastest}, now())
    for name in candidates.worth_trying(found):
        if name not in found.seconds:
            found.seconds[name] = None
            # There may be no compiler, or none that knows these layers.
            with suppress(FedloomError) if "compiled" in name else nullcontext():
                found.seconds[name] = trial.seconds(candidates.engine(name))
    found.keep()
    return found


class Candidates:
    """The engines that may train the task, each made when it is first asked for."""

    def __init__(
        self, task: Task, schedule: Schedule | None, in_process: bool, proof: Proof, memory_budget: int
    ) -> None:
        self.task, self.schedule, self.in_process, self.proof = task, schedule, in_process, proof
        self._options: dict[str, Any] = {"memory_budget": memory_budget}
        self._made: dict[str, RowsEngine | ProcessesEngine] = {}

    def worth_trying(self, found: TrialResult) -> Iterator[EngineName]:
        """The engines that are worth a trial round, by what has been found of those before."""
        yield "rows"
        if not self.proof.unstackable:
            yield "stacked"
        to_come = found.to_come(self.task, self.schedule)
        if not self.proof.unstackable and _launches_kernels(self.task) and to_come > 10 * COMPILING:
            yield "stacked(compiled=True)"
        if self.in_process or not has_cores(self.task) or to_come <= 2 * START:
            return
        here = found.measured()
        limit = CLOSE * min(here["rows"], here.get("stacked", math.inf))
        if here["rows"] <= limit:
            yield "processes"
        if here.get("stacked", math.inf) <= limit:
            yield "processes(inside=stacked)"

    def engine(self, name: str) -> RowsEngine | ProcessesEngine:
        """The engine of this name. The worker processes are the same whichever way they train."""
        kind = "processes" if name.startswith("processes") else name
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        engine = self._made[kind]
        if isinstance(engine, ProcessesEngine):
            engine.inside = "stacked" if "stacked" in name else "rows"
        return engine

    def _make(self, kind: str) -> RowsEngine | ProcessesEngine:
        if kind == "processes":
            workers = most_workers(self.task, self.schedule)
            return ProcessesEngine(self.task, self.proof, workers=workers, **self._options)
        if kind == "rows":
            return RowsEngine(self.task, self.proof, **self._options)
        return StackedEngine(self.task, self.proof, compiled="compiled" in kind, **self._options)

    def close_others(self, best: RowsEngine | ProcessesEngine) -> None:
        for engine in self._made.values():
            if engine is not best:
                engine.close()


def _launches_kernels(task: Task) -> bool:
    """Whether starting each operation costs enough for compiled steps to be worth a try."""
    return task.initial.is_cuda


class TrialRound:
    """A round of plain averaging over the task's first clients, the same for every engine. `fastest`: seconds of the fastest one,
    of the rows engine at first.

    It is a whole round where that takes the rows engine little longer than half of `SECONDS`, else one of fewer steps.
    """

    def __init__(self, task: Task, rows: RowsEngine) -> None:
        self.clients = min(CLIENTS, task.clients)
        self._asked = task
        self._take(rows, 1)
        self._run(rows, 1)
        if self._run(rows, 1) > LONG_STEP:
            self.clients = min(FEW, task.clients)
        taken = self._run(rows, self.clients)
        # In steps, since in a short round what each client costs once stands for more than it is.
        while self.task is not task and taken < SECONDS / 2:
            self._take(rows, math.ceil(self.steps * max(2, min(8, SECONDS / taken))))
            taken = self._run(rows, self.clients)
        self.fastest = taken
        self.fastest = self._again(rows, taken)

    def _take(self, rows: RowsEngine, steps: int) -> None:
        """Let clients make so many steps in the trial, or as many as the task asks for."""
        asked = mean_steps(self._asked)
        self.steps = min(float(steps), asked)
        training = replace(self._asked.training, steps=steps)
        self.task = self._asked if steps >= asked else replace(self._asked, training=training)
        rows.begin(self.task, None)

    def seconds(self, engine: RowsEngine | ProcessesEngine) -> float:
        """Seconds of a round after one that warms up."""
        engine.begin(self.task, None)
        self._run(engine, self.clients)
        seconds = self._again(engine, self._run(engine, self.clients))
        self.fastest = min(self.fastest, seconds)
        return seconds

    def _again(self, engine: RowsEngine | ProcessesEngine, first: float) -> float:
        """The better of two rounds, where the first was short and may be the fastest."""
        last = first > min(CLOSE * self.fastest, 2 * SECONDS)
        return first if last else min(first, self._run(engine, self.clients))

    def _run(self, engine: RowsEngine | ProcessesEngine, count: int) -> float:
        """Seconds of a round of the first `count` clients. Nothing of it lasts."""
        task, rate = self.task, self.task.training.learning_rate
        round = Round(1, 1, 0, task.clients, count, rate, rate, selected=tuple(range(count)))
        method = Algorithm()
        method.setup(
            Plan(task.layout, task.initial, task.clients, count, 1, 0, task.dataset.classes, task.sizes, task.model)
        )
        message = method.send(round)
        client_tasks = [ClientTask(client, slot, dict(message)) for slot, client in enumerate(round.selected)]
        with using_threads(step_threads(task)):
            began = time.perf_counter()
            for _ in engine.train(method, round, client_tasks):
                pass
            ended = time.perf_counter()
        engine.rollback()
        return ended - began
