"""Make an engine by its name, or by a rule where nobody names one: by the model, the method, sizes
and cores, without a clock.
"""

from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from fedloom.config.expression import Call, parse
from fedloom.config.registry import Entry
from fedloom.engines.base import Choice, LocalEngine, engines
from fedloom.engines.dispatch import CannotSend
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.proof import Proof, prove
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine, unstackable_method
from fedloom.engines.work import has_cores, mean_steps, most_workers, step_multiply_adds
from fedloom.errors import InvalidValue
from fedloom.flat.device import require_device
from fedloom.flat.linear_chain import linear_layers
from fedloom.method import Method, components
from fedloom.rounds.schedule import Schedule
from fedloom.state.store import BUDGET
from fedloom.task import Task

PLACEMENT = ("workers", "threads", "cpus", "gpus", "address", "memory_budget", "object_store")
"""Options that decide where and how fast clients train and leave the results alone, but for the
last digits of sums.
"""

DEFAULT = "default"
"""Name of the engine that a rule chooses."""

START = 6.0
"""Seconds that starting worker processes may cost."""

STEP_SECONDS, MULTIPLY_ADDS = 1e-3, 2e10
"""Seconds of a step outside stacks on one core, and multiply-adds per second on top. Of
convolutions, from digits_cnn (0.1 million a sample) to ResNet-20 (34 million), the sum was right
within a factor of 2.5.
"""

STACK_STEP_SECONDS, STACK_MULTIPLY_ADDS = 3e-5, 4.5e10
"""The same of a client's step in a stack of linear layers."""

SPLIT_SECONDS = 0.04
"""Seconds of a round on one core from which it pays to spread stacks over processes. Below,
messages cost more than they save: on two idle cores two processes took 0.7 of the time of one with
ten MLPs (0.1 s), 0.75 with a hundred logistic regressions (0.15 s), and 1.4 with ten of these
(0.015 s).
"""

SMALL_STEP = 1e7
"""Multiply-adds of a client's step over frozen linear layers below which stacks beat rows: 0.35 of
their time at 4e6.
"""


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
    """Make an engine by name. Its `chosen` says which one it is, and why if the rule chose it.

    Engines agree to float tolerance and not bit for bit, so a run that must repeat exactly
    elsewhere names its engine.

    Args:
        name: `rows`, `stacked`, `processes`, `ray` or `default`, with options in brackets if any:
            `ray(workers=4, gpus=1)`. `ray://host:port` is `ray(address='ray://host:port')`; `auto`
            is an older name of `default`.
        task: What clients train.
        schedule: Rounds and participation, by which the rule counts the work; without it, rounds
            count as many.
        in_process: Start no processes by the rule, since recorders hook client training or other
            runs share the cores.
        algorithm: The method, which the rule asks if its clients can be stacked.
        begun: The choice a resumed run began with; the rule keeps it.
        **options: Options of the engine, in addition to those in the name.

    Raises:
        UnknownName: There is no engine of this name.
        InvalidValue: The engine does not take these options.
    """
    entry, settings = read_engine(name, **options)
    facts = (schedule, in_process, algorithm, begun) if entry.make is by_rule else ()
    engine: LocalEngine = entry.make(task, *facts, **settings)
    engine.chosen = engine.chosen or Choice(name)
    return engine


def read_engine(text: str, **options: Any) -> tuple[Entry[Any], dict[str, Any]]:
    """Return the engine that `text` names, and its options with `options`; `UnknownName` or
    `InvalidValue` in one line.
    """
    call = Call("ray", named={"address": text}) if text.startswith("ray://") else parse(text)
    return engines.read(replace(call, named={**call.named, **options}))


def require_engine_on(text: str, device: str) -> None:
    """Raise `InvalidValue` unless `text` names an engine and `device` a device that it takes tasks
    on.
    """
    entry, _ = read_engine(text)
    require_device(device)
    if device.startswith("cuda") and entry.name in ("processes", "ray"):
        remedy = (
            "ray(gpus=1) takes GPUs of its own" if entry.name == "ray" else "take stacked or rows"
        )
        raise InvalidValue(
            f"engine {entry.name!r} takes data on the CPU, not device = {device!r}: {remedy}"
        )


