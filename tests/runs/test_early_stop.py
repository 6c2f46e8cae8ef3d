"""Early stopping ends a run in the round that a naive count over a longer run gives, also if the
run is resumed or lengthened.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.common.errors import CheckpointError, InvalidValue
from fedloom.runs.config_file import configuration
from fedloom.runs.configured import run_configured
from fedloom.runs.events import Event, RunName
from fedloom.runs.finished_round import FinishedRound
from small_task import other_notices, small_task

OPTIONS: dict[str, Any] = {
    "participation": 0.5,
    "evaluate_every": 2,
    "personal_every": 3,
    "seed": 3,
}


def naive_end(
    history: list[dict[str, Any]], figure: str, rises: bool, by: float, evaluations: int, every: int
) -> int:
    """Return the round in which the last of `evaluations` values in a row fails to improve, or the
    last round.
    """
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
def test_it_ends_in_the_round_of_a_naive_count(
    stop: dict[str, Any], figure: str, rises: bool, every: int
) -> None:
    unstopped = fl.run("scaffold", small_task(), rounds=30, **OPTIONS)
    end = naive_end(
        unstopped.history, figure, rises, stop.get("by", 0.0), stop["evaluations"], every
    )
    stopped = fl.run("scaffold", small_task(), rounds=30, stop=fl.Stop(**stop), **OPTIONS)
    assert 2 < end < 30
    assert len(stopped.history) == end
    assert stopped.history[:-1] == unstopped.history[: end - 1]
    assert {"accuracy", "loss", "client_accuracy", "personal_accuracy"} <= stopped.history[
        -1
    ].keys()
    short = fl.run("scaffold", small_task(), rounds=end, **OPTIONS)
    assert stopped.history == short.history
    assert stopped.federation.client_history == short.federation.client_history
    assert torch.equal(stopped.federation.model(), short.federation.model())
    (notice,) = other_notices(stopped.federation.notices)
    word = "risen" if rises else "fallen"
    assert notice.startswith(
        f"the run ends after round {end}: {figure} has not {word} by more than "
        f"{stop.get('by', 0):g}"
    )


def interrupting(last_round: int) -> Any:
    def on_round(round: FinishedRound) -> None:
        if round.number == last_round:
            raise KeyboardInterrupt

    return on_round


def test_stopped_runs_resume_from_any_round(tmp_path: Path) -> None:
    stop = fl.Stop(evaluations=2)
    uninterrupted = fl.run("scaffold", small_task(), rounds=30, stop=stop, **OPTIONS)
    for stopped_after in range(1, len(uninterrupted.history)):
        folder = tmp_path / str(stopped_after)
        with pytest.raises(KeyboardInterrupt):
            fl.run(
                "scaffold",
                small_task(),
                rounds=30,
                stop=stop,
                directory=folder,
                on_round=interrupting(stopped_after),
                **OPTIONS,
            )
        resumed = fl.run(
            "scaffold", small_task(), rounds=30, stop=stop, directory=folder, **OPTIONS
        )
        assert resumed.history == uninterrupted.history
        assert json.loads((folder / "result.json").read_text())["rounds"] == len(
            uninterrupted.history
        )
    assert (
        fl.run("scaffold", small_task(), rounds=30, stop=stop, directory=folder, **OPTIONS).history
        == uninterrupted.history
    )


def test_runs_continue_with_more_rounds_or_patience(tmp_path: Path) -> None:
    def run(rounds: int, evaluations: int | None, **options: Any) -> list[dict[str, Any]]:
        stop = fl.Stop(evaluations=evaluations, **options)
        return fl.run(
            "scaffold", small_task(), rounds=rounds, stop=stop, directory=tmp_path, **OPTIONS
        ).history

    def fresh(rounds: int, evaluations: int | None) -> list[dict[str, Any]]:
        return fl.run(
            "scaffold",
            small_task(),
            rounds=rounds,
            stop=fl.Stop(evaluations=evaluations),
            **OPTIONS,
        ).history

    stopped = run(20, 2)
    assert len(stopped) < 20
    # More rounds change nothing.
    assert [r["round"] for r in run(25, 2)] == [r["round"] for r in stopped]
    patient = run(25, 5)
    assert len(stopped) < len(patient)
    assert [r.get("training_loss") for r in patient] == [
        r.get("training_loss") for r in fresh(25, 5)
    ]
    for changed in (
        {"evaluations": 4},
        {"evaluations": 6, "by": 0.1},
        {"evaluations": 6, "metric": "loss"},
    ):
        with pytest.raises(CheckpointError, match=r"a run with stop\."):
            run(25, **changed)  # type: ignore[arg-type]
    assert len(run(25, None)) == 25


def test_the_extra_evaluation_of_the_last_round_does_not_count(tmp_path: Path) -> None:
    options = {
        **OPTIONS,
        "evaluate_every": 4,
        "directory": tmp_path,
        "stop": fl.Stop(evaluations=2),
    }
    for rounds in (5, 6, 7, 30):
        lengthened = fl.run("scaffold", small_task(), rounds=rounds, **options)
    uninterrupted = fl.run("scaffold", small_task(), rounds=30, **{**options, "directory": None})
    assert len(lengthened.history) == len(uninterrupted.history) < 30
    assert torch.equal(lengthened.federation.model(), uninterrupted.federation.model())


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (
            {"evaluations": 2, "metric": "acuracy"},
            r"stop.metric 'acuracy' is not allowed: did you mean 'accuracy'",
        ),
        ({"evaluations": 2, "metric": "new_client_f"}, "is not allowed"),
        (
            {"evaluations": 2, "metric": "constant"},
            "stop.goal: set .rise. or .fall. as the direction of constant",
        ),
        ({"evaluations": 0}, "evaluations must be at least 1, not 0"),
    ],
)
def test_bad_stops_are_refused(stop: dict[str, Any], text: str) -> None:
    def constant(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return 1.0

    task = fl.make_task("digits", clients=4, metrics=[constant])
    with pytest.raises(InvalidValue, match=text):
        fl.run("fedavg", task, rounds=3, stop=fl.Stop(**stop))


def test_stopping_needs_test_samples() -> None:
    task = dataclasses.replace(small_task(own_test=False), test=small_task().test[:0])
    with pytest.raises(InvalidValue, match="allowed: none, without test samples"):
        fl.run("fedavg", task, rounds=3, stop=fl.Stop(2))


def test_the_command_and_comparisons_stop_early(tmp_path: Path) -> None:
    keys = {"rounds": 40, "participation": 0.5, "evaluate_every": 1, "stop": {"evaluations": 2}}
    table = {
        **keys,
        "model": "mlp(hidden=[4])",
        "data": {"clients": 5},
        "directory": str(tmp_path / "command"),
    }
    checked = configuration({**table, "algorithm": "fedavg"})
    events: list[Event] = []
    summary = run_configured(checked, RunName("fedavg", 0), events.append)
    assert len(summary.records) == events[-1].finished < 40
    assert any("the run ends after round" in event.text for event in events)
    run_configured(checked, RunName("fedavg", 0), events.append)
    assert events[-1].kind == "skipped"
    task = fl.make_task("digits", clients=5, model="mlp(hidden=[4])")
    result = fl.compare(
        ["fedavg", "fedmr"],
        task,
        seeds=[0, 1],
        directory=tmp_path / "python",
        workers=1,
        quiet=True,
        **keys,
    )
    rounds = result.frame()["rounds"].tolist()
    assert rounds[0] == len(summary.records)
    assert all(number < 40 for number in rounds)
    varied = configuration(
        {**table, "algorithm": "fedavg", "settings": {"stop": {"evaluations": [1, 2]}}}
    )
    assert list(varied.settings) == ["stop.evaluations=1", "stop.evaluations=2"]
