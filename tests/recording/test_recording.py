"""Recordings compared with plain loops.

Recordings do not change a run, and a killed run loses no recordings.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import fedloom as fl
from fedloom.algorithm.records import Message, Replies
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.common.round import Round
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.ray.driver import RayEngine
from fedloom.engines.rows import RowsEngine
from fedloom.local.cohort import Cohort
from fedloom.parts.ala import Ala, Blend
from fedloom.parts.building import build
from fedloom.recording.recorder import build_recorders, expression, recorders
from fedloom.recording.run_recording import Recording
from fedloom.recording.trajectory import principal_plane
from fedloom.report.page import render
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.runs.config_file import configuration
from fedloom.runs.directory import RunDirectory
from fedloom.runs.events import RunName
from fedloom.runs.finished_round import FinishedRound
from fedloom.sites.flower_engine import FlowerEngine
from fedloom.study.comparison import Comparison
from fedloom.task import Task
from json_lines import json_lines
from recording_support import run_recorded
from small_task import small_task

ALL = ("objective(every=2)", "ala(client=3)", "trajectory(client=2, first=2, last=6, grid=3)")
SAME = ("metrics.jsonl", "clients.jsonl", "model.safetensors")


class Witness(FedAvg):
    """FedAvg that stores the models its clients received and uploaded."""

    def setup(self, plan: Any) -> None:
        super().setup(plan)
        self.received: list[dict[int, Tensor]] = []
        self.uploaded: list[dict[int, Tensor]] = []
        self.entering: dict[int, Tensor] = {}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        self.entering[cohort.clients[0]] = inbox["model"][0].clone()
        return super().train(cohort, inbox)

    def receive(self, round: Round, replies: Replies) -> None:
        clients = replies.clients.tolist()
        self.received.append({client: self.entering[client] for client in clients})
        self.uploaded.append(
            {client: row.clone() for client, row in zip(clients, replies["model"], strict=True)}
        )
        super().receive(round, replies)


def naive_loss(task: Task, row: Tensor, client: int) -> float:
    """Return the mean cross entropy on a client's training samples, one sample at a time."""
    module = task.module(row).eval()
    losses = []
    for index in task.partition[client]:
        with torch.no_grad():
            logits = module(task.train.inputs[int(index)].unsqueeze(0))
        losses.append(float(F.cross_entropy(logits, task.train.labels[int(index)].unsqueeze(0))))
    return sum(losses) / len(losses)


def naive_objective(task: Task, rows: dict[int, Tensor]) -> float:
    total = sum(len(task.partition[client]) for client in rows)
    return (
        sum(
            len(task.partition[client]) * naive_loss(task, row, client)
            for client, row in rows.items()
        )
        / total
    )


def recorded(result: Any, kind: str) -> dict[str, Any]:
    return next(entry for entry in result.recorded if entry["kind"] == kind)


def test_the_objective_equals_plain_loops() -> None:
    task, method = small_task(), Witness()
    schedule = Schedule(rounds=5, participation=0.5, seed=1, dropout=0.3)
    _, recording = run_recorded(method, task, schedule, "objective(every=2)")
    assert recording["objective"]["rounds"] == [2, 4]
    for index, number in enumerate((2, 4)):
        for when, models in (("before", method.received), ("after", method.uploaded)):
            naive = naive_objective(task, models[number - 1])
            assert recording["objective"][when][index] == pytest.approx(naive, rel=1e-5)
    assert recording["objective"]["after"][0] != pytest.approx(
        recording["objective"]["before"][0], rel=1e-3
    )


def test_clients_that_never_train_do_not_shift_the_numbers() -> None:
    task, method = small_task(), Witness()
    schedule = Schedule(rounds=4, participation=1.0, seed=1, new_clients=0.3)
    federation = Federation(Witness(), task, RowsEngine(task), schedule)
    trained = [int(number) for number in federation.numbers][:4]
    moved = next(number for index, number in enumerate(trained) if index != number)
    _, recording = run_recorded(method, task, schedule, f"trajectory(client={moved})")
    mine = trained.index(moved)
    naive = [naive_loss(task, models[mine], moved) for models in method.uploaded]
    assert recording["trajectory"]["losses"] == pytest.approx(naive, rel=1e-5)
    newcomer = int(federation.numbers[-1])
    with pytest.raises(InvalidValue, match=f"record: .*client {newcomer} never trains"):
        run_recorded(Witness(), task, schedule, f"trajectory(client={newcomer})")


