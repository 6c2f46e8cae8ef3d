"""The configuration of runs."""

import copy
import dataclasses
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fedloom.algorithm.method import Method
from fedloom.common.errors import InvalidValue, quoted
from fedloom.common.fields import (
    Count,
    NonNegativeInt,
    Positive,
    require_fields,
)
from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, make_dataset
from fedloom.engines.choose import DEFAULT, without_placement
from fedloom.engines.dispatch import MOST_WORKERS
from fedloom.parts.building import build
from fedloom.recording.recorder import Recorder, build_recorders, expression
from fedloom.report.summary import Target, TargetValue
from fedloom.rounds.schedule import NEUTRAL, Schedule
from fedloom.runs.entry import Own, schedule_part, training_part
from fedloom.runs.python_objects import PythonObjects
from fedloom.task import Task, withhold
from fedloom.task.making import make_task

Fraction = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class Data:
    """The table `[data]` (see `make_task`). A `validation` share replaces all test data (see
    `withhold`).
    """

    name: str = "digits"
    clients: NonNegativeInt = 20
    partition: str = "dirichlet(0.5)"
    local_test: Fraction | None = None
    merge: bool = False
    validation: Fraction | None = None
    label_noise: str = "none"
    shift: str = "none"

    def __post_init__(self) -> None:
        require_fields(self)


