"""Make an engine by its name, or by a rule where nobody names one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fedloom.engines.ray.driver  # noqa: F401  registers the engine
from fedloom.algorithm import Algorithm
from fedloom.config.expression import Call, parse
from fedloom.config.registry import Entry
from fedloom.engines.base import Choice, LocalEngine, engines
from fedloom.engines.rule import by_rule
from fedloom.errors import InvalidValue
from fedloom.flat.device import require_device
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task

PLACEMENT = ("workers", "threads", "cpus", "gpus", "address", "memory_budget", "object_store")
"""Options that decide where and how fast clients train and leave the results alone, but for the last digits of sums."""

DEFAULT = "default"
"""Name of the engine that a rule chooses."""


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
    """Make an engine by name. Its `chosen` says which one it is, and why if the rule chose it.

    Engines agree to float tolerance and not bit for bit, so a run that must repeat exactly elsewhere names its engine.

    Args:
        name: `rows`, `stacked`, `processes`, `ray` or `default`, with options in brackets if any: `ray(workers=4, gpus=1)`.
            `ray://host:port` is `ray(address='ray://host:port')`; `auto` is an older name of `default`.
        task: What clients train.
        schedule: Rounds and participation, by which the rule counts the work; without it, rounds count as many.
        in_process: Start no processes, since recorders hook client training.
        alone: False if other runs share the cores: the rule then starts no processes either.
        algorithm: The method, which the rule asks if its clients can be stacked.
        begun: The choice a resumed run began with; the rule keeps it.
        **options: Options of the engine, in addition to those in the name.

    Raises:
        UnknownName: There is no engine of this name.
        InvalidValue: The engine does not take these options.
    """
    entry, settings = read_engine(name, **options)
    engine: LocalEngine
    if entry.make is by_rule:
        engine = by_rule(task, schedule, in_process or not alone, algorithm, begun, **settings)
    else:
        engine = entry.make(task, **settings)
        engine.chosen = Choice(name)
    return engine


def read_engine(text: str, **options: Any) -> tuple[Entry[Any], dict[str, Any]]:
    """Return the engine that `text` names, and its options with `options`; `UnknownName` or `InvalidValue` in one line."""
    call = Call("ray", named={"address": text}) if text.startswith("ray://") else parse(text)
    named = {**call.named, **options}
    if call.name == "auto":
        named.pop("fresh", None)  # an option of its former trial
    return engines.read(replace(call, named=named))


def require_engine_on(text: str, device: str) -> None:
    """Raise `InvalidValue` unless `text` names an engine and `device` a device that it takes tasks on."""
    entry, _ = read_engine(text)
    require_device(device)
    if device.startswith("cuda") and entry.name in ("processes", "ray"):
        remedy = "ray(gpus=1) takes GPUs of its own" if entry.name == "ray" else "take stacked or rows"
        raise InvalidValue(f"engine {entry.name!r} takes data on the CPU, not device = {device!r}: {remedy}")


def settled_by(text: str) -> str:
    """Return the engine without its `PLACEMENT` options: a run may be resumed with more workers or at another address."""
    entry, options = read_engine(text)
    return str(Call(entry.name, named={name: value for name, value in options.items() if name not in PLACEMENT}))