def test_ala_is_recorded_epoch_by_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[int, list[float]]] = []

    def listen(cohort: Cohort, blend: Blend) -> None:
        if cohort.clients == (3,) and blend.losses:
            reported.append((cohort.round.number, [float(loss[0]) for loss in blend.losses]))

    method = build("ala(fedavg, epochs=3, start_round=2, max_epochs=15)")
    assert isinstance(method, Ala)
    monkeypatch.setattr(method, "record_learning", listen)
    schedule = Schedule(rounds=6, participation=1.0, seed=1)
    _, recording = run_recorded(method, small_task(), schedule, "ala(client=3)")
    assert (
        list(zip(recording["ala"]["rounds"], recording["ala"]["losses"], strict=True)) == reported
    )
    assert recording["ala"]["rounds"] == [2, 3, 4, 5, 6]
    assert [len(losses) for losses in recording["ala"]["losses"][1:]] == [3] * 4
    assert len(recording["ala"]["losses"][0]) > 10


def test_the_trajectory_lies_over_the_clients_loss() -> None:
    task, method = small_task(), Witness()
    schedule = Schedule(rounds=7, participation=1.0, seed=1)
    _, recording = run_recorded(
        method, task, schedule, "trajectory(client=2, first=3, last=6, grid=4)"
    )
    trajectory, models = (
        recording["trajectory"],
        [method.uploaded[number - 1][2] for number in range(3, 7)],
    )
    assert trajectory["rounds"] == [3, 4, 5, 6]
    assert trajectory["losses"] == pytest.approx(
        [naive_loss(task, row, 2) for row in models], rel=1e-5
    )

    rows, trainable = torch.stack(models).double().numpy(), task.layout.trainable
    centre = rows.mean(0)
    _, _, axes = np.linalg.svd(rows[:, :trainable] - centre[:trainable], full_matrices=False)
    axes = axes[:2] * np.sign([axis[np.abs(axis).argmax()] for axis in axes[:2]])[:, None]
    points = (rows[:, :trainable] - centre[:trainable]) @ axes.T
    assert np.allclose(trajectory["points"], points, rtol=1e-6, atol=1e-9)
    for axis, ticks in ((0, trajectory["x"]), (1, trajectory["y"])):
        low, high = points[:, axis].min(), points[:, axis].max()
        beyond = 0.2 * (high - low)
        assert np.allclose(ticks, np.linspace(low - beyond, high + beyond, 4))
    for (i, up), (j, along) in itertools.product(
        enumerate(trajectory["y"]), enumerate(trajectory["x"])
    ):
        row = centre.copy()
        row[:trainable] += along * axes[0] + up * axes[1]
        assert trajectory["surface"][i][j] == pytest.approx(
            naive_loss(task, torch.from_numpy(row).float(), 2), rel=1e-4
        )


@given(st.integers(3, 9), st.integers(2, 40), st.integers(0, 10_000))
@settings(deadline=None, max_examples=25)
def test_the_plane_equals_numpys_svd(count: int, width: int, seed: int) -> None:
    rows = torch.randn(
        count, width, generator=torch.Generator().manual_seed(seed)
    ) * torch.linspace(3, 1, width)
    plane = principal_plane(rows)
    assert plane is not None
    centred = rows.double().numpy() - rows.double().numpy().mean(0)
    _, singular, _ = np.linalg.svd(centred, full_matrices=False)
    assert np.allclose(plane.axes @ plane.axes.T, np.eye(2), atol=1e-7)
    assert np.allclose(np.linalg.norm(plane.points, axis=0), singular[:2])
    assert np.allclose(plane.explained, singular[:2] ** 2 / (singular**2).sum())
    assert np.allclose(plane.points, centred @ plane.axes.numpy().T)
    assert all(axis[axis.abs().argmax()] > 0 for axis in plane.axes)