@cache
def settled_by(text: str) -> str:
    """Return the engine without its `PLACEMENT` options: a run may be resumed with more workers or
    at another address.
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
    """Make the engine that is usually fastest on a task like this: the same one every time on the
    same kind of machine.

    On a CPU, chains of linear layers train in stacks if the method's clients can train together,
    and other models in worker processes, one for each thread, if training takes twice as long as
    their start. Stacks are spread over worker processes too if rounds are long. On a GPU, models
    train in stacks of as many as fit in memory. Everything else trains row by row.

    A resumed run goes on in the engine that it was `begun` in. If no processes may start here, it
    goes on in this process: to the same numbers in rows, to float tolerance in stacks.

    Args:
        task: What clients train.
        schedule: Rounds and participation; without it, rounds count as many.
        in_process: Start no processes.
        algorithm: The method; without it, its clients count as stackable.
        begun: The choice that a resumed run began with.
        memory_budget: Bytes of client memory kept in this process; beyond it, the least recently
            used clients go to files.
    """
    chosen, proof = (begun, None) if begun else choice(task, schedule, in_process, algorithm)
    stacks, spreads = "stacked" in chosen.name, chosen.name.startswith("processes")
    if spreads and has_cores(task) and not in_process:
        _, options = read_engine(
            chosen.name, workers=most_workers(task, schedule), memory_budget=memory_budget
        )
        try:
            engine: LocalEngine = ProcessesEngine(task, proof, **options)
        except CannotSend:
            if begun:
                raise
            reason = "worker processes cannot be sent this task"
            chosen = Choice("stacked" if stacks else "rows", reason=reason)
            in_this = StackedEngine if stacks else RowsEngine
            engine = in_this(task, proof, memory_budget=memory_budget)
    else:
        engine = (StackedEngine if stacks else RowsEngine)(task, proof, memory_budget=memory_budget)
        if spreads:
            clients = (
                "clients train in one process" if stacks else "clients train one after another"
            )
            engine.notice(
                f"the run began in {chosen.name}, but starts no processes here: {clients}"
            )
    engine.chosen = chosen
    return engine


def choice(
    task: Task, schedule: Schedule | None, in_process: bool, algorithm: Method | None
) -> tuple[Choice, Proof | None]:
    """Return the rule's choice, and the proof of the task's shortcuts if it took one."""
    cuda, spreads, workers = (
        task.initial.is_cuda,
        has_cores(task) and not in_process,
        most_workers(task, schedule),
    )
    stackable = algorithm is None or unstackable_method(components(algorithm)) is None
    plain = stackable and task.training.autocast == "none"
    products = (
        plain
        and task.objective.plain_cross_entropy
        and bool(linear_layers(task.model, task.layout))
    )
    if cuda or products or (plain and _low_rank(task)):
        proof = prove(task.model, task.dataset, task.train, task.training, stack=True)
        if (
            task.clients == 1
            or proof.unstackable
            or (not cuda and products and not proof.shortcuts.linear)
        ):
            return Choice("rows", reason="models of this task cannot be stacked"), proof
        if cuda:
            if StackedEngine(task, proof).chunk == 1:
                return Choice(
                    "rows", reason="the memory of the GPU holds one model in training"
                ), proof
            return Choice("stacked", reason="models train fastest in stacks on a GPU"), proof
        if not products:
            return Choice(
                "stacked", reason="small steps over frozen linear layers train fastest in stacks"
            ), proof
        seconds = round_seconds(task, schedule, STACK_STEP_SECONDS, STACK_MULTIPLY_ADDS)
        if (
            spreads
            and workers > 1
            and seconds > SPLIT_SECONDS
            and _outweighs_start(schedule, seconds)
        ):
            name = f"processes(workers={workers}, inside=stacked)"
            return Choice(name, reason="stacks of linear layers are worth all cores"), proof
        return Choice("stacked", reason="linear layers train fastest in stacks"), proof
    if not spreads:
        return Choice("rows", reason="no worker processes are started here"), None
    if not _outweighs_start(schedule, round_seconds(task, schedule)):
        return Choice("rows", reason="too little training for the start of workers"), None
    return Choice(
        f"processes(workers={workers})", reason="training outweighs the start of workers"
    ), None


def _low_rank(task: Task) -> bool:
    """Return True for small steps of a model of linear layers, some of them frozen, as with LoRA."""
    layers = [
        layer
        for layer in task.model.modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    linear = bool(task.layout.frozen) and all(isinstance(layer, nn.Linear) for layer in layers)
    return linear and step_multiply_adds(task) < SMALL_STEP


def _outweighs_start(schedule: Schedule | None, seconds: float) -> bool:
    """Return True if rounds of so many seconds take together twice as long as the start of workers."""
    return schedule is None or schedule.rounds * seconds > 2 * START


def round_seconds(
    task: Task,
    schedule: Schedule | None,
    step: float = STEP_SECONDS,
    multiply_adds: float = MULTIPLY_ADDS,
) -> float:
    """Estimate the seconds that a round's local training takes one core: `step` each and so many
    multiply-adds per second.
    """
    clients = task.clients if schedule is None else schedule.participants(task.clients)
    return clients * mean_steps(task) * (step + step_multiply_adds(task) / multiply_adds)
