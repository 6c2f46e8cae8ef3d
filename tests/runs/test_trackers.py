"""Trackers and plugins.

The events of a run are read from real event files and a real MLflow database.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

import fedloom as fl
from fedloom.algorithm import algorithms
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.common.plugins import import_plugins
from fedloom.rounds.checkpoint import RoundLog
from fedloom.runs.config_file import configuration
from fedloom.runs.configuration import Configuration
from fedloom.runs.configured import run_configured
from fedloom.runs.events import Event, RunName
from fedloom.runs.trackers.tracker import TrackedRun, Tracking, build_tracker
from small_task import other_notices, small_task

JOB = {
    "name": "job",
    "rounds": 6,
    "participation": 0.5,
    "evaluate_every": 2,
    "checkpoint_every": 4,
    "model": "logistic",
    "data": {"clients": 4, "partition": "iid"},
}


class RecordingTracker:
    """A user's tracker without knowledge of earlier starts; `all` outlives the single trackers."""

    all: ClassVar[list[RecordingTracker]] = []

    def __init__(self, word: str = "") -> None:
        self.word, self.rounds = word, dict[int, Mapping[str, float]]()
        self.result: Mapping[str, float] | None = None
        RecordingTracker.all.append(self)

    def begin(self, run: TrackedRun) -> None:
        self.run = run

    def record(self, round: int, figures: Mapping[str, float]) -> None:
        assert round not in self.rounds
        self.rounds[round] = figures

    def end(self, result: Mapping[str, float] | None) -> None:
        self.result = result
        self.ended = True


class Broken:
    """Fails in the given round; 0 is the start and 99 the end."""

    def __init__(self, round: int) -> None:
        self.round = round

    def begin(self, run: TrackedRun) -> None:
        self.fail(0)

    def record(self, round: int, figures: Mapping[str, float]) -> None:
        self.fail(round)

    def end(self, result: Mapping[str, float] | None) -> None:
        self.fail(99)

    def fail(self, round: int) -> None:
        if round == self.round:
            raise ConnectionError("the server is\ngone")


