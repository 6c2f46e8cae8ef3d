"""Which engine trains where nobody names one: a rule of the model, the method, the sizes and the cores, without a clock."""

from __future__ import annotations

from fedloom.algorithm import Algorithm
from fedloom.engines.base import Choice, LocalEngine, engines
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine, apart
from fedloom.engines.trial import START
from fedloom.engines.work import CONVOLUTIONS, has_cores, mean_steps, most_workers, step_multiply_adds
from fedloom.flat.linear_chain import linear_layers
from fedloom.local.proof import Proof, prove
from fedloom.rounds.schedule import Schedule
from fedloom.state.store import BUDGET
from fedloom.task import Task

STEP_SECONDS, MULTIPLY_ADDS = 1e-3, 2e10
"""A step of convolutions takes about so many seconds on one core, and one second for so many multiply-adds. From digits_cnn (0.1
million a sample) to ResNet-20 (34 million) this was right within a factor of 2.5."""


@engines.register("default")
def by_rule(
    task: Task,
    schedule: Schedule | None = None,
    in_process: bool = False,
    algorithm: Algorithm | None = None,
    begun: Choice | None = None,
    *,
    memory_budget: int = BUDGET,
) -> LocalEngine:
    """The engine that is usually fastest on a task like this: the same one every time on the same kind of machine.

    On a CPU, chains of linear layers train in stacks where the method's clients can train together, and convolutions in
    worker processes, as many as there are threads, where training would take twice the start of these (without a `schedule`,
    rounds are taken to be many). On a GPU, models train in stacks of as many as fit in memory. Everything else trains row by row.
    With `in_process`, no process is started.

    A run goes on in the engine that it was `begun` in; where no processes are started now, rows give their numbers.
    """
    chosen, proof = (begun, None) if begun else choice(task, schedule, in_process, algorithm)
    engine: LocalEngine
    if chosen.name == "stacked":
        engine = StackedEngine(task, proof, memory_budget=memory_budget)
    elif chosen.name != "rows" and has_cores(task) and not in_process:
        engine = ProcessesEngine(task, workers=most_workers(task, schedule), memory_budget=memory_budget)
    else:
        engine = RowsEngine(task, proof, memory_budget=memory_budget)
        if chosen.name != "rows":
            engine.notice(
                f"the run began in {chosen.name}, but starts no processes here: clients train one after another"
            )
    engine.chosen = chosen
    return engine


def choice(
    task: Task, schedule: Schedule | None, in_process: bool, algorithm: Algorithm | None
) -> tuple[Choice, Proof | None]:
    """The rule's choice, and which shortcuts the task allows where that was found out."""
    cuda = task.initial.is_cuda
    together = algorithm is None or apart(algorithm) is None
    products = together and task.objective.plain_cross_entropy and task.training.autocast == "none"
    if cuda or (products and linear_layers(task.model, task.layout)):
        proof = prove(task.model, task.dataset, task.train, task.training, stack=True)
        if task.clients == 1 or proof.unstackable or not (cuda or proof.shortcuts.linear):
            return Choice("rows", reason="models of this task cannot be stacked"), proof
        if not cuda:
            return Choice("stacked", reason="linear layers train fastest in stacks"), proof
        if StackedEngine(task, proof).chunk == 1:
            return Choice("rows", reason="the memory of the GPU holds one model in training"), proof
        return Choice("stacked", reason="models train fastest in stacks on a GPU"), proof
    if any(isinstance(layer, CONVOLUTIONS) for layer in task.model.modules()):
        if in_process or not has_cores(task):
            return Choice("rows", reason="no worker processes are started here"), None
        if training_seconds(task, schedule) > 2 * START:
            workers = most_workers(task, schedule)
            return Choice(f"processes(workers={workers})", reason="convolutions outweigh the start of workers"), None
        return Choice("rows", reason="too few convolutions for the start of workers"), None
    return Choice("rows", reason="neither convolutions nor linear layers alone, whose clients train together"), None


def training_seconds(task: Task, schedule: Schedule | None) -> float:
    """Seconds that all local training takes one core, by the count of its multiply-adds."""
    if schedule is None:
        return float("inf")
    step = STEP_SECONDS + step_multiply_adds(task) / MULTIPLY_ADDS
    return schedule.rounds * schedule.participants(task.clients) * mean_steps(task) * step
