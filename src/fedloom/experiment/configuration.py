"""What a run is told: a TOML file, changed by `key=value` on the command line, and checked before any work begins."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fedloom.algorithm import build, describe
from fedloom.config.checks import require_at_least, require_one_of, require_share
from fedloom.config.expression import Call, allowed, parse
from fedloom.config.plugins import import_plugins
from fedloom.config.registry import Registry
from fedloom.data.dataset import Dataset, datasets
from fedloom.data.partition import partitions
from fedloom.engines.choose import require_engine_on, settled_by
from fedloom.errors import FedloomError, InvalidValue
from fedloom.experiment.settings import changed as with_changes
from fedloom.experiment.settings import combinations, label
from fedloom.experiment.trackers.tracker import build_tracker
from fedloom.experiment.validation import withhold
from fedloom.models import models
from fedloom.recording.recorder import build_recorders, expression
from fedloom.report.summary import MEASURES
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task, make_task
from fedloom.training import Training

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Data(BaseModel):
    """The table `[data]`: what is learned and how the clients share it (see `make_task`).

    With `validation`, such as 0.2, that share of each client's training samples takes the place of all test data, which is
    then looked at nowhere (see `withhold`).
    """

    model_config = _STRICT

    name: str = "digits"
    clients: int = 20
    partition: str = "dirichlet(0.5)"
    local_test: float | None = None
    merge: bool = False
    validation: float | None = None


class Configuration(BaseModel):
    """A whole experiment. `fedloom run` takes `algorithm` and `seed`, `fedloom compare` takes `algorithms` and `seeds`.

    The keys of `schedule` stand at the top of a file, beside these. Results lie in `directory`, by default `runs/<name>`.
    `workers` runs go on at a time, each with `threads` threads (by default PyTorch's number, shared out to the workers);
    neither changes what is computed, beyond the last digits of sums. The `pool` they go on in is `processes`, `ray` (a cluster of
    this machine) or `ray://host:port` (one whose nodes share the file system).
    `record` says what is written down beside the figures,
    such as `["objective(every=10)", "ala(client=8)", "trajectory(client=4)"]`. `engine` is `rows`, `stacked`, `processes`,
    `ray`, or `auto`, which takes the one that is fastest here; engines agree but for the last digits, so `auto` may not repeat
    those. An engine may have options: `ray(workers=4, gpus=1)`, `ray://host:10001`. `device` is where data and models lie: `cpu`,
    `cuda`, `cuda:1`, or `auto`, a GPU where there is one.
    `plugins` are modules of the user's own that register methods, models or data, imported before anything is looked up.
    `trackers` hear of every round, such as `["tensorboard", "mlflow(uri='sqlite:///mlflow.db')", "module:Class"]`.

    `targets`, `last` (evaluations in the mean of the last ones), `against` (what methods are tested against: the `best` or
    the `first`) and `measure` (what they are judged by: `final`, `best`, `last` or `personal`) only decide what tables show
    and what `fedloom tune` looks for. `variants` are the settings of the table `[settings]` by their labels, each
    a whole configuration whose `changes` say what it changed.
    """

    model_config = _STRICT

    name: str = "experiment"
    algorithm: str | None = None
    algorithms: list[str] = []
    seed: int = 0
    seeds: list[int] = []
    plugins: list[str] = []
    trackers: list[str] = []
    schedule: Schedule = Schedule()
    targets: list[float] = []
    last: int = 10
    against: str = "best"
    measure: str = "last"
    record: list[str] = []
    directory: str | None = None
    engine: str = "rows"
    device: str = "cpu"
    threads: int | None = None
    workers: int = 1
    pool: str = "processes"
    model: str = "mlp"
    data: Data = Data()
    training: Training = Training()
    variants: dict[str, Configuration] = {}
    changes: dict[str, Any] = {}

    @property
    def settings(self) -> dict[str, Configuration]:
        """The configuration of each setting by its label; this one alone, labelled "", where no key varies."""
        return self.variants or {"": self}

    @property
    def folder(self) -> Path:
        """Where the runs and comparisons of this experiment lie."""
        return Path(self.directory) if self.directory is not None else Path("runs") / self.name

    def task(self, seed: int, dataset: Dataset | None = None) -> Task:
        """The task of one seed; `dataset` saves reading the data again."""
        task = make_task(
            self.data.name if dataset is None else dataset,
            clients=self.data.clients,
            partition=self.data.partition,
            model=self.model,
            training=self.training,
            local_test=self.data.local_test,
            merge=self.data.merge,
            seed=seed,
            device=self.device,
        )
        return task if self.data.validation is None else withhold(task, self.data.validation, seed)

    def resolved(self, algorithm: str, seed: int, setting: str = "") -> dict[str, Any]:
        """Everything that one run's figures depend on, with defaults filled in; plain values, ready for JSON."""
        if setting:
            return self.settings[setting].resolved(algorithm, seed)
        recorders = [expression(recorder) for recorder in build_recorders(self.record)]
        return {
            "algorithm": describe(build(algorithm)),
            **schedule_values(dataclasses.replace(self.schedule, seed=seed)),
            "model": self.model,
            # What was added later is only said where it is used, so that older runs stay what they are.
            "data": self.data.model_dump(exclude={"validation"} if self.data.validation is None else None),
            "training": dataclasses.asdict(self.training),
            **({"record": recorders} if recorders else {}),
            **({"engine": engine} if (engine := settled_by(self.engine)) != "rows" else {}),
            **({"device": self.device} if self.device != "cpu" else {}),
        }


def schedule_values(schedule: Schedule) -> dict[str, Any]:
    """The part of a schedule that figures depend on; how often a checkpoint is written is not."""
    return {name: value for name, value in dataclasses.asdict(schedule).items() if name != "checkpoint_every"}


def load(path: Path, overrides: Sequence[str] = ()) -> Configuration:
    """Read and check a configuration file, with `key=value` overrides (`training.learning_rate=0.1`).

    The experiment is called like the file unless the file says otherwise. Raises `InvalidValue` or `UnknownName`, in one
    line, for anything that is not allowed.
    """
    return configuration(read_table(path, overrides))


def read_table(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a file and `key=value` overrides say, not checked yet. Raises as `load` does where it cannot be read."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise InvalidValue(f"{path} is not a TOML file: it is not text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidValue(f"{path} is not a TOML file: {' '.join(str(error).split())}") from None
    table.setdefault("name", path.stem)
    for override in overrides:
        put(table, override)
    return table


def configuration(table: Mapping[str, Any]) -> Configuration:
    """The configuration of a table of plain values. Raises as `load` does."""
    _require_known(table, "", [key.partition(".")[0] for key in _KEYS])
    for name, known in _SECTIONS.items():
        section = table.get(name, {})
        if not isinstance(section, Mapping):
            raise InvalidValue(f"{name} must be a table with the keys {', '.join(known)}, not {section!r}")
        _require_known(section, f"{name}.", known)
    values = {key: value for key, value in table.items() if key not in (*_SCHEDULE, "settings")}
    values["schedule"] = _dataclass(Schedule, {key: table[key] for key in _SCHEDULE if key in table}, "")
    values["training"] = _dataclass(Training, table.get("training", {}), "training.")
    values["data"] = _model(Data, table.get("data", {}), "data.")
    found: Configuration = _model(Configuration, values, "")
    _check(found)
    return found.model_copy(update={"variants": _variants(table)}) if "settings" in table else found


def _variants(table: Mapping[str, Any]) -> dict[str, Configuration]:
    """The configuration of each setting by its label, checked like any other."""
    base = {key: value for key, value in table.items() if key != "settings"}
    found = {}
    for changes in combinations(table["settings"], VARYING):
        try:
            variant = configuration(with_changes(base, changes))
        except FedloomError as error:
            raise InvalidValue(f"settings, {label(changes)}: {error}") from None
        found[label(changes)] = variant.model_copy(update={"changes": changes})
    return found


_SECTIONS = {"data": list(Data.model_fields), "training": [field.name for field in dataclasses.fields(Training)]}

_SCHEDULE = [field.name for field in dataclasses.fields(Schedule) if field.name != "seed"]

_KEYS = [
    *(name for name in Configuration.model_fields if name not in ("schedule", "variants", "changes", *_SECTIONS)),
    "settings",
    *_SCHEDULE,
    *(f"{section}.{name}" for section, names in _SECTIONS.items() for name in names),
]
"""Every key that a file may hold, with its table."""

VARYING = [
    *(name for name in _SCHEDULE if name != "checkpoint_every"),
    "model",
    "engine",
    *(f"{section}.{name}" for section, names in _SECTIONS.items() for name in names),
]
"""The keys that settings may vary: those that figures depend on, but for the method and the seed."""


def _require_known(table: Mapping[str, Any], prefix: str, known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            # Nearest in the same table, or else the same word in another.
            homes = {full.rpartition(".")[2]: full for full in reversed(_KEYS)}
            close = difflib.get_close_matches(key, known, n=1) or difflib.get_close_matches(key, homes, n=1)
            near = prefix + close[0] if close and close[0] in known else homes[close[0]] if close else ""
            there = ", ".join(dict.fromkeys(prefix + name for name in known))
            raise InvalidValue(
                f"unknown key '{prefix}{key}': " + (f"did you mean '{near}'?" if near else f"there are {there}")
            )


def _model(kind: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    """An instance of a pydantic model."""
    hints = get_type_hints(kind)
    try:
        return kind.model_validate({key: _none(value, hints[key]) for key, value in values.items()})
    except ValidationError as error:
        raise _explained(error, prefix) from None


def _dataclass(kind: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    """An instance of a plain dataclass, whose own checks speak after those of the types."""
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for key, value in values.items():
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(hints[key], config=ConfigDict(strict=True))
            given[key] = adapter.validate_python(_none(value, hints[key]))
        except ValidationError as error:
            raise _explained(error, prefix + key) from None
    try:
        return kind(**given)
    except InvalidValue as error:
        raise InvalidValue(f"{prefix}{error}") from None


def _none(value: Any, hint: Any) -> Any:
    """TOML has no word for nothing: 'none' stands for it where nothing is allowed."""
    return None if value == "none" and type(None) in get_args(hint) else value


def _explained(error: ValidationError, prefix: str) -> InvalidValue:
    """The first thing that pydantic found wrong, as one line."""
    first = error.errors()[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else str(part) for part in first["loc"])
    return InvalidValue(f"{prefix}{place} must be {allowed(error)}, not {first['input']!r}")


def put(table: dict[str, Any], text: str, example: str = "rounds=50 or training.learning_rate=0.1") -> None:
    """Put `key=value` into the table; tables on the way are made. Raises `InvalidValue`, with the `example`, otherwise."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise InvalidValue(f"{text!r} is not key=value, such as {example}")
    *tables, last = key.split(".")
    for depth, name in enumerate(tables, start=1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise InvalidValue(f"{key!r} cannot be set: {'.'.join(tables[:depth])!r} is a value, not a table")
    table[last] = _value(value.strip())


def _value(text: str) -> Any:
    """A value as TOML writes it; what TOML does not know is text, and lists and inline tables may hold such text too."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        if text.startswith("[") and text.endswith("]"):
            return [_spoken(item) for item in parse(f"list({text})").positional[0]]
        if text.startswith("{") and text.endswith("}"):
            return {name: _spoken(item) for name, item in parse(f"table({text[1:-1]})").named.items()}
    except InvalidValue:
        pass
    return text


def _spoken(item: Any) -> Any:
    """A bare word or a call as the text that it was."""
    return str(item) if isinstance(item, Call) else item


def _check(found: Configuration) -> None:
    """What types alone cannot say."""
    import_plugins(found.plugins)
    if not re.fullmatch(r"\w[\w. +=-]*", found.name):
        raise InvalidValue(
            f"name {found.name!r} must begin with a letter, figure or _ and can name a folder: no slashes"
        )
    seeds = found.seeds or [found.seed]
    for seed in seeds:
        require_at_least("seed", seed, 0)
    for target in found.targets:
        require_share("target accuracy", target)
    require_at_least("last", found.last, 1)
    require_one_of("against", found.against, ("best", "first"))
    require_one_of("measure", found.measure, MEASURES)
    require_at_least("workers", found.workers, 1)
    if not found.pool.startswith("ray://"):
        require_one_of("pool", found.pool, ("processes", "ray", "ray://host:port"))
    if found.threads is not None:
        require_at_least("threads", found.threads, 1)
    if len(set(seeds)) < len(seeds):
        raise InvalidValue(f"seeds must differ from each other, not {seeds}")
    if found.data.local_test is not None and not 0 < found.data.local_test < 1:
        raise InvalidValue(f"data.local_test must lie between 0 and 1, not {found.data.local_test}")
    if found.data.validation is not None and not 0 < found.data.validation < 1:
        raise InvalidValue(f"data.validation must lie between 0 and 1, not {found.data.validation}")
    require_at_least("data.clients", found.data.clients, 0)
    require_engine_on(found.engine, found.device)
    _check_expressions(found)


def _check_expressions(found: Configuration) -> None:
    """Every method, data set, partition and model is looked up before the first round of any."""
    if found.algorithm is not None:
        _named("algorithm", found.algorithm, build)
    methods = [describe(_named("algorithms", text, build)) for text in found.algorithms]
    for position, method in enumerate(methods):
        if method in methods[:position]:
            raise InvalidValue(f"algorithms lists {method!r} twice")
    _check_recorders(found)
    for text in found.trackers:
        _named("trackers", text, build_tracker)
    _named("data.name", found.data.name, lambda text: _looked_up(datasets, text))
    _named("data.partition", found.data.partition, lambda text: _looked_up(partitions, text))
    if ":" not in found.model:
        _named("model", found.model, lambda text: _looked_up(models, text))


def _check_recorders(found: Configuration) -> None:
    """Each recorder must have something to record in one of the methods."""
    for text in found.record:
        _named("record", text, lambda one: build_recorders([one]))
    try:
        recorders = build_recorders(found.record)
    except InvalidValue as error:
        raise InvalidValue(f"record: {error}") from None
    texts = found.algorithms or ([] if found.algorithm is None else [found.algorithm])
    for recorder in recorders:
        reasons = [recorder.unfit(build(text)) for text in texts]
        if reasons and all(reasons):
            raise InvalidValue(f"record: {recorder.name}: nothing to record for {', '.join(texts)}: {reasons[0]}")


def _named(key: str, text: str, make: Any) -> Any:
    """`make(text)`, its error prefixed with the key where it does not name one itself."""
    try:
        return make(text)
    except FedloomError as error:
        raise InvalidValue(f"{key} = {text!r}: {error}") from None


def _looked_up(registry: Registry[Any], text: str) -> None:
    call = parse(text)
    registry[call.name].options(call.positional, call.named)
