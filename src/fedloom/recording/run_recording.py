"""The recording of one run: it observes the rounds, keeps the measurements, also when the run is killed, and gathers them.

In the run's directory: `recorded.jsonl`, a line a round; `recorded/round-*.safetensors`, the models that are kept;
`recording.json`, all of it as reports draw it, when the run is finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedloom.algorithm import Replies, describe
from fedloom.errors import InvalidValue
from fedloom.recording.recorder import Exchange, Kept, Measurement, Recorder, RunContext, partial_models
from fedloom.round import Round
from fedloom.rounds.checkpoint import RecordsInMemory, RoundLog, without_gap
from fedloom.rounds.engine import INTEGERS, ClientTask
from fedloom.rounds.federation import Federation
from fedloom.rounds.scoring import Evaluator
from fedloom.state.files import flush, remove_unfinished, write_text
from fedloom.state.tensors import read_tensors, write_tensors

RESULT = "recording.json"


class Recording:
    """Lets recorders measure what they want of each round; the run itself is the same with and without.

    A round's measurements are kept when the round is, so that a run that is resumed records the same bytes. `notices`: which
    recorders were left out because they do not apply to this method, a line each.
    """

    def __init__(self, recorders: Sequence[Recorder], directory: Path | None = None) -> None:
        self.recorders = list(recorders)
        self.directory = directory
        self.notices: list[str] = []
        self._log = None if directory is None else RoundLog(directory / "recorded.jsonl")
        self._records = self._log or RecordsInMemory()
        self._tensors: dict[int, dict[str, Tensor]] = {}  # of all rounds, where there is no directory
        self._pending: dict[str, Measurement] = {}
        self._unsynced: list[Path] = []

    def begin(self, federation: Federation) -> None:
        """Take the federation, which is set up. Raises `InvalidValue` when a recorder asks for what it cannot have."""
        in_process = federation.engine.in_process
        if in_process is None:
            name = type(federation.engine).__name__
            raise InvalidValue(
                f"record works in simulations on one machine, which has the clients' samples, not in {name}"
            )
        self._federation = federation
        task, method = federation.task, federation.algorithm
        evaluator = Evaluator(task.model, task.layout, task.dataset)
        trainers = task.clients - federation.schedule.newcomers(task.clients)
        self._context = RunContext(task, federation.schedule.rounds, trainers, federation.numbers, evaluator)
        partial, applicable = partial_models(method), []
        for recorder in self.recorders:
            try:
                recorder.require(self._context)
            except InvalidValue as error:
                raise InvalidValue(f"record: {recorder.name}: {error}") from None
            reason = recorder.inapplicable(method) or (partial if recorder.needs_models else "")
            if reason:
                self.notices.append(f"{recorder.name} is not recorded for {describe(method)}: {reason}")
            else:
                applicable.append(recorder)
        self.recorders = applicable
        hooks = {recorder.name: recorder.hook(method, self._context) for recorder in self.recorders}
        self._hooks = {name: reported for name, reported in hooks.items() if reported is not None}
        if self._hooks and not in_process:
            raise InvalidValue(
                f"record: {next(iter(self._hooks))}: it hooks client training, which is in other processes here"
            )
        if self.directory is not None:
            remove_unfinished(self._folder)

    @property
    def _folder(self) -> Path:
        assert self.directory is not None
        return self.directory / "recorded"

    def _path(self, number: int) -> Path:
        assert self.directory is not None
        return kept_file(self.directory, number)

    @property
    def logs(self) -> Sequence[RoundLog]:
        """Where the measurements are written."""
        return [] if self._log is None else [self._log]

    def finished(self) -> int:
        """How many rounds from the first on have all their measurements on disk."""
        lines = [] if self._log is None else self._log.read()
        whole = without_gap(lines)
        lost = (k for k, line in enumerate(lines[:whole]) if line["kept"] and not self._path(line["round"]).exists())
        return next(lost, whole)

    def resume(self, finished: int) -> None:
        """Go on after round `finished`; what was recorded of later ones is dropped."""
        if self._log is not None:
            self._log.resume(finished)

    def observe(self, round: Round, client_tasks: Sequence[ClientTask], replies: Replies) -> None:
        """Measure what recorders want of this round, which may still fail. Nothing given is changed or kept without a copy."""
        exchanges = _exchanges(client_tasks, replies)
        self._pending = {}
        for recorder in self.recorders:
            reported = self._hooks[recorder.name](round.number) if recorder.name in self._hooks else None
            found = (
                recorder.measure(round.number, exchanges, self._context) if reported is None else Measurement(reported)
            )
            if found is not None:
                self._pending[recorder.name] = found

    def commit(self, number: int) -> None:
        """The round has succeeded: its measurements are kept, models before the line that refers to them."""
        method, integers = self._federation.algorithm, self._federation.integers
        values = {
            recorder.name: _plain(
                recorder.complete(self._pending[recorder.name].value, method, integers, self._context)
            )
            for recorder in self.recorders
            if recorder.name in self._pending
        }
        tensors = {f"{name}/{key}": t for name, found in self._pending.items() for key, t in found.tensors.items()}
        line = {"round": number, "kept": bool(tensors), "values": values}
        self._pending = {}
        if self._log is None:
            self._tensors[number] = tensors
        elif tensors:
            self._folder.mkdir(exist_ok=True)
            write_tensors(self._path(number), tensors, {"round": str(number)}, durable=False)
            self._unsynced.append(self._path(number))
        self._records.append(line)

    def sync(self) -> None:
        """Wait until all measurements are on the disk."""
        for path in self._unsynced:
            flush(path)
        self._unsynced = []
        if self._log is not None:
            self._log.sync()

    def results(self) -> list[dict[str, Any]]:
        """What each recorder has found, ready for JSON and for reports; recorders without a single measurement are left out.

        Raises `DamagedCheckpoint` when a model that was kept cannot be read.
        """
        found, recorded = [], self._records.read()
        for recorder in self.recorders:
            lines = [line for line in recorded if recorder.name in line["values"]]
            if series := [(line["round"], line["values"][recorder.name]) for line in lines]:
                kept = self._kept(recorder, [line["round"] for line in lines if line["kept"]])
                found.append(_plain({"kind": recorder.kind, **recorder.result(series, kept, self._context)}))
        return found

    def write(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Write the results into the run's directory."""
        if self.directory is not None:
            write_text(self.directory / RESULT, json.dumps(list(results)) + "\n")

    def _kept(self, recorder: Recorder, numbers: Sequence[int]) -> Kept:
        """The tensors that a recorder kept in these rounds."""
        prefix = f"{recorder.name}/"
        found = {}
        for number in numbers:
            tensors = (
                self._tensors[number] if self._log is None else read_tensors(self._path(number), round=str(number))[0]
            )
            found[number] = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        return found


def kept_file(directory: Path, number: int) -> Path:
    """Where a run's directory keeps the models of a round, each as `recorder/key`."""
    return directory / "recorded" / f"round-{number:07d}.safetensors"


def _exchanges(client_tasks: Sequence[ClientTask], replies: Replies) -> list[Exchange]:
    """What the clients that replied received and uploaded, in the order of the slots; none where it is not one model each."""
    if "model" not in replies.tensors or any("model" not in client_task.inbox for client_task in client_tasks):
        return []
    sent = {client_task.slot: client_task.inbox for client_task in client_tasks if client_task.slot is not None}
    integers = replies.tensors.get(INTEGERS)
    found = []
    for place, slot in enumerate(replies.slots.tolist()):
        inbox = sent[slot]
        found.append(
            Exchange(
                slot,
                int(replies.clients[place]),
                inbox["model"][0],
                replies["model"][place],
                inbox[INTEGERS][0] if INTEGERS in inbox else None,
                None if integers is None else integers[place],
            )
        )
    return found


def _plain(value: Any) -> Any:
    """The value with None for figures that are not finite, which JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