@dataclass(frozen=True)
class Configuration(Schedule):
    """A whole experiment; `docs/configuration.md` explains every key.

    `variants` are the settings of the table `[settings]` by their labels, each a whole
    configuration with its `changes`. `own` are the settings of single methods by their labels.
    `tuned` are the values that a search chose for single methods. `objects` are the methods and the
    task of a comparison in Python, in place of those that the keys name.
    """

    name: str = "experiment"
    algorithm: str | None = None
    algorithms: list[str] | dict[str, str] = field(default_factory=list)
    seeds: list[NonNegativeInt] = field(default_factory=list)
    plugins: list[str] = field(default_factory=list)
    trackers: list[str] = field(default_factory=list)
    targets: list[Positive | str] = field(default_factory=list)
    last: Count = 10
    against: Literal["best", "first"] = "best"
    measure: Literal[
        "default", "final", "best", "last", "personal", "rounds", "bytes", "seconds"
    ] = "default"
    record: list[str] = field(default_factory=list)
    keep_models: Count | None = None
    directory: str | None = None
    engine: str = DEFAULT
    device: str = "cpu"
    threads: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = None
    workers: Count | Literal["auto"] = "auto"
    pool: str = "processes"
    model: str = "mlp"
    objective: str | None = None
    metrics: list[str] = field(default_factory=list)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    variants: "dict[str, Configuration]" = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Own] = field(default_factory=dict)
    tuned: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: PythonObjects | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measure == "default":
            personal = self.personal_every and self.data.local_test is not None
            object.__setattr__(self, "measure", "personal" if personal else "last")
        if not re.fullmatch(r"\w[\w. +=-]{,199}", self.name):
            raise InvalidValue(
                f"name {quoted(self.name)} must begin with a letter, figure or _ and can name "
                "a folder: no slashes, "
                "at most 200 characters"
            )
        if self.pool not in ("processes", "ray") and not self.pool.startswith("ray://"):
            raise InvalidValue(
                f"pool must be processes, ray or ray://host:port, not {quoted(self.pool)}"
            )
        if self.pool == "processes" and self.workers != "auto" and self.workers > MOST_WORKERS:
            raise InvalidValue(
                f"workers must be at most {MOST_WORKERS} on this machine, not {self.workers}"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise InvalidValue(f"seeds must differ from each other, not {quoted(self.seeds)}")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out objects that are built once: another process must import the plugins first."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @property
    def schedule(self) -> Schedule:
        return self.seeded(self.seed)

    def seeded(self, seed: int) -> Schedule:
        return Schedule(
            **{entry.name: getattr(self, entry.name) for entry in fields(Schedule)} | {"seed": seed}
        )

    def method(self, algorithm: str) -> Method:
        """Return a new method of an expression or of a label in `algorithms`. Raises as `build`."""
        if self.objects is not None:
            return copy.deepcopy(self.objects.methods[algorithm])
        labels = self.algorithms if isinstance(self.algorithms, dict) else {}
        return copy.deepcopy(self._built(labels.get(algorithm, algorithm)))

    @cached_property
    def _built(self) -> Callable[[str], Method]:
        return cache(build)  # once each

    def recorders(self) -> list[Recorder]:
        return copy.deepcopy(self._recorders)

    @cached_property
    def _recorders(self) -> list[Recorder]:
        return build_recorders(self.record)

    @property
    def runs_at_a_time(self) -> int:
        """The number of runs that go on at a time; 1 where that is left open."""
        return 1 if self.workers == "auto" else self.workers

    @property
    def methods(self) -> list[str]:
        """The methods to compare, by label or expression: those listed, or else the method of
        `fedloom run`.
        """
        listed = self.algorithms if self.objects is None else self.objects.methods
        return list(listed) or ([] if self.algorithm is None else [self.algorithm])

    def labelled(self, algorithm: str) -> bool:
        return self.objects is not None or (
            isinstance(self.algorithms, dict) and algorithm in self.algorithms
        )

    def of(self, algorithm: str) -> "Configuration":
        """Return the configuration of one method: its own settings replace those of all methods.

        Raises `InvalidValue` where they do not fit the others.
        """
        own = self.own.get(algorithm)
        if not own:
            return self
        training, schedule = training_part(own), schedule_part(own)
        if self.objects is not None:
            return replace(self, objects=self.objects.trained_with(training), **schedule)
        return replace(self, training=replace(self.training, **training), **schedule)

    def choices(self, algorithm: str) -> dict[str, Any]:
        """Return the settings that distinguish a method's runs: its own and the tuned ones."""
        tuned = {
            key.removeprefix("algorithm."): value
            for key, value in self.tuned.get(algorithm, {}).items()
            if key.startswith("algorithm.")
        }
        return tuned | self.own.get(algorithm, {})

    def only_method(self, purpose: str) -> str:
        """Return the method to run, tune or train. Raise `InvalidValue` where none is named, or
        several are.
        """
        if self.algorithm is None and len(self.methods) != 1:
            listed = f"the file compares {', '.join(map(repr, self.algorithms))}"
            choice = listed if self.algorithms else "such as algorithm=fedmr"
            raise InvalidValue(f"no method to {purpose}: give algorithm=..., {choice}")
        return self.algorithm or self.methods[0]

    @property
    def settings(self) -> "dict[str, Configuration]":
        """The configuration of each setting by its label; without settings, this one with the label
        "".
        """
        return self.variants or {"": self}

    @property
    def folder(self) -> Path:
        return Path(self.directory) if self.directory is not None else Path("runs") / self.name

    def task(self, seed: int, read: Callable[[str], Dataset] = make_dataset) -> Task:
        """Make the task of a seed, which the targets must fit; `read` may know the data set
        already.

        Args:
            seed: Seed of the partition and the initial weights.
            read: Makes a data set from its expression.

        Returns:
            The task. With `validation` it tests on training samples that are withheld.

        Raises:
            InvalidValue: The configuration does not fit the data, or a target does not fit the
                task.
        """
        if self.objects is not None:
            task = self.objects.task(seed)
        else:
            options = dataclasses.asdict(replace(self.data, validation=None))
            del options["validation"]
            task = make_task(
                read(options.pop("name")),
                **options,
                model=self.model,
                training=self.training,
                objective=self.objective,
                metrics=self.metrics,
                seed=seed,
                device=self.device,
            )
        _require_targets(self.targets, task)
        return task if self.data.validation is None else withhold(task, self.data.validation, seed)

    def resolved(self, algorithm: str, seed: int) -> dict[str, Any]:
        """Return everything that the figures of a run depend on, with defaults filled in; plain
        values, ready for JSON.

        Args:
            algorithm: Label or expression of the method.
            seed: Seed of the run.

        Returns:
            A nested table by the keys of a configuration file.
        """
        return self.of(algorithm)._resolved(algorithm, seed)

    def _resolved(self, algorithm: str, seed: int) -> dict[str, Any]:
        if self.objects is None:
            described: dict[str, Any] = {
                "algorithm": str(self.method(algorithm)),
                "model": self.model,
                "objective": self.objective,
                "metrics": self.metrics,
                "data": dataclasses.asdict(self.data),
                "training": dataclasses.asdict(self.training),
            }
        else:
            described = self.objects.described(algorithm, seed)
            if self.data.validation is not None:
                described["validation"] = self.data.validation
        unused = {"clock": not self.clock.runs, "stop": self.stop.evaluations is None}
        schedule = dataclasses.asdict(self.seeded(seed))
        return {
            **described,
            **{
                name: value
                for name, value in schedule.items()
                if name not in NEUTRAL and not unused.get(name)
            },
            "record": [expression(recorder) for recorder in self._recorders],
            "engine": without_placement(self.engine),
            "device": self.device,
            **({"plugins": self.plugins} if self.plugins else {}),
        }


def _require_targets(targets: Sequence[TargetValue], task: Task) -> None:
    """Raise `InvalidValue` for a target that no figure of the task can be."""
    prefixes, metrics = (
        ("", "client_", "personal_", "new_client_"),
        [metric.name for metric in task.dataset.metrics],
    )
    recorded = {prefix + name for prefix in prefixes for name in task.objective.figure_names}
    for value in targets:
        figure = Target.of(value, task.objective.metric).figure
        # Methods record other figures too, so only a likely typing error is refused.
        near = difflib.get_close_matches(
            figure, recorded | {"training_loss", "epsilon", *metrics}, n=1, cutoff=0.8
        )
        if near and figure != near[0] and not figure.endswith(("_std", "_worst")):
            raise InvalidValue(
                f"targets: {quoted(value)}: no {quoted(figure)} is recorded: did you mean "
                f"{near[0]!r}?"
            )
