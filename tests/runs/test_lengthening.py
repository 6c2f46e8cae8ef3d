"""Lengthened runs continue from the last round and equal longer runs from the start."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from every_method import EVERY_METHOD
from fedloom.algorithm import Algorithm
from fedloom.algorithm.method import Method, components, needs_total_rounds
from fedloom.common.errors import CheckpointError
from fedloom.parts.building import build
from fedloom.parts.hooks import Part
from fedloom.runs.config_file import configuration
from fedloom.runs.configuration import Configuration
from fedloom.runs.configured import run_configured, run_directory
from fedloom.runs.directory import RunDirectory
from fedloom.runs.events import Event, RunName
from fedloom.runs.finished_round import FinishedRound
from fedloom.state.tensors import read_tensors
from fedloom.study.comparison import Comparison
from json_lines import json_lines
from small_task import other_notices, small_task

SHORT, LONG = 5, 9
FINAL_FILES = {"result.json", "model.safetensors", "recording.json"}


def run(
    folder: Path, rounds: int, method: str = "scaffold", stop: int | None = None, **settings: Any
) -> fl.Result:
    """Run with an evaluation in every fourth round; interrupt the run after round `stop`."""

    def stopping(round: FinishedRound) -> None:
        if round.number == stop:
            raise KeyboardInterrupt

    options: dict[str, Any] = {
        "evaluate_every": 4,
        "personal_every": 3,
        "checkpoint_every": 2,
        "seed": 3,
    } | settings
    return fl.run(
        method,
        small_task(),
        rounds=rounds,
        participation=0.5,
        directory=folder,
        on_round=stopping,
        **options,
    )


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return json_lines(folder / name)


def assert_same(lengthened: Path, uninterrupted: Path) -> None:
    """Assert equal models, checkpoints and metrics.

    The evaluation in the last round of the shorter run is ignored.
    """
    for name in ("model.safetensors", "configuration.json"):
        assert (lengthened / name).read_bytes() == (uninterrupted / name).read_bytes(), name
    state, expected = (
        read_tensors(folder / f"checkpoint-{LONG:07d}.safetensors")[0]
        for folder in (lengthened, uninterrupted)
    )
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    records, reference = lines(lengthened), lines(uninterrupted)
    assert "accuracy" in records[SHORT - 1]
    assert "accuracy" not in reference[SHORT - 1]
    records[SHORT - 1] = {name: records[SHORT - 1][name] for name in reference[SHORT - 1]}
    assert records == reference
    assert [line for line in lines(lengthened, "clients.jsonl") if line["round"] != SHORT] == lines(
        uninterrupted, "clients.jsonl"
    )


@pytest.mark.parametrize("method", ["scaffold", "fedmr", "ala(feddyn)", "stages(fedavg:6, fedmr)"])
def test_a_lengthened_run_equals_one_of_that_length(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uninterrupted, lengthened = tmp_path / "uninterrupted", tmp_path / "lengthened"
    run(uninterrupted, LONG, method)
    run(lengthened, SHORT, method)
    caplog.clear()
    result = run(lengthened, LONG, method)
    assert other_notices(record.getMessage() for record in caplog.records) == [
        f"{lengthened}: going on from round {SHORT} of {LONG}"
    ]
    assert_same(lengthened, uninterrupted)
    assert (
        len(result.history)
        == LONG
        == json.loads((lengthened / "result.json").read_text())["rounds"]
    )
    caplog.clear()
    run(lengthened, LONG, method)
    assert not other_notices(record.getMessage() for record in caplog.records)


def test_a_lengthened_run_is_unfinished_until_its_new_end(tmp_path: Path) -> None:
    uninterrupted, lengthened = tmp_path / "uninterrupted", tmp_path / "lengthened"
    record = ["landscape(grid=3)"]
    run(uninterrupted, LONG, record=record)
    run(lengthened, SHORT, record=record)
    (lengthened / "report.html").write_text("of the shorter run")
    (lengthened / "landscape.json").write_text("{}")
    assert {path.name for path in lengthened.iterdir()} >= FINAL_FILES
    with pytest.raises(KeyboardInterrupt):
        run(lengthened, LONG, record=record, stop=SHORT + 1)
    assert not {path.name for path in lengthened.iterdir()} & {
        *FINAL_FILES,
        "report.html",
        "landscape.json",
    }
    assert RunDirectory(lengthened).rounds == LONG
    run(lengthened, LONG, record=record)
    assert_same(lengthened, uninterrupted)
    assert (lengthened / "recording.json").read_bytes() == (
        uninterrupted / "recording.json"
    ).read_bytes()


def test_a_longer_run_that_cannot_start_leaves_the_shorter_one_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, SHORT)
    original = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

    def failing(*_: object) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("fedloom.engines.rows.RowsEngine.begin", failing)
        with pytest.raises(RuntimeError, match="no room"):
            run(tmp_path, LONG)
    assert {
        path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()
    } == original
    run(tmp_path, LONG)


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_an_interrupted_run_can_be_lengthened(stop: int, tmp_path: Path) -> None:
    uninterrupted, lengthened = tmp_path / "uninterrupted", tmp_path / "lengthened"
    run(uninterrupted, LONG)
    with pytest.raises(KeyboardInterrupt):
        run(lengthened, SHORT, stop=stop)
    if stop < SHORT:  # then round SHORT has no additional evaluation
        run(lengthened, LONG)
        assert lines(lengthened) == lines(uninterrupted)
        assert (lengthened / "model.safetensors").read_bytes() == (
            uninterrupted / "model.safetensors"
        ).read_bytes()
    else:
        run(lengthened, LONG)
        assert_same(lengthened, uninterrupted)


def test_without_the_last_checkpoint_it_resumes_from_the_one_before(tmp_path: Path) -> None:
    uninterrupted, lengthened = tmp_path / "uninterrupted", tmp_path / "lengthened"
    run(uninterrupted, LONG)
    run(lengthened, SHORT)
    (lengthened / f"checkpoint-{SHORT:07d}.safetensors").unlink()
    result = run(lengthened, LONG)
    assert lines(lengthened) == lines(uninterrupted)
    assert (lengthened / "model.safetensors").read_bytes() == (
        uninterrupted / "model.safetensors"
    ).read_bytes()
    assert len(result.history) == LONG


@pytest.mark.parametrize(
    "method", ["fedphp", "fedasam(swa=true)", "ala(fedphp)", "stages(umf(fedavg):3, fedmr)"]
)
def test_a_method_that_depends_on_the_total_rounds_is_not_lengthened(
    method: str, tmp_path: Path
) -> None:
    run(tmp_path, 2, method)
    original = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(
        CheckpointError,
        match=r"rounds = 2, not 4, and what .* does in a round depends on how many there",
    ) as error:
        run(tmp_path, 4, method)
    assert "choose another name or directory, or start again with --fresh" in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == original


def test_fewer_rounds_than_are_done_are_refused(tmp_path: Path) -> None:
    run(tmp_path, SHORT)
    with pytest.raises(
        CheckpointError,
        match=f"has done {SHORT} of {SHORT} rounds, so that rounds must be more than .*, not 4:",
    ):
        run(tmp_path, 4)
    assert len(run(tmp_path, SHORT).history) == SHORT


def test_an_unfinished_run_can_be_shortened(tmp_path: Path) -> None:
    uninterrupted, lengthened = tmp_path / "uninterrupted", tmp_path / "lengthened"
    run(uninterrupted, SHORT)
    with pytest.raises(KeyboardInterrupt):
        run(lengthened, LONG, stop=3)
    with pytest.raises(
        CheckpointError,
        match=f"has done 3 of {LONG} rounds, so that rounds must be more than 3, not 3:",
    ):
        run(lengthened, 3)
    run(lengthened, SHORT)
    for name in ("model.safetensors", "metrics.jsonl", "configuration.json"):
        assert (lengthened / name).read_bytes() == (uninterrupted / name).read_bytes(), name


def test_a_finished_run_without_checkpoints_is_not_lengthened(tmp_path: Path) -> None:
    run(tmp_path, SHORT)
    for path in tmp_path.glob("checkpoint-*"):
        path.unlink()
    with pytest.raises(
        CheckpointError,
        match=f"holds no checkpoint any more, to go on from round {SHORT} of {LONG}:",
    ):
        run(tmp_path, LONG)
    assert RunDirectory(tmp_path).finished


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def plan(folder: Path, rounds: int, **keys: object) -> Configuration:
    return configuration(
        {
            "name": "job",
            "directory": str(folder),
            "rounds": rounds,
            "participation": 0.5,
            "evaluate_every": 1,
            "model": "logistic",
            "data": {"clients": 4, "partition": "iid"},
            **keys,
        }
    )


def test_a_comparison_is_lengthened_run_by_run(tmp_path: Path) -> None:
    methods = ["fedavg", "fedmr"]
    Comparison.of(plan(tmp_path / "whole", 5, algorithms=methods)).run(lambda event: None)
    Comparison.of(plan(tmp_path / "parts", 3, algorithms=methods)).run(lambda event: None)
    run_configured(plan(tmp_path / "parts", 5), RunName("fedmr", 0), lambda event: None)
    events: list[Event] = []
    Comparison.of(plan(tmp_path / "parts", 5, algorithms=methods)).run(events.append)
    assert [
        (event.kind, event.run.algorithm, event.finished)
        for event in events
        if event.kind != "round"
    ] == [
        ("skipped", "fedmr", 5),
        ("started", "fedavg", 3),
        ("ended", "fedavg", 5),
    ]
    for method in methods:
        for name in ("metrics.jsonl", "model.safetensors", "configuration.json"):
            inside = (
                run_directory(plan(tmp_path / "parts", 5), method, 0).path.relative_to(
                    tmp_path / "parts"
                )
                / name
            )
            assert (tmp_path / "parts" / inside).read_bytes() == (
                tmp_path / "whole" / inside
            ).read_bytes()
    assert {
        entry["directory"]
        for entry in json.loads((tmp_path / "parts/comparison.json").read_text())["runs"]
    } == {str(tmp_path / "parts" / method / "seed-0") for method in methods}


def test_a_comparison_that_cannot_be_lengthened_changes_nothing(tmp_path: Path) -> None:
    methods = ["fedavg", "fedphp"]
    Comparison.of(plan(tmp_path, 2, algorithms=methods)).run(lambda event: None)
    with pytest.raises(
        CheckpointError, match="what fedphp does in a round depends on how many there are"
    ):
        Comparison.of(plan(tmp_path, 3, algorithms=methods)).run(lambda event: None)
    assert RunDirectory(tmp_path / "fedavg/seed-0").finished


@pytest.mark.parametrize("expression", [*EVERY_METHOD, "fedsam(swa=true)"])
def test_methods_that_read_the_total_rounds_declare_it(expression: str) -> None:
    """A class sets `needs_total_rounds` if its module reads the number of rounds."""
    for method in components(build(expression)):
        bases = (Method, Algorithm, Part)
        ancestors = [
            kind for kind in type(method).__mro__ if issubclass(kind, Method) and kind not in bases
        ]
        reading = {kind.__module__ for kind in ancestors if re.search(r"\.rounds\b", _source(kind))}
        declaring = {kind.__module__ for kind in ancestors if _declares(kind)}
        assert reading <= declaring, (
            f"{type(method).__name__} reads round.rounds: give it needs_total_rounds"
        )


def _declares(kind: type) -> bool:
    """Return True if the facts of a class contain `needs_total_rounds`."""
    names = {"facts", "base_facts"} & vars(kind).keys()
    return bool(names) and "needs_total_rounds=" in inspect.getsource(kind)


def _source(kind: type) -> str:
    return inspect.getsource(sys.modules[kind.__module__])


def test_the_methods_that_need_the_total_rounds() -> None:
    assert {text for text in EVERY_METHOD if needs_total_rounds(build(text))} == {
        "apple",
        "fedphp",
        "fisher_merge(fedmr)",
        "umf(feddc)",
    }
    assert needs_total_rounds(build("stages(fedavg:2, fedasam(swa=true))"))
    assert not needs_total_rounds(build("umf(fedavg, simulate_all=true)"))
