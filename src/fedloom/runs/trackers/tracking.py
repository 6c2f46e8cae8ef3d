"""The trackers of one run: each hears of every round once, whatever happens to the run, and never
at its expense.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedloom.errors import CheckpointError, error_text
from fedloom.rounds.evaluation import Record
from fedloom.runs.directory import read_json
from fedloom.runs.trackers.tracker import TrackedRun, Tracker, build_tracker
from fedloom.state.files import write_bytes

FILE = "trackers.json"
"""In the run's directory: the run's token, and the last round that each tracker recorded."""


class Tracking:
    """Passes a run on to its trackers. One that fails is left out from then on, and `say` hears of
    it.
    """

    def __init__(
        self,
        expressions: Sequence[str | Tracker],
        directory: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._trackers = {
            _name(tracker, k): build_tracker(tracker) for k, tracker in enumerate(expressions)
        }
        self._directory = directory
        self._say = say
        self._state: dict[str, Any] = {"token": uuid.uuid4().hex, "latest": {}}
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
        if self._directory is not None:
            with suppress(CheckpointError):
                self._state = read_json(self._directory / FILE, dict)
        self._write()
        method, seed = str(configuration["algorithm"]), int(configuration["seed"])
        run = TrackedRun(
            experiment, label, method, seed, configuration, self._state["token"], self._directory
        )
        for name in list(self._trackers):
            recorded = self._attempt(name, "begin", run)
            if recorded is not None:
                self._state["latest"][name] = recorded
        seconds = {timing["round"]: timing for timing in timings}
        for record in records:
            self.record(record, seconds.get(record["round"], {}))

    def record(self, record: Record, timing: Record) -> None:
        """Pass a round on to the trackers that have not recorded it."""
        number, latest = int(record["round"]), self._state["latest"]
        figures = _numbers(
            {**record, "faults": len(record.get("faults", ())), **timing, "round": None}
        )
        for name in [name for name in self._trackers if latest.get(name, 0) < number]:
            self._attempt(name, "record", number, figures)
            latest[name] = number
            self._write()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Note the figures at the end of a finished run."""
        self._result = _numbers(result)

    def _write(self) -> None:
        if self._directory is not None:
            write_bytes(self._directory / FILE, json.dumps(self._state).encode(), durable=False)

    def _attempt(self, name: str, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._trackers[name], method)(*arguments)
        except Exception as error:  # whatever a tracker does, the run is worth more
            self._trackers.pop(name, None)
            self._say(f"tracker {name} failed and hears no more of this run: {error_text(error)}")
            return None


def _name(expression: str | Tracker, index: int) -> str:
    """Return a tracker's name in notices and in the file, the same at every start of the run."""
    return expression if isinstance(expression, str) else f"{type(expression).__name__} {index + 1}"


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    return {
        k: float(v)
        for k, v in figures.items()
        if isinstance(v, int | float) and not isinstance(v, bool)
    }
