"""Parameter search: the trials and their validation score; test data are never read."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedloom as fl
from fedloom.cli import main
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.data.dataset import Dataset, Samples, datasets, make_dataset
from fedloom.parts.building import build
from fedloom.runs.config_file import put
from fedloom.runs.events import Event
from fedloom.study.parameters import parameter_keys, with_parameters
from fedloom.study.pools import SerialPool
from fedloom.study.search import Search, Trial, best_of
from fedloom.study.suggest import search_optuna
from fedloom.study.trials import final_trial, jobs_of, run_trials
from fedloom.task import withhold


@datasets.register("small-digits")
def small_digits(*, garbled: bool = False) -> Dataset:
    """Return 300 training and 60 test digits; `garbled` permutes the test labels."""
    digits = make_dataset("digits")
    train, test = digits.train[:300], digits.test[:60]
    labels = (test.labels * 7 + 3) % 10 if garbled else test.labels
    return dataclasses.replace(
        digits, name="small-digits", train=train, test=Samples(test.inputs, labels)
    )


def table(folder: Path, **keys: object) -> dict[str, Any]:
    return {
        "name": "job",
        "directory": str(folder),
        "algorithm": "fedprox",
        "rounds": 2,
        "participation": 1.0,
        "evaluate_every": 1,
        "model": "logistic",
        "data": {"name": "small-digits", "clients": 3, "partition": "iid"},
        **keys,
    }


def searched(*texts: str) -> dict[str, Any]:
    search: dict[str, Any] = {}
    for text in texts:
        put(search, text)
    return search


RATES = "training.learning_rate=[0.001, 0.5]"


def grid(
    content: dict[str, Any], *texts: str, events: list[Event] | None = None
) -> tuple[Search, list[Trial]]:
    heard: list[Event] = [] if events is None else events
    search = Search(content, searched(*texts))
    trials = search.grid()
    run_trials(trials, SerialPool(), heard.append, lambda: False)
    return search, trials


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([0.1, 0.25, 0.5]), st.booleans())
def test_validation_data_are_training_data_of_the_clients_and_nothing_else(
    seed: int, share: float, local: bool
) -> None:
    task = fl.make_task(
        "digits",
        clients=4,
        partition="dirichlet(0.5)",
        model="logistic",
        local_test=0.25 if local else None,
    )
    validation = withhold(task, share, seed)
    withheld: list[int] = []
    for client in range(4):
        all_samples, training = (
            set(task.partition[client].tolist()),
            set(validation.partition[client].tolist()),
        )
        validation_samples = all_samples - training
        assert training < all_samples
        assert len(training) == max(1, int((1 - share) * len(all_samples) + 1e-9))
        withheld += sorted(validation_samples)
        if local:
            assert validation.local_test is not None
            assert set(validation.local_test[client].tolist()) == validation_samples
    assert (validation.local_test is None) == (not local)
    assert torch.equal(validation.test.inputs, task.train.inputs[torch.tensor(sorted(withheld))])
    repeated = withhold(task, share, seed)
    assert (repeated.partition.indices == validation.partition.indices).all()
    other_seed = withhold(task, share, seed + 1)
    assert not np.array_equal(other_seed.partition.indices, validation.partition.indices)


def test_parameters_are_set_wherever_they_stand() -> None:
    def changed(expression: str, changes: dict[str, Any]) -> str:
        return str(with_parameters(build(expression), changes))

    assert changed("ala(fedprox)", {"algorithm.mu": 0.5}) == "ala(fedprox(mu=0.5))"
    assert changed("fedmr(layer)", {"algorithm.unit": "segment", "algorithm.fraction": 0.5}) == (
        "fedmr(unit='segment', fraction=0.5)"
    )
    assert (
        changed("stages(fedprox:3, fedmr)", {"algorithm.fedprox.mu": 0.5})
        == "stages(fedprox(mu=0.5):3, fedmr)"
    )
    assert changed("fedprox", {}) == "fedprox"
    keys = parameter_keys(build("stages(fedmr:3, fedmr)"))
    assert "algorithm.unit" not in keys  # two methods of one name have it
    assert {"algorithm.mu", "algorithm.fedprox.mu"} <= set(parameter_keys(build("ala(fedprox)")))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("algorithm.mo=[1]",), "unknown key 'algorithm.mo': did you mean 'algorithm.mu'?"),
        (
            ("algorithm.mu=[0.1, -1]",),
            "algorithm.mu=-1: mu must be at least 0 and at most 3.4e+38, not -1",
        ),
        (("algorithm.mu=0.1",), "algorithm.mu must be a list such as"),
        (("algorithm.mu={from=0.1, to=1}",), "algorithm.mu lacks steps"),
        (("training.epoch=[1]",), "did you mean 'training.epochs'?"),
        (("training.epochs=[1, half]",), "training.epochs must be a whole number, not 'half'"),
        (("data.validation=[0.1]",), "unknown key 'data.validation'"),
        ((), "nothing to search"),
    ],
)
def test_a_bad_search_space_is_refused_before_the_first_run(
    tmp_path: Path, texts: tuple[str, ...], message: str
) -> None:
    with pytest.raises(FedloomError) as caught:
        Search(table(tmp_path), searched(*texts))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algorithm": "none", "algorithms": ["fedavg", "fedmr"]}, "no method to tune"),
        ({"measure": "personal"}, "data.local_test"),
        (
            {"measure": "seconds", "targets": [0.9]},
            "measure must be one of final, best, last, personal for fedloom tune",
        ),
    ],
)
def test_a_configuration_that_cannot_be_tuned_is_refused(
    tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidValue, match=re.escape(message)):
        Search(table(tmp_path, **keys), searched(RATES))


def test_a_grid_takes_every_combination_and_the_best_by_validation(tmp_path: Path) -> None:
    search, trials = grid(table(tmp_path, seeds=[0, 1], last=1), RATES, "algorithm.mu=[0, 10]")
    assert [tuple(trial.changes.values()) for trial in trials] == [
        (0.001, 0),
        (0.001, 10),
        (0.5, 0),
        (0.5, 10),
    ]
    for trial in trials:
        finals = [
            json.loads((path / "result.json").read_text())["accuracy"]
            for path in run_folders(trial)
        ]
        assert trial.score == pytest.approx(sum(finals) / 2)
        settled = json.loads((run_folders(trial)[0] / "configuration.json").read_text())
        assert settled["data"]["validation"] == 0.2
    assert best_of(trials).score == max(trial.score or 0 for trial in trials)
    assert best_of(trials).changes["training.learning_rate"] == 0.5
    sample = search.grid(2)
    assert len(sample) == 2
    assert [trial.changes for trial in sample] == [trial.changes for trial in search.grid(2)]


def run_folders(trial: Trial) -> list[Path]:
    return [job.path for job in jobs_of([trial]).values()]


@pytest.mark.parametrize("local_test", [None, 0.25])
def test_the_test_labels_do_not_matter(tmp_path: Path, local_test: float | None) -> None:
    """Scores are the same with garbled test labels."""
    scores = []
    for name in ("small-digits", "small-digits(garbled=true)"):
        data = {"name": name, "clients": 3, "partition": "iid", "local_test": local_test}
        _, trials = grid(table(tmp_path / name, data=data), RATES)
        scores.append([trial.score for trial in trials])
    assert scores[0] == scores[1]
    assert scores[0][0] != scores[0][1]


def test_an_interrupted_search_resumes_and_repeats_nothing(tmp_path: Path) -> None:
    events: list[Event] = []
    search = Search(table(tmp_path), searched(RATES))
    rounds = 0

    def stopped() -> bool:
        nonlocal rounds
        rounds += 1
        return rounds == 5  # in the middle of the second run

    with pytest.raises(KeyboardInterrupt):
        run_trials(search.grid(), SerialPool(), lambda event: None, stopped)
    _, resumed = grid(table(tmp_path), RATES, events=events)
    assert [event.kind for event in events if event.kind in ("skipped", "started")] == [
        "skipped",
        "started",
    ]
    events.clear()
    _, repeated = grid(table(tmp_path), RATES, "training.momentum=[0, 0.5]", events=events)
    # the earlier trials had no momentum
    assert sum(event.kind == "skipped" for event in events) == 2
    assert [trial.score for trial in repeated[::2]] == [trial.score for trial in resumed]


def test_a_trial_that_fails_is_not_chosen_and_stops_no_other(tmp_path: Path) -> None:
    _, trials = grid(table(tmp_path), "training.learning_rate=[1e38, 0.1]")
    assert trials[0].score is None
    assert "diverged" in trials[0].reason
    assert best_of(trials) is trials[1]
    with pytest.raises(InvalidValue, match="none of 1 trials"):
        best_of(trials[:1])


def test_the_test_data_are_scored_once_for_one_choice(tmp_path: Path) -> None:
    search, trials = grid(table(tmp_path, last=1), RATES)
    tested = final_trial(search, best_of(trials))
    run_trials([tested], SerialPool(), lambda event: None, lambda: False)
    task = fl.make_task(
        "small-digits",
        clients=3,
        partition="iid",
        model="logistic",
        training={"learning_rate": 0.5},
    )
    single_run = fl.run("fedprox", task, rounds=2, participation=1.0, evaluate_every=1)
    assert tested.score == single_run.accuracy  # on all training data, scored on the test data
    events: list[Event] = []
    repeated = final_trial(search, best_of(trials))
    run_trials([repeated], SerialPool(), events.append, lambda: False)
    assert repeated.score == tested.score
    assert [event.kind for event in events] == ["skipped"]
    with pytest.raises(InvalidValue, match=r"used once, for training\.learning_rate=0\.5"):
        final_trial(search, trials[0])


def test_optuna_suggests_the_same_trials_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    content = table(
        tmp_path, seeds=[0, 1], rounds=3, data={**table(tmp_path)["data"], "clients": 2}
    )
    texts = (
        "training.learning_rate={from=0.02, to=1, scale=log}",
        "training.epochs={from=1, to=2}",
        "algorithm.mu=[0, 1]",
    )

    def optuna_trials(events: list[Event]) -> list[Trial]:
        search = Search(content, searched(*texts), steps_needed=False)
        return search_optuna(
            search, lambda batch: run_trials(batch, SerialPool(), events.append, lambda: False), 10
        )

    events: list[Event] = []
    trials, repeated = optuna_trials([]), optuna_trials(events)
    assert {event.kind for event in events} == {"skipped"}
    assert [trial.changes for trial in trials] == [trial.changes for trial in repeated]
    assert [trial.values for trial in trials] == [trial.values for trial in repeated]
    for trial in trials:
        assert 0.02 <= trial.changes["training.learning_rate"] <= 1
        assert trial.changes["training.epochs"] in (1, 2)
        assert trial.changes["algorithm.mu"] in (0, 1)
    assert capsys.readouterr() == ("", ""), "Optuna says of itself what it does"
    assert len({trial.changes["training.learning_rate"] for trial in trials}) == 10


def test_the_command_prints_its_trials_and_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    content = {
        key: value for key, value in table(tmp_path).items() if key not in ("name", "directory")
    }
    Path("job.toml").write_text(tomli_w.dumps({**content, "workers": 1}))
    command = [
        "tune",
        "job.toml",
        "rounds=1",
        "--quiet",
        "--search",
        RATES,
        "--search",
        "algorithm.mu=[0, 1]",
    ]
    assert main(command) == 0
    out, progress = capsys.readouterr()
    assert progress == ""
    assert max(map(len, out.splitlines()[:8])) <= 80
    assert "mean accuracy of the last evaluation on validation data" in " ".join(out.split())
    with Path("runs/job/tune/trials.csv").open() as file:
        lines = list(csv.DictReader(file))
    best = max(lines, key=lambda line: float(line["validation"]))
    assert len(lines) == 4
    assert "best:   fedloom run runs/job/tune/best.toml\n" in out
    chosen = tomllib.loads(Path("runs/job/tune/best.toml").read_text())
    assert chosen["algorithm"] == best["method"]
    assert str(chosen["training"]["learning_rate"]) == best["training.learning_rate"]
    assert "test:" not in out
    assert main(["run", "runs/job/tune/best.toml", "--quiet"]) == 0
    capsys.readouterr()
    assert main([*command, "--test"]) == 0
    tested, progress = capsys.readouterr()
    assert progress == ""
    assert tested.startswith(out), "the result and nothing else"
    assert re.fullmatch(r"test:   \d+\.\d\d %, mean accuracy[^\n]*\n", tested.removeprefix(out))
    assert main(["tune", "job.toml", "--search", "algorithm.mo=[1]"]) == 2
    assert "did you mean 'algorithm.mu'?" in capsys.readouterr().err


def test_each_setting_is_searched_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {
        key: value for key, value in table(tmp_path).items() if key not in ("name", "directory")
    }
    settings = {"data": {"partition": ["iid", "dirichlet(0.1)"]}}
    Path("job.toml").write_text(tomli_w.dumps({**content, "workers": 1, "settings": settings}))
    command = [
        "tune",
        "job.toml",
        "rounds=1",
        "algorithm=fedprox",
        "--quiet",
        "--search",
        "algorithm.mu=[0.01, 1]",
    ]
    assert main(command) == 0
    out, _ = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("data.partition=")] == [
        "data.partition=iid",
        "data.partition=dirichlet(0.1)",
    ]
    for line in (line for line in out.splitlines() if line.startswith("best:")):
        best = tomllib.loads(Path(line.rpartition(" ")[2].strip("'")).read_text())
        assert best["algorithm"] in ("fedprox", "fedprox(mu=1)"), best
        assert best["data"]["partition"].replace("(0.1)", "-0.1") in line
    for folder in ("data.partition=iid", "data.partition=dirichlet-0.1"):
        assert len(Path(f"runs/job/{folder}/tune/trials.csv").read_text().splitlines()) == 3


AXES = {"mu": (0, 10), "training.learning_rate": np.array([0.001, 0.5])}


def python_search(
    folder: Path | None, method: Any = "fedprox", search: Any = AXES, **options: Any
) -> fl.TuneResult:
    task = fl.make_task("small-digits", clients=3, partition="iid", model="logistic")
    usual = {
        "rounds": 2,
        "participation": 1.0,
        "evaluate_every": 1,
        "workers": 1,
        "quiet": True,
        "directory": folder,
    }
    return fl.tune(method, task, search, **{**usual, **options})


def test_python_searches_as_the_command_does(tmp_path: Path) -> None:
    result = python_search(tmp_path / "python", test=True, last=1)
    search, trials = grid(table(tmp_path / "command", last=1), "algorithm.mu=[0, 10]", RATES)
    assert [trial.changes for trial in result.trials] == [trial.changes for trial in trials]
    assert [trial.values for trial in result.trials] == [trial.values for trial in trials]
    assert result.best.changes == best_of(trials).changes
    assert str(result.method.algorithm) == best_of(trials).algorithm
    for trial, same in zip(result.trials, trials, strict=True):
        for path, other in zip(run_folders(trial), run_folders(same), strict=True):
            assert path.relative_to(tmp_path / "python") == other.relative_to(tmp_path / "command")
            for name in ("metrics.jsonl", "split.npz"):
                assert (path / name).read_bytes() == (other / name).read_bytes()
            settings = (
                json.loads((folder / "configuration.json").read_text())["training"]
                for folder in (path, other)
            )
            assert next(settings) == next(settings)
    tested = final_trial(search, best_of(trials))
    run_trials([tested], SerialPool(), lambda event: None, lambda: False)
    assert result.tested is not None
    assert result.tested.values == tested.values
    with pytest.raises(InvalidValue, match="used once"):
        python_search(tmp_path / "python", search={**AXES, "mu": [5]}, test=True, last=1)


def test_a_search_in_python_gives_tables_frames_and_figures(tmp_path: Path) -> None:
    result = python_search(tmp_path, seeds=[0, 1], last=1)
    shown, frame, curves = result.table(), result.frame(), result.curves()
    assert list(shown.columns) == ["algorithm.mu", "training.learning_rate", "Validation"]
    assert shown.index[0] == str(result.best.number)
    assert len(frame) == 8
    for trial in result.trials:
        mu, rate = trial.changes.values()
        lines = frame[(frame["algorithm.mu"] == mu) & (frame["training.learning_rate"] == rate)]
        assert dict(zip(lines["seed"], lines["accuracy"], strict=True)) == trial.values
    assert curves["round"].tolist() == [1, 2] * 8
    assert {trace.name for trace in result.plot().data if trace.name} == set(frame["method"])
    assert len(result.differences().query("measure == 'final'")) == 3
    assert repr(result).splitlines()[1].startswith(str(result.best.number))
    assert "accuracy of the last evaluation on validation data, %" in repr(result)
    assert len(repr(result.best)) < 300
    assert f"<b>{shown['Validation'].iloc[0]}</b>" in result._repr_html_()
    assert "learning_rate=0.5" in result.report().read_text()
    with (result.folder / "trials.csv").open() as file:
        assert [line["method"] for line in csv.DictReader(file)] == [
            trial.algorithm for trial in result.trials
        ]


def test_a_search_in_python_goes_on_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedloom.rounds.federation import Federation

    step, steps = Federation.step, [0]

    def counted(self: Federation) -> Any:
        steps[0] += 1
        if steps[0] == 4:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Federation, "step", counted)
    with pytest.raises(KeyboardInterrupt):
        python_search(tmp_path / "parts")
    parts = python_search(tmp_path / "parts")
    assert steps[0] == 4 + 8 - 3  # the interrupted round, and the rounds after it
    more = python_search(tmp_path / "parts", search={**AXES, "mu": [0, 10, 20]}, seeds=[0, 1])
    assert steps[0] == 9 + 24 - 8
    whole = python_search(None)
    assert [trial.values for trial in parts.trials] == [trial.values for trial in whole.trials]
    assert [trial.values[0] for trial in more.trials[:4]] == [
        trial.values[0] for trial in whole.trials
    ]
    folder = whole.folder.parent
    assert folder.exists()
    del whole
    assert not folder.exists()


class Partly(fl.Algorithm):
    """Moves part of the way to the mean."""

    step: float = 1.0

    def update(self, round: Any, aggregate: Any) -> None:
        self.state["model"] = torch.lerp(self.state["model"], aggregate.mean["model"], self.step)


@pytest.mark.parametrize("method", [Partly(step=0.3), f"{__name__}:Partly"])
def test_own_methods_are_searched(method: Any) -> None:
    search = {
        "step": [0.0, 1.0],
        "participation": {"from": 0.5, "to": 1.0, "steps": 2},
        "training.clip": [None, 1.0],
    }
    result = python_search(
        None, method, {**search, "training.learning_rate": [0.5]}, trials=5, workers=2
    )
    assert len(result.trials) == 5
    assert result.best.changes["algorithm.step"] == 1.0
    best = result.method.algorithm
    assert isinstance(best, Partly)
    assert best.step == 1.0


def test_suggestions_that_repeat_share_their_runs(tmp_path: Path) -> None:
    search = {"mu": [0, 10], "training": {"learning_rate": {"from": 0.1, "to": 0.5, "steps": 2}}}
    result = python_search(tmp_path, search=search, optuna=True, trials=7, seeds=[0, 1])
    choices = {str(trial.changes) for trial in result.trials}
    assert len(choices) < 7 == len(result.trials)
    assert len(result.frame()) == 2 * len(choices)
    assert set(result.curves()["training.learning_rate"]) <= {0.1, 0.5}


def test_a_task_for_each_seed_and_the_clients_own_tests(tmp_path: Path) -> None:
    def task(seed: int) -> fl.Task:
        return fl.make_task("digits", clients=3, model="logistic", local_test=0.25, seed=seed)

    options: dict[str, Any] = {
        "rounds": 2,
        "participation": 1.0,
        "workers": 1,
        "quiet": True,
        "personal_every": 1,
    }
    result = fl.tune(
        "fedprox", task, {"mu": [0, 100.0]}, seeds=[3, 4], directory=tmp_path, **options
    )
    assert "accuracy of the clients' own models on validation data" in repr(result)
    for trial in result.trials:
        for seed, value in trial.values.items():
            validated = withhold(task(seed), 0.2, seed)
            run = fl.run(f"fedprox(mu={trial.changes['algorithm.mu']})", validated, seed=seed, rounds=2,
                         participation=1.0, personal_every=1, quiet=True)  # fmt: skip
            assert value == run.history[-1]["personal_accuracy"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"search": {"mo": [1]}}, "unknown key 'mo': there are algorithm.mu, "),
        ({"search": {"lr": [1]}}, "did you mean 'training.learning_rate'"),
        ({"search": {"training.bs": [1]}}, "did you mean 'training.batch_size'"),
        ({"search": {"mu": [-1]}}, "mu must be at least 0"),
        ({"search": {"mu": []}}, "algorithm.mu lists no value"),
        ({"search": {"mu": {"from": 0, "to": 1}}}, "lacks steps"),
        ({"search": {}}, "nothing to search: give keys with values"),
        (
            {"search": ["mu"]},
            r"search must be a dictionary such as \{'mu': \[0.01, 0.1\]\}, not \['mu'\]",
        ),
        ({"search": {"data.clients": [2]}}, "unknown key 'data.clients'"),
        ({"method": "fedproxx"}, "did you mean 'fedprox'"),
        ({"method": Partly}, r"expected a method, got a class: give an object"),
        ({"round": 3}, "unknown key 'round': did you mean 'rounds'"),
        ({"seeds": []}, "at least one seed"),
        ({"trials": 0}, "trials must be at least 1, not 0"),
        (
            {"measure": "seconds", "targets": [0.5]},
            "measure must be one of final, best, last, personal for fedloom tune, not 'seconds'",
        ),
        ({"measure": "personal"}, "measure = 'personal' needs test data of the clients' own"),
    ],
)
def test_mistakes_in_python_are_told_in_one_line(change: dict[str, Any], text: str) -> None:
    with pytest.raises(FedloomError, match=text) as caught:
        python_search(None, **change)
    assert "\n" not in str(caught.value)
