"""Each claim that holds for all engines, as one function.

The rows engine is the reference. Results of the others are equal to its results: bit by bit if
clients train one after another, and to float tolerance in stacks. `algorithms/` and `seams/` check
the rows engine against definitions. `sites/test_same_numbers.py` does the same for real sites.

Workers start once for all tests. A claim runs with some engines only in `make chaos`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_support import (
    CLIENTS,
    NAMES,
    TASK,
    assert_close,
    assert_same,
    in_precision,
    jobs,
    named_task,
    set_up,
)
from engine_support import run as run_on
from every_method import EVERYBODY
from fedloom.algorithm.method import Method
from fedloom.algorithm.records import Message, Plan, uniform
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import Diverged, InvalidValue
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.data.partition import Partition
from fedloom.engines.base import LocalEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Answer, Fault, FoldedBlock
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.state.pool_files import PoolFiles
from fedloom.task import Task
from fedloom.task.making import make_task
from objective_support import KINDS, make
from process_support import (
    BadlyPersonal,
    Deadly,
    Dividing,
    Failing,
    Misconfigured,
    OneByOne,
    Peeking,
    Reporting,
    described,
)
from ray_support import Echoing
from small_task import KeepsClientMemory, other_notices
from stacked_support import METHODS

STACK_TOLERANCE = 1e-8
"""Largest difference of stacks in double precision."""

LOCK_STEP = "clients that fail in lock step train one by one: "


@dataclass(frozen=True)
class Subject:
    """An engine under test.

    Attributes:
        engine: The engine, for any task.
        task: Its task: six unequal clients, with batch norm and dropout.
        stacks: True if clients train in lock step.
        worker: Name of a worker in messages; empty if clients train in this process.
    """

    engine: Any
    task: Task
    stacks: bool = False
    worker: str = ""

    def run(self, algorithm: Method, task: Task | None = None, **settings: Any) -> Federation:
        """Return a finished run on this engine."""
        task = task or self.task
        engine = self.engine
        if task is not self.task and not self.worker:  # it is built for one model
            engine = type(engine)(task)
        return run_on(algorithm, engine, task=task, **settings)

    def assert_as_in_rows(self, make: Callable[[], Method], **settings: Any) -> Federation:
        """Assert that a run is equal to the same run in rows, and return it."""
        federation = self.run(make(), **settings)
        self.assert_same(federation, on_rows(make(), **settings))
        return federation

    def assert_same(self, federation: Federation, expected: Federation) -> None:
        wide = federation.model().dtype == torch.float64
        tolerance = (STACK_TOLERANCE if wide else 1e-5) if self.stacks else 0.0
        assert_same(federation, expected, tolerance)


def on_rows(algorithm: Method, task: Task | None = None, **settings: Any) -> Federation:
    """Return a finished run on a new rows engine."""
    task = task or DOUBLE
    return run_on(algorithm, RowsEngine(task), task=task, **settings)


DOUBLE = in_precision(TASK, torch.float64)
"""In double precision, stacks differ from rows in the last digits only."""
IN_STACKS = replace(DOUBLE)
"""The same task. Workers receive a task with the settings of the engine, once."""

GROUPS = {"processes": "processes", "stacked processes": "processes", "ray": "waiting"}
"""Engines whose workers take seconds to start, so that all their tests run in one process."""

IN_PROCESS = ("rows", "stacked")
WORKERS = ("processes", "stacked processes", "ray")
COMPARED = ("stacked", *WORKERS)
EVERY_ENGINE = ("rows", *COMPARED)


def engines(*names: str, rare: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Run a test with these engines, and with the `rare` ones only in `make chaos`."""
    return pytest.mark.parametrize(
        "subject", [pytest.param(name, marks=marks(name, name in rare)) for name in names],
        indirect=True,
    )  # fmt: skip


def marks(engine: str, rare: bool = False) -> list[pytest.MarkDecorator]:
    group = [pytest.mark.xdist_group(GROUPS[engine])] if engine in GROUPS else []
    return [*group, pytest.mark.minutes] if rare else group


