"""The directory of one run: its ownership, its locking and its files.

`docs/cli.md` lists the files. A run writes result.json last, so this file marks it as
finished. JSON objects hold a digest of themselves. result.json holds a digest of every file with
figures, splits, labels or the model. The digests are compared before a finished run is shown, used
or lengthened.
"""

import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import file_digest
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from fedloom.algorithm.method import Method, needs_total_rounds
from fedloom.common.digest import Checksum, digest, digest_of_json
from fedloom.common.errors import CheckpointError, FedloomError
from fedloom.common.training import Training
from fedloom.engines.base import Choice
from fedloom.engines.choose import DEFAULT
from fedloom.objectives import Metric
from fedloom.recording.run_recording import RESULT as RECORDED
from fedloom.report.clients import client_table
from fedloom.report.summary import REAL_SITES, RunSummary, dotted, summarise
from fedloom.rounds.checkpoint import RoundLog
from fedloom.rounds.schedule import Stop
from fedloom.runs.identity import environment, version_changes
from fedloom.state.files import read_file, remove_unfinished, slug, write_text

_Json = TypeVar("_Json", dict[str, Any], list[Any])

SITES = "sites.json"
"""File of a run over real sites: the name of the federation at its sites, and how many samples each
had at the start.
"""

LANDSCAPE = "landscape.json"
"""File in a run's folder with the loss around its final model."""

_LONGEST = 80  # characters of a folder's name that is made from an expression

# All files that a run writes: starting afresh removes them.
_MODEL = ("model.safetensors", "preprocessing.json", "personal.safetensors", "model-card.md")
_FILES = (
    "configuration.json", "split.npz", "test-split.npz", "labels.safetensors", "task.json",
    "environment.json", "engine.json", "metrics.jsonl", "timings.jsonl", "clients.jsonl", "clients",
    "client_metrics.jsonl", "models",
    "checkpoint-*", "pool", *_MODEL, "result.json", "report.html", LANDSCAPE, "recorded",
    "recorded.jsonl", RECORDED, "trackers.json", "events.out.tfevents.*",
)  # fmt: skip

# Files of a finished run only. The first marks it as finished, so it is removed first.
_END = ("result.json", *_MODEL, "report.html", LANDSCAPE, RECORDED)

_DIGESTED = (
    "metrics.jsonl", "timings.jsonl", "clients.jsonl", "client_metrics.jsonl", "recorded.jsonl",
    RECORDED, *_MODEL,
    "split.npz", "test-split.npz", "labels.safetensors",
)  # fmt: skip

# Keys of a resolved configuration with digests as values.
_OBJECTS = {
    "code": "a run of this method with other code",
    "task.data": "a run on other samples",
    "task.split": "a run with another split",
    "task.start": "a run with another initial model",
    "task.loss": "a run with another loss",
}

_REMEDY = "choose another name or directory, or start again with --fresh (in Python fresh=True)"


