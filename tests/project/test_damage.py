"""Damaged files are refused in one line or read without change."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from damage import damages
from fedloom.common.errors import CheckpointError, DamagedCheckpoint, FedloomError
from fedloom.data.dataset import DataSpec, Samples
from fedloom.data.partition import Partition
from fedloom.data.sets.normalisation import Split
from fedloom.data.sets.origin import cached_split
from fedloom.engines.rows import RowsEngine
from fedloom.models.build import build_model
from fedloom.recording.landscape import Landscape
from fedloom.report.page import render
from fedloom.rounds.checkpoint import Checkpoint, Checkpoints, RoundLog
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.runs.config_file import configuration
from fedloom.runs.configured import run_configured
from fedloom.runs.directory import RunDirectory, read_json, write_json
from fedloom.runs.events import RunName
from fedloom.runs.final_landscape import landscape_of
from fedloom.serving.artifact import load_model, save_model
from fedloom.state.client_files import ClientFiles
from fedloom.state.store import ClientStore
from fedloom.state.tensors import read_tensors, write_tensors
from fedloom.study.comparison import Comparison
from fedloom.study.stored_runs import add_landscapes, read_runs
from fedloom.study.watch.live import Watched
from small_task import KeepsClientMemory, other_notices, small_task

TENSORS = {
    "weight": torch.randn(40, 30, generator=torch.Generator().manual_seed(0)),
    "half": torch.arange(7).bfloat16(),
    "count": torch.tensor(5),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 3),
}
OTHER = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}


def plain(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in sorted(tensors.items())}


def checkpoint(folder: Path) -> tuple[Path, Callable[[], Any]]:
    Checkpoints(folder, "run").save(Checkpoint(7, TENSORS, OTHER, {"metrics.jsonl": "0"}))

    def read() -> Any:
        checkpoints = Checkpoints(folder, "run")
        latest = checkpoints.latest(9, lambda checkpoint: None)
        if latest is None:
            (notice,) = checkpoints.notices
            assert "starting again from round 1" in notice
            raise DamagedCheckpoint(notice)
        return latest.round, plain(latest.server), plain(latest.clients), latest.logs

    return next(folder.iterdir()), read


def model(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "model.safetensors"
    spec = DataSpec((1, 8, 8), 10)
    save_model(
        path, build_model("mlp(hidden=[4])", spec, 0), "mlp(hidden=[4])", spec, {"method": "fedavg"}
    )
    return path, lambda: plain(dict(load_model(path).state_dict()))


def client(folder: Path) -> tuple[Path, Callable[[], Any]]:
    store = ClientStore(folder, budget=0)
    store.write(3, TENSORS)
    store.commit()
    state = store.state()

    def read() -> Any:
        fresh = ClientStore(folder, budget=0)
        fresh.restore(state)
        return plain(fresh.read(3))

    return next(folder.iterdir()), read


def site(folder: Path) -> tuple[Path, Callable[[], Any]]:
    memory = ClientFiles(folder)
    memory.write(3, 4, TENSORS)
    return memory.path(3, 4), lambda: plain(memory.read(3, 4))


def split(folder: Path) -> tuple[Path, Callable[[], Any]]:
    path = folder / "split.npz"
    Partition(np.arange(300), np.array([0, 100, 150, 300])).save(path)

    def read() -> Any:
        partition = Partition.load(path)
        return partition.indices.tolist(), partition.offsets.tolist()

    return path, read


KINDS = {"checkpoint": checkpoint, "model": model, "client": client, "site": site, "split": split}


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_read_right(kind: str, tmp_path: Path) -> None:
    path, read = KINDS[kind](tmp_path)
    expected, content = read(), path.read_bytes()
    refused = 0
    for damage, damaged in damages(content, 240):
        path.write_bytes(damaged)
        try:
            content_read = read()
        except FedloomError:
            refused += 1
        else:
            assert content_read == expected, damage
    assert refused > 120


def test_every_bit_of_a_file_of_tensors_counts(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    write_tensors(path, {"weight": torch.arange(5.0)}, {"round": "3"})
    content, expected = path.read_bytes(), ({"weight": [0.0, 1.0, 2.0, 3.0, 4.0]}, {"round": "3"})
    unseen = 0
    for index in range(len(content)):
        for bit in range(8):
            path.write_bytes(
                content[:index] + bytes([content[index] ^ 1 << bit]) + content[index + 1 :]
            )
            try:
                tensors, metadata = read_tensors(path)
            except DamagedCheckpoint:
                continue
            unseen += 1
            assert (
                {name: tensor.tolist() for name, tensor in tensors.items()},
                metadata,
            ) == expected
    # Damage to padding spaces of the header, such as a line break, has no effect.
    assert unseen <= 64


def test_a_damaged_cache_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    created: list[int] = []
    samples = Samples(TENSORS["weight"], torch.arange(40))

    def make() -> Split:
        created.append(1)
        return samples, samples[:7]

    def tensors(split: Split) -> list[list[float]]:
        return [
            tensor.flatten().tolist()
            for samples in split
            for tensor in (samples.inputs, samples.labels)
        ]

    expected = tensors((samples, samples[:7]))
    cached_split("digits", "key", make)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for damage, damaged in damages(content, 40):
        path.write_bytes(damaged)
        assert tensors(cached_split("digits", "key", make)) == expected, damage
        assert path.read_bytes() == content or len(created) == 1, damage
    assert len(created) > 20
    other_split = cached_split("digits", "other key", lambda: (samples[:3], samples))
    names = sorted(tmp_path.iterdir(), key=lambda name: name == path)
    path.write_bytes(names[0].read_bytes())  # under the name of another split
    assert tensors(cached_split("digits", "key", make)) == expected != tensors(other_split)


@pytest.mark.parametrize("kind", ["checkpoint", "client", "site"])
def test_a_file_under_the_name_of_another_is_refused(kind: str, tmp_path: Path) -> None:
    path, read = KINDS[kind](tmp_path)
    if kind == "checkpoint":
        path.rename(tmp_path / "checkpoint-0000008.safetensors")
        with pytest.raises(
            DamagedCheckpoint, match="contains round 7, but has the name of another round"
        ):
            read()
    elif kind == "client":
        store = ClientStore(tmp_path, budget=0)
        store.restore({"versions": torch.tensor([[3, 1]])})
        path.rename(tmp_path / "client-000004.v1.safetensors")
        with pytest.raises(DamagedCheckpoint, match="is of client 3, not 4"):
            store.restore({"versions": torch.tensor([[4, 1]])})
    else:
        path.rename(tmp_path / "client-000003.v5.safetensors")
        with pytest.raises(DamagedCheckpoint, match="is of version 4, not 5"):
            ClientFiles(tmp_path).read(3, 5)


# --- finished runs ---

NAMES = (
    "configuration.json", "task.json", "environment.json", "engine.json", "result.json", "metrics.jsonl", "timings.jsonl",
    "clients.jsonl", "recorded.jsonl", "recording.json", "comparison.json", "landscape.json",
)  # fmt: skip
JOB = {
    "name": "job", "algorithm": "fedavg", "rounds": 2, "evaluate_every": 1, "participation": 1.0, "model": "logistic",
    "record": ["objective"],
}  # fmt: skip
TASK = {
    "data": {
        "clients": 3,
        "local_test": 0.25,
        "partition": "dirichlet(0.5)",
        "label_noise": "symmetric(0.3)",
    }
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a comparison of one finished run and all kinds of its files."""
    folder = tmp_path_factory.mktemp("compared")
    table = {**JOB, **TASK, "directory": str(folder)}
    assert Comparison.of(configuration(table)).run(lambda event: None) == {}
    add_landscapes(read_runs(folder), Landscape(grid=3), print)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_no_reader_of_a_finished_run_shows_a_changed_figure(name: str, compared: Path) -> None:
    (folder,) = compared.glob("*/seed-*")
    path = (compared if name == "comparison.json" else folder) / name
    content, expected = (
        path.read_bytes(),
        (read_runs(compared), Watched(compared).state()["groups"][0]["runs"]),
    )
    refused = 0
    try:
        for damage, damaged in damages(content, 60):
            path.write_bytes(damaged)
            runs, message = None, ""
            try:
                runs = read_runs(compared)
            except FedloomError as error:
                message = str(error)
            assert runs in (None, expected[0]), damage
            assert runs or name in message, damage
            assert len(message.splitlines()) == (runs is None)
            refused += runs is None
            (watched,) = Watched(compared).state()["groups"][0]["runs"]
            assert watched["state"] == "damaged" or watched | {"quiet": 0} == expected[1][0] | {
                "quiet": 0
            }, damage
    finally:
        path.write_bytes(content)
    assert refused > 40