@pytest.fixture
def subject(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """Return an engine without client memory."""
    chosen = _subject(request.param, request)
    if request.param == "stacked processes":
        monkeypatch.setattr(chosen.engine, "inside", "stacked")
        monkeypatch.setattr(chosen.engine, "wanted_chunk", 3)
    chosen.engine.begin(chosen.task, None)
    return chosen


def _subject(name: str, request: pytest.FixtureRequest) -> Subject:
    if name in IN_PROCESS:
        return _in_process(name)
    if name == "ray":
        return Subject(request.getfixturevalue("ray_actors"), DOUBLE, worker="Ray actor")
    workers = request.getfixturevalue("worker_processes")
    stacks = name == "stacked processes"
    return Subject(workers, IN_STACKS if stacks else DOUBLE, stacks, "worker process")


@cache
def _in_process(name: str) -> Subject:
    stacks = name == "stacked"
    engine = StackedEngine(DOUBLE, chunk=4) if stacks else RowsEngine(DOUBLE)
    return Subject(engine, DOUBLE, stacks)


# --- equal numbers ---

PREFIXES = ("ala(", "fedavg", "fedmr", "fedrep", "moon", "quantised", "scaffold", "stages", "umf")
QUICK = {
    "stacked processes": METHODS,
    "stacked": [name for name in METHODS if name.startswith(PREFIXES)],
    "processes": [name for name in METHODS if name.startswith(PREFIXES)],
    "ray": ["fedmr", "umf(feddc)", "scaffold"],
}
"""Methods in `make test`. Worker processes with stacks run them all: their clients train in lock
step, and in copies of the method without the server's state. The other engines run one of each kind,
and in `make chaos` all.
"""


def cases() -> list[Any]:
    return [
        pytest.param(engine, method, marks=marks(engine, method not in QUICK[engine]))
        for engine in COMPARED
        for method in METHODS
    ]


@cache
def rounds_in_rows(method: str) -> Federation:
    return on_rows(build(method), **settings_of(method))


def settings_of(method: str) -> dict[str, Any]:
    share = 1.0 if method.startswith(EVERYBODY) else 0.84  # five of six clients
    return {"participation": share, "dropout": 0.2, "personal_every": 2}


@pytest.mark.parametrize(("subject", "method"), cases(), indirect=["subject"])
def test_every_method_gives_the_numbers_of_rows(subject: Subject, method: str) -> None:
    federation = subject.run(build(method), **settings_of(method))
    subject.assert_same(federation, rounds_in_rows(method))
    assert federation.client_history
    assert federation.engine.notices == []


@engines(*COMPARED)
def test_new_clients_and_lost_replies_are_those_of_rows(subject: Subject) -> None:
    settings = {"personal_every": 1, "new_clients": 0.34, "dropout": 0.2}
    federation = subject.assert_as_in_rows(KeepsClientMemory, **settings)
    assert "new_client_accuracy" in federation.history[-1]
    assert any(record["faults"] for record in federation.history)


@engines(*EVERY_ENGINE)
def test_a_run_goes_on_from_its_checkpoint(subject: Subject, tmp_path: Path) -> None:
    schedule = Schedule(rounds=4, participation=1.0, seed=3, evaluate_every=1)
    halted = Federation(KeepsClientMemory(), subject.task, subject.engine, schedule, tmp_path)
    halted.step()
    halted.step()
    halted.save()
    resumed = Federation(KeepsClientMemory(), subject.task, subject.engine, schedule, tmp_path)
    assert resumed.finished == 2
    resumed.run()
    subject.assert_same(resumed, on_rows(KeepsClientMemory(), rounds=4))


@engines(*EVERY_ENGINE)
def test_client_memory_in_files_changes_no_number(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject.engine.store, "budget", 0)
    federation, expected = subject.run(KeepsClientMemory()), on_rows(KeepsClientMemory())
    assert {*federation.engine.memory()} == {"versions"}  # of files
    tolerance = STACK_TOLERANCE if subject.stacks else 0.0
    assert_close(federation.server_state(), expected.server_state(), tolerance)
    for client in range(CLIENTS):
        memory = federation.engine.store.read(client)
        assert_close(memory, expected.engine.store.read(client), tolerance)


@engines(*COMPARED)
def test_tasks_in_single_precision_give_the_numbers_of_rows(subject: Subject) -> None:
    federation = subject.assert_as_in_rows(KeepsClientMemory, task=TASK)
    assert federation.engine.store.read(0)["rounds"].dtype == torch.int64


@pytest.mark.parametrize("kind", KINDS)
@engines("stacked processes", "ray")
def test_every_objective_gives_the_numbers_of_rows(subject: Subject, kind: str) -> None:
    metrics = ["objective_support:median_error"] if kind == "huber" else []
    task = in_precision(make(kind, local_test=0.25, metrics=metrics), torch.float64)
    federation = subject.assert_as_in_rows(KeepsClientMemory, task=task, rounds=2, personal_every=1)
    measure = task.objective.metric.name
    expected = {measure, f"client_{measure}", f"personal_{measure}_worst"}
    assert expected <= federation.history[-1].keys()
    assert federation.notices == []


@engines(*COMPARED)
def test_a_frozen_layer_trains_as_in_rows(subject: Subject) -> None:
    frozen = in_precision(TASK, torch.float64)
    frozen.model.hidden.requires_grad_(False)
    subject.assert_as_in_rows(lambda: build("fedmr"), task=frozen)


NOISY = [
    ("quantised(private(fedavg, noise=0.5), bits=8)", "poisson"),
    ("lowrank(local_private(fedmr, noise=0.5), rank=1)", "fixed"),
    ("sparse(dp_sgd(fedbuff(fedprox, k=2), noise=0.5), share=0.2)", "fixed"),
]
"""Privacy, codes and asynchronous steps. They require a model without batch norm."""


@cache
def digits() -> Task:
    training = Training(learning_rate=0.1, batch_size=20)
    return make_task("digits", clients=6, model="mlp(hidden=[4])", training=training)


@pytest.mark.parametrize(("method", "mode"), NOISY)
@engines("processes", "ray")
def test_clients_draw_the_same_noise_in_other_processes(
    subject: Subject, method: str, mode: str
) -> None:
    federation = subject.assert_as_in_rows(
        lambda: build(method), task=digits(), rounds=2, participation=0.5, participation_mode=mode
    )
    assert not any(record["faults"] for record in federation.history)


@cache
def many_clients() -> Task:
    """Return the task with two samples for each client."""
    samples = len(TASK.train)
    indices = torch.arange(samples).numpy()
    return replace(
        DOUBLE, partition=Partition.from_sizes(indices, [2] * (samples // 2)), local_test=None
    )


@pytest.mark.parametrize(
    ("method", "share"), [("fedavg", 1.0), ("fedexp", 1.0), ("umf(scaffold)", 0.5)]
)
@engines("processes", "ray")
def test_blocks_are_folded_where_their_clients_train_to_the_same_bits(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, method: str, share: float
) -> None:
    monkeypatch.setattr("fedloom.algorithm.records.MOST_SLOTS", 2)
    results: list[Answer | Fault | FoldedBlock] = []
    train = subject.engine.train

    def noted(*arguments: Any, **options: Any) -> Any:
        for result in train(*arguments, **options):
            results.append(result)
            yield result

    monkeypatch.setattr(subject.engine, "train", noted)
    settings = {"task": many_clients(), "rounds": 2, "participation": share}
    subject.assert_as_in_rows(lambda: build(method), **settings)
    participants = round(share * many_clients().clients)
    assert sum(isinstance(result, FoldedBlock) for result in results) == 2 * -(-participants // 2)
    assert not any(
        result.tensors
        for result in results
        if isinstance(result, Answer) and result.job.slot is not None
    )


@engines(*COMPARED)
def test_a_method_may_be_defined_inside_a_function(subject: Subject) -> None:
    factor = 0.5

    class Inside(FedAvg):
        def train(self, cohort: Cohort, inbox: Message) -> Message:
            return {"model": super().train(cohort, inbox)["model"] * factor}

    subject.assert_as_in_rows(Inside)


@engines(*COMPARED)
def test_a_method_that_cannot_be_stacked_trains_one_client_at_a_time(subject: Subject) -> None:
    federation = subject.assert_as_in_rows(OneByOne)
    notice = ["onebyone: OneByOne trains one client at a time"] if subject.stacks else []
    assert federation.engine.notices == notice
    notices = [other_notices(timing.get("notices", ())) for timing in federation.timings]
    assert notices == [notice, [], []]


@pytest.mark.parametrize("method", ["fedavg", "moon", "fedrep", "fedgen"])
@engines(*IN_PROCESS)
def test_training_leaves_the_tasks_model_and_torchs_generator_as_they_were(
    subject: Subject, method: str
) -> None:
    """The engine uses the tensors of the task's model until it binds its own modules to rows."""
    model = subject.task.model
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    federation = subject.run(build(method), rounds=2, participation=0.7)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not torch.equal(federation.model(), subject.task.initial)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, original[name]), name
    assert all(parameter.requires_grad for parameter in model.parameters())


# --- plan, round and replies ---


PLAN = Plan(
    layout=DOUBLE.layout,
    initial=DOUBLE.initial,
    clients=CLIENTS,
    participants=5,
    rounds=9,
    seed=11,
    classes=DOUBLE.dataset.classes,
    sizes=DOUBLE.sizes,
    module=DOUBLE.model,
    remote=True,
    poisson=True,
    pools=PoolFiles(budget=1 << 20),
    training=DOUBLE.training,
    awaited=4,
    first_round=2,
)

ROUND = Round(
    number=3,
    rounds=9,
    seed=11,
    clients=CLIENTS,
    participants=5,
    learning_rate=0.2,
    initial_learning_rate=0.4,
    rate_change=0.5,
    selected=tuple(range(CLIENTS)),
    poisson=True,
    closes=7.5,
)


@pytest.mark.parametrize(("values", "kind"), [(PLAN, Plan), (ROUND, Round)])
def test_no_field_has_the_value_that_a_receiver_would_fill_in(values: Any, kind: Any) -> None:
    for field in fields(kind):
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if default is not MISSING:
            value = described(values)[field.name]
            assert value != described(replace(values, **{field.name: default}))[field.name], (
                field.name
            )


@engines(*EVERY_ENGINE)
def test_clients_see_every_field_of_the_plan_and_of_the_round(subject: Subject) -> None:
    method = Reporting()
    method.setup(replace(PLAN))
    _, work = jobs(subject.engine)
    assert len(list(subject.engine.train(Pipeline(method), ROUND, work))) == CLIENTS
    subject.engine.commit()
    texts = [subject.engine.store.read(client)["seen"] for client in range(CLIENTS)]
    expected = {"plan": described(PLAN), "round": described(ROUND)}
    for text in texts:
        assert json.loads(bytes(text.tolist())) == expected


@engines(*EVERY_ENGINE)
def test_replies_stay_as_they_are_when_later_rounds_run(subject: Subject) -> None:
    pipeline = set_up(subject.engine, KeepsClientMemory())
    round, work = jobs(subject.engine)
    replies = answers(subject.engine, pipeline, round)
    copies = {client: model.clone() for client, model in replies.items()}
    for number in (2, 3, 4):
        later = replace(round, number=number)
        assert len(list(subject.engine.train(pipeline, later, work))) == CLIENTS
    for client, model in copies.items():
        assert torch.equal(replies[client], model)


def answers(engine: LocalEngine, pipeline: Pipeline, round: Round) -> dict[int, Tensor]:
    """Return the model of each client's reply."""
    _, work = jobs(engine)
    results = list(engine.train(pipeline, round, work))
    models = {
        result.job.client: result.tensors["model"]
        for result in results
        if isinstance(result, Answer)
    }
    assert len(models) == len(results) == CLIENTS
    return models


@engines(*WORKERS)
def test_replies_may_be_written_to_even_where_they_are_what_was_sent(subject: Subject) -> None:
    pipeline = set_up(subject.engine, Echoing())
    round, _ = jobs(subject.engine)
    replies = answers(subject.engine, pipeline, round)
    copies = {client: model.clone() for client, model in replies.items()}
    for model in replies.values():
        model.zero_()
    repeated = answers(subject.engine, pipeline, round)
    for client, model in copies.items():
        assert torch.equal(repeated[client], model)
        assert torch.equal(model, subject.task.initial)


@engines(*EVERY_ENGINE)
def test_a_round_left_early_disturbs_nothing(subject: Subject) -> None:
    pipeline = set_up(subject.engine, KeepsClientMemory())
    results = subject.engine.train(pipeline, *jobs(subject.engine))
    assert isinstance(next(results), Answer)
    results.close()
    if subject.worker:
        assert not any(handle.group for handle in subject.engine._handles)
    subject.assert_as_in_rows(KeepsClientMemory)


# --- failures of clients ---


@engines(*EVERY_ENGINE)
def test_clients_that_fail_are_named_with_their_reasons_and_harm_no_other(
    subject: Subject,
) -> None:
    federation = subject.assert_as_in_rows(Failing)
    faults = federation.history[0]["faults"]
    division = "ZeroDivisionError: integer division or modulo by zero"
    shape = f"'model' has shape [{TASK.layout.size - 1}], but `expects` requires"
    assert {fault["client"]: fault["reason"].partition(" [")[0] for fault in faults} == {
        0: division,
        1: "Private: 1 and 2",
        2: "'model' is not finite",
        3: shape.partition(" [")[0],
    }
    clients = federation.history[0]["clients"]
    assert [fault["client"] for fault in faults] == sorted(range(4), key=clients.index)
    notices = federation.engine.notices
    if not subject.stacks:
        assert notices == []
        return
    reasons = {f"failing: {LOCK_STEP}{reason}" for reason in (division, "Private: 1 and 2")}
    assert notices
    assert {*notices} <= reasons
    reported = [
        [text for text in timing.get("notices", ()) if LOCK_STEP in text]
        for timing in federation.timings
    ]
    assert [sorted(texts) for texts in reported] == [sorted(notices), [], []]


def seed_that_selects(client: int) -> int:
    for seed in range(1000):
        if uniform(Round(1, 1, seed, CLIENTS, 1, 0.1, 0.1)) == (client,):
            return seed
    raise AssertionError("no seed selects the client")


@engines(*EVERY_ENGINE)
def test_a_round_in_which_everybody_fails_raises_the_first_clients_error(subject: Subject) -> None:
    settings = {"rounds": 1, "participation": 0.17}
    with pytest.raises(ZeroDivisionError):
        subject.run(Failing(), **settings, seed=seed_that_selects(0))
    # An error that cannot be pickled becomes a RuntimeError with the same text.
    with pytest.raises(Exception, match="1 and 2"):
        subject.run(Failing(), **settings, seed=seed_that_selects(1))


@engines(*EVERY_ENGINE)
def test_errors_name_the_clients_and_the_round(subject: Subject) -> None:
    """Notices and errors of a run name clients as in the data, and the round."""
    task = named_task()
    notices = subject.run(Failing(), task=task, rounds=2).notices
    for name, reason in (
        ("Aachen", r"ZeroDivisionError: .* by zero \(at .*process_support.py:\d+ in train\)"),
        ("Bern", "Private: 1 and 2"),
        ("Cork", "'model' is not finite"),
        ("Delft", "'model' has shape"),
    ):
        start = f"round 1 continues without a reply of client '{name}': "
        found = [text for text in notices if text.startswith(start)]
        assert len(found) == 1, notices
        assert re.search(reason, found[0])
    named = rf"round 1, clients? '({'|'.join(NAMES)})'"
    with pytest.raises(ZeroDivisionError) as caught:
        subject.run(Dividing(), task=task)
    assert re.fullmatch(named, "".join(caught.value.__notes__))
    with pytest.raises(InvalidValue, match=rf"^{named}.*: mu must be at least 0, not -1$"):
        subject.run(Misconfigured(), task=task)
    with pytest.raises(LookupError, match="no personal model") as personal:
        subject.run(BadlyPersonal(), task=task, personal_every=1)
    assert re.fullmatch(named, "".join(personal.value.__notes__))
    diverging = replace(task, training=Training(learning_rate=1e30))
    with pytest.raises(Diverged, match=r"no reply is finite, clients '.*', '.*', '.*' and 3 more;"):
        subject.run(FedAvg(), task=diverging)
    explosive = replace(task, training=Training(learning_rate=1e6))
    with pytest.raises(Diverged, match=r"client '\w+' has the highest training loss, \d"):
        subject.run(FedAvg(), task=explosive, rounds=9)


@engines(*EVERY_ENGINE)
def test_a_wrong_setting_ends_the_round_and_leaves_the_engine_usable(subject: Subject) -> None:
    with pytest.raises(InvalidValue, match=r": mu must be at least 0, not -1$"):
        subject.run(Misconfigured())
    subject.assert_as_in_rows(FedAvg)


@engines(*WORKERS)
def test_the_servers_state_does_not_reach_clients(subject: Subject) -> None:
    with pytest.raises(AttributeError, match="state"):
        subject.run(Peeking(), rounds=1)


@engines(*WORKERS)
def test_methods_that_cannot_travel_are_refused_in_one_line(subject: Subject) -> None:
    method = FedAvg()
    method.lock = threading.Lock()  # type: ignore[attr-defined]
    name = subject.engine.name
    with pytest.raises(
        InvalidValue, match=f"^engine '{name}' cannot send this to its workers: "
    ) as caught:
        subject.run(method)
    assert "\n" not in str(caught.value)


# --- deaths of workers ---


@engines(*WORKERS, rare=("ray",))
def test_a_worker_that_dies_is_replaced_and_its_clients_train_again(
    subject: Subject, tmp_path: Path
) -> None:
    times = 1 if subject.worker == "Ray actor" else 2
    list(subject.engine.train(set_up(subject.engine, FedAvg()), *jobs(subject.engine)))
    processes = {*subject.engine.processes}
    federation = subject.run(Deadly(victim=2, times=times, directory=str(tmp_path)))
    died = {int(mark.name) for mark in tmp_path.iterdir()}
    assert len(died) == times
    assert died & processes
    assert not died & {*subject.engine.processes}
    subject.assert_same(federation, on_rows(KeepsClientMemory()))


@engines(*WORKERS, rare=("ray",))
def test_a_client_that_kills_its_worker_each_time_fails_and_the_others_do_not(
    subject: Subject, tmp_path: Path
) -> None:
    federation = subject.run(Deadly(victim=2, times=3, directory=str(tmp_path)), rounds=1)
    (fault,) = federation.history[0]["faults"]
    assert fault["client"] == 2
    assert fault["reason"].startswith(f"its {subject.worker} died 3 times (")
    if subject.worker == "worker process":
        assert fault["reason"].endswith("(killed by SIGKILL)")
    assert "\n" not in fault["reason"]
    store = subject.engine.store
    assert [client for client in range(CLIENTS) if store.read(client)] == [0, 1, 3, 4, 5]


@engines("processes", "ray")
def test_workers_killed_between_two_rounds_are_replaced(subject: Subject) -> None:
    schedule = Schedule(3, 1.0, seed=3, evaluate_every=1)
    federation = Federation(KeepsClientMemory(), subject.task, subject.engine, schedule)
    federation.step()
    killed = subject.engine.processes[: 1 if subject.worker == "Ray actor" else None]
    for process in killed:
        os.kill(process, signal.SIGKILL)
    federation.run()
    assert not {*killed} & {*subject.engine.processes}
    subject.assert_same(federation, on_rows(KeepsClientMemory()))