class RunDirectory:
    """The directory of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / ".lock"

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").exists()

    @property
    def begun(self) -> bool:
        return (self.path / "configuration.json").exists()

    def ended(self, configuration: Mapping[str, Any]) -> bool:
        """Return True if the directory holds a finished run with the same end. Raise
        `CheckpointError` for a damaged file.
        """
        return self.finished and all(
            self.configuration.get(key) == configuration.get(key) for key in ("rounds", "stop")
        )

    @property
    def rounds(self) -> int | None:
        """The total number of rounds; None in an empty directory. Raises as `configuration`."""
        return int(self.configuration["rounds"]) if self.begun else None

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """The resolved configuration, read once. Raises `CheckpointError` when the file is missing
        or damaged.
        """
        return read_json(self.path / "configuration.json", dict)

    def require_intact(self) -> None:
        """Raise `CheckpointError` if a file of a finished run was changed."""
        if not self.finished:
            return
        present = self._digests()
        path = self.path / "result.json"
        with readable(path):
            written = dict(read_json(path, dict, _REMEDY)["files"])
        for name in _DIGESTED:
            if written.get(name) != present.get(name):
                raise CheckpointError(
                    f"{self.path / name} has changed since it was written: {_REMEDY}"
                )

    def _refusal(self, run: str) -> CheckpointError:
        return CheckpointError(f"{self.path} holds {run}: {_REMEDY}")

    def finish(self, figures: Mapping[str, Any]) -> None:
        write_json(self.path / "result.json", {**figures, "files": self._digests()})

    def _digests(self) -> dict[str, str]:
        digests = {}
        for path in (self.path / name for name in _DIGESTED):
            if path.exists():
                with path.open("rb") as file:
                    digests[path.name] = file_digest(file, Checksum).hexdigest()
        return digests

    @property
    def engine(self) -> Choice | None:
        """The engine that the rule chose for the run. Raises as `configuration`."""
        path = self.path / "engine.json"
        if not path.exists():
            return None
        with readable(path):
            return Choice(**read_json(path, dict))

    def with_engine(self, configuration: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration with the engine of this run, unless it names one."""
        if configuration["engine"] != DEFAULT or not self.begun:
            return configuration
        return {**configuration, "engine": self.configuration["engine"]}

    def begin(
        self, configuration: dict[str, Any], method: Method, fresh: bool = False
    ) -> list[str]:
        """Prepare the directory for a run, which `settle` begins. Return notices. Raises as
        `require`.

        Args:
            configuration: The run's resolved configuration.
            method: The method, which decides if the number of rounds may change.
            fresh: Delete an earlier run instead of continuing it.

        Returns:
            Notices about versions of libraries that changed since the run began.

        Raises:
            CheckpointError: The directory has another run, or is damaged.
        """
        if fresh:
            self.clear()
        for folder in (self.path, self.path / "models"):
            remove_unfinished(folder)
        self.require(configuration, method)
        self.require_intact()
        if self.ended(configuration):
            return []
        present = environment()
        path = self.path / "environment.json"
        earlier = read_json(path, dict) if path.exists() else present
        write_json(path, present)
        if changes := version_changes(earlier, present):
            return [f"{self.path} was begun with {changes}: the last digits may differ"]
        return []

    def settle(self, configuration: Mapping[str, Any]) -> None:
        """Write the configuration. A run that finished with fewer rounds is unfinished from now
        on.
        """
        if not self.ended(configuration):
            for name in _END:
                (self.path / name).unlink(missing_ok=True)
        write_json(self.path / "configuration.json", configuration)
        self.__dict__.pop("configuration", None)

    def require(self, configuration: dict[str, Any], method: Method) -> None:
        """Raise `CheckpointError` if the run here differs in more than its end.

        The end is the number of rounds, and a `stop` that waits longer.

        Args:
            configuration: The run's resolved configuration.
            method: The method, which decides if the number of rounds may change.
        """
        if not self.begun:
            return
        former, stop = (
            Stop(**table.get("stop", {})) for table in (self.configuration, configuration)
        )
        longer = stop.extends(former)
        stored = dotted(self.configuration)
        wanted = dotted(self.with_engine(configuration))
        for key in sorted(stored.keys() | wanted.keys()):
            is_end = key == "rounds" or (longer and key.startswith("stop."))
            if stored.get(key) != wanted.get(key) and not is_end:
                values = f"a run with {key} = {stored.get(key)!r}, not {wanted.get(key)!r}"
                raise self._refusal(_OBJECTS.get(key, values))
        if stored["rounds"] != wanted["rounds"]:
            training = Training(**configuration["training"])
            self._require_rounds(stored["rounds"], wanted["rounds"], method, training)

    def _require_rounds(self, stored: int, rounds: int, method: Method, training: Training) -> None:
        begun = f"a run with rounds = {stored}, not {rounds}, and"
        if not training.same_rates(stored, rounds):
            rates = f"the learning rates of training.schedule = {training.schedule!r}"
            raise self._refusal(f"{begun} {rates} depend on how many there are")
        if needs_total_rounds(method):
            raise self._refusal(
                f"{begun} what {method} does in a round depends on how many there are"
            )
        records = RoundLog(self.path / "metrics.jsonl").read()
        done = max((record["round"] for record in records), default=0)
        if rounds <= done:  # also if equal: the last round may not have been evaluated
            reason = f"so that rounds must be more than {done}, not {rounds}"
            raise self._refusal(f"a run that has done {done} of {stored} rounds, {reason}")
        if self.finished and not any(self.path.glob("checkpoint-*.safetensors")):
            raise self._refusal(f"no checkpoint any more, to go on from round {done} of {rounds}")

    def clear(self) -> None:
        """Remove only the files of a run."""
        self.__dict__.pop("configuration", None)
        for path in itertools.chain.from_iterable(map(self.path.glob, _FILES)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def summary(self, algorithm: str | None = None) -> RunSummary:
        """Return the figures so far.

        Args:
            algorithm: Name of the method in the summary; by default as configured.

        Raises:
            CheckpointError: A file is damaged.
        """
        self.require_intact()
        configuration = self.configuration
        task = read_json(self.path / "task.json", dict)
        recorded = self.path / RECORDED
        with readable(self.path):
            summary = RunSummary(
                algorithm or str(configuration["algorithm"]),
                int(configuration["seed"]),
                RoundLog(self.path / "metrics.jsonl").read(),
                RoundLog(self.path / "timings.jsonl").read(),
                task["label_counts"],
                task["class_names"],
                configuration,
                read_json(self.path / "environment.json", dict) | self.provenance(self.engine),
                read_json(recorded, list) if recorded.exists() else [],
                RoundLog(self.path / "clients.jsonl").read(),
                task["wrong_labels"],
                Metric(**task["metric"]),
                task.get("client_names"),
            )
            summarise([summary])  # tables show only figures of runs
            client_table([summary])
            for entry in summary.recorded:
                entry["kind"]
            return summary

    def provenance(self, engine: Choice | None) -> dict[str, str]:
        """Return the engine of a rule and the real sites, which reports show beside the
        versions.
        """
        real = {REAL_SITES: "real"} if (self.path / SITES).exists() else {}
        return real if engine is None else {"engine": str(engine), **real}


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file. If another process holds it, `wait` or raise `CheckpointError`.

    Args:
        path: The lock file. Its folder is created.
        wait: Wait until the other process releases the lock, instead of raising an error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=-1 if wait else 0):
            yield
    except Timeout:
        raise CheckpointError(
            f"{path.parent} is in use by another process: wait or choose another folder"
        ) from None


