"""The configuration of runs: a TOML file, changed by `key=value` on the command line, checked
before any work begins.
"""

import copy
import dataclasses
import difflib
import re
import tomllib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field

from fedloom.config.expression import DEEPEST, Call, parse, parse_value, show
from fedloom.config.fields import (
    Count,
    NonNegativeInt,
    Positive,
    require_fields,
    require_plain,
    type_hints,
)
from fedloom.config.plugins import import_plugins
from fedloom.data.dataset import Dataset, datasets
from fedloom.data.noise import label_noises
from fedloom.data.partition import partitions
from fedloom.data.shift import shifts
from fedloom.engines.choose import DEFAULT, require_engine_on, settled_by
from fedloom.engines.dispatch import MOST_WORKERS
from fedloom.errors import LONGEST_QUOTED, FedloomError, InvalidValue, one_line, quoted, shortened
from fedloom.method import Method
from fedloom.models import models
from fedloom.objectives.custom import build_objective
from fedloom.parts.building import build
from fedloom.recording.recorder import Recorder, build_recorders, expression
from fedloom.report.summary import TO_TARGET, Target, TargetValue
from fedloom.rounds.clock import Clock
from fedloom.rounds.schedule import NEUTRAL, Schedule, Stop
from fedloom.runs.python_objects import PythonObjects
from fedloom.runs.settings import combinations, label, require_key, with_changes
from fedloom.runs.trackers.tracker import build_tracker
from fedloom.task import Task, make_dataset, make_task, withhold
from fedloom.training import Training

_Kind = TypeVar("_Kind", bound=Hashable)
_Value = TypeVar("_Value")
_Made = TypeVar("_Made")

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
    configuration with its `changes`. `objects` are the methods and the task of a comparison in
    Python, in place of those that the keys name.
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
    objects: PythonObjects | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measure == "default":
            personal = self.personal_every and self.data.local_test is not None
            object.__setattr__(self, "measure", "personal" if personal else "last")
        if not re.fullmatch(r"\w[\w. +=-]{,199}", self.name):
            raise InvalidValue(
                f"name {quoted(self.name)} must begin with a letter, figure or _ and can name a folder: no slashes, "
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
        """Leave out what is built once: another process must import the plugins first."""
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
        """The configuration of each setting by its label; this one alone, labelled "", where no key
        varies.
        """
        return self.variants or {"": self}

    @property
    def folder(self) -> Path:
        return Path(self.directory) if self.directory is not None else Path("runs") / self.name

    def task(self, seed: int, read: Callable[[str], Dataset] = make_dataset) -> Task:
        """Make the task of a seed, which the targets must fit; `read` may know the data set
        already.
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
        """
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
            "engine": settled_by(self.engine),
            "device": self.device,
            **({"plugins": self.plugins} if self.plugins else {}),
        }


def load(path: Path, overrides: Sequence[str] = ()) -> Configuration:
    """Read and check a configuration file with `key=value` overrides. Raise `InvalidValue` or
    `UnknownName`.
    """
    return configuration(read_table(path, overrides))