def test_models_in_line_or_too_few_span_no_plane() -> None:
    line = torch.arange(5.0).unsqueeze(1) * torch.randn(
        1, 8, generator=torch.Generator().manual_seed(1)
    )
    assert principal_plane(line) is None
    assert principal_plane(torch.ones(4, 8)) is None
    assert principal_plane(torch.eye(2)) is None
    task = small_task()
    schedule = Schedule(rounds=2, participation=1.0)
    _, recording = run_recorded(FedAvg(), task, schedule, "trajectory(client=1, last=2)")
    assert len(recording["trajectory"]["losses"]) == 2
    assert "points" not in recording["trajectory"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with all recordings, `whole`, and the same run without recordings, `bare`."""
    folder = tmp_path_factory.mktemp("recorded")
    run(folder / "whole", ALL)
    run(folder / "bare", ())
    return folder


class Stopped(Exception):
    pass


def run(directory: Path, record: tuple[str, ...], stop_at: int | None = None) -> Any:
    def stop(round: FinishedRound) -> None:
        if round.number == stop_at:
            raise Stopped

    return fl.run(
        "ala(fedavg, max_epochs=12)", small_task(), rounds=8, participation=1.0, seed=4, evaluate_every=1, dropout=0.1,
        checkpoint_every=3, personal_every=4, directory=directory, record=record, on_round=stop,
    )  # fmt: skip


def test_the_run_is_the_same_without_recording(folder: Path) -> None:
    for name in SAME:
        assert (folder / "whole" / name).read_bytes() == (folder / "bare" / name).read_bytes(), name
    assert not list((folder / "bare").glob("record*"))
    assert json.loads((folder / "bare" / "configuration.json").read_text())["record"] == []
    timings = json_lines(folder / "whole" / "timings.jsonl")
    assert all(timing["record_seconds"] > 0 for timing in timings)


def killed_in_round(directory: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the state of a run after a kill.

    The recordings and metrics of the round exist, and the checkpoint is some rounds older.
    """
    with monkeypatch.context() as patch:
        patch.setattr(
            Federation, "save", lambda self: None if self.finished == number else SAVE(self)
        )
        with pytest.raises(Stopped):
            run(directory, ALL, stop_at=number)


SAVE = Federation.save


@pytest.mark.parametrize("number", [2, 5, 7])
def test_a_killed_run_resumes_to_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    killed_in_round(tmp_path / "run", number, monkeypatch)
    assert (
        json.loads((tmp_path / "run/recorded.jsonl").read_text().splitlines()[-1])["round"]
        == number
    )
    with (tmp_path / "run/recorded.jsonl").open("a") as file:
        file.write('{"round": 6, "ke')
    assert run(tmp_path / "run", ALL).history[-1]["round"] == 8
    names = sorted(path.name for path in (folder / "whole/recorded").iterdir())
    assert len(names) >= 4
    assert sorted(path.name for path in (tmp_path / "run/recorded").iterdir()) == names
    for name in (
        *SAME,
        "recorded.jsonl",
        "recording.json",
        *(f"recorded/{file}" for file in names),
    ):
        assert (tmp_path / "run" / name).read_bytes() == (folder / "whole" / name).read_bytes(), (
            name
        )


def test_lost_recordings_are_made_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lost in ("recorded.jsonl", "recorded"):
        directory = tmp_path / lost
        killed_in_round(directory, 5, monkeypatch)
        shutil.rmtree(directory / lost) if (directory / lost).is_dir() else (
            directory / lost
        ).unlink()
        run(directory, ALL)
        for name in (*SAME, "recorded.jsonl", "recording.json"):
            assert (directory / name).read_bytes() == (folder / "whole" / name).read_bytes(), name


def test_a_finished_run_returns_its_recordings(folder: Path) -> None:
    summary = RunDirectory(folder / "whole").summary()
    assert {entry["kind"] for entry in summary.recorded} == {"objective", "ala", "trajectory"}
    assert run(folder / "whole", ALL).recorded == summary.recorded
    with pytest.raises(FedloomError, match=r"record = \[.*ala.*not \[\]"):
        run(folder / "whole", ())


def test_the_report_shows_recordings(folder: Path) -> None:
    summary = RunDirectory(folder / "whole").summary()
    page = render("Recorded", [summary])
    assert "What was recorded" in page
    data = json.loads(page.partition('id="figures">')[2].partition("</script>")[0])
    method = "ala-fedavg-max_epochs=12"
    names = ("objective", f"ala-3-{method}", f"trajectory-2-{method}")
    drawn = [data[name]["variants"][""]["data"] for name in names]
    by_kind = {entry["kind"]: entry for entry in summary.recorded}
    assert len(drawn[1]) == len(by_kind["ala"]["rounds"])  # one line per round
    assert drawn[2][0]["type"] == "contour"
    assert len(by_kind["trajectory"]["surface"]) == 3
    assert "What was recorded" not in render("Bare", [RunDirectory(folder / "bare").summary()])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "objetive",
            "unknown recorder 'objetive': did you mean 'objective'? (there are: aggregate, "
            "ala, client_models, landscape, "
            "memorisation, objective, similarity, steps, trajectory)",
        ),
        ("ala(clent=3)", "ala has no parameter 'clent': did you mean 'client'? (it has: client)"),
        ("objective(every=0)", "objective: every must be at least 1, not 0"),
        ("objective(every=often)", "objective: every must be a whole number, not 'often'"),
        ("trajectory(first=5, last=3)", "last must be at least 5, not 3"),
        ("objective:3", "objective:3: :3 is not allowed here, remove it"),
    ],
)
def test_bad_recorders_are_refused_at_the_start(text: str, message: str) -> None:
    with pytest.raises(FedloomError) as refused:
        fl.run("fedala", small_task(), rounds=2, record=[text])
    assert str(refused.value) == message
    with pytest.raises(InvalidValue) as refused:
        configuration({"algorithm": "fedala", "record": [text]})
    assert str(refused.value) == f"record = {[text]!r}: {message}"


