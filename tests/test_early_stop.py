"""Early stopping: a run ends where a naive count over the figures of a longer run says, however it came there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.errors import CheckpointError, InvalidValue
from fedloom.experiment.configuration import configuration
from fedloom.experiment.events import Event, RunName
from fedloom.experiment.run import run_configured
from small_task import small_task

OPTIONS: dict[str, Any] = {"participation": 0.5, "evaluate_every": 2, "personal_every": 3, "seed": 3}


def naive_end(history: list[dict[str, Any]], figure: str, rises: bool, by: float, evaluations: int, every: int) -> int:
    """The round after which `evaluations` values in a row have not beaten the last improvement, or the last round."""
    best, since = None, 0
    for record in history:
        if record["round"] % every or figure not in record:
            continue
        value = record[figure] if rises else -record[figure]
        if best is None or value > best + by:
            best, since = value, 0
        else:
            since += 1
        if since == evaluations:
            return int(record["round"])
    return int(history[-1]["round"])


@pytest.mark.parametrize(
    ("stop", "figure", "rises", "every"),
    [
        ({"evaluations": 2}, "accuracy", True, 2),
        ({"evaluations": 3, "by": 0.02}, "accuracy", True, 2),
        ({"evaluations": 2, "metric": "loss", "by": 0.01}, "loss", False, 2),
        ({"evaluations": 2, "metric": "personal_accuracy"}, "personal_accuracy", True, 3),
        ({"evaluations": 1, "metric": "client_loss"}, "client_loss", False, 2),
    ],
)
def test_it_ends_where_a_naive_count_says(stop: dict[str, Any], figure: str, rises: bool, every: int) -> None:
    whole = fl.run("scaffold", small_task(), rounds=30, **OPTIONS)
    end = naive_end(whole.history, figure, rises, stop.get("by", 0.0), stop["evaluations"], every)
    stopped = fl.run("scaffold", small_task(), rounds=30, stop=fl.Stop(**stop), **OPTIONS)
    assert 2 < end < 30
    assert len(stopped.history) == end
    assert stopped.history[:-1] == whole.history[: end - 1]
    assert {"accuracy", "loss", "client_accuracy", "personal_accuracy"} <= stopped.history[-1].keys()
    short = fl.run("scaffold", small_task(), rounds=end, **OPTIONS)
    assert stopped.history == short.history
    assert stopped.federation.client_history == short.federation.client_history
    assert torch.equal(stopped.federation.algorithm.model(), short.federation.algorithm.model())
    (notice,) = stopped.federation.notices
    word = "risen" if rises else "fallen"
    assert notice.startswith(
        f"the run ends after round {end}: {figure} has not {word} by more than {stop.get('by', 0):g}"
    )


def interrupting(last: int) -> Any:
    def on_round(record: dict[str, Any], timing: dict[str, Any]) -> None:
        if record["round"] == last:
            raise KeyboardInterrupt

    return on_round


def test_it_is_saved_and_resumed_and_read(tmp_path: Path) -> None:
    stop = fl.Stop(evaluations=2)
    whole = fl.run("scaffold", small_task(), rounds=30, stop=stop, **OPTIONS)
    for last in range(1, len(whole.history)):
        folder = tmp_path / str(last)
        with pytest.raises(KeyboardInterrupt):
            fl.run(
                "scaffold", small_task(), rounds=30, stop=stop, directory=folder, on_round=interrupting(last), **OPTIONS
            )
        resumed = fl.run("scaffold", small_task(), rounds=30, stop=stop, directory=folder, **OPTIONS)
        assert resumed.history == whole.history
        assert json.loads((folder / "result.json").read_text())["rounds"] == len(whole.history)
    assert fl.run("scaffold", small_task(), rounds=30, stop=stop, directory=folder, **OPTIONS).history == whole.history


def test_longer_and_more_patient_runs_go_on(tmp_path: Path) -> None:
    def run(rounds: int, evaluations: int | None, **more: Any) -> list[dict[str, Any]]:
        stop = fl.Stop(evaluations=evaluations, **more)
        return fl.run("scaffold", small_task(), rounds=rounds, stop=stop, directory=tmp_path, **OPTIONS).history

    def fresh(rounds: int, evaluations: int | None) -> list[dict[str, Any]]:
        return fl.run("scaffold", small_task(), rounds=rounds, stop=fl.Stop(evaluations=evaluations), **OPTIONS).history

    first = run(20, 2)
    assert len(first) < 20
    assert [r["round"] for r in run(25, 2)] == [r["round"] for r in first]  # more rounds change nothing
    patient = run(25, 5)
    assert len(first) < len(patient)
    assert [r.get("training_loss") for r in patient] == [r.get("training_loss") for r in fresh(25, 5)]
    for more in ({"evaluations": 4}, {"evaluations": 6, "by": 0.1}, {"evaluations": 6, "metric": "loss"}):
        with pytest.raises(CheckpointError, match=r"a run with stop\."):
            run(25, **more)  # type: ignore[arg-type]
    assert len(run(25, None)) == 25


def test_an_evaluation_at_the_end_alone_does_not_count(tmp_path: Path) -> None:
    options = {**OPTIONS, "evaluate_every": 4, "directory": tmp_path, "stop": fl.Stop(evaluations=2)}
    for rounds in (5, 6, 7, 30):
        parts = fl.run("scaffold", small_task(), rounds=rounds, **options)
    whole = fl.run("scaffold", small_task(), rounds=30, **{**options, "directory": None})
    assert len(parts.history) == len(whole.history) < 30
    assert torch.equal(parts.federation.algorithm.model(), whole.federation.algorithm.model())


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ({"evaluations": 2, "metric": "acuracy"}, r"stop.metric 'acuracy' is not allowed: did you mean 'accuracy'"),
        ({"evaluations": 2, "metric": "new_client_f"}, "is not allowed"),
        ({"evaluations": 2, "metric": "same"}, "stop.goal: say whether same should rise or fall"),
        ({"evaluations": 0}, "evaluations must be at least 1, not 0"),
    ],
)
def test_mistakes_are_told(stop: dict[str, Any], text: str) -> None:
    def same(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return 1.0

    task = fl.make_task("digits", clients=4, metrics=[same])
    with pytest.raises(InvalidValue, match=text):
        fl.run("fedavg", task, rounds=3, stop=fl.Stop(**stop))


def test_without_test_samples_nothing_can_stop_it() -> None:
    task = dataclasses.replace(small_task(own_test=False), test=small_task().test[:0])
    with pytest.raises(InvalidValue, match="allowed: none, without test samples"):
        fl.run("fedavg", task, rounds=3, stop=fl.Stop(2))


def test_the_command_and_comparisons(tmp_path: Path) -> None:
    keys = {"rounds": 40, "participation": 0.5, "evaluate_every": 1, "stop": {"evaluations": 2}}
    table = {**keys, "model": "mlp(hidden=[4])", "data": {"clients": 5}, "directory": str(tmp_path / "command")}
    checked = configuration({**table, "algorithm": "fedavg"})
    events: list[Event] = []
    summary = run_configured(checked, RunName("fedavg", 0), events.append)
    assert len(summary.records) == events[-1].finished < 40
    assert any("the run ends after round" in event.text for event in events)
    run_configured(checked, RunName("fedavg", 0), events.append)
    assert events[-1].kind == "skipped"
    task = fl.make_task("digits", clients=5, model="mlp(hidden=[4])")
    result = fl.compare(
        ["fedavg", "fedmr"], task, seeds=[0, 1], directory=tmp_path / "python", workers=1, quiet=True, **keys
    )
    rounds = result.frame()["rounds"].tolist()
    assert rounds[0] == len(summary.records)
    assert all(number < 40 for number in rounds)
    varied = configuration({**table, "algorithm": "fedavg", "settings": {"stop": {"evaluations": [1, 2]}}})
    assert list(varied.settings) == ["stop.evaluations=1", "stop.evaluations=2"]
