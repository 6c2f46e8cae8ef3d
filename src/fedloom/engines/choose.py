"""Which engine trains: by name, or the one that is fastest here and now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fedloom.engines.ray.driver  # noqa: F401  registers the engine
from fedloom.config.expression import Call, parse
from fedloom.config.registry import Entry
from fedloom.engines.base import Choice, LocalEngine, engines
from fedloom.engines.trial import fastest
from fedloom.errors import InvalidValue
from fedloom.flat.device import require_device
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task

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
    Raises `UnknownName` for another name and `InvalidValue` for options that the engine does not take.
    """
    entry, given = read_engine(name, **options)
    if entry.make is fastest:
        chosen: LocalEngine = fastest(task, schedule, in_process, **given)
        return chosen
    engine: LocalEngine = entry.make(task, **given)
    engine.chosen = Choice(name)
    return engine


def read_engine(text: str, **options: Any) -> tuple[Entry[Any], dict[str, Any]]:
    """The engine that `text` names, and its options with `options`.

    Raises `UnknownName` or `InvalidValue`, in one line, for whatever does not fit.
    """
    call = Call("ray", named={"address": text}) if text.startswith("ray://") else parse(text)
    return engines.read(replace(call, named={**call.named, **options}))


def require_engine_on(text: str, device: str) -> None:
    """Raise `InvalidValue` unless `text` names an engine and `device` a device that it takes tasks on."""
    entry, _ = read_engine(text)
    require_device(device)
    if device.startswith("cuda") and entry.name in ("processes", "ray"):
        other = "ray(gpus=1) takes GPUs of its own" if entry.name == "ray" else "take stacked or rows"
        raise InvalidValue(f"engine {entry.name!r} takes data on the CPU, not device = {device!r}: {other}")


def settled_by(text: str) -> str:
    """The engine without what does not change a run's figures: a run may go on with more workers or at another address."""
    entry, options = read_engine(text)
    return str(Call(entry.name, named={name: value for name, value in options.items() if name not in WHERE}))
