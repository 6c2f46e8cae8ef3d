"""The default engine: its choice, its repeatability, and the engine of a resumed run."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import fedloom as fl
from fedloom.common.errors import CheckpointError, InvalidValue
from fedloom.data.partition import Partition
from fedloom.engines.base import Choice, LocalEngine
from fedloom.engines.choose import make_engine
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.processes.worker import VARIABLE
from fedloom.engines.rows import RowsEngine
from fedloom.engines.rule import START_SECONDS, choice, round_seconds
from fedloom.engines.stacked import StackedEngine
from fedloom.engines.work import mean_steps, multiply_adds
from fedloom.objectives.custom import build_objective
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.runs.config_file import configuration
from fedloom.runs.configuration import Configuration
from fedloom.runs.configured import run_configured, run_directory
from fedloom.runs.events import Event, RunName
from fedloom.runs.progress import Lines
from fedloom.study.comparison import Comparison
from fedloom.task import Task
from fedloom.task.making import make_task

SHORT, LONG = Schedule(rounds=2, participation=0.5), Schedule(rounds=10_000, participation=0.5)


def task(model: str = "mlp(hidden=[16])", clients: int = 6, **training: Any) -> Task:
    return make_task(
        "digits", clients=clients, partition="dirichlet(0.5)", model=model, training=training
    )


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has two threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("model", "method", "schedule", "training", "expected"),
    [
        ("mlp(hidden=[16])", "fedavg", LONG, {}, "stacked"),
        ("mlp(hidden=[16])", "fedmr", SHORT, {"momentum": 0.9, "weight_decay": 0.01}, "stacked"),
        ("logistic", "stages(fedavg:1, fedmr)", SHORT, {}, "stacked"),
        ("mlp(hidden=[16])", "fedavg", LONG, {"optimizer": "adam"}, "stacked"),
        ("mlp(hidden=[16])", "umf(feddc)", LONG, {"clip": 1.0}, "stacked"),
        ("mlp(hidden=[16])", "fedavg", LONG, {"autocast": "bfloat16"}, "processes(workers=2)"),
        ("mlp(hidden=[16])", "dp_sgd(fedavg, clip=1, noise=1)", LONG, {}, "processes(workers=2)"),
        ("mlp(hidden=[16])", "dp_sgd(fedavg, clip=1, noise=1)", SHORT, {}, "rows"),
        (
            "mlp(hidden=[400, 400])",
            "fedavg",
            LONG,
            {"epochs": 10},
            "processes(workers=2, inside=stacked)",
        ),
        ("mlp(hidden=[400, 400])", "fedavg", SHORT, {"epochs": 10}, "stacked"),
        (
            "mlp(hidden=[400, 400])",
            "dp_sgd(fedavg, clip=1, noise=1)",
            LONG,
            {"epochs": 10},
            "processes(workers=2)",
        ),
        ("digits_cnn", "fedavg", LONG, {}, "processes(workers=2)"),
        ("digits_cnn", "fedprox", LONG, {"optimizer": "adam"}, "processes(workers=2)"),
        ("digits_cnn", "fedavg", None, {}, "processes(workers=2)"),
        ("digits_cnn", "fedavg", SHORT, {}, "rows"),
    ],
)
def test_the_choice_depends_on_model_method_settings_and_work(
    model: str, method: str, schedule: Schedule | None, training: dict[str, Any], expected: str
) -> None:
    choices = [choice(task(model, **training), schedule, False, build(method))[0] for _ in range(2)]
    assert choices[0].name == expected
    assert choices[0].reason
    assert choices[0] == choices[1]


def test_small_low_rank_adapters_of_frozen_layers_train_in_stacks() -> None:
    class LowRank(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.base = nn.Linear(64, width).requires_grad_(False)
            self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, width, bias=False)
            self.head = nn.Linear(width, 10)

        def forward(self, inputs: Tensor) -> Tensor:
            flat = inputs.flatten(1)
            out: Tensor = self.head(torch.relu(self.base(flat) + self.up(self.down(flat))))
            return out

    for width, method, expected in (
        (32, "fedavg", "stacked"),
        (2000, "fedavg", "rows"),
        (32, "dp_sgd(fedavg, clip=1, noise=1)", "rows"),
    ):
        assert (
            choice(replace(task(), model=LowRank(width)), LONG, False, build(method))[0].name
            == expected
        )


@pytest.mark.usefixtures("cores")
def test_no_processes_start_in_workers_or_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    small = task("digits_cnn")

    def name(in_process: bool = False) -> str:
        return choice(small, LONG, in_process, build("fedavg"))[0].name

    assert name() == "processes(workers=2)"
    assert name(in_process=True) == "rows"
    with monkeypatch.context() as inside:
        inside.setattr(torch, "get_num_threads", lambda: 1)
        assert name() == "rows"
    with monkeypatch.context() as inside:
        inside.setenv(VARIABLE, "1")
        assert name() == "rows"
    with monkeypatch.context() as inside:
        inside.setattr(
            "multiprocessing.parent_process", lambda: "a program that spreads its work by itself"
        )
        assert name() == "rows"


def test_models_that_cannot_be_stacked_train_row_by_row() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)
            self.layer.register_forward_hook(lambda layer, inputs, output: 2 * output)

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.layer(inputs.flatten(1))
            return out

    assert choice(replace(task(), model=Shared()), LONG, False, None)[0].name == "rows"
    smoothed = replace(
        task().dataset, objective=build_objective("classification(label_smoothing=0.1)")
    )
    assert choice(replace(task(), dataset=smoothed), LONG, False, None)[0].name == "rows"
    single_client = replace(
        task(),
        partition=Partition.from_sizes(task().partition.indices, [len(task().partition.indices)]),
    )
    assert choice(single_client, LONG, False, None)[0].name == "rows"


@pytest.mark.usefixtures("cores")
def test_work_is_counted_in_multiply_adds() -> None:
    sample = torch.zeros(1, 1, 8, 8)
    assert (
        multiply_adds(
            nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), sample
        )
        == 2368
    )
    assert multiply_adds(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), sample) == 36 * 4 * 9
    small = task("digits_cnn", batch_size=10, epochs=2)
    random_state = torch.random.get_rng_state()
    once = round_seconds(small, SHORT)
    assert torch.equal(random_state, torch.random.get_rng_state())
    sizes = small.partition.sizes
    for changes, expected_steps in (
        ({"steps": 5}, 5),
        ({"batch_size": None}, 2),
        ({}, (2 * -(-sizes // 10)).mean()),
    ):
        assert mean_steps(
            replace(small, training=replace(small.training, **changes))
        ) == pytest.approx(expected_steps)
    step = 1e-3 + 3 * 10 * multiply_adds(small.model, sample) / 2e10
    steps = sum(2 * -(-int(size) // 10) for size in small.partition.sizes) / 6
    assert once == pytest.approx(3 * steps * step)
    rounds = int(2 * START_SECONDS / once)
    for extra, expected in ((0, "rows"), (1, "processes(workers=2)")):
        assert choice(small, replace(SHORT, rounds=rounds + extra), False, None)[0].name == expected


@pytest.mark.parametrize(
    ("method", "engine"), [("fedprox", "stacked"), ("dp_sgd(fedavg, clip=1, noise=1)", "rows")]
)
def test_a_default_run_has_the_numbers_of_the_chosen_engine(method: str, engine: str) -> None:
    small = task()
    by_default, named = (
        fl.run(method, small, rounds=3, participation=0.5, engine=name)
        for name in ("default", engine)
    )
    assert fl.run(method, small, rounds=3, participation=0.5).history == by_default.history
    assert by_default.history == named.history
    assert torch.equal(by_default.federation.model(), named.federation.model())
    assert by_default.engine is not None
    assert by_default.engine.name == engine
    assert named.engine.named
    assert str(named.engine) == engine
    assert by_default.configuration["engine"] == "default"


@pytest.mark.usefixtures("cores")
def test_processes_give_a_run_the_numbers_of_rows(caplog: pytest.LogCaptureFixture) -> None:
    small = task("digits_cnn", clients=2, steps=1)
    with caplog.at_level(logging.INFO, "fedloom"):
        engine = make_engine("default(memory_budget=1000)", small, LONG, algorithm=build("fedavg"))
    assert isinstance(engine, ProcessesEngine)
    assert engine.workers == 1  # a round trains one of two clients
    assert engine.store.budget == 1000
    schedule = Schedule(2, 1.0)
    runs = [
        Federation(build("fedavg"), small, local_engine, schedule)
        for local_engine in (engine, RowsEngine(small))
    ]
    for run in runs:
        run.run()
    engine.close()
    assert torch.equal(runs[0].model(), runs[1].model())


def test_a_resumed_run_keeps_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = task()
    uninterrupted = fl.run("fedmr", small, rounds=4, participation=0.5, engine="stacked")
    fl.run("fedmr", small, rounds=2, participation=0.5, directory=tmp_path)
    saved = json.loads((tmp_path / "engine.json").read_text())
    assert saved["name"] == "stacked"
    assert saved["reason"]
    monkeypatch.setattr(
        "fedloom.engines.choose.choice", lambda *_: (Choice("rows", reason="another rule"), None)
    )
    result = fl.run("fedmr", small, rounds=4, participation=0.5, directory=tmp_path)
    assert isinstance(result.federation.engine, StackedEngine)
    assert torch.equal(result.federation.model(), uninterrupted.federation.model())
    assert json.loads((tmp_path / "engine.json").read_text()) == saved
    assert result.summary.environment["engine"] == f"stacked ({saved['reason']})"
    with pytest.raises(CheckpointError, match="engine = 'default', not 'rows'"):
        fl.run("fedmr", small, rounds=5, participation=0.5, directory=tmp_path, engine="rows")


def test_a_run_with_a_named_engine_resumes_in_it_by_default(tmp_path: Path) -> None:
    small = task()
    uninterrupted = fl.run("fedmr", small, rounds=4, participation=0.5, engine="rows")
    fl.run("fedmr", small, rounds=2, participation=0.5, directory=tmp_path, engine="rows")
    result = fl.run("fedmr", small, rounds=4, participation=0.5, directory=tmp_path)
    assert type(result.federation.engine) is RowsEngine
    assert result.configuration["engine"] == "rows"
    assert json.loads((tmp_path / "configuration.json").read_text())["engine"] == "rows"
    assert not (tmp_path / "engine.json").exists()
    assert torch.equal(result.federation.model(), uninterrupted.federation.model())


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("name", "model", "kind"),
    [
        ("processes(workers=2)", "digits_cnn", RowsEngine),
        ("processes(workers=2, inside=stacked)", "mlp(hidden=[16])", StackedEngine),
    ],
)
def test_a_run_in_worker_processes_resumes_without_them_if_none_may_start(
    name: str, model: str, kind: type[RowsEngine]
) -> None:
    begun = Choice(name, reason="it was worth it")
    engine: LocalEngine = make_engine("default", task(model), LONG, in_process=True, begun=begun)
    assert type(engine) is kind
    assert engine.chosen == begun
    assert any("starts no processes here" in notice for notice in engine.notices)


def test_a_finished_run_is_read_without_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = task()
    result = fl.run("fedmr", small, rounds=2, participation=0.5, directory=tmp_path)

    def started(*_: object, **__: object) -> LocalEngine:
        raise AssertionError("an engine is made for nothing")

    monkeypatch.setattr("fedloom.runs.run_plan.make_engine", started)
    repeated = fl.run("fedmr", small, rounds=2, participation=0.5, directory=tmp_path)
    assert repeated.history == result.history
    assert repeated.engine == result.engine
    assert torch.equal(repeated.federation.model(), result.federation.model())


def plan(folder: Path, **keys: Any) -> Configuration:
    table = {"directory": str(folder), "rounds": 1, "participation": 0.5, "data": {"clients": 6}}
    return configuration(
        {**table, "model": "mlp(hidden=[16])", "algorithms": ["fedavg", "fedmr"], **keys}
    )


def test_the_choice_is_printed_first_and_stands_in_the_report(tmp_path: Path) -> None:
    job, text = plan(tmp_path), StringIO()
    display = Lines(Console(file=text, width=200), 2, 1)
    assert Comparison.of(job).run(display) == {}
    reason = "stacked (linear layers train fastest in stacks)"
    lines = text.getvalue().splitlines()
    assert lines[0] == f"engine: {reason}"
    assert text.getvalue().count("engine:") == 1
    assert reason in (tmp_path / "report.html").read_text()
    name = RunName("fedmr", 0)
    assert job.resolved(*name[:2])["engine"] == "default"
    assert run_directory(job, *name).engine == Choice(
        "stacked", reason="linear layers train fastest in stacks"
    )
    events: list[Event] = []
    run_configured(job, name, events.append, fresh=True)
    assert [event.text for event in events if event.kind == "started"] == [reason]


@pytest.mark.parametrize("workers", [1, 2])
def test_runs_of_a_comparison_start_no_processes_of_their_own(tmp_path: Path, workers: int) -> None:
    """Concurrent runs share the cores, start no processes and give equal numbers."""
    job = plan(tmp_path, model="digits_cnn", workers=workers, threads=2, training={"steps": 1})
    assert Comparison.of(job).run(lambda event: None) == {}
    engines = [run_directory(job, method, 0).engine for method in ("fedavg", "fedmr")]
    assert engines == 2 * [Choice("rows", reason="no worker processes are started here")]


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("parametrize", [weight_norm, spectral_norm, orthogonal])
def test_models_that_cannot_be_sent_train_in_rows(parametrize: Any) -> None:
    layers = nn.Flatten(), parametrize(nn.Linear(64, 16)), nn.Tanh(), nn.Linear(16, 10)
    given = make_task("digits", clients=4, model=nn.Sequential(*layers))
    assert choice(given, LONG, False, None)[0].name.startswith("processes")
    engine = make_engine("default", given, LONG)
    assert type(engine) is RowsEngine
    assert engine.chosen == Choice("rows", reason="this task cannot be sent to worker processes")
    with pytest.raises(InvalidValue, match="cannot send this to its workers"):
        make_engine("processes", given)