def read_table(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a file and `key=value` overrides as a table that is not checked yet. Raises as `load`."""
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
    except OSError as error:
        raise InvalidValue(
            f"cannot read {path}: {(error.strerror or str(error)).lower()}"
        ) from None
    if len(content) > LONGEST_FILE:
        raise InvalidValue(f"{path} is longer than {LONGEST_FILE:,} bytes: no configuration is")
    try:
        table = tomllib.loads(content.decode())
    except RecursionError:
        raise InvalidValue(f"{path} nests more than {DEEPEST} levels deep") from None
    except ValueError as error:
        raise InvalidValue(
            f"{path} is not a TOML file: {one_line(str(error), LONGEST_QUOTED)}"
        ) from None
    _require_plain_values(table)
    table.setdefault("name", path.stem)
    for override in overrides:
        put(table, override)
    return table


def configuration(table: Mapping[str, Any]) -> Configuration:
    """Return the checked configuration of a table of plain values. Raises as `load`."""
    _require_plain_values(table)
    values = {key: value for key, value in table.items() if key != "settings"}
    for name, kind in _SECTIONS.items():
        values[name] = _read(kind, values.get(name, {}), name)
    base = _read(Configuration, values)
    _check(base)
    if "settings" not in table:
        return base
    variants = {}
    for changes in combinations(table["settings"], VARYING):
        try:
            variant = configuration(with_changes({**table, "settings": {}}, changes))
        except FedloomError as error:
            raise InvalidValue(f"settings, {label(changes)}: {error}") from None
        variants[label(changes)] = replace(variant, changes=changes)
    return replace(base, variants=variants)


def _require_plain_values(table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        require_plain(value, key if key in _KEYS else quoted(key))


_SECTIONS: dict[str, type] = {"data": Data, "training": Training, "clock": Clock, "stop": Stop}

_IN_SECTIONS = [
    f"{section}.{entry.name}" for section, kind in _SECTIONS.items() for entry in fields(kind)
]

_KEYS = [
    *(
        entry.name
        for entry in fields(Configuration)
        if entry.name not in ("variants", "changes", "objects")
    ),
    "settings",
    *_IN_SECTIONS,
]
"""Every key that a file may hold, with its table."""

VARYING = [
    *(
        entry.name
        for entry in fields(Schedule)
        if entry.name not in ("seed", "clock", "stop", *NEUTRAL)
    ),
    "model",
    "engine",
    *_IN_SECTIONS,
]
"""The keys that settings may vary: those that figures depend on, except the method and the seed."""


def _read(kind: type[_Kind], table: object, section: str = "") -> _Kind:
    """Return the dataclass of a table. TOML has no null: 'none' stands for it where it is allowed."""
    prefix = section and f"{section}."
    if not isinstance(table, Mapping):
        names = ", ".join(key.removeprefix(prefix) for key in _KEYS if key.startswith(prefix))
        raise InvalidValue(
            f"{section} must be a table with the keys {names}, not {quoted(table, show)}"
        )
    for key in table:
        require_key(prefix + key, _KEYS)
    hints = type_hints(kind)
    try:
        return kind(
            **{
                k: None if v == "none" and type(None) in get_args(hints[k]) else v
                for k, v in table.items()
            }
        )
    except InvalidValue as error:
        raise InvalidValue(f"{prefix}{error}") from None


LONGEST_FILE = 4 << 20
"""Bytes of a configuration file, at most."""


def put(
    table: dict[str, Any], text: str, example: str = "rounds=50 or training.learning_rate=0.1"
) -> None:
    """Put `key=value` into the table; tables on the way are made. Raises `InvalidValue`, with the
    `example`, otherwise.
    """
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\s*[\w-]+(\.[\w-]+)*\s*", key):
        raise InvalidValue(f"{quoted(text)} is not key=value, such as {example}")
    if key.count(".") >= DEEPEST:
        raise InvalidValue(f"{quoted(key)} nests more than {DEEPEST} levels deep")
    parsed = _value(value.strip())
    require_plain(parsed, shortened(key.strip()))
    table.update(with_changes(table, {key.strip(): parsed}))


def _value(text: str) -> Any:
    """Read a value as TOML writes it; anything else is text, inside lists and inline tables too."""
    with suppress(ValueError, RecursionError):
        table = tomllib.loads(f"value = {text}")
        if len(table) == 1:
            return table["value"]
    with suppress(InvalidValue):
        if text.startswith("[") and text.endswith("]"):
            return _as_written(parse_value(text))
        if text.startswith("{") and text.endswith("}"):
            return {
                name: _as_written(item)
                for name, item in parse(f"table({text[1:-1]})").named.items()
            }
    return text


def _as_written(value: Any) -> Any:
    """Turn calls and none back into text, inside lists too: TOML has neither."""
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    return show(value) if value is None or isinstance(value, Call) else value


def _check(checked: Configuration) -> None:
    """Look up every engine, method, recorder, data set, partition and model before the first round
    of any run.
    """
    import_plugins(checked.plugins)
    require_engine_on(checked.engine, checked.device)
    if checked.algorithm is not None:
        _named("algorithm", checked.algorithm, checked.method)
    described = [str(_named("algorithms", text, checked.method)) for text in checked.algorithms]
    for position, method in enumerate(described):
        if method in described[:position]:
            raise InvalidValue(f"algorithms lists {quoted(method)} twice")
    for recorder in _named("record", checked.record, lambda record: checked.recorders()):
        reasons = [recorder.inapplicable(checked.method(text)) for text in checked.methods]
        if reasons and all(reasons):
            listed = ", ".join(checked.methods)
            raise InvalidValue(
                f"record: {recorder.name}: nothing to record for {listed}: {reasons[0]}"
            )
    for text in checked.trackers:
        _named("trackers", text, build_tracker)
    if checked.measure in TO_TARGET and not checked.targets:
        raise InvalidValue(
            f"measure = {checked.measure!r} is what it takes to reach the first of the targets: give targets = [0.9]"
        )
    _named("data.name", checked.data.name, datasets.read)
    if ":" not in checked.data.partition.partition("(")[0]:
        _named("data.partition", checked.data.partition, partitions.read)
    _named("data.label_noise", checked.data.label_noise, label_noises.build_unless_none)
    _named("data.shift", checked.data.shift, shifts.build_unless_none)
    if checked.objective is not None:
        _named("objective", checked.objective, build_objective)
    if ":" not in checked.model:
        _named("model", checked.model, models.read)


def _named(key: str, value: _Value, make: Callable[[_Value], _Made]) -> _Made:
    """Return `make(value)`; the text of its errors begins with the key and the value."""
    try:
        return make(value)
    except FedloomError as error:
        raise InvalidValue(f"{key} = {quoted(value)}: {error}") from None


def _require_targets(targets: Sequence[TargetValue], task: Task) -> None:
    """Raise `InvalidValue` for a target that no figure of the task can be."""
    prefixes, metrics = (
        ("", "client_", "personal_", "new_client_"),
        [metric.name for metric in task.dataset.metrics],
    )
    recorded = {prefix + name for prefix in prefixes for name in task.objective.figure_names}
    for value in targets:
        figure = Target.of(value, task.objective.metric).figure
        # Methods record figures of their own: only what looks like a slip of the pen is refused.
        near = difflib.get_close_matches(
            figure, recorded | {"training_loss", "epsilon", *metrics}, n=1, cutoff=0.8
        )
        if near and figure != near[0] and not figure.endswith(("_std", "_worst")):
            raise InvalidValue(
                f"targets: {quoted(value)}: no {quoted(figure)} is recorded: did you mean {near[0]!r}?"
            )
