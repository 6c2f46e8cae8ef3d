"""Which engine trains: by name, or the one that is fastest here and now."""

from __future__ import annotations

import inspect
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
from fedloom.engines.ray import RayEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import InvalidValue, suggestion
from fedloom.expression import Call, checked, parse, plain
from fedloom.registry import Entry
from fedloom.round import Round
from fedloom.task import Task

LocalEngine = RowsEngine | ProcessesEngine | RayEngine
"""An engine that this process directs (the stacked engine is a kind of the rows engine)."""

ENGINES: dict[str, Callable[..., LocalEngine]] = {
    "rows": RowsEngine,
    "stacked": StackedEngine,
    "processes": ProcessesEngine,
    "ray": RayEngine,
}

WHERE = ("workers", "threads", "cpus", "gpus", "address", "memory_budget", "object_store")
"""Options that say where and how fast clients train, not what comes of it (but for the last digits of sums)."""

TRIAL_STEPS = 4
"""Local steps of each client in a trial."""

TRIAL_CLIENTS = 10
"""Clients in a trial, where there are so many."""


def make_engine(name: str, task: Task, **options: Any) -> LocalEngine:
    """The engine called `name`, made with `options`: `rows`, `stacked`, `processes`, `ray`, or `auto`, which measures.

    `name` may hold options itself, as in `ray(workers=4, gpus=1)`; `ray://host:port` is `ray(address='ray://host:port')`.

    `auto` runs a short round of plain averaging in each engine on this machine on this task and takes the fastest; options are
    then that engine's. Which one it was, and the seconds, stand in the engine's `chosen`. Engines agree to float tolerance and
    not bit for bit, so a run that is to be repeated exactly names its engine.
    Raises `InvalidValue` for another name or for options that the engine does not have.
    """
    call = require_engine(name)
    if call.name == "auto":
        return _fastest(task, options)
    try:
        engine = ENGINES[call.name](task, **{**call.named, **options})
    except TypeError as error:
        raise InvalidValue(f"engine {call.name!r}: {error}") from error
    engine.chosen = Choice(name)
    return engine


def require_engine(text: str) -> Call:
    """The engine that `text` names, with its options. Raises `InvalidValue`, with the nearest name, where there is none."""
    if text.startswith("ray://"):
        return Call("ray", named={"address": text})
    if "(" not in text:  # whatever else stands there, it is meant as a name
        require_one_of("engine", text, (*ENGINES, "auto"))
    call = parse(text)
    require_one_of("engine", call.name, (*ENGINES, "auto"))
    if call.positional or call.until is not None:
        raise InvalidValue(f"engine {text!r}: options have names, such as ray(workers=2)")
    known = [] if call.name == "auto" else list(inspect.signature(ENGINES[call.name]).parameters)[1:]
    for option in call.named:
        if option not in known:
            there = ", ".join(known) or "none"
            raise InvalidValue(
                f"engine {call.name!r} has no option {option!r}:{suggestion(option, known)} (it has: {there})"
            )
    if call.name == "auto":
        return call
    given = {name: plain(value) for name, value in call.named.items()}
    entry = Entry(f"engine {call.name!r}", ENGINES[call.name].__init__)
    return Call(call.name, named=checked(entry, given))


def settled_by(text: str) -> str:
    """The engine without what does not change a run's figures: a run may go on with more workers or at another address."""
    call = require_engine(text)
    return str(Call(call.name, named={name: value for name, value in call.named.items() if name not in WHERE}))


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
