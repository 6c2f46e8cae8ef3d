"""Which engine trains: by name, or the one that is fastest here and now."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedloom.config.checks import require_one_of
from fedloom.config.expression import Call, checked, parse, plain
from fedloom.config.registry import Entry
from fedloom.engines.base import Choice
from fedloom.engines.processes.engine import ProcessesEngine
from fedloom.engines.ray.engine import RayEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.engines.trial import fastest
from fedloom.errors import InvalidValue, suggestion
from fedloom.flat.device import require_device
from fedloom.rounds.schedule import Schedule
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


def make_engine(
    name: str, task: Task, schedule: Schedule | None = None, *, in_process: bool = False, **options: Any
) -> LocalEngine:
    """The engine called `name`, made with `options`: `rows`, `stacked`, `processes`, `ray`, or `auto`, which measures.

    `name` may hold options itself, as in `ray(workers=4, gpus=1)`; `ray://host:port` is `ray(address='ray://host:port')`.

    `auto` runs a short round of plain averaging in each engine on this machine on this task and takes the fastest; options are
    then those that all of these have. Worker processes are tried only where the rounds of the `schedule` are worth their start;
    without one they are taken to be many. `in_process=True`: recorders hook client training, so engines with several processes
    are excluded. Which engine was taken, and the seconds of each, stand in the engine's `chosen`. Engines agree to float
    tolerance and not bit for bit, so a run that is to be repeated exactly names its engine.
    Raises `InvalidValue` for another name or for options that the engine does not have.
    """
    call = require_engine(name)
    try:
        if call.name == "auto":
            return fastest(task, schedule, options, in_process=in_process)
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
    found = Call(call.name, named=checked(entry, given))
    if "inside" in found.named:
        require_one_of("inside", found.named["inside"], ("rows", "stacked"))
    return found


def require_engine_on(text: str, device: str) -> None:
    """Raise `InvalidValue` unless `text` names an engine and `device` a device that it takes tasks on."""
    call = require_engine(text)
    require_device(device)
    if device.startswith("cuda") and call.name in ("processes", "ray"):
        other = "ray(gpus=1) takes GPUs of its own" if call.name == "ray" else "take stacked or rows"
        raise InvalidValue(f"engine {call.name!r} takes data on the CPU, not device = {device!r}: {other}")


def settled_by(text: str) -> str:
    """The engine without what does not change a run's figures: a run may go on with more workers or at another address."""
    call = require_engine(text)
    return str(Call(call.name, named={name: value for name, value in call.named.items() if name not in WHERE}))
