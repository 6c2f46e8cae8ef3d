"""Creation of engines by name or by the rule of `engines/rule.py`."""

from dataclasses import replace
from functools import cache
from typing import Any

from fedloom.algorithm.method import Method
from fedloom.common.device import require_device
from fedloom.common.errors import InvalidValue
from fedloom.common.expression import Call, parse
from fedloom.common.registry import RegistryEntry
from fedloom.engines.base import Choice, LocalEngine, engines
from fedloom.engines.dispatch import CannotSend
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.rule import choice
from fedloom.engines.stacked import StackedEngine
from fedloom.engines.work import has_cores, most_workers
from fedloom.rounds.schedule import Schedule
from fedloom.state.store import BUDGET
from fedloom.task import Task

PLACEMENT = ("workers", "threads", "cpus", "gpus", "address", "memory_budget", "object_store")
"""Options that change where and how fast clients train, but only the last digits of results."""

DEFAULT = "default"
"""Name of the engine that the rule chooses."""


def make_engine(
    name: str,
    task: Task,
    schedule: Schedule | None = None,
    *,
    in_process: bool = False,
    algorithm: Method | None = None,
    begun: Choice | None = None,
    **options: Any,
) -> LocalEngine:
    """Create an engine by name. Its attribute `chosen` has the name and the reason of the rule.

    Results of different engines are equal to float tolerance, but not bitwise. Name the engine of a
    run that must be repeated exactly on another machine.

    Args:
        name: `rows`, `stacked`, `processes`, `ray` or `default`, with options in brackets if any:
            `ray(workers=4, gpus=1)`. `ray://host:port` is `ray(address='ray://host:port')`. `auto`
            is an older name of `default`.
        task: Data, model and local training.
        schedule: Rounds and participation, from which the rule estimates the work. Without it, the
            rule assumes many rounds.
        in_process: True to start no processes by the rule, because recorders observe the training
            or other runs use the cores.
        algorithm: The method. The rule checks if its clients can be stacked.
        begun: Choice with which a resumed run began. The rule returns the same engine.
        **options: Options of the engine, in addition to the options in the name.

    Returns:
        The engine. Close it after use: it may hold worker processes.

    Raises:
        UnknownName: If no engine has this name.
        InvalidValue: If the engine does not have these options.
    """
    entry, settings = read_engine(name, **options)
    facts = (schedule, in_process, algorithm, begun) if entry.make is by_rule else ()
    engine: LocalEngine = entry.make(task, *facts, **settings)
    engine.chosen = engine.chosen or Choice(name)
    return engine


def read_engine(text: str, **options: Any) -> tuple[RegistryEntry[Any], dict[str, Any]]:
    """Parse the name of an engine.

    Args:
        text: Name with options in brackets.
        **options: Further options.

    Returns:
        The registered engine, and all its options.

    Raises:
        UnknownName: If no engine has this name.
        InvalidValue: If the engine does not have these options.
    """
    call = Call("ray", named={"address": text}) if text.startswith("ray://") else parse(text)
    return engines.read(replace(call, named={**call.named, **options}))


def require_engine_on(text: str, device: str) -> None:
    """Check that an engine can train on a device.

    Args:
        text: Name of the engine with options.
        device: `cpu`, `cuda`, `cuda:1` or `auto`.

    Raises:
        InvalidValue: If the engine or the device does not exist, or the engine needs another one.
    """
    entry, _ = read_engine(text)
    require_device(device)
    if device.startswith("cuda") and entry.name in ("processes", "ray"):
        remedy = (
            "set device = 'cpu' and engine = 'ray(gpus=1)' to train on GPUs"
            if entry.name == "ray"
            else "use the engine stacked or rows"
        )
        raise InvalidValue(
            f"engine {entry.name!r} needs data on the CPU, not device = {device!r}: {remedy}"
        )


@cache
def without_placement(text: str) -> str:
    """Return the name of an engine without its `PLACEMENT` options.

    A run may resume with other values of these options, such as more workers or another address.
    """
    entry, options = read_engine(text)
    return str(
        Call(
            entry.name,
            named={name: value for name, value in options.items() if name not in PLACEMENT},
        )
    )


@engines.register("default")
@engines.register("auto")
def by_rule(
    task: Task,
    schedule: Schedule | None = None,
    in_process: bool = False,
    algorithm: Method | None = None,
    begun: Choice | None = None,
    *,
    memory_budget: int = BUDGET,
) -> LocalEngine:
    """Create the engine that is usually the fastest for a task.

    The choice is the same for the same task on the same kind of machine:

    - On a CPU, chains of linear layers train in stacks if clients of the method can train in lock
      step. If rounds are long, the stacks are spread over worker processes.
    - Other models train in worker processes, one per thread, if training takes twice as long as
      the start of the processes.
    - On a GPU, models train in stacks that fill the memory.
    - All other tasks train row by row.

    A resumed run continues in the engine with which it began. If no processes may start here, it
    continues in this process: with the same results in rows, and to float tolerance in stacks.

    Args:
        task: Data, model and local training.
        schedule: Rounds and participation. Without it, the rule assumes many rounds.
        in_process: True to start no processes.
        algorithm: The method. Without it, clients count as stackable.
        begun: Choice with which a resumed run began.
        memory_budget: Bytes of client memory in this process. If clients need more, the memory of
            the least recently used clients is moved to files.

    Returns:
        The engine. Its attribute `chosen` has the reason of the choice.
    """
    chosen, proof = (begun, None) if begun else choice(task, schedule, in_process, algorithm)
    stacks = "stacked" in chosen.name
    spreads = chosen.name.startswith("processes")
    if spreads and has_cores(task) and not in_process:
        _, options = read_engine(
            chosen.name, workers=most_workers(task, schedule), memory_budget=memory_budget
        )
        try:
            engine: LocalEngine = ProcessesEngine(task, proof, **options)
        except CannotSend:
            if begun:
                raise
            reason = "this task cannot be sent to worker processes"
            chosen = Choice("stacked" if stacks else "rows", reason=reason)
            kind = StackedEngine if stacks else RowsEngine
            engine = kind(task, proof, memory_budget=memory_budget)
    else:
        engine = (StackedEngine if stacks else RowsEngine)(task, proof, memory_budget=memory_budget)
        if spreads:
            consequence = (
                "clients train in one process" if stacks else "clients train one after another"
            )
            engine.notice(
                f"the run began in {chosen.name}, but starts no processes here: {consequence}"
            )
    engine.chosen = chosen
    return engine