@pytest.mark.parametrize(
    "name", ["model.safetensors", "split.npz", "test-split.npz", "labels.safetensors"]
)
def test_a_finished_run_with_a_damaged_model_or_split_is_not_used(
    name: str, compared: Path, tmp_path: Path
) -> None:
    """Reports, users of the model and resumption refuse a damaged run, and the watch shows the
    damage.
    """
    folder = tmp_path / "copy"
    shutil.copytree(compared, folder)
    (run,) = folder.glob("*/seed-*")
    path, table = run / name, {**JOB, **TASK, "directory": str(folder)}
    users: list[Callable[[], object]] = [
        lambda: read_runs(folder),
        lambda: run_configured(configuration(table), RunName("fedavg", 0), lambda event: None),
        lambda: run_configured(
            configuration({**table, "rounds": 4}), RunName("fedavg", 0), lambda event: None
        ),
        lambda: Comparison.of(configuration(table)).run(lambda event: None),
        lambda: landscape_of(run, Landscape(grid=3)),
    ]
    content = path.read_bytes()
    for damage, damaged in [*damages(content, 4), ("gone", None)]:
        path.unlink() if damaged is None else path.write_bytes(damaged)
        for use in users:
            with pytest.raises(
                FedloomError, match=rf"{re.escape(name)} has changed since it was written: [^\n]*$"
            ) as caught:
                use()
            assert "\n" not in str(caught.value), damage
        (watched,) = Watched(folder).state()["groups"][0]["runs"]
        assert watched["state"] == "damaged", damage
        path.write_bytes(content)
    assert read_runs(folder)


