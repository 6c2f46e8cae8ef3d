"""The methods and the task of runs in Python, as objects that no text describes."""

import copy
import dataclasses
import dis
import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedloom.algorithm.method import Method, components
from fedloom.common.digest import digest
from fedloom.common.errors import InvalidValue, quoted
from fedloom.objectives.custom import expression_of
from fedloom.runs.identity import task_digests
from fedloom.task import Task

TaskOf = Task | Callable[[int], Task]
"""A task, or a function from a seed to the task of that seed."""


@dataclass(frozen=True)
class PythonObjects:
    """Methods by label, and their task. They travel to worker processes as a whole.

    Attributes:
        methods: The methods by label.
        source: The task, or a function of the seed.
        training: Settings of local training in place of those of the task.
        texts: By label, the expression of each method and a digest of its code, which only the
            process of the user can compute.
        tasks: By seed, the description of the task, once it is made.
    """

    methods: Mapping[str, Method]
    source: TaskOf
    training: Mapping[str, Any] = field(default_factory=dict)
    texts: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    tasks: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, method in self.methods.items():
            self.texts[name] = {"algorithm": str(method), "code": code_digest(components(method))}

    def task(self, seed: int) -> Task:
        """Return the task of a seed. Raises `InvalidValue` where the function gives something
        else.
        """
        task = self._made(seed)
        training = dataclasses.replace(task.training, **self.training)
        return dataclasses.replace(task, training=training) if self.training else task

    def _made(self, seed: int) -> Task:
        task = self.source(seed) if callable(self.source) else self.source
        if not isinstance(task, Task):
            raise InvalidValue(
                f"task must be a Task or a function seed -> Task, not {quoted(task)}: see "
                "fl.make_task"
            )
        return task

    def trained_with(self, training: Mapping[str, Any]) -> "PythonObjects":
        """Return the objects with other settings of local training; texts and tasks are shared."""
        changed = copy.copy(self)
        object.__setattr__(changed, "training", {**self.training, **training})
        return changed

    def described(self, name: str, seed: int) -> dict[str, Any]:
        """Return everything but the schedule that the figures of a run depend on.

        The task of each seed is made once.

        Args:
            name: Label of the method.
            seed: Seed of the run.

        Returns:
            Plain values.
        """
        if seed not in self.tasks:
            task = self._made(seed)
            loss = {} if expression_of(task.objective) else {"loss": code_digest([task.objective])}
            self.tasks[seed] = {
                "model": type(task.model).__name__,
                "data": {"name": task.dataset.name, "clients": task.clients},
                "training": dataclasses.asdict(task.training),
                "task": {**task_digests(task), **loss},
            }
        described = {**self.texts[name], **self.tasks[seed]}
        return {**described, "training": {**described["training"], **self.training}}


def code_digest(objects: Iterable[object]) -> str:
    """Return a digest of the user's classes and functions in methods or a loss.

    It covers the compiled code and plain attributes. These change with the behaviour of the code
    and not with comments or lines.
    """
    sources: dict[Any, None] = {}  # in order, each once
    values = []
    for item in objects:
        attributes = vars(item)
        values += [[k, v] for k, v in attributes.items() if isinstance(v, bool | int | float | str)]
        for source in (*type(item).__mro__, *attributes.values()):
            if isinstance(source, type) or hasattr(source, "__code__"):
                sources[source] = None
    code = io.StringIO()
    for source in sources:
        if not str(source.__module__).startswith(("fedloom.", "builtins", "torch.")):
            dis.dis(source, file=code)
    plain = re.sub(r"0x\w+|file .*? line \d+|(?m:^ *\d+ )", "", code.getvalue())
    return digest(plain + repr(values))
