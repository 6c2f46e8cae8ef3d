"""Methods with their own settings: each run trains with all of them, and none is dropped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fedloom as fl
from fedloom.cli import main
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.runs.config_file import configuration
from fedloom.study.comparison import Comparison
from fedloom.study.watch.live import Watched
from small_task import small_task

OPTIONS: dict[str, Any] = {"rounds": 2, "participation": 1.0, "evaluate_every": 1, "quiet": True}
COMPARED: dict[str, Any] = {**OPTIONS, "workers": 1}


def losses(result: fl.Result) -> list[float]:
    return [record["loss"] for record in result.history]


def trained_with(method: Any, task: fl.Task, **training: Any) -> list[float]:
    """Return the losses of a plain run on the task with other settings of local training."""
    changed = replace(task, training=replace(task.training, **training))
    return losses(fl.run(method, changed, **OPTIONS))


def test_a_run_trains_with_the_settings_of_an_entry() -> None:
    task = small_task()
    entry = fl.Entry("fedavg", learning_rate=0.3, momentum=0.5)
    result = fl.run(entry, task, **OPTIONS)
    assert losses(result) == trained_with("fedavg", task, learning_rate=0.3, momentum=0.5)
    assert losses(result) != trained_with("fedavg", task)
    assert task.training.learning_rate != 0.3, "the task of the caller is unchanged"
    assert result.configuration["training"]["learning_rate"] == 0.3


def test_an_entry_sets_the_schedule_and_refuses_an_option_that_contradicts() -> None:
    entry = fl.Entry("fedavg", participation=0.5)
    result = fl.run(entry, small_task(), rounds=1, quiet=True)
    assert len(result.history[0]["clients"]) == 3
    with pytest.raises(
        InvalidValue, match=r"participation = 1\.0 contradicts participation = 0\.5"
    ):
        fl.run(entry, small_task(), **OPTIONS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rat": 0.1}, "unknown key 'learning_rat': did you mean 'learning_rate'?"),
        ({"lr": 0.1}, "unknown key 'lr': did you mean 'learning_rate'?"),
        ({"learning_rate": -1}, "learning_rate must be greater than 0 and at most 3.4e+38, not -1"),
        ({"participation": 2}, "participation must be in (0, 1], not 2"),
        ({"seed": 1}, "unknown key 'seed'"),
        ({"clients": 3}, "unknown key 'clients'"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FedloomError) as caught:
        fl.Entry("fedavg", **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_comparison_trains_each_method_with_its_own_settings(tmp_path: Path) -> None:
    task = small_task()
    methods = {
        "plain": "fedavg",
        "slow": fl.Entry("fedavg", learning_rate=0.001),
        "fast": fl.Entry("fedavg", learning_rate=0.3, epochs=2),
    }
    result = fl.compare(methods, task, directory=tmp_path, **COMPARED)
    curves = result.curves().set_index(result.curves().columns[0])
    expected = {
        "plain": trained_with("fedavg", task),
        "slow": trained_with("fedavg", task, learning_rate=0.001),
        "fast": trained_with("fedavg", task, learning_rate=0.3, epochs=2),
    }
    assert {name: curves.loc[name, "loss"].tolist() for name in methods} == expected
    folders = {run.path.parent.name for run in result.runs}
    assert folders == {"plain", "slow-learning_rate=0.001", "fast-learning_rate=0.3-epochs=2"}
    for run in result.runs:
        training = json.loads((run.path / "configuration.json").read_text())["training"]
        rates = {"plain": task.training.learning_rate, "slow": 0.001, "fast": 0.3}
        assert training["learning_rate"] == rates[run.summary.algorithm]
    changed = methods | {"slow": fl.Entry("fedavg", learning_rate=0.002)}
    fl.compare(changed, task, directory=tmp_path, **COMPARED)  # other settings, another directory
    with pytest.raises(InvalidValue, match="two methods are called 'fedavg': give labels"):
        fl.compare(["fedavg", methods["slow"]], task, **COMPARED)


def test_runs_of_one_algorithm_are_separate_methods_also_before_the_end(tmp_path: Path) -> None:
    methods = {
        "slow": fl.Entry("fedavg", learning_rate=0.001),
        "fast": fl.Entry("fedavg", learning_rate=0.3),
    }
    fl.compare(methods, small_task(), directory=tmp_path, **COMPARED)
    (tmp_path / "comparison.json").unlink()  # as if the comparison went on
    names = {"slow-learning_rate=0.001", "fast-learning_rate=0.3"}
    assert {run.summary.algorithm for run in fl.read_comparison(tmp_path).runs} == names
    page = Watched(tmp_path).page(None)
    assert page is not None
    assert set(re.findall(r'<tr data-method="([^"]+)"', page)) == names


def test_several_processes_make_the_same_runs(tmp_path: Path) -> None:
    methods = {"a": fl.Entry("fedavg", learning_rate=0.3), "b": fl.Entry("fedmr", epochs=2)}
    frames = [
        fl.compare(
            methods,
            small_task(),
            directory=tmp_path / str(workers),
            **{**OPTIONS, "workers": workers},
        )
        .curves()
        .drop(columns="seconds")
        for workers in (1, 2)
    ]
    assert frames[0].equals(frames[1])


def test_the_table_methods_equals_entries_in_python(tmp_path: Path) -> None:
    entries = [
        {"algorithm": "fedavg", "label": "FedAvg", "learning_rate": 0.1, "clip": "none"},
        {"algorithm": "fedprox(mu=1)", "participation": 0.5, "epochs": 2},
    ]
    table = {
        "methods": entries,
        "rounds": 2,
        "evaluate_every": 1,
        "participation": 1.0,
        "model": "logistic",
        "data": {"clients": 4},
        "training": {"learning_rate": 0.5, "momentum": 0.5, "clip": 1.0},
        "directory": str(tmp_path / "file"),
        "workers": 1,
    }
    assert Comparison.of(configuration(table)).run(lambda event: None) == {}
    task = fl.make_task("digits", clients=4, model="logistic", training=table["training"])
    result = fl.compare(
        {
            "FedAvg": fl.Entry("fedavg", learning_rate=0.1, clip=None),
            "fedprox(mu=1)": fl.Entry("fedprox(mu=1)", participation=0.5, epochs=2),
        },
        task,
        directory=tmp_path / "python",
        **OPTIONS,
    )
    for run in result.runs:
        inside = run.path.relative_to(tmp_path / "python")
        stored = tmp_path / "file" / inside / "metrics.jsonl"
        assert stored.read_bytes() == (run.path / "metrics.jsonl").read_bytes()
    settled = json.loads((tmp_path / "file" / inside / "configuration.json").read_text())
    assert settled["training"]["momentum"] == 0.5, "other settings are those of [training]"


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([{"algorithm": "fedavg", "lr": 1}], "unknown key 'methods.lr': did you mean 'methods.learning_rate'?"),
        ([{"algorithm": "fedavg", "learning_rate": 0}], "methods, fedavg: learning_rate must be greater than 0"),
        ([{"label": "A"}], "[[methods]] number 1 needs an algorithm, such as algorithm = 'fedavg'"),
        ("fedavg", "methods must be tables [[methods]], each with an algorithm, not 'fedavg'"),
        ([{"algorithm": "fedavgg"}], "did you mean 'fedavg'?"),
        (
            [{"algorithm": "fedavg"}, {"algorithm": "fedavg", "epochs": 2}],
            "methods lists 'fedavg' twice: give each a label of its own",
        ),
        (
            [{"algorithm": "fedavg", "momentum": 0.9}],
            "methods, fedavg: rprop has no momentum",
        ),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused_in_one_line(methods: Any, message: str) -> None:
    with pytest.raises(FedloomError) as caught:
        configuration({"methods": methods, "training": {"optimizer": "rprop"}})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_methods_are_given_once_and_no_setting_varies_what_a_method_sets() -> None:
    entry = {"algorithm": "fedavg", "learning_rate": 0.1}
    with pytest.raises(InvalidValue, match=re.escape("give algorithms or [[methods]], not both")):
        configuration({"methods": [entry], "algorithms": ["fedmr"]})
    settings = {"training": {"learning_rate": [0.1, 0.2]}}
    with pytest.raises(InvalidValue, match="the method 'fedavg' sets learning_rate itself"):
        configuration({"methods": [entry], "settings": settings})


def test_the_command_runs_and_compares_methods_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    methods = [
        {"algorithm": "fedavg", "label": "slow", "learning_rate": 0.001},
        {"algorithm": "fedavg", "label": "fast one", "learning_rate": 0.5, "rounds": 3},
    ]
    content = {"rounds": 2, "model": "logistic", "data": {"clients": 4}, "methods": methods}
    Path("job.toml").write_text(tomli_w.dumps({**content, "workers": 1}))
    assert main(["compare", "job.toml", "--quiet"]) == 0
    out, _ = capsys.readouterr()
    assert "fast one" in out
    run = Path("runs/job/fast-one-learning_rate=0.5-rounds=3/seed-0/metrics.jsonl")
    assert len(run.read_text().splitlines()) == 3
    assert main(["run", "job.toml", "algorithm=fast one", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("fast one, seed 0: ")
    assert main(["check", "job.toml"]) == 0
    assert capsys.readouterr().out.count("nothing to fix") == 2


def test_settings_in_python_equal_those_of_the_command(tmp_path: Path) -> None:
    settings = {"participation": [0.5, 1.0], "training": {"epochs": [1, 2]}}
    table = {
        "algorithms": ["fedavg"],
        "rounds": 2,
        "evaluate_every": 1,
        "model": "logistic",
        "data": {"clients": 4},
        "settings": settings,
        "directory": str(tmp_path / "file"),
        "workers": 1,
    }
    Comparison.of(configuration(table)).run(lambda event: None)
    task = fl.make_task("digits", clients=4, model="logistic")
    options = {**COMPARED, "directory": tmp_path / "python"}
    del options["participation"]
    result = fl.compare(["fedavg"], task, settings=settings, **options)
    assert len(result.runs) == 4
    for run in result.runs:
        stored = tmp_path / "file" / run.path.relative_to(tmp_path / "python")
        assert (stored / "metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes()
    with pytest.raises(InvalidValue, match=r"settings\.data\.clients: the task is an object"):
        fl.compare(["fedavg"], task, settings={"data.clients": [3]}, quiet=True)


def test_a_tuned_method_keeps_all_its_settings(tmp_path: Path) -> None:
    task = small_task()
    search = {"mu": [0.0, 1.0], "training.learning_rate": [0.3], "participation": [1.0]}
    options = {**COMPARED, "directory": tmp_path / "tune"}
    del options["participation"]
    entry = fl.Entry("fedprox", momentum=0.5)
    tuned = fl.tune(entry, task, search, **options)
    mu = tuned.settings["algorithm.mu"]
    assert tuned.settings == {
        "algorithm.mu": mu,
        "training.learning_rate": 0.3,
        "participation": 1.0,
    }
    assert (tuned.training.learning_rate, tuned.training.momentum) == (0.3, 0.5)
    expected = trained_with(fl.FedProx(mu=mu), task, learning_rate=0.3, momentum=0.5)
    assert losses(tuned.run(task)) == expected, "the schedule is that of the search"
    schedule = {"rounds": 2, "evaluate_every": 1, "quiet": True}
    assert losses(fl.run(tuned, task, **schedule)) == expected
    assert losses(fl.run(tuned.method, task, **schedule)) == expected
    compared = fl.compare({"FedProx": tuned}, task, workers=1, **schedule)
    assert compared.curves()["loss"].tolist() == expected
    with pytest.raises(InvalidValue, match="contradicts"):
        tuned.run(task, participation=0.5)
    with pytest.raises(InvalidValue, match="expected a method, got a Entry"):
        fl.build(tuned.method)  # type: ignore[arg-type]
