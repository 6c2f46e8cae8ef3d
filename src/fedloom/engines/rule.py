"""The rule that chooses an engine for a task.

It depends on the model, the method, sizes and cores. It measures no time.
"""

from torch import nn

from fedloom.algorithm.method import Method, components
from fedloom.engines.base import Choice
from fedloom.engines.proof import Proof, prove
from fedloom.engines.stacked import StackedEngine, unstackable_method
from fedloom.engines.work import has_cores, mean_steps, most_workers, step_multiply_adds
from fedloom.flat.linear_chain import linear_layers
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task

START_SECONDS = 6.0
"""Estimated time to start worker processes."""

STEP_SECONDS = 1e-3
MULTIPLY_ADDS = 2e10
"""Cost of a step outside stacks on one core: constant seconds, and multiply-adds per second.

For convolutions from digits_cnn (0.1 million multiply-adds per sample) to ResNet-20 (34 million),
the estimate was correct within a factor of 2.5.
"""

STACK_STEP_SECONDS = 3e-5
STACK_MULTIPLY_ADDS = 1e11
"""The same cost for a client's step in a stack of linear layers."""

SPLIT_SECONDS = 0.04
"""Smallest duration of a round on one core for which stacks are spread over processes.

In shorter rounds the messages cost more than the processes save. On two idle cores, two processes
took 0.7 of the time of one process with ten MLPs (0.1 s), 0.75 with a hundred logistic regressions
(0.15 s), and 1.4 with ten logistic regressions (0.015 s).
"""

SMALL_STEP = 1e7
"""Largest number of multiply-adds of a step over frozen linear layers that trains in stacks.

At 4e6, stacks take 0.35 of the time of rows.
"""


def choice(
    task: Task, schedule: Schedule | None, in_process: bool, algorithm: Method | None
) -> tuple[Choice, Proof | None]:
    """Choose the engine that is usually the fastest for a task.

    Args:
        task: Data, model and local training.
        schedule: Rounds and participation, or None for many rounds.
        in_process: True to start no processes.
        algorithm: The method, or None for a stackable one.

    Returns:
        The choice, and the proof of the task's shortcuts if the rule needed it.
    """
    cuda = task.initial.is_cuda
    spreads = has_cores(task) and not in_process
    workers = most_workers(task, schedule)
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
                reason = "the memory of the GPU is too small for several models in training"
                return Choice("rows", reason=reason), proof
            return Choice("stacked", reason="models train fastest in stacks on a GPU"), proof
        if not products:
            return Choice(
                "stacked", reason="small steps over frozen linear layers train fastest in stacks"
            ), proof
        seconds = round_seconds(task, schedule, STACK_STEP_SECONDS, STACK_MULTIPLY_ADDS)
        long = seconds > SPLIT_SECONDS and _exceeds_start(schedule, seconds)
        if spreads and workers > 1 and long:
            name = f"processes(workers={workers}, inside=stacked)"
            return Choice(name, reason="rounds are long enough for stacks on all cores"), proof
        return Choice("stacked", reason="linear layers train fastest in stacks"), proof
    if not spreads:
        return Choice("rows", reason="no worker processes are started here"), None
    if not _exceeds_start(schedule, round_seconds(task, schedule)):
        return Choice("rows", reason="too little training for the start of workers"), None
    return Choice(
        f"processes(workers={workers})", reason="training outweighs the start of workers"
    ), None


def _low_rank(task: Task) -> bool:
    """Return True for small steps of linear layers with frozen ones among them, as with LoRA."""
    layers = [
        layer
        for layer in task.model.modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    linear = bool(task.layout.frozen) and all(isinstance(layer, nn.Linear) for layer in layers)
    return linear and step_multiply_adds(task) < SMALL_STEP


def _exceeds_start(schedule: Schedule | None, seconds: float) -> bool:
    """Return True if all rounds, of `seconds` each, take over twice as long as starting workers."""
    return schedule is None or schedule.rounds * seconds > 2 * START_SECONDS


def round_seconds(
    task: Task,
    schedule: Schedule | None,
    step: float = STEP_SECONDS,
    multiply_adds: float = MULTIPLY_ADDS,
) -> float:
    """Estimate the duration of a round's local training on one core, in seconds.

    Args:
        task: Data, model and local training.
        schedule: Participation, or None if all clients train.
        step: Constant seconds of a step.
        multiply_adds: Multiply-adds per second.

    Returns:
        Seconds, for clients of mean size.
    """
    clients = task.clients if schedule is None else schedule.participants(task.clients)
    return clients * mean_steps(task) * (step + step_multiply_adds(task) / multiply_adds)