def read_json(path: Path, kind: type[_Json], remedy: str = "start again with --fresh") -> _Json:
    """Return the JSON in a file. Raise `CheckpointError`, with the remedy, when the file is missing
    or damaged.

    Args:
        path: The file.
        kind: Type of the value, `dict` or `list`.
        remedy: End of the error.

    Returns:
        The value. The digest in an object has been checked.
    """
    try:
        value = json.loads(read_file(path))
        if isinstance(value, kind) and (isinstance(value, list) or _intact(value)):
            return value
    except (OSError, ValueError, RecursionError):
        pass
    raise CheckpointError(f"{path} is missing or damaged: {remedy}")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise `CheckpointError` in place of the errors of values that no run wrote."""
    try:
        yield
    except (
        OSError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        if isinstance(error, FedloomError):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise CheckpointError(
            f"{path} holds what no run wrote ({reason}): start again with --fresh"
        ) from None


def finished_runs(folder: Path) -> dict[str, list[Path]]:
    """Return the finished runs of all settings in the folder of an experiment, by `fingerprint`."""
    runs: dict[str, list[Path]] = {}
    for pattern in ("*/seed-*", "*/*/seed-*"):
        for path in sorted(folder.glob(f"{pattern}/configuration.json")):
            run = RunDirectory(path.parent)
            with suppress(CheckpointError):  # a damaged run stands for no other
                if run.finished:
                    runs.setdefault(fingerprint(run.configuration), []).append(run.path)
    return runs


def fingerprint(configuration: Mapping[str, Any]) -> str:
    """Return a digest of a resolved configuration: equal for equal ones; a key that is not set
    equals one set to none.
    """
    settled = {key: value for key, value in dotted(configuration).items() if value is not None}
    return digest_of_json(settled)


def folder_name(expression: str) -> str:
    """Return a method's expression as a folder's name, with a digest where it is long or nests."""
    # 1e+38 is not 1e-38
    plain = re.sub(r"(?<=\d)e\+(?=\d)", "e", expression.replace("'", "").replace('"', ""))
    name = slug(plain.replace(":", "_"))
    if plain.count("(") < 2 and len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{digest(expression)[:8]}"


def setting_folder(folder: Path, setting: str) -> Path:
    """Return the folder of a setting; without a setting, the folder of the experiment.

    Args:
        folder: Folder of the experiment.
        setting: Label of the setting, such as `data.partition=iid`, or "".

    Returns:
        The folder, with a name that all file systems allow.
    """
    return folder / folder_name(setting) if setting else folder


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object and its digest to a file. Raise `CheckpointError` when it cannot be
    written.

    Args:
        path: The file.
        value: The object, with plain values.
    """
    write_text(path, to_json({**value, "digest": _digest(value)}))


def _intact(value: dict[str, Any]) -> bool:
    """Return True if an object has no digest, or matches its digest, which is then removed."""
    if value:
        name, digest = value.popitem()  # its name may be damaged
        if digest != _digest(value):
            value[name] = digest
    return "digest" not in value


def _digest(value: Mapping[str, Any]) -> str:
    return Checksum(json.dumps(value).encode()).hexdigest()


def to_json(value: Any) -> str:
    """Return JSON as people read it."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
