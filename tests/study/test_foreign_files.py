"""Foreign files in a run's folder: `report` refuses them in one line or omits them, and `watch`
shows the other runs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedloom.common.errors import FedloomError
from fedloom.runs.config_file import configuration
from fedloom.study.comparison import Comparison
from fedloom.study.comparison_result import read_comparison
from fedloom.study.watch.live import Watched

FILES = (
    "configuration.json", "task.json", "environment.json", "engine.json", "recording.json", "landscape.json",
    "metrics.jsonl", "timings.jsonl", "clients.jsonl",
)  # fmt: skip
"""Files of a run's folder that reports read."""

CONTENTS: dict[str, Any] = {
    "object": {"name": 3, "seconds": [1], "unknown": {}},
    "list": [1, {"kind": 3}, {"kind": "ala"}, "x"],
    "number": 1e400,
    "record": {
        "round": 1,
        "accuracy": "high",
        "seconds": "long",
        "personal": {"clients": 5},
        "faults": [3],
    },
    "huge": {
        "round": 1,
        "accuracy": 10**400,
        "rounds": 10**400,
        "label_counts": 5,
        "class_names": {},
        "metric": [],
    },
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a comparison of two runs with recordings, and its page."""
    folder = tmp_path_factory.mktemp("compared") / "pair"
    table = {
        "name": "pair", "directory": str(folder), "rounds": 3, "participation": 1.0, "model": "logistic",
        "algorithms": ["fedavg", "fedala"], "seeds": [0], "evaluate_every": 1, "personal_every": 1,
        "record": ["ala(client=0)", "trajectory(client=0, grid=3)"],
        "data": {"name": "digits", "clients": 2, "partition": "iid", "local_test": 0.25},
    }  # fmt: skip
    Comparison.of(configuration(table)).run(lambda event: None)
    return folder


def require_report_or_line(folder: Path) -> str:
    """Require that a folder gives a report or one short error line; return the line."""
    try:
        assert read_comparison(folder).rewrite_reports()
    except FedloomError as error:
        text = str(error)
        assert "\n" not in text
        assert len(text) < 400
        return text
    return ""


def spoil(run: Path, name: str, write: Callable[[Path], object]) -> None:
    """Replace a run's file and remove the finished mark, so that no digest covers the file."""
    (run / "result.json").unlink()
    (run / name).unlink(missing_ok=True)
    write(run / name)


def _write(text: str, path: Path) -> None:
    path.write_text(text)


WRITERS: dict[str, Callable[[Path], object]] = {
    **{kind: partial(_write, json.dumps(value)) for kind, value in CONTENTS.items()},
    "cut": lambda path: path.write_text('{"round": 1, "accu'),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_no_run_wrote_is_one_line_or_left_out_and_the_other_run_is_watched(
    name: str, compared: Path, tmp_path: Path
) -> None:
    for kind, write in WRITERS.items():
        folder = tmp_path / kind / "pair"
        shutil.copytree(compared, folder)
        spoil(folder / "fedavg" / "seed-0", name, write)
        require_report_or_line(folder)
        watched = Watched(folder.parent)
        runs = [run for group in watched.state()["groups"] for run in group["runs"]]
        assert [run["state"] for run in runs if run["algorithm"] == "fedala"] == ["finished"], (
            kind,
            runs,
        )
        if kind in ("list", "record"):
            page = watched.page("pair")
            assert page is not None
            assert "Learning curves" in page, kind


@pytest.mark.parametrize("name", ["comparison.json", "report.html", "trajectories.json"])
def test_a_comparisons_own_files_may_be_foreign_too(
    name: str, compared: Path, tmp_path: Path
) -> None:
    page = '<script type="application/json" id="about">{}</script>'
    texts = {kind: json.dumps(value) for kind, value in CONTENTS.items()}
    texts["runs"] = json.dumps({"runs": [{"setting": 3, "directory": 4, "algorithm": 5}], "of": 4})
    for kind, text in texts.items():
        folder = tmp_path / kind / "pair"
        shutil.copytree(compared, folder)
        (folder / name).write_text(page.replace("{}", text) if name == "report.html" else text)
        require_report_or_line(folder)


def test_a_foreign_engine_is_named(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "pair")
    (tmp_path / "pair/fedavg/seed-0/engine.json").write_text('{"engine": "steam"}')
    text = require_report_or_line(tmp_path / "pair")
    assert "engine.json" in text
    assert "start again with --fresh" in text
