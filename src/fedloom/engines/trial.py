"""Which engine of this machine is fastest on a task: a short round of plain averaging in each."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace

from fedloom.algorithm import Algorithm, Plan
from fedloom.engines.base import Choice, engines
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.engines.work import has_cores, mean_steps, most_workers, step_threads, using_threads
from fedloom.errors import FedloomError
from fedloom.local.proof import prove
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

START = 6.0
"""Seconds that starting worker processes may cost; they are tried where the rounds to come take twice as long."""

COMPILING = 60.0
"""Seconds that compiling a step may cost; it is tried on CUDA, where the rounds to come take ten times as long. On a CPU compiled
steps took 0.83 to 1.23 of the others' time."""


@engines.register("auto")
def fastest(
    task: Task, schedule: Schedule | None = None, in_process: bool = False, *, memory_budget: int = BUDGET
) -> RowsEngine | ProcessesEngine:
    """The engine, ready for the task, whose trial round was shortest. `memory_budget` is each one's.

    Worker processes start once, to be kept where they win, and only where the rounds to come are worth it; without a `schedule`
    they are taken to be many. Compiled steps are tried likewise, and on CUDA alone. With `in_process`, clients learn in this
    process, where a recorder can listen.
    """
    proof = prove(task.model, task.dataset, task.train, task.training, stack=True)
    rows = RowsEngine(task, proof, memory_budget=memory_budget)
    made: dict[str, RowsEngine | ProcessesEngine] = {"rows": rows}
    trial = TrialRound(task, rows)
    seconds = {"rows": trial.seconds(rows)}
    if not proof.unstackable:
        made["stacked"] = StackedEngine(task, proof, memory_budget=memory_budget)
        seconds["stacked"] = trial.seconds(made["stacked"])
    worth_compiling = trial.to_come(min(seconds.values()), schedule) > 10 * COMPILING
    if "stacked" in made and _launches_kernels(task) and worth_compiling:
        name = "stacked(compiled=True)"
        made[name] = StackedEngine(task, proof, compiled=True, memory_budget=memory_budget)
        with suppress(FedloomError):  # no compiler here, or none that knows these layers
            seconds[name] = trial.seconds(made[name])
    if not in_process and has_cores(task) and trial.to_come(min(seconds.values()), schedule) > 2 * START:
        processes = ProcessesEngine(task, workers=most_workers(task, schedule), memory_budget=memory_budget)
        for inside in ("rows", "stacked") if "stacked" in made else ("rows",):
            name = f"processes(inside={inside})" if inside != "rows" else "processes"
            processes.inside, made[name] = inside, processes
            seconds[name] = trial.seconds(processes)
    taken = min(seconds, key=lambda name: seconds[name])
    best = made[taken]
    if isinstance(best, ProcessesEngine):
        best.inside = "stacked" if "stacked" in taken else "rows"
    for engine in made.values():
        if engine is not best:
            engine.close()
    best.begin(task, None)
    best.chosen = Choice(taken, seconds)
    return best


def _launches_kernels(task: Task) -> bool:
    """Whether starting each operation costs enough for compiled steps to be worth a try."""
    return task.initial.is_cuda


class TrialRound:
    """A round of plain averaging over the task's first clients, the same for every engine.

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

    def _take(self, rows: RowsEngine, steps: int) -> None:
        """Let clients make so many steps in the trial, or as many as the task asks for."""
        asked = mean_steps(self._asked)
        self.steps = min(float(steps), asked)
        training = replace(self._asked.training, steps=steps)
        self.task = self._asked if steps >= asked else replace(self._asked, training=training)
        rows.begin(self.task, None)

    def seconds(self, engine: RowsEngine | ProcessesEngine) -> float:
        """Seconds of a round, the better of two after one that warms up (of one after one where they are long)."""
        engine.begin(self.task, None)
        self._run(engine, self.clients)
        first = self._run(engine, self.clients)
        return first if first > 2 * SECONDS else min(first, self._run(engine, self.clients))

    def to_come(self, seconds: float, schedule: Schedule | None) -> float:
        """Seconds that the rounds of the schedule take when a round of the trial takes `seconds`."""
        if schedule is None:
            return float("inf")
        participants = schedule.participants(self._asked.clients)
        longer = mean_steps(self._asked) / self.steps
        return schedule.rounds * seconds * longer * participants / self.clients

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
