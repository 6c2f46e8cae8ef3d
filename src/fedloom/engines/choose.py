"""Which engine trains: by name, or the one that is fastest here and now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fedloom.algorithm import Algorithm, Plan
from fedloom.checks import require_one_of
from fedloom.engines.base import Choice, Order
from fedloom.engines.local import RowsEngine
from fedloom.engines.processes import ProcessesEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import InvalidValue
from fedloom.round import Round
from fedloom.task import Task

LocalEngine = RowsEngine | ProcessesEngine
"""An engine on this machine (the stacked engine is a kind of the rows engine)."""

ENGINES: dict[str, Callable[..., LocalEngine]] = {
    "rows": RowsEngine,
    "stacked": StackedEngine,
    "processes": ProcessesEngine,
}

TRIAL_STEPS = 4
"""Local steps of each client in a trial."""

TRIAL_CLIENTS = 10
"""Clients in a trial, where there are so many."""


def make_engine(name: str, task: Task, **options: Any) -> LocalEngine:
    """The engine called `name`, made with `options`: `rows`, `stacked`, `processes`, or `auto`, which measures.

    `auto` runs a short round of plain averaging in each engine on this task and takes the fastest; options are then that
    engine's. Which one it was, and the seconds, stand in the engine's `chosen`. Engines agree to float tolerance and not bit
    for bit, so a run that is to be repeated exactly names its engine.
    Raises `InvalidValue` for another name or for options that the engine does not have.
    """
    if name == "auto":
        return _fastest(task, options)
    require_engine(name)
    try:
        engine = ENGINES[name](task, **options)
    except TypeError as error:
        raise InvalidValue(f"engine {name!r}: {error}") from error
    engine.chosen = Choice(name)
    return engine


def require_engine(name: str) -> None:
    """Raise `InvalidValue`, with the nearest name, unless an engine is called so."""
    require_one_of("engine", name, (*ENGINES, "auto"))


def _fastest(task: Task, options: dict[str, Any]) -> LocalEngine:
    seconds: dict[str, float] = {}
    for name in _candidates(task):
        engine = ENGINES[name](_shortened(task))
        if not (isinstance(engine, StackedEngine) and engine.unstackable):
            seconds[name] = _trial(engine, task)
        engine.close()
    chosen = min(seconds, key=lambda name: seconds[name])
    fastest = make_engine(chosen, task, **options)
    fastest.chosen = Choice(chosen, seconds)
    return fastest


def _candidates(task: Task) -> list[str]:
    """Worker processes share data and models in the memory of the CPU, and pay where there are cores for them."""
    workers = not task.initial.is_cuda and torch.get_num_threads() > 1
    return ["rows", "stacked", *(["processes"] if workers else [])]


def _shortened(task: Task) -> Task:
    return replace(task, training=replace(task.training, steps=TRIAL_STEPS))


def _trial(engine: LocalEngine, task: Task) -> float:
    """Seconds of a round of a few clients and steps, the better of two after one that warms up. Nothing of it lasts."""
    count = min(TRIAL_CLIENTS, task.clients)
    rate = task.training.learning_rate
    round = Round(1, 1, 0, task.clients, count, rate, rate, selected=tuple(range(count)))
    method = Algorithm()
    method.setup(
        Plan(task.layout, task.initial, task.clients, count, 1, 0, task.dataset.classes, task.sizes, task.model)
    )
    message = method.send(round)
    orders = [Order(client, slot, dict(message)) for slot, client in enumerate(round.selected)]
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in engine.train(method, round, orders):
            pass
        times.append(time.perf_counter() - began)
        engine.rollback()
    return min(times[1:])
