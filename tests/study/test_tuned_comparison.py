"""Comparisons that tune each method first: equal to the steps by hand, resumed, and reported."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import fedloom as fl
from fedloom.cli import main
from fedloom.common.errors import InvalidValue
from fedloom.study.search import SHARE
from fedloom.task import withhold
from small_task import small_task

OPTIONS: dict[str, Any] = {
    "rounds": 3,
    "participation": 1.0,
    "evaluate_every": 1,
    "measure": "final",
    "workers": 1,
    "quiet": True,
}
RATES = [0.001, 0.1, 1.0]
SEARCH = {"training.learning_rate": RATES, "mu": [0.0, 1.0]}


def best_rate(method: str, task: fl.Task, seeds: range) -> float:
    """Return the best of the rates by plain runs on the held-out samples, without a search."""
    means = []
    for rate in RATES:
        scores = []
        for seed in seeds:
            held_out = withhold(task, SHARE, seed)
            changed = replace(held_out, training=replace(task.training, learning_rate=rate))
            run = fl.run(method, changed, seed=seed, rounds=3, participation=1.0, evaluate_every=1)
            scores.append(run.history[-1]["accuracy"])
        means.append(np.mean(scores))
    return RATES[int(np.argmax(means))]


def test_it_chooses_by_held_out_samples_and_trains_on_all(tmp_path: Path) -> None:
    task, seeds = fl.make_task("digits", clients=4, model="logistic"), range(2)
    result = fl.compare(
        ["fedavg"], task, seeds=seeds, tune={"training.learning_rate": RATES}, **OPTIONS
    )
    rate = best_rate("fedavg", task, seeds)
    assert result.method_settings()["learning_rate"].tolist() == [str(rate)]
    changed = replace(task, training=replace(task.training, learning_rate=rate))
    for seed, (_, row) in zip(seeds, result.frame().iterrows(), strict=True):
        run = fl.run("fedavg", changed, seed=seed, rounds=3, participation=1.0, evaluate_every=1)
        assert row["accuracy"] == run.accuracy, "on the test data"


def test_it_equals_the_searches_and_the_comparison_by_hand(tmp_path: Path) -> None:
    task, methods = small_task(), {"FedAvg": "fedavg", "FedProx": "fedprox"}
    options = {**OPTIONS, "seeds": [0, 1]}
    result = fl.compare(methods, task, tune=SEARCH, trials=3, directory=tmp_path / "one", **options)
    rates = {"training.learning_rate": RATES}
    tuned = {
        "FedAvg": fl.tune("fedavg", task, rates, trials=3, **options),
        "FedProx": fl.tune("fedprox", task, SEARCH, trials=3, **options),
    }
    by_hand = fl.compare(tuned, task, directory=tmp_path / "hand", **options)
    assert len(tuned["FedProx"].trials) == len(tuned["FedAvg"].trials) == 3
    assert {name: len(one.runs) for name, one in tuned.items()} == {"FedAvg": 6, "FedProx": 6}
    for run, same in zip(result.runs, by_hand.runs, strict=True):
        assert run.name == same.name
        for name in ("metrics.jsonl", "model.safetensors", "split.npz"):
            assert (run.path / name).read_bytes() == (same.path / name).read_bytes()
    assert result.differences().equals(by_hand.differences())
    chosen = tuned["FedProx"].settings
    row = result.method_settings().set_index("Method").loc["FedProx"]
    assert row["Algorithm"] == str(fl.FedProx(mu=chosen["algorithm.mu"]))
    assert row["learning_rate"] == str(chosen["training.learning_rate"])
    assert row["Validation"] == tuned["FedProx"].table()["Validation"].iloc[0]


def test_a_stopped_comparison_continues_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedloom.rounds.federation import Federation

    step, steps = Federation.step, [0]
    stops = {2, 9, 14}  # in the first search, in the second, and in the comparison

    def counted(self: Federation) -> Any:
        steps[0] += 1
        if steps[0] in stops:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Federation, "step", counted)

    def compared(folder: str) -> fl.ComparisonResult:
        search = {"training.learning_rate": [0.01, 0.1]}
        methods = {"A": "fedavg", "B": "fedmr"}
        return fl.compare(
            methods, small_task(), tune=search, directory=tmp_path / folder, **OPTIONS
        )

    for _ in stops:
        with pytest.raises(KeyboardInterrupt):
            compared("parts")
    parts = compared("parts")
    assert steps[0] == 18 + len(stops), "6 runs of 3 rounds, and the interrupted rounds"
    whole = compared("whole")
    assert parts.curves().drop(columns="seconds").equals(whole.curves().drop(columns="seconds"))
    steps_before = steps[0]
    repeated = compared("parts")
    assert steps[0] == steps_before
    assert repeated.method_settings().equals(whole.method_settings())


def test_a_method_keeps_the_settings_that_it_sets_itself() -> None:
    methods = {"fixed": fl.Entry("fedavg", learning_rate=0.05), "FedAvg": "fedavg"}
    search = {"training.learning_rate": [0.01, 0.1]}
    result = fl.compare(methods, small_task(), tune=search, **OPTIONS)
    table = result.method_settings().set_index("Method")
    assert table.loc["fixed", ["learning_rate", "Trials"]].tolist() == ["0.05", "–"]
    assert table.loc["FedAvg", "Trials"] == "2"
    assert "Not tuned: fixed." in result.notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tune": SEARCH}, "grids of different sizes (FedAvg 3, FedProx 6): give trials"),
        ({"tune": {"training.learning_rat": [1]}}, "did you mean 'training.learning_rate'?"),
        ({"tune": {"step": [1]}}, "unknown key 'step'"),
        ({"tune": {}}, "nothing to tune"),
        ({"tune": {"data.clients": [3]}}, "unknown key 'data.clients'"),
        (
            {"tune": {"participation": [0.5]}, "settings": {"participation": [0.5, 1.0]}},
            "participation cannot be tuned: the settings give it",
        ),
    ],
)
def test_a_wrong_search_is_refused_before_the_first_run(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    methods = {"FedAvg": "fedavg", "FedProx": "fedprox"}
    with pytest.raises(InvalidValue) as caught:
        fl.compare(methods, small_task(), directory=tmp_path, **{**OPTIONS, **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_command_tunes_in_each_setting_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {
        "algorithms": ["fedavg", "fedprox"],
        "rounds": 2,
        "evaluate_every": 1,
        "participation": 1.0,
        "model": "logistic",
        "workers": 1,
        "data": {"clients": 3},
        "settings": {"data": {"partition": ["iid", "dirichlet(0.1)"]}},
    }
    Path("job.toml").write_text(tomli_w.dumps(content))
    command = ["compare", "job.toml", "--quiet", "--tune", "training.learning_rate=[0.001,0.5]"]
    assert main(command) == 0
    out, progress = capsys.readouterr()
    assert progress == ""
    flat = " ".join(out.split())
    assert "tuned before the comparison with 2 trials of 1 seed for each method" in flat
    assert (
        "mean accuracy of the last evaluation on samples held out of the clients' training data"
        in flat
    )
    edge = "fedavg (data.partition=iid): training.learning_rate = 0.5 is at the edge"
    assert edge in flat
    for setting in ("data.partition=iid", "data.partition=dirichlet-0.1"):
        page = Path(f"runs/job/{setting}/report.html").read_text()
        assert "Settings of each method" in page
        choices = json.loads(Path(f"runs/job/{setting}/tuning.json").read_text())["methods"]
        assert choices["fedprox"]["values"]["training.learning_rate"] == 0.5
        assert len(list(Path(f"runs/job/{setting}").glob("fedprox/tune/*/*/seed-0"))) == 2
        assert Path(f"runs/job/{setting}/fedprox-learning_rate=0.5/seed-0/result.json").exists()
    assert "is at the edge" in Path("runs/job/comparison.md").read_text()
    stored = fl.read_comparison("runs/job")
    assert re.search(r"tuned before the comparison with 2 trials", repr(stored))
    assert stored.method_settings()["Trials"].tolist() == ["2"] * 4
    assert main([*command, "--trials", "1"]) == 0
    assert "with 1 trials" not in capsys.readouterr().out
    assert main(["compare", "job.toml", "--quiet"]) == 0
    assert "tuned" not in capsys.readouterr().out, "the choices of an earlier call are gone"
