"""The directory of one run: whose it is, who is working in it, and what it holds when the run is finished.

configuration.json     everything the figures depend on, defaults filled in
split.npz              which samples each client holds (`Partition.load` reads it); test-split.npz where clients test too
labels.safetensors     where there is label noise, the training labels as `given` to the clients and the `true` ones
task.json              label counts of the clients, class names, sizes
environment.json       versions and machine of the latest start
sites.json             over real sites, the name of the federation there and the samples of each
engine.json            where nobody named the engine, which one was taken, and the rule's reason or what was measured
metrics.jsonl          one line a round, the same in every repetition
timings.jsonl          seconds of each round
recorded.jsonl         on request, what was noted of each round (with recorded/, models that were kept); recording.json, all of it
checkpoint-*           the state to go on from, with pool/ where a pool of models is larger than `pool_budget`
model.safetensors      the final model, by the names of the module's `state_dict`
result.json            the figures at the end; written last, so that its presence says that the run is finished
landscape.json         on request, the loss around the final model (`fedloom report --landscape`)
report.html            figures and tables to look at

So that nobody takes damaged figures for those of the run, JSON objects hold a digest of themselves, and result.json digests of
the files with figures. `.safetensors` and `.npz` files, too, hold one of themselves.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from filelock import FileLock, Timeout

from fedloom.algorithm import Algorithm, describe
from fedloom.engines.base import Choice
from fedloom.engines.choose import DEFAULT
from fedloom.errors import CheckpointError
from fedloom.experiment.identity import environment, version_changes
from fedloom.objectives import Metric
from fedloom.recording.run_recording import RESULT as RECORDED
from fedloom.report.summary import REAL_SITES, RunSummary, dotted
from fedloom.rounds.checkpoint import RoundLog
from fedloom.state.files import remove_unfinished, slug, write_text
from fedloom.training import Training

_Json = TypeVar("_Json", dict[str, Any], list[Any])

SITES = "sites.json"
"""File of a run over real sites: the name of the federation at its sites, and how many samples each had at the start."""

_LONGEST = 80  # of a folder's name that is made from an expression

# What a run writes, and so all that starting afresh may remove.
_FILES = (
    "configuration.json", "split.npz", "test-split.npz", "labels.safetensors", "task.json", "environment.json",
    "engine.json", "metrics.jsonl", "timings.jsonl", "clients.jsonl", "clients", "checkpoint-*", "pool", "model.safetensors",
    "result.json", "report.html", "landscape.json", "recorded", "recorded.jsonl", RECORDED, "trackers.jsonl",
    "events.out.tfevents.*",
)  # fmt: skip

# What is there of a run that came to its end, and of no other. The first says that it did, so it goes first.
_END = ("result.json", "model.safetensors", "report.html", "landscape.json", RECORDED)

# Files with figures, which hold no digest themselves.
_FIGURES = ("metrics.jsonl", "timings.jsonl", "clients.jsonl", "recorded.jsonl", RECORDED)

_OTHERWISE = "choose another name or directory, or start again with --fresh"


class RunDirectory:
    """One run's directory."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, path / ".lock"

    @property
    def finished(self) -> bool:
        """Whether a run came to its end here."""
        return (self.path / "result.json").exists()

    def ended(self, configuration: Mapping[str, Any]) -> bool:
        """Whether a run of as many rounds came to its end here. Raises `CheckpointError` when a file is damaged."""
        return self.finished and self.rounds == configuration["rounds"]

    @property
    def rounds(self) -> int | None:
        """How many rounds the run here has, done or to come; None where there is no run. Raises as `configuration`."""
        return int(self.configuration["rounds"]) if (self.path / "configuration.json").exists() else None

    @property
    def configuration(self) -> dict[str, Any]:
        """What the run here depends on. Raises `CheckpointError` when that file is missing or damaged."""
        return read_json(self.path / "configuration.json", dict)

    def require_figures(self) -> None:
        """Raise `CheckpointError` where the figures of a run that came to its end are not as they were written."""
        written = read_json(self.path / "result.json", dict, _OTHERWISE).get("files") if self.finished else None
        if isinstance(written, dict) and written != (found := self._digests()):
            name = next((name for name in _FIGURES if written.get(name) != found.get(name)), "result.json")
            raise CheckpointError(f"{self.path / name} is not as it was written: {_OTHERWISE}")

    def finish(self, figures: Mapping[str, Any]) -> None:
        """Write the figures at the end, as the last of the run's files."""
        write_json(self.path / "result.json", {**figures, "files": self._digests()})

    def _digests(self) -> dict[str, str]:
        """Of the files with figures."""
        present = (self.path / name for name in _FIGURES if (self.path / name).exists())
        return {path.name: xxhash.xxh3_128(path.read_bytes()).hexdigest() for path in present}

    @property
    def engine(self) -> Choice | None:
        """The engine that the run here was begun in, where nobody named one. Raises as `configuration`."""
        path = self.path / "engine.json"
        return Choice(**read_json(path, dict)) if path.exists() else None

    def kept(self, configuration: dict[str, Any]) -> dict[str, Any]:
        """The configuration, which goes on in the engine of the run here if it names none."""
        if configuration["engine"] != DEFAULT or self.rounds is None:
            return configuration
        return {**configuration, "engine": self.configuration["engine"]}

    def begin(self, configuration: dict[str, Any], method: Algorithm, fresh: bool = False) -> list[str]:
        """Make the directory ready for a run of this configuration, which `settle` makes it that of once the run is sure to
        start; what there is to say about going on is returned, line by line.

        With `fresh`, an earlier run's files are removed. Raises as `require`.
        """
        if fresh:
            self.clear()
        remove_unfinished(self.path)
        self.require(configuration, method)
        if self.ended(configuration):
            self.require_figures()
            return []
        return self._note_environment()

    def settle(self, configuration: Mapping[str, Any]) -> None:
        """Make the directory that of this configuration. Where a run with fewer rounds came to its end, that is no end now."""
        if not self.ended(configuration):
            for name in _END:
                (self.path / name).unlink(missing_ok=True)
        write_json(self.path / "configuration.json", configuration)

    def _note_environment(self) -> list[str]:
        present, path = environment(), self.path / "environment.json"
        before = read_json(self.path / "environment.json", dict) if path.exists() else present
        write_json(path, present)
        changes = version_changes(before, present)
        return [f"{self.path} was begun with {changes}: the last digits may differ"] if changes else []

    def require(self, configuration: dict[str, Any], method: Algorithm) -> None:
        """Raise `CheckpointError` unless the directory is empty, or holds a run of `method` that can go on, or has come to its
        end, with this configuration: nothing differs, unless in the number of rounds. The text names the first key that does.
        """
        if not (self.path / "configuration.json").exists():
            return
        before, now = dotted(self.configuration), dotted(self.kept(configuration))
        for key in sorted((before.keys() | now.keys()) - {"rounds"}):
            if before.get(key) != now.get(key):
                raise CheckpointError(
                    f"{self.path} holds a run with {key} = {before.get(key)!r}, not {now.get(key)!r}: {_OTHERWISE}"
                )
        if before["rounds"] != now["rounds"]:
            self._require_rounds(before["rounds"], now["rounds"], method, Training(**configuration["training"]))

    def _require_rounds(self, before: int, now: int, method: Algorithm, training: Training) -> None:
        """Raise `CheckpointError` unless the run can come to its end after another number of rounds than it was begun with."""
        if not training.same_rates(before, now):
            raise CheckpointError(
                f"{self.path} holds a run with rounds = {before}, not {now}, and the learning rates of "
                f"training.schedule = {training.schedule!r} depend on how many there are: {_OTHERWISE}"
            )
        if method.needs_total_rounds:
            raise CheckpointError(
                f"{self.path} holds a run with rounds = {before}, not {now}, "
                f"and what {describe(method)} does in a round depends on how many there are: {_OTHERWISE}"
            )
        done = max((record["round"] for record in RoundLog(self.path / "metrics.jsonl").read()), default=0)
        if now <= done:  # also after as many: nobody may have evaluated the last one
            raise CheckpointError(
                f"{self.path} holds a run that has done {done} of {before} rounds, so that rounds must be more than {done}, "
                f"not {now}: {_OTHERWISE}"
            )
        if self.finished and not any(self.path.glob("checkpoint-*.safetensors")):
            raise CheckpointError(
                f"{self.path} holds no checkpoint any more, to go on from round {done} of {now}: {_OTHERWISE}"
            )

    def clear(self) -> None:
        """Remove what a run wrote, and nothing else."""
        for pattern in _FILES:
            for path in self.path.glob(pattern):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def summary(self, algorithm: str | None = None) -> RunSummary:
        """What the run has left so far; `algorithm` is how its method is to be called (by default as in its configuration).

        Raises `CheckpointError` when a file is missing or damaged.
        """
        self.require_figures()
        configuration, task = (
            read_json(self.path / "configuration.json", dict),
            read_json(self.path / "task.json", dict),
        )
        return RunSummary(
            algorithm or str(configuration["algorithm"]),
            int(configuration["seed"]),
            RoundLog(self.path / "metrics.jsonl").read(),
            RoundLog(self.path / "timings.jsonl").read(),
            task["label_counts"],
            task["class_names"],
            configuration,
            read_json(self.path / "environment.json", dict)
            | trained_in(self.engine)
            | ({REAL_SITES: "real"} if (self.path / SITES).exists() else {}),
            read_json(recorded, list) if (recorded := self.path / RECORDED).exists() else [],
            RoundLog(self.path / "clients.jsonl").read(),
            task["wrong_labels"],
            Metric(**task["metric"]),
        )


