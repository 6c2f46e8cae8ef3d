"""The recording of one run: it observes the rounds and stores the measurements.

Measurements survive a kill of the run. The run's directory contains `recorded.jsonl`, a line per
round; `recorded/round-*.safetensors`, recorded models; and, when the run is finished,
`recording.json`, all of them in the form for reports.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedloom.algorithm.records import INTEGERS, Replies
from fedloom.common.errors import InvalidValue
from fedloom.common.round import Round
from fedloom.recording.recorder import (
    ClientExchange,
    Measurement,
    Recorder,
    RunContext,
    partial_models,
)
from fedloom.rounds.checkpoint import RoundLog, entries_below
from fedloom.rounds.engine import Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.scoring import Evaluator
from fedloom.state.files import flush, remove_unfinished, write_text
from fedloom.state.tensors import read_tensors, write_tensors

RESULT = "recording.json"


class MeasurementLog(RoundLog):
    """The measurements of each round, with models in separate files."""

    def __init__(self, directory: Path | None) -> None:
        super().__init__(None if directory is None else directory / "recorded.jsonl")
        self.directory = directory
        self.unsynced: list[Path] = []

    def complete(self, records: list[dict[str, Any]]) -> int:
        """Return the number of complete rounds, from the first on.

        A round is complete if all its measurements and models are on the disk.
        """
        complete = super().complete(records)
        if self.directory is not None:
            for line in records[:complete]:
                if line["kept"] and not models_file(self.directory, line["round"]).exists():
                    return int(line["round"]) - 1
        return complete

    def sync(self) -> None:
        for path in self.unsynced:
            flush(path)
        self.unsynced = []
        super().sync()


class Recording:
    """The recorders of a run. They do not change the run.

    A round's measurements are stored when the round succeeds, so a resumed run records the same
    bytes. `notices` names the recorders that do not apply to this method, one per line.
    """

    def __init__(self, recorders: Sequence[Recorder], directory: Path | None = None) -> None:
        self.recorders = list(recorders)
        self.directory = directory
        self.notices: list[str] = []
        self.log = MeasurementLog(directory)
        # tensors of all rounds, for a run without a directory
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._pending: dict[str, Measurement] = {}

    def begin(self, federation: Federation) -> None:
        """Start to record a federation after its setup.

        Raises:
            InvalidValue: A recorder is not possible in this run.
        """
        in_process = federation.engine.in_process
        if in_process is None:
            place = "simulations on one machine with the clients' samples"
            raise InvalidValue(
                f"record works in {place}, not in {type(federation.engine).__name__}"
            )
        self._federation = federation
        task = federation.task
        method = federation.algorithm
        evaluator = Evaluator(task.model, task.layout, task.dataset)
        trainers = task.clients - federation.schedule.newcomers(task.clients)
        self._context = RunContext(
            task, federation.schedule.rounds, trainers, federation.numbers, evaluator
        )
        partial = partial_models(method)
        applicable = []
        for recorder in self.recorders:
            try:
                recorder.require(self._context)
            except InvalidValue as error:
                raise InvalidValue(f"record: {recorder.name}: {error}") from None
            reason = recorder.inapplicable(method) or (partial if recorder.needs_models else "")
            if reason:
                self.notices.append(f"{recorder.name} is not recorded for {method}: {reason}")
            else:
                applicable.append(recorder)
        self.recorders = applicable
        hooks = {
            recorder.name: recorder.hook(federation, self._context) for recorder in self.recorders
        }
        self._hooks = {name: reported for name, reported in hooks.items() if reported is not None}
        if self._hooks and not in_process:
            reason = "it hooks client training, but clients train in other processes here"
            raise InvalidValue(f"record: {next(iter(self._hooks))}: {reason}")
        if self.directory is not None:
            remove_unfinished(self.directory / "recorded")

    def observe(self, round: Round, jobs: Sequence[Job], replies: Replies) -> None:
        """Let the recorders measure this round, which may still fail.

        Args:
            round: The round.
            jobs: The clients' work. It is not changed, and nothing is stored without a copy.
            replies: The clients' replies, likewise.
        """
        exchanges = exchanged_models(jobs, replies)
        self._pending = {}
        for recorder in self.recorders:
            reported = (
                self._hooks[recorder.name](round.number) if recorder.name in self._hooks else None
            )
            measurement = recorder.measure(round.number, exchanges, self._context)
            if reported is not None:
                measurement = (
                    reported if isinstance(reported, Measurement) else Measurement(reported)
                )
            if measurement is not None:
                self._pending[recorder.name] = measurement

    def commit(self, number: int) -> None:
        """Store the measurements of a successful round, models before the line that names them."""
        values = {
            recorder.name: _plain(recorder.complete(pending.value, self._federation, self._context))
            for recorder in self.recorders
            if (pending := self._pending.get(recorder.name)) is not None
        }
        tensors = {
            f"{name}/{key}": t
            for name, pending in self._pending.items()
            for key, t in pending.tensors.items()
        }
        line = {"round": number, "kept": bool(tensors), "values": values}
        self._pending = {}
        if self.directory is None:
            self._tensors[number] = tensors
        elif tensors:
            path = models_file(self.directory, number)
            path.parent.mkdir(exist_ok=True)
            write_tensors(path, tensors, {"round": str(number)}, durable=False)
            self.log.unsynced.append(path)
        self.log.append(line)

    def results(self) -> list[dict[str, Any]]:
        """Return each recorder's result, ready for JSON and for reports.

        Recorders without a measurement are left out.
        """
        results = []
        records = self.log.read()
        for recorder in self.recorders:
            lines = [line for line in records if recorder.name in line["values"]]
            if series := [(line["round"], line["values"][recorder.name]) for line in lines]:
                stored = [line["round"] for line in lines if line["kept"]]
                tensors = {number: self._models(recorder.name, number) for number in stored}
                results.append(
                    _plain(
                        {"kind": recorder.kind, **recorder.result(series, tensors, self._context)}
                    )
                )
        return results

    def write(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Write the results into the run's directory."""
        if self.directory is not None:
            write_text(self.directory / RESULT, json.dumps(list(results)) + "\n")

    def _models(self, name: str, number: int) -> dict[str, Tensor]:
        if self.directory is None:
            return entries_below(f"{name}/", self._tensors[number])
        return recorded_tensors(self.directory, name, number)


