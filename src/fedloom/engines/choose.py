"""Which engine trains: by name, by a rule, or the one that is fastest here and now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fedloom.engines.ray.driver  # noqa: F401  registers the engine
from fedloom.algorithm import Algorithm
from fedloom.config.expression import Call, parse
from fedloom.config.registry import Entry
from fedloom.engines.base import Choice, LocalEngine, engines
from fedloom.engines.rule import by_rule
from fedloom.engines.trial import fastest
from fedloom.errors import InvalidValue
from fedloom.flat.device import require_device
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task

WHERE = ("workers", "threads", "cpus", "gpus", "address", "memory_budget", "object_store", "fresh")
"""Options that say where and how fast clients train, not what comes of it (but for the last digits of sums)."""


DEFAULT = "default"
"""The engine of who names none: a rule chooses."""


def make_engine(
    name: str,
    task: Task,
    schedule: Schedule | None = None,
    *,
    in_process: bool = False,
    alone: bool = True,
    algorithm: Algorithm | None = None,
    begun: Choice | None = None,
    **options: Any,
) -> LocalEngine:
    """The engine called `name`, made with `options`: `rows`, `stacked`, `processes`, `ray`, `default`, for which a rule chooses,
    or `auto`, which measures.

    `name` may hold options itself, as in `ray(workers=4, gpus=1)`; `ray://host:port` is `ray(address='ray://host:port')`.

    `default` looks at the task, the `schedule` and the `algorithm` and takes the same engine every time on the same kind of
    machine (`by_rule`); a run goes on in the engine that it was `begun` in. Where the run is not `alone`, but one of several that
    share the cores, the rule starts no processes.
    `auto` runs a short round of plain averaging in each engine on this machine on this task and takes the fastest, or what an
    earlier run found so on such a task, unless the trial is to be `fresh`; other options are those that all of these have. Worker
    processes are tried only where the rounds of the `schedule` are worth their start; without one they are taken to be many.
    `in_process=True`: recorders hook client training, so engines with several processes are excluded. Which engine was taken, and
    the seconds of each, stand in the engine's `chosen`. Engines agree to float tolerance and not bit for bit, so a run that is to
    be repeated exactly names its engine.
    Raises `UnknownName` for another name and `InvalidValue` for options that the engine does not take.
    """
    entry, given = read_engine(name, **options)
    engine: LocalEngine
    if entry.make is by_rule:
        engine = by_rule(task, schedule, in_process or not alone, algorithm, begun, **given)
    elif entry.make is fastest:
        engine = fastest(task, schedule, in_process, **given)
    else:
        engine = entry.make(task, **given)
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
