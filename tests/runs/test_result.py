"""The result of a run in Python, its displays and argument errors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedloom as fl
from fedloom.common.errors import InvalidValue
from fedloom.runs.events import Event, RunName
from fedloom.runs.progress import NotebookBars, display
from small_task import small_task

OPTIONS: dict[str, Any] = {"rounds": 4, "participation": 0.5, "evaluate_every": 2, "seed": 3}


def test_a_result_is_shown_in_five_lines() -> None:
    result = fl.run("fedmr", small_task(), engine="rows", **OPTIONS)
    title, scores, costs, engine, names = repr(result).splitlines()
    assert title == "fedmr on small, 6 clients, seed 3"
    assert scores.startswith(
        f"test accuracy {100 * result.accuracy:.2f} %, best {100 * result.best_accuracy:.2f} %"
    )
    assert costs.startswith("4 rounds, ")
    assert engine == "engine: rows"
    assert all(hasattr(result, name.strip(".").partition("(")[0]) for name in names.split())
    assert "<td>fedmr</td>" in result._repr_html_()


def test_curves_hold_the_history() -> None:
    result = fl.run("fedmr", small_task(), **OPTIONS)
    curves = result.curves()
    assert curves["round"].tolist() == [1, 2, 3, 4]
    assert curves["loss"].dropna().tolist() == [
        record["loss"] for record in result.history if "loss" in record
    ]
    assert curves["seconds"].tolist() == [timing["seconds"] for timing in result.timings]
    (trace,) = [trace for trace in result.plot("loss").data if trace.name]
    assert trace.y == pytest.approx(curves["loss"].dropna().to_numpy())


@pytest.mark.parametrize("engine", ["rows", "stacked", "default", "processes(workers=2)"])
def test_the_result_names_the_engine(engine: str, tmp_path: Path) -> None:
    result = fl.run("fedavg", small_task(), engine=engine, directory=tmp_path, **OPTIONS)
    repeated = fl.run("fedavg", small_task(), engine=engine, directory=tmp_path, **OPTIONS)
    assert result.engine.name.partition("(")[0] in ("rows", "stacked", "processes")
    assert result.engine.named == (engine != "default")
    assert repeated.engine.name.partition("(")[0] == result.engine.name.partition("(")[0]


class Handle:
    """An IPython display that stores its outputs."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, data: dict[str, str], raw: bool) -> None:
        self.shown.append(data["text/plain"])


def test_a_notebook_shows_bars_in_one_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = Handle()
    monkeypatch.setattr("IPython.display.display", lambda *values, **options: handle)
    time = iter(range(100))
    bars = NotebookBars(2, 4, clock=lambda: float(next(time)))
    name = RunName("fedavg", 7)
    bars(Event("started", name))
    bars(Event("round", name, 3, {"accuracy": 0.5}))
    assert "seed 7: fedavg" in handle.shown[-1]
    assert "3/4" in handle.shown[-1]
    assert "50.0 %" in handle.shown[-1]
    bars(Event("ended", name, 4, {"accuracy": 0.75}, 1.0))
    bars.clear()
    assert handle.shown[-1] == ""
    assert capsys.readouterr().out == "fedavg, seed 7: accuracy 75.0 % after 4 rounds, 1 s\n"


def test_a_script_whose_output_is_a_file_shows_no_bar() -> None:
    text = io.StringIO()
    with display(Console(file=text), 1, 4, brief=True) as watch:
        watch(Event("started", RunName("fedavg", 0)))
        watch(Event("ended", RunName("fedavg", 0), 4))
    assert text.getvalue() == ""


def test_a_terminal_shows_a_bar_that_vanishes() -> None:
    text = io.StringIO()
    with display(Console(file=text, force_terminal=True, width=100), 1, 4, brief=True) as watch:
        watch(Event("started", RunName("fedavg", 0)))
        watch(Event("round", RunName("fedavg", 0), 2))
    assert "seed 0: fedavg" in text.getvalue()
    assert "engine" not in text.getvalue()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"algorithm": fl.FedMR},
            r"expected a method, got a class: give an object such as FedMR\(\)",
        ),
        ({"algorithm": 3}, r"expected a method, got a int: give an object such as FedMR\(\)"),
        ({"task": "digits"}, "task must be a Task, not 'digits': make one with fl.make_task"),
        ({"round": 5}, "unknown key 'round': did you mean 'rounds'"),
    ],
)
def test_bad_arguments_of_a_run_are_refused_in_one_line(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidValue, match=text):
        fl.run(**{"algorithm": "fedavg", "task": small_task(), **OPTIONS, **change})