def test_an_engine_file_of_another_program_is_named(compared: Path) -> None:
    (run,) = compared.glob("*/seed-*")
    (run / "engine.json").write_text('{"version": "1.0", "cylinders": 8}')
    with pytest.raises(
        CheckpointError, match=r"engine.json (holds what no run wrote|is missing or damaged)"
    ):
        read_runs(compared)
    (run / "engine.json").unlink()


def test_a_changed_result_stops_a_resumed_run(compared: Path) -> None:
    (folder,) = compared.glob("*/seed-*")
    path = folder / "result.json"
    content = path.read_text()
    path.write_text(content.replace('"rounds": 2', '"rounds": 3'))
    table = {**JOB, **TASK, "directory": str(compared)}
    with pytest.raises(CheckpointError, match=r"result.json is missing or damaged: "):
        run_configured(configuration(table), RunName("fedavg", 0), lambda event: None)
    path.write_text(content)
    run_configured(configuration(table), RunName("fedavg", 0), lambda event: None)


def test_a_missing_file_of_figures_is_noticed(compared: Path) -> None:
    (folder,) = compared.glob("*/seed-*")
    content = (folder / "clients.jsonl").read_bytes()
    (folder / "clients.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"clients.jsonl has changed since it was written: "):
        RunDirectory(folder).summary()
    (folder / "clients.jsonl").write_bytes(content)


def test_objects_without_a_digest_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"accuracy": 0.5}')
    assert read_json(path, dict) == {"accuracy": 0.5}
    write_json(path, {"accuracy": 0.5, "of": {"α": [None, 1e-300, -0.0]}})
    assert read_json(path, dict) == {"accuracy": 0.5, "of": {"α": [None, 1e-300, -0.0]}}
    path.write_text(path.read_text().replace("0.5", "0.7"))
    with pytest.raises(CheckpointError, match=r"result.json is missing or damaged: start again"):
        read_json(path, dict)


# --- figures ---

SCHEDULE = Schedule(
    rounds=5, participation=0.5, seed=3, evaluate_every=1, checkpoint_every=2, personal_every=2
)


def federation(directory: Path) -> Federation:
    task = small_task()
    return Federation(KeepsClientMemory(), task, RowsEngine(task), SCHEDULE, directory, "this run")


@pytest.mark.parametrize("name", ["metrics.jsonl", "clients.jsonl"])
def test_a_changed_figure_before_the_checkpoint_is_noticed_and_computed_again(
    name: str, tmp_path: Path
) -> None:
    run = federation(tmp_path)
    run.run()
    expected, model = (tmp_path / name).read_bytes(), run.model()
    noticed = 0
    for damage, damaged in damages(expected, 12):
        (tmp_path / name).write_bytes(damaged)
        repeated = federation(tmp_path)
        assert repeated.checkpoints is not None
        noticed += bool(repeated.checkpoints.notices)
        repeated.run()
        assert (tmp_path / name).read_bytes() == expected, damage
        assert torch.equal(repeated.model(), model), damage
    assert noticed > 8


def test_a_changed_figure_of_the_newest_rounds_falls_back_to_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    federation(tmp_path).run()
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[4].replace('"loss": ', '"loss": 1')]))
    repeated = federation(tmp_path)
    assert repeated.finished == 4
    (notice,) = other_notices(repeated.notices)
    assert (
        "metrics.jsonl has changed since it was written, up to round 5: continuing after round 4"
        in notice
    )


@pytest.mark.parametrize(
    "name", ["round", "ended", "seconds", "train_seconds", "server_seconds", "evaluate_seconds"]
)
def test_a_damaged_name_among_the_times_does_not_lose_the_run(
    name: str, compared: Path, tmp_path: Path
) -> None:
    """A line of times without one of its names is dropped; the run continues and its report is
    written.
    """
    (finished,) = compared.glob("*/seed-*")
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    path = tmp_path / "run" / "timings.jsonl"
    path.write_text(path.read_text().replace(f'"{name}"', f'"{name[:-1]}_"', 1))
    run = RunName("fedavg", 0)
    figures = run_configured(
        configuration({**JOB, **TASK}), run, lambda event: None, path=tmp_path / "run"
    )
    assert len(figures.records) == 2
    lost = name in ("round", "ended", "seconds", "train_seconds")  # tables and pages read these
    assert [times["round"] for times in figures.timings] == ([2] if lost else [1, 2])
    assert "2 rounds" in render("job", [figures], [], "")


def test_lines_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    federation(tmp_path).run()
    log = RoundLog(tmp_path / "metrics.jsonl")
    (tmp_path / "checkpoint-0000005.safetensors").unlink()
    repeated = federation(tmp_path)
    assert repeated.finished == 4
    assert other_notices(repeated.notices) == []
    with pytest.raises(CheckpointError, match="has changed since it was written, up to round 3"):
        log.require(3, "0")