class Killed(BaseException):
    """Simulates a kill: the run must not depend on anything except the files on disk."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "test_trackers_here", sys.modules[__name__])
    RecordingTracker.all = []
    with warnings.catch_warnings():  # TensorBoard's reader and MLflow emit warnings
        warnings.simplefilter("ignore")
        yield


def job(*trackers: str, **changes: Any) -> Configuration:
    return configuration({**JOB, **changes, "trackers": list(trackers)})


def go(settings: Configuration, stop_after: int | None = None, fresh: bool = False) -> list[Event]:
    """Run the job, or stop it after a round as Ctrl-C does; return the events."""
    events: list[Event] = []

    def watch(event: Event) -> None:
        events.append(event)
        if event.kind == "round" and event.finished == stop_after:
            raise KeyboardInterrupt

    try:
        run_configured(settings, RunName("fedavg", 0), watch, fresh=fresh)
    except KeyboardInterrupt:
        assert stop_after is not None
    return events


def forget(rounds: int, folder: Path) -> None:
    """Leave the files of a run that was killed long after checkpoint number `rounds`."""
    for path in folder.glob("checkpoint-*.safetensors"):
        if int(path.stem.partition("-")[2]) > rounds:
            path.unlink()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_a_tracker_of_ones_own_hears_every_round_with_all_figures() -> None:
    go(job("test_trackers_here:RecordingTracker(word='hello')"))
    tracker = RecordingTracker.all[-1]
    assert tracker.word == "hello"
    assert (tracker.run.experiment, tracker.run.label, tracker.run.algorithm, tracker.run.seed) == (
        "job",
        "fedavg/seed-0",
        "fedavg",
        0,
    )
    assert tracker.run.directory == Path("runs/job/fedavg/seed-0")
    assert tracker.run.configuration["model"] == "logistic"
    records = RoundLog(tracker.run.directory / "metrics.jsonl").read()
    assert [record["round"] for record in records] == list(tracker.rounds)
    for record in records:
        figures = tracker.rounds[record["round"]]
        assert figures["bytes_up"] == record["bytes_up"]
        assert figures["faults"] == 0
        assert figures["seconds"] > 0
        assert figures.get("accuracy") == record.get("accuracy")
        assert "clients" not in figures
    assert tracker.result is not None
    assert tracker.result["accuracy"] == records[-1]["accuracy"]


def test_a_run_in_python_takes_trackers_as_objects_too(tmp_path: Path) -> None:
    tracker, another = RecordingTracker(), RecordingTracker()
    result = fl.run(
        "fedavg", small_task(), rounds=3, participation=0.5, trackers=[tracker, another]
    )
    assert list(tracker.rounds) == list(another.rounds) == [1, 2, 3]
    assert tracker.run.directory is None
    assert tracker.result is not None
    assert tracker.result["accuracy"] == result.accuracy
    recorder = RecordingTracker()
    for _ in range(2):  # the second start only reads the run
        fl.run(
            "fedavg",
            small_task(),
            rounds=3,
            participation=0.5,
            directory=tmp_path / "kept",
            trackers=[recorder],
        )
    assert list(recorder.rounds) == [1, 2, 3]


@pytest.mark.parametrize("kill", [False, True])
def test_no_round_is_told_of_twice_when_a_run_goes_on(kill: bool) -> None:
    folder = Path("runs/job/fedavg/seed-0")
    settings = job("test_trackers_here:RecordingTracker", "tensorboard")
    go(settings, stop_after=5)
    if kill:
        forget(4, folder)
    go(settings)
    # the check of the configuration made the first
    earlier, later = RecordingTracker.all[1:]
    assert list(earlier.rounds) == [1, 2, 3, 4, 5]
    assert earlier.result is None
    assert list(later.rounds) == [6]
    assert later.run.token == earlier.run.token
    assert [step for step, _ in scalars(folder)["bytes_up"]] == [1, 2, 3, 4, 5, 6]


def test_a_tracker_added_later_hears_of_the_rounds_before() -> None:
    go(job("test_trackers_here:RecordingTracker"), stop_after=4)
    go(job("test_trackers_here:RecordingTracker", "tensorboard"))
    assert [step for step, _ in scalars(Path("runs/job/fedavg/seed-0"))["seconds"]] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_tensorboard_shows_the_figures_and_starting_afresh_replaces_them() -> None:
    folder = Path("runs/job/fedavg/seed-0")
    settings = job("tensorboard", "tensorboard(directory='elsewhere')")
    go(settings)
    figures = scalars(folder)
    records = RoundLog(folder / "metrics.jsonl").read()
    expected = {r["round"]: r["accuracy"] for r in records if r.get("accuracy") is not None}
    assert len(expected) == 3
    assert dict(figures["accuracy"]) == pytest.approx(expected)
    assert dict(scalars(Path("elsewhere/job/fedavg/seed-0"))["accuracy"]) == pytest.approx(expected)
    go(settings, fresh=True)
    for log_folder in (folder, Path("elsewhere/job/fedavg/seed-0")):
        assert [step for step, _ in scalars(log_folder)["bytes_down"]] == [1, 2, 3, 4, 5, 6]


def test_tensorboard_goes_on_after_an_event_file_that_was_cut_short() -> None:
    folder = Path("runs/job/fedavg/seed-0")
    settings = job("tensorboard")
    go(settings, stop_after=5)
    (path,) = folder.glob("events.out.tfevents.*")
    path.write_bytes(path.read_bytes()[:-20])
    go(settings)
    steps = Counter(step for step, _ in scalars(folder)["last_round"])
    assert steps == dict.fromkeys(range(1, 7), 1)


def test_mlflow_keeps_parameters_metrics_and_files(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/store.db"
    settings = job(f"mlflow(uri='{uri}', every=0)")
    go(settings, stop_after=5)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("job")
    assert experiment is not None
    (stopped,) = client.search_runs([experiment.experiment_id])
    assert stopped.info.status == "KILLED"
    forget(4, Path("runs/job/fedavg/seed-0"))
    go(settings)
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "fedavg/seed-0")
    assert run.data.params["data.partition"] == "iid"
    records = RoundLog(Path("runs/job/fedavg/seed-0/metrics.jsonl")).read()
    for name in ("accuracy", "bytes_up"):
        history = [
            (metric.step, metric.value)
            for metric in client.get_metric_history(run.info.run_id, name)
        ]
        assert sorted(history) == [
            (r["round"], r[name]) for r in records if r.get(name) is not None
        ]
    assert run.data.metrics["final_accuracy"] == records[-1]["accuracy"]
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
        "model.safetensors", "configuration.json", "metrics.jsonl", "result.json",
    }  # fmt: skip
    go(settings, fresh=True)
    assert len(client.search_runs([experiment.experiment_id])) == 2


class FakeWandb(types.ModuleType):
    """A substitute for the part of wandb that a tracker uses."""

    def __init__(self, step: int = 0) -> None:
        super().__init__("wandb")
        self.step = step
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, float] = {}
        self.exit_code: int | None = None
        self.options: dict[str, Any] = {}

    def init(self, **options: Any) -> FakeWandb:
        self.options = options
        self.resumed = self.step > 0
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self.logged.append((step, figures))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_weights_and_biases_is_told_as_its_documentation_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requirement = "fedloom.runs.trackers.wandb.require_installed"
    with pytest.raises(FedloomError, match=r"tracker wandb needs 'wandb': pip install wandb"):
        build_tracker("wandb")
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(requirement, lambda *_: None)
    go(job("wandb(project='mine')"))
    assert [step for step, _ in fake.logged] == [1, 2, 3, 4, 5, 6]
    assert fake.logged[-1][1]["accuracy"] == fake.summary["final_accuracy"]
    assert fake.exit_code == 0
    assert (fake.options["project"], fake.options["mode"], fake.options["name"]) == (
        "mine",
        "offline",
        "fedavg/seed-0",
    )
    online = FakeWandb(step=4)  # three rounds exist: the next step is the fourth
    monkeypatch.setitem(sys.modules, "wandb", online)
    fl.run("fedavg", small_task(), rounds=5, participation=0.5, trackers=["wandb(mode=online)"])
    assert [step for step, _ in online.logged] == [4, 5]


@pytest.mark.parametrize("round", [0, 3, 99])
def test_a_tracker_that_fails_costs_one_line_and_nothing_else(round: int) -> None:
    events = go(
        job(f"test_trackers_here:Broken(round={round})", "test_trackers_here:RecordingTracker")
    )
    notices = [event.text for event in events if event.kind == "notice"]
    assert notices == [
        f"tracker test_trackers_here:Broken(round={round}) failed and is disabled for this run: "
        "ConnectionError: the server is gone"
    ]
    assert events[-1].kind == "ended"
    assert list(RecordingTracker.all[-1].rounds) == [1, 2, 3, 4, 5, 6]
    plain = go(job(directory="plain"))
    assert plain[-1].record == events[-1].record


def test_a_failing_tracker_is_warned_of_in_python(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedloom"):
        fl.run("fedavg", small_task(), rounds=2, participation=0.5, trackers=[Broken(1)])
    assert other_notices(record.getMessage() for record in caplog.records) == [
        "tracker Broken 1 failed and is disabled for this run: ConnectionError: the server is gone"
    ]


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("tensorbord", "unknown tracker 'tensorbord': did you mean 'tensorboard'?"),
        ("tensorboard(folder='x')", "tensorboard has no parameter 'folder'"),
        ("mlflow(every=often)", "mlflow: every must be a number, not 'often'"),
        ("nowhere:Tracker", "tracker 'nowhere:Tracker': cannot import 'nowhere'"),
        ("test_trackers_here:JOB", "'JOB' must be a function or class, not dict"),
        ("test_trackers_here:Recording", "did you mean 'RecordingTracker'?"),
        ("test_trackers_here:Broken", "cannot be made: TypeError"),
        ("test_trackers_here:Killed", "a tracker has begin, record and end"),
    ],
)
def test_what_is_wrong_with_a_tracker_is_said_before_the_first_round(
    expression: str, text: str
) -> None:
    with pytest.raises(FedloomError) as caught:
        job(expression)
    assert text in str(caught.value)
    assert str(caught.value).startswith(f"trackers = {expression!r}: ")
    assert "\n" not in str(caught.value)


def test_an_interrupt_inside_a_tracker_stops_the_run() -> None:
    class Stopping(RecordingTracker):
        def record(self, round: int, figures: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fl.run("fedavg", small_task(), rounds=2, participation=0.5, trackers=[Stopping()])


def test_without_trackers_no_file_is_left(tmp_path: Path) -> None:
    with Tracking([], tmp_path, pytest.fail) as tracking:
        tracking.begin("job", "x", {"algorithm": "fedavg", "seed": 0}, [], [])
        tracking.record({"round": 1}, {})
    assert list(tmp_path.iterdir()) == []


PLUGIN = '''
from dataclasses import dataclass

from fedloom.algorithm import algorithms
from fedloom.algorithms.fedavg import FedAvg


@algorithms.register("plugged")
@dataclass
class Plugged(FedAvg):
    """A method that a plugin brings."""
'''


def test_plugins_are_known_to_the_command_line_and_to_worker_processes(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(PLUGIN)
    table = (
        'plugins = ["my_methods"]\nalgorithms = ["plugged", "fedavg"]\nworkers = '
        "2\nthreads = 1\nrounds = 2\n"
    )
    (tmp_path / "job.toml").write_text(
        table + 'model = "logistic"\n[data]\nclients = 4\npartition = "iid"\n'
    )
    command = [sys.executable, "-m", "fedloom"]
    done = subprocess.run(
        [*command, "compare", "job.toml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/job/comparison.json").read_text())
    assert [row["algorithm"] for row in summary["methods"]] == ["plugged", "fedavg"]
    assert summary["failed"] == []
    listed = subprocess.run(
        [*command, "algorithms", "plugged"],
        env={**os.environ, "FEDLOOM_PLUGINS": "my_methods"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "A method that a plugin brings." in listed.stdout


def test_a_plugin_that_cannot_be_imported_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "half_a_plugin.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(
        InvalidValue,
        match=r"^plugins: cannot import 'half_a_plugin': ModuleNotFoundError: No module",
    ):
        configuration({**JOB, "plugins": ["half_a_plugin"]})
    with pytest.raises(
        InvalidValue, match=r"is a file: give the name of the module, such as 'my.methods'"
    ):
        import_plugins(["my/methods.py"])
    (tmp_path / "taken.py").write_text(PLUGIN.replace("plugged", "fedprox"))
    assert "fedprox" in algorithms
    with pytest.raises(InvalidValue, match="two algorithms are named 'fedprox'"):
        configuration({**JOB, "plugins": ["taken"]})


def test_a_kill_in_the_middle_of_a_round_loses_no_figures(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os, signal\n"
        "class Deadly:\n"
        "    def begin(self, run): pass\n"
        "    def record(self, round, figures):\n"
        "        if round == 5 and not os.path.exists('marked'):\n"
        "            open('marked', 'w').close()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "    def end(self, result): pass\n"
    )
    (tmp_path / "job.toml").write_text(
        'algorithm = "fedavg"\nrounds = 6\ncheckpoint_every = 2\nmodel = "logistic"\nthreads = 1\n'
        'trackers = ["tensorboard(flush_seconds=0)", "deadly:Deadly"]\n[data]\nclients = 4\n'
    )
    command = [sys.executable, "-m", "fedloom", "run", "job.toml"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGKILL
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = Counter(step for step, _ in scalars(Path("runs/job/fedavg/seed-0"))["last_round"])
    assert steps == dict.fromkeys(range(1, 7), 1)


def test_a_server_of_mlflow_that_does_not_answer_is_tried_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tracker is then disabled, and the run continues."""
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)
    attempts = 0

    def refuse(server: socket.socket) -> None:
        nonlocal attempts
        with suppress(OSError):
            while True:
                server.accept()[0].close()
                attempts += 1

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=refuse, args=(server,), daemon=True).start()
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        with caplog.at_level(logging.WARNING):
            events = go(job(f"mlflow(uri='{uri}')"))
        server.shutdown(socket.SHUT_RDWR)
    assert len(events) >= 6
    assert attempts == 2
