"""Federations with recorded rounds, for the tests of recorders."""

from __future__ import annotations

from typing import Any

from fedloom.algorithm import Algorithm
from fedloom.engines.rows import RowsEngine
from fedloom.recording.recorder import build_recorders
from fedloom.recording.run_recording import Recording
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task


def run_recorded(
    method: Algorithm, task: Task, schedule: Schedule, *expressions: str
) -> tuple[Federation, dict[str, Any]]:
    """Return the federation after its last round, and the entry of each recorder by its kind."""
    recording = Recording(build_recorders(expressions))
    federation = Federation(method, task, RowsEngine(task), schedule, observers=[recording])
    federation.run()
    return federation, {entry["kind"]: entry for entry in recording.results()}