def trained_in(chosen: Choice | None) -> dict[str, str]:
    """What reports say of an engine that nobody named, beside versions and machine."""
    return {} if chosen is None else {"engine": str(chosen)}


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file alone, making its folder if need be. The system releases it when the process dies.

    Where another process holds it, `wait` for it, or else raise `CheckpointError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise CheckpointError(
            f"{path.parent} is in use by another process: wait for it or choose another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def read_json(path: Path, kind: type[_Json], remedy: str = "start again with --fresh") -> _Json:
    """The object (as `write_json` wrote it) or list in a file. Raises `CheckpointError`, with the remedy, when it is missing or
    damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, kind) and (isinstance(found, list) or _intact(found)):
            return found
    except (OSError, ValueError, RecursionError):
        pass
    raise CheckpointError(f"{path} is missing or damaged: {remedy}")


def finished_runs(folder: Path) -> dict[str, list[Path]]:
    """The finished runs in the folder of an experiment, whatever setting they were made for, by `fingerprint`."""
    found: dict[str, list[Path]] = {}
    for pattern in ("*/seed-*", "*/*/seed-*"):
        for path in sorted(folder.glob(f"{pattern}/configuration.json")):
            place = RunDirectory(path.parent)
            with suppress(CheckpointError):  # a damaged run is nobody's
                if place.finished:
                    found.setdefault(fingerprint(place.configuration), []).append(place.path)
    return found


def fingerprint(configuration: Mapping[str, Any]) -> str:
    """A digest of a resolved configuration: equal for equal ones, where a key that is not set and one set to none are equal."""
    settled = {key: value for key, value in dotted(configuration).items() if value is not None}
    return hashlib.sha256(json.dumps(settled, sort_keys=True).encode()).hexdigest()


def folder_name(expression: str) -> str:
    """A method's expression as the name of a folder: `stages(fedavg:20, fedmr)` is `stages-fedavg_20-fedmr`.

    Expressions that are long or nest get a digest at the end, so that different ones stay different.
    """
    plain = re.sub(r"(?<=\d)e\+(?=\d)", "e", expression.replace("'", "").replace('"', ""))  # 1e+38 is not 1e-38
    name = slug(plain.replace(":", "_"))
    if plain.count("(") < 2 and len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(expression.encode()).hexdigest()[:8]}"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A file of an object and its digest. Raises `CheckpointError` when it cannot be written."""
    write_text(path, to_json({**value, "digest": _digest(value)}))


def _intact(value: dict[str, Any]) -> bool:
    """Whether an object is as it was written; one without a digest is taken as it is. Its digest is removed."""
    if value:
        name, written = value.popitem()  # whatever its name is: that may be what is damaged
        if written != _digest(value):
            value[name] = written
    return "digest" not in value


def _digest(value: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(value).encode()).hexdigest()


def to_json(value: Any) -> str:
    """JSON as people read it."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