def models_file(directory: Path, number: int) -> Path:
    """Return the file of a round's recorded models, each named `recorder/key`.

    Args:
        directory: The run's directory.
        number: Number of the round.

    Returns:
        Path of a safetensors file, which may not exist.
    """
    return directory / "recorded" / f"round-{number:07d}.safetensors"


def recorded_tensors(directory: Path, recorder: str, number: int) -> dict[str, Tensor]:
    """Return the tensors that a recorder stored in a round.

    Args:
        directory: The run's directory.
        recorder: Name of the recorder.
        number: Number of the round.

    Returns:
        Tensors by the names that the recorder gave them.

    Raises:
        DamagedCheckpoint: The file cannot be read.
    """
    return entries_below(
        f"{recorder}/", read_tensors(models_file(directory, number), round=str(number))[0]
    )


def exchanged_models(jobs: Sequence[Job], replies: Replies) -> list[ClientExchange]:
    """Return the models of the clients that replied, in the order of the slots.

    Empty if clients do not exchange one model each.

    Args:
        jobs: Jobs of the round, with the messages that clients received.
        replies: Valid replies.

    Returns:
        Received and uploaded model of each client, `[P]`.
    """
    if "model" not in replies.matrices or any("model" not in job.inbox for job in jobs):
        return []
    inboxes = {job.slot: job.inbox for job in jobs if job.slot is not None}
    models = replies.matrices["model"]
    integers = replies.matrices.get(INTEGERS)
    return [
        ClientExchange(
            slot,
            client,
            inboxes[slot]["model"][0],
            models[slot],
            inboxes[slot][INTEGERS][0] if INTEGERS in inboxes[slot] else None,
            None if integers is None else integers[slot],
        )
        for client, slot in zip(map(int, replies.clients), replies.slots.tolist(), strict=True)
    ]


def _plain(value: Any) -> Any:
    """Return the value with None in place of figures that are not finite, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
