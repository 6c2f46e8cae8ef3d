"""The trackers of one run: each hears of every round once, whatever happens to the run, and never at its expense."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedloom.errors import error_text
from fedloom.experiment.trackers.tracker import TrackedRun, Tracker, build_tracker
from fedloom.rounds.evaluation import Record
from fedloom.state.files import write_text

FILE = "trackers.jsonl"
"""In the run's directory: the run's token, then what each tracker was told."""


class Tracking:
    """Passes a run on to its trackers. One that fails is left out from then on, and `say` hears of it."""

    def __init__(
        self, expressions: Sequence[str | Tracker], directory: Path | None, say: Callable[[str], None]
    ) -> None:
        self._trackers = {_name(tracker, k): build_tracker(tracker) for k, tracker in enumerate(expressions)}
        self._path = None if directory is None or not expressions else directory / FILE
        self._say = say
        self._latest: dict[str, int] = {}  # round of each tracker
        self._result: Mapping[str, float] | None = None

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._trackers):
            self._attempt(name, "end", self._result)

    def begin(
        self,
        experiment: str,
        label: str,
        configuration: Mapping[str, Any],
        records: Sequence[Record],
        timings: Sequence[Record],
    ) -> None:
        """Begin or resume a run that has these rounds; trackers hear of those that they missed."""
        if not self._trackers:
            return
        token = self._resume()
        directory = None if self._path is None else self._path.parent
        method, seed = str(configuration["algorithm"]), int(configuration["seed"])
        run = TrackedRun(experiment, label, method, seed, configuration, token, directory)
        for name in list(self._trackers):
            recorded = self._attempt(name, "begin", run)
            if recorded is not None:
                self._latest[name] = recorded
        seconds = {timing["round"]: timing for timing in timings}
        for record in records:
            self.record(record, seconds.get(record["round"], {}))

    def record(self, record: Record, timing: Record) -> None:
        """Pass a round on to the trackers that have not recorded it."""
        number, informed = int(record["round"]), []
        figures = _figures(record, timing)
        for name in list(self._trackers):
            if self._latest.get(name, 0) < number:
                self._attempt(name, "record", number, figures)
                self._latest[name] = number
                informed.append(name)
        if informed and self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps({'round': number, 'told': informed})}\n")

    def finish(self, result: Mapping[str, Any]) -> None:
        """Note the figures at the end of a finished run."""
        self._result = {name: float(value) for name, value in result.items() if _is_number(value)}

    def _attempt(self, name: str, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._trackers[name], method)(*arguments)
        except Exception as error:  # whatever a tracker does, the run is worth more
            self._trackers.pop(name, None)
            self._say(f"tracker {name} failed and hears no more of this run: {error_text(error)}")
            return None

    def _resume(self) -> str:
        """Read the file of an earlier start. Return the run's token, a new one where it starts afresh."""
        lines = []
        for text in self._path.read_bytes().splitlines() if self._path is not None and self._path.exists() else ():
            with suppress(ValueError, RecursionError):  # a kill may have cut the last line short
                lines.append(json.loads(text))
        lines = [line for line in lines if isinstance(line, dict)]
        for line in lines[1:]:
            for name in line.get("told", ()):
                self._latest[name] = max(self._latest.get(name, 0), int(line["round"]))
        if lines and isinstance(lines[0].get("token"), str):
            return str(lines[0]["token"])
        token = uuid.uuid4().hex
        if self._path is not None:
            write_text(self._path, json.dumps({"token": token}) + "\n")
        return token


def _name(expression: str | Tracker, index: int) -> str:
    """Return a tracker's name in notices and in the file, the same at every start of the run."""
    return expression if isinstance(expression, str) else f"{type(expression).__name__} {index + 1}"


def _figures(record: Record, timing: Record) -> dict[str, float]:
    """Return the numbers of a round: its figures, the number of clients that failed, and its times."""
    figures = {**record, "faults": len(record.get("faults", ())), **timing}
    return {name: float(value) for name, value in figures.items() if name != "round" and _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
