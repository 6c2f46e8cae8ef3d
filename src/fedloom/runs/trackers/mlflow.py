"""MLflow: a run with parameters, metrics and the model's files, in a local database or on a
server.
"""

import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedloom.common.errors import installing
from fedloom.common.fields import NonNegative
from fedloom.report.summary import dotted
from fedloom.runs.trackers.tracker import TrackedRun, require_installed, trackers

_TAG = "fedloom.run"
_LAST = "last_round"
_FILES = ("model.safetensors", "configuration.json", "metrics.jsonl", "result.json")
_MOST = 900  # metrics in one request

_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Limits of MLflow's requests, unless the environment sets others. By default it tries eight times
to reach a server, and a run would wait for minutes.
"""


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore MLflow's warnings, which a user of fedloom cannot act on."""
    with warnings.catch_warnings(action="ignore"):
        yield


@trackers.register("mlflow")
@dataclass
class MLflow:
    """Parameters, the figures of each round, and the files of the finished run, for MLflow.

    `uri` is MLflow's store, such as `'sqlite:///mlflow.db'` or `'http://host:5000'`; by default
    `MLFLOW_TRACKING_URI`. `experiment` is MLflow's name of the experiment, by default the same.
    Figures are sent every `every` seconds, since a request can take longer than a round. Needs the
    extra `mlflow`.
    """

    uri: str | None = None
    experiment: str | None = None
    every: NonNegative = 5.0

    def __post_init__(self) -> None:
        require_installed("mlflow", installing("mlflow"))

    @_without_warnings()
    def begin(self, run: TrackedRun) -> int:
        """Make the run, or find it by its tag; return the last round that MLflow has."""
        import mlflow

        for name, value in _LIMITS.items():
            os.environ.setdefault(name, value)
        self._run = run
        self._waiting = list[Any]()
        self._sent = time.monotonic()
        # Processes must not make the same new database or experiment at the same time.
        file = Path(tempfile.gettempdir()) / f"fedloom-mlflow-{os.getuid()}.lock"
        with FileLock(file, timeout=60):
            self._client = client = mlflow.MlflowClient(self.uri)
            name = self.experiment or run.experiment
            experiment = client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else client.create_experiment(name)
            tag = f"tags.`{_TAG}` = '{run.token}'"
            if runs := client.search_runs([number], tag, max_results=1):
                self._id = runs[0].info.run_id
                client.update_run(self._id, status="RUNNING")
                history = client.get_metric_history(self._id, _LAST)
                return max((metric.step for metric in history), default=0)
            created = client.create_run(number, tags={_TAG: run.token}, run_name=run.label)
            self._id = created.info.run_id
            for name, value in dotted(run.configuration).items():
                # 500 characters are accepted by every version
                client.log_param(self._id, name, str(value)[:500])
        return 0

    def record(self, round: int, figures: Mapping[str, float]) -> None:
        """Log a metric for each figure, at once or together with later rounds."""
        if self._waiting and len(self._waiting) + len(figures) >= _MOST:
            self._send()
        self._add({**figures, _LAST: round}, round)
        if time.monotonic() - self._sent >= self.every:
            self._send()

    @_without_warnings()
    def end(self, result: Mapping[str, float] | None) -> None:
        """Send all metrics, the figures at the end as `final_...`, and the files of a finished
        run.
        """
        self._add({f"final_{name}": value for name, value in (result or {}).items()}, 0)
        self._send()
        if result is not None and self._run.directory is not None:
            for path in (self._run.directory / name for name in _FILES):
                if path.exists():
                    self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, "KILLED" if result is None else "FINISHED")

    def _add(self, figures: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        time_ms = int(1000 * time.time())
        self._waiting += [Metric(name, value, time_ms, step) for name, value in figures.items()]

    @_without_warnings()
    def _send(self) -> None:
        """Send one request, which MLflow takes as a whole or not at all."""
        waiting = self._waiting
        self._waiting = []
        if waiting:
            self._client.log_batch(self._id, metrics=waiting)
        self._sent = time.monotonic()