@pytest.mark.parametrize(
    ("method", "texts", "message"),
    [
        (
            "fedavg",
            ["ala"],
            "record: ala of client 0: nothing to record for fedavg: it does not learn with ala",
        ),
        (
            "fedala",
            ["ala(client=6)"],
            "record: ala of client 6: client must be between 0 and 5, not 6",
        ),
        (
            "fedavg",
            ["trajectory(last=3)"],
            "record: trajectory of client 0: last must be at most 2, .* not 3",
        ),
        ("fedavg", ["objective", "objective(every=3)"], "objective is recorded once, not twice"),
    ],
)
def test_recorders_that_do_not_fit_the_run_are_refused(
    method: str, texts: list[str], message: str
) -> None:
    with pytest.raises(InvalidValue, match=message):
        fl.run(method, small_task(), rounds=2, record=texts)


def test_methods_without_full_models_are_left_out_with_a_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = fl.run(
        "fedper", small_task(), rounds=1, participation=1.0, record=["objective(every=1)"]
    )
    assert result.recorded == []
    assert (
        "objective is not recorded for fedper: part of the model stays at its clients"
        in caplog.text
    )
    assert fl.run("fedfomo", small_task(), rounds=1, record=["objective(every=1)"]).recorded == []
    assert "its clients do not receive one model" in caplog.text


@pytest.mark.parametrize("engine", [RayEngine, FlowerEngine])
def test_engines_with_remote_clients_are_refused(engine: type[Any]) -> None:
    task = small_task()
    federation = Federation(FedAvg(), task, RowsEngine(task), Schedule(rounds=1))
    federation.engine = engine.__new__(engine)
    with pytest.raises(
        InvalidValue,
        match=rf"record works in simulations on one machine .* not in {engine.__name__}",
    ):
        Recording(build_recorders(["objective"])).begin(federation)


def test_recorders_that_hook_client_training_need_it_in_this_process() -> None:
    task = small_task()
    federation = Federation(build("ala(fedavg)"), task, RowsEngine(task), Schedule(rounds=1))
    federation.engine = ProcessesEngine.__new__(ProcessesEngine)
    with pytest.raises(
        InvalidValue,
        match="record: ala of client 0: it hooks client training, but clients train in other "
        "processes",
    ):
        Recording(build_recorders(["ala"])).begin(federation)
    Recording(build_recorders(["objective"])).begin(federation)


def test_a_comparison_records_for_methods_that_support_it(tmp_path: Path) -> None:
    job = configuration(
        {
            "name": "both", "directory": str(tmp_path), "algorithms": ["fedavg", "fedala"], "rounds": 3, "participation": 1.0,
            "model": "logistic", "data": {"clients": 4, "partition": "iid"}, "record": ["objective(every=1)", "ala(client=3)"],
        }
    )  # fmt: skip
    notices: list[str] = []
    comparison = Comparison(job, (RunName("fedavg", 0), RunName("fedala", 0)))
    assert comparison.run(lambda event: notices.append(event.text)) == {}
    assert "ala of client 3 is not recorded for fedavg: it does not learn with ala" in notices
    kinds = [
        [entry["kind"] for entry in run.summary.recorded] for run in comparison.result({}).runs
    ]
    assert kinds == [["objective"], ["objective", "ala"]]
    assert "What was recorded" in (tmp_path / "report.html").read_text()


def every_recorder() -> Iterator[str]:
    return (entry.name for entry in recorders)


@pytest.mark.parametrize("name", list(every_recorder()))
def test_recorders_round_trip(name: str) -> None:
    (recorder,) = build_recorders([name])
    assert build_recorders([expression(recorder)]) == [recorder]
    assert recorders[name].summary
    assert recorder.name.startswith(name)
