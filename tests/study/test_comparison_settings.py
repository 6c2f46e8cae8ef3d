"""Comparisons in several settings: their runs and folders, and that each run is made once."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from fedloom.cli import main
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.report import image_files as images
from fedloom.runs.config_file import configuration, put
from fedloom.runs.configuration import Configuration
from fedloom.runs.directory import fingerprint
from fedloom.runs.events import Event
from fedloom.runs.settings import Range, label
from fedloom.study.comparison import Comparison
from report_support import ablations_drawn


def plan(folder: Path, **keys: object) -> Configuration:
    return configuration(
        {
            "name": "job",
            "directory": str(folder),
            "algorithms": ["fedavg", "fedmr"],
            "rounds": 2,
            "participation": 0.5,
            "model": "logistic",
            "data": {"clients": 4, "partition": "iid"},
            **keys,
        }
    )


def overridden(*overrides: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for override in overrides:
        put(table, override)
    return table


def test_settings_are_the_product_of_all_values() -> None:
    settings = configuration(
        overridden(
            "settings.data.partition=[iid, dirichlet(0.1)]",
            "settings.training.epochs=[1, 5, 7]",
            "settings.participation={from=0.1, to=0.5, steps=3}",
        )
    )
    assert list(settings.variants) == [
        f"data.partition={partition}, training.epochs={epochs}, participation={share}"
        for partition, epochs, share in itertools.product(
            ("iid", "dirichlet(0.1)"), (1, 5, 7), (0.1, 0.3, 0.5)
        )
    ]
    variant = settings.variants[
        "data.partition=dirichlet(0.1), training.epochs=7, participation=0.3"
    ]
    assert (variant.data.partition, variant.training.epochs, variant.schedule.participation) == (
        "dirichlet(0.1)",
        7,
        0.3,
    )
    assert variant.data.clients == settings.data.clients


@pytest.mark.parametrize(
    ("spacing", "values"),
    [
        (Range(1, 5, 3), [1, 3, 5]),
        (Range(1, 4, 3), [1.0, 2.5, 4.0]),
        (Range(0.1, 0.5, 5), [0.1, 0.2, 0.3, 0.4, 0.5]),
        (Range(0.001, 1, 4, logarithmic=True), [0.001, 0.01, 0.1, 1.0]),
    ],
)
def test_a_range_includes_both_ends_and_has_no_stray_digits(
    spacing: Range, values: list[float]
) -> None:
    assert spacing.values() == values
    assert list(map(type, spacing.values())) == list(map(type, values))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("settings=3", "settings must be a table"),
        ("settings.rouns=[1]", "unknown key 'settings.rouns': did you mean 'settings.rounds'?"),
        ("settings.epochs=[1]", "did you mean 'settings.training.epochs'?"),
        ("settings.seeds=[0, 1]", "unknown key 'settings.seeds'"),
        (
            "settings.training.epochs=5",
            "settings.training.epochs must be a list such as [1, 5] or a range",
        ),
        ("settings.training.epochs=[]", "settings.training.epochs lists no value"),
        ("settings.training.epochs=[2, 2]", "lists 2 twice"),
        ("settings.training.epochs=[1, x]", "training.epochs must be a whole number, not 'x'"),
        (
            "settings.training.epochs={from=1, to=4, steps=3}",
            "training.epochs must be a whole number, not 1.0",
        ),
        ("settings.training.epochs={from=1, to=4}", "settings.training.epochs lacks steps"),
        (
            "settings.rounds={from=5, to=4, steps=2}",
            "from a smaller number to a larger one, not from 5 to 4",
        ),
        ("settings.rounds={from=1, to=4, steps=2, scale=lgo}", "did you mean 'log'?"),
        ("settings.rounds={from=1, to=4, stps=2}", "did you mean 'settings.rounds.steps'?"),
        (
            "settings.participation={from=0, to=1, steps=2, scale=log}",
            "must be greater than 0, not 0",
        ),
        ("settings.data.partition=[iid, dirichlt(1)]", "did you mean 'dirichlet'?"),
        ("settings.combine=zip", "unknown key 'settings.combine'"),
        ("against=frist", "did you mean 'first'?"),
        ("measure=lst", "did you mean 'last'?"),
        (
            "measure=seconds",
            "measure = 'seconds' needs a target to reach: give targets = [0.9]",
        ),
        ("last=0", "last must be at least 1, not 0"),
        ("data.validation=1", "data.validation must be in (0, 1), not 1"),
    ],
)
def test_bad_settings_are_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(FedloomError) as caught:
        configuration(overridden(override))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_impossible_setting_is_refused_before_the_first_round(tmp_path: Path) -> None:
    job = plan(tmp_path, settings={"data": {"clients": [4, 5000]}})
    with pytest.raises(InvalidValue, match=r"settings, data\.clients=5000: .*5000 clients"):
        Comparison.of(job).run(lambda event: None)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_comparison_in_several_settings_makes_each_run_once(tmp_path: Path) -> None:
    settings = {"data": {"partition": ["iid", "dirichlet(0.5)"]}}
    job = plan(tmp_path, rounds=3, seeds=[0, 1], settings=settings)
    events: list[Event] = []
    assert Comparison.of(job).run(events.append) == {}
    assert sum(event.kind == "ended" for event in events) == 8
    for setting, partition in (
        ("data.partition=iid", "iid"),
        ("data.partition=dirichlet-0.5", "dirichlet(0.5)"),
    ):
        for method, seed in itertools.product(("fedavg", "fedmr"), (0, 1)):
            directory = tmp_path / setting / method / f"seed-{seed}"
            assert (
                json.loads((directory / "configuration.json").read_text())["data"]["partition"]
                == partition
            )
            assert (directory / "result.json").exists()
        assert (tmp_path / setting / "report.html").exists()
    overview = (tmp_path / "report.html").read_text()
    links = [unquote(link) for link in re.findall(r'<a href="([^"]+/report.html)"', overview)]
    assert [tmp_path / link for link in links] == [
        tmp_path / name / "report.html"
        for name in ("data.partition=iid", "data.partition=dirichlet-0.5")
    ]
    assert all((tmp_path / link).exists() for link in links)
    drawn = re.findall(r'<div id="([^"]+)" style="height', overview)
    assert drawn[:2] == [
        "data.partition=iid-curve-accuracy",
        "data.partition=dirichlet-0.5-curve-accuracy",
    ]
    assert "ablation-data.partition" in drawn
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text() == overview
    report = json.loads((tmp_path / "comparison.json").read_text())
    for line in csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text())):
        finals = [
            run["accuracy"]
            for run in report["runs"]
            if (run["algorithm"], run["setting"])
            == (line["method"], {"data.partition": line["data.partition"]})
        ]
        assert float(line["final"]) == pytest.approx(sum(finals) / 2)
    for name in ("comparison.md", "comparison.tex", "differences.csv"):
        assert "dirichlet(0.5)" in (tmp_path / name).read_text()

    events.clear()
    wider = plan(
        tmp_path, rounds=3, seeds=[0, 1], settings={**settings, "training": {"epochs": [1, 2]}}
    )
    Comparison.of(wider).run(events.append)  # the runs above had one local epoch
    assert {event.run.setting for event in events if event.kind == "skipped"} == {
        "data.partition=iid, training.epochs=1",
        "data.partition=dirichlet(0.5), training.epochs=1",
    }
    assert sum(event.kind == "ended" for event in events) == 8


def test_a_rewritten_report_and_its_images_keep_the_measure_of_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"participation": [0.5, 1.0]}
    Comparison.of(plan(tmp_path, algorithms=["fedavg"], measure="best", settings=settings)).run(
        lambda event: None
    )
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(images, "require_images", lambda formats: None)
    monkeypatch.setattr(
        images, "save_figures", lambda folder, figures, formats: list(drawn.update(figures) or ())
    )
    assert main(["report", str(tmp_path), "--images", "png"]) == 0
    (page,) = ablations_drawn((tmp_path / "report.html").read_text())
    title = "Best accuracy of any<br>evaluation"
    assert page["layout"]["yaxis"]["title"]["text"] == title
    assert drawn["ablation-participation"].layout.yaxis.title.text == title
    assert drawn["ablation-participation"].layout.title.text
    assert main(["report", str(tmp_path), "--images", "png", "--no-captions"]) == 0
    assert not drawn["ablation-participation"].layout.title.text


def test_a_setting_reuses_the_runs_of_a_plain_comparison(tmp_path: Path) -> None:
    Comparison.of(plan(tmp_path)).run(lambda event: None)
    events: list[Event] = []
    Comparison.of(plan(tmp_path, settings={"data": {"partition": ["iid"]}})).run(events.append)
    assert [event.kind for event in events] == ["skipped", "skipped"]
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert [run["directory"] for run in report["runs"]] == [
        str(tmp_path / m / "seed-0") for m in ("fedavg", "fedmr")
    ]


def test_a_failed_run_in_one_setting_stops_no_other(tmp_path: Path) -> None:
    job = plan(
        tmp_path,
        algorithms=["fedavg"],
        rounds=5,
        settings={"training": {"learning_rate": [0.1, 1e38]}},
    )
    failed = Comparison.of(job).run(lambda event: None)
    assert [name.setting for name in failed] == ["training.learning_rate=1e+38"]
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert [run["setting"] for run in report["runs"]] == [{"training.learning_rate": 0.1}]
    assert report["failed"][0]["setting"] == {"training.learning_rate": 1e38}
    assert "diverged" in report["failed"][0]["reason"]


def test_workers_make_the_runs_of_all_settings(tmp_path: Path) -> None:
    settings, threads = {"training": {"epochs": [1, 2]}}, set(threading.enumerate())
    one_worker = plan(tmp_path / "alone", algorithms=["fedavg"], threads=1, settings=settings)
    two_workers = plan(
        tmp_path / "crew", algorithms=["fedavg"], threads=1, settings=settings, workers=2
    )
    for job in (one_worker, two_workers):
        assert Comparison.of(job).run(lambda event: None) == {}
    for path in sorted((tmp_path / "alone").rglob("metrics.jsonl")):
        path_of_two = tmp_path / "crew" / path.relative_to(tmp_path / "alone")
        assert path_of_two.read_bytes() == path.read_bytes()
    assert set(threading.enumerate()) <= threads


def test_a_key_that_is_not_set_and_one_set_to_none_are_one_configuration() -> None:
    plain = {"rounds": 3, "data": {"clients": 2}}
    assert fingerprint(plain) == fingerprint(
        {"data": {"clients": 2, "validation": None}, "rounds": 3}
    )
    assert fingerprint(plain) != fingerprint({"rounds": 3, "data": {"clients": 3}})


def test_labels_have_the_syntax_of_the_command_line() -> None:
    changes = {
        "data.partition": "dirichlet(0.1)",
        "training.clip": "none",
        "data.merge": True,
        "rounds": 3,
    }
    assert (
        label(changes)
        == "data.partition=dirichlet(0.1), training.clip=none, data.merge=true, rounds=3"
    )
    assert label({}) == ""
