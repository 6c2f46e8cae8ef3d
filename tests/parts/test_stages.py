"""Methods in stages: switches at given rounds, and after the loss has stopped decreasing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from batch_order import batch_order
from fedloom.algorithm import Algorithm
from fedloom.algorithm.records import Plan
from fedloom.algorithms.fedkdmr import FedKDMR
from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, Samples
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.course import Course, client_pipeline
from fedloom.parts.pipeline import Pipeline
from fedloom.parts.stages import Stages, has_stopped_improving
from fedloom.rounds.engine import Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from naive import State, World, assert_same, average, shares, uniform
from naive_personal import World as Personal
from small_task import small_task

# an improvement too large for this data, so that the switch occurs within a few rounds
SLOW = 0.3


# --- stages of known length ---


def test_each_stage_starts_from_the_model_that_the_last_one_left() -> None:
    world = World(norm=True, rounds=5)
    run = world.run(build("stages(fedavg:2, fedavg(weighted=false):4, fedavg)"))
    state, expected = world.initial(), []
    for number, clients in enumerate(run.selected, start=1):
        weights = uniform(clients) if number in (3, 4) else shares(world, clients)
        state = average([world.train(state, number, client)[0] for client in clients], weights)
        expected.append(state)
    assert_same(run.models, expected)


def test_the_last_method_leads_beyond_its_own_last_round() -> None:
    world = World()
    assert_same(world.run(build("stages(fedavg:2)")).models, world.run(build("fedavg")).models, 0)


def test_the_model_between_two_stages_is_that_of_the_finished_one() -> None:
    world = World(rounds=2)
    staged = world.run(build("stages(fedavg:2, fedmr)"))
    assert_same(staged.models, world.run(build("fedavg")).models)
    pool = staged.federation.server_state()["inner1.pool"]
    assert torch.equal(pool, pool[:1].expand_as(pool))


@pytest.mark.parametrize("before", ["fedavg:2", "stages(fedavg:1, fedavg):2"])
@pytest.mark.parametrize(
    "method",
    [
        "afl",
        "fedexp",
        "cfl(mean_norm=1000.0, client_norm=0.0, first_round=2)",
        "silobn",
        "fedper",
        "lg_fedavg",
        "fedrep",
        "fedbabu",
        "apfl",
        "ditto",
        "fedrod",
        "fedas",
        "feddbe",
        "fedbn",
    ],
)
def test_a_later_stage_is_a_run_of_its_own_from_the_model_of_the_stage_before(
    method: str, before: str
) -> None:
    """With whole batches and a deterministic model, no number depends on a random stream."""
    settings = Training(learning_rate=0.1, batch_size=None)
    norm = method in ("silobn", "fedbn", "fedrep")
    world = Personal(norm=norm, rounds=6, participation=1.0, training=settings)
    staged = world.run(build(f"stages({before}, {method})")).moments
    first = Personal(norm=norm, rounds=2, participation=1.0, training=settings)
    middle = first.run(build("fedavg")).federation
    second = Personal(norm=norm, rounds=4, participation=1.0, training=settings)
    second.module = copy.deepcopy(second.module)
    middle.task.layout.load(second.module, middle.model(), middle.integers)
    for later, alone in zip(staged[2:], second.run(build(method)).moments, strict=True):
        torch.testing.assert_close(later.parameters, alone.parameters, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(later.personal, alone.personal, rtol=1e-9, atol=1e-9)


class AtSites(RowsEngine):
    """Trains and personalises as sites do: they have only the expression and the messages."""

    expression = ""

    def at_site(self, round: Round, jobs: Sequence[Job]) -> Pipeline:
        method, task = build(self.expression), self.task
        plan = Plan(
            task.layout,
            task.initial,
            round.clients,
            round.participants,
            round.rounds,
            round.seed,
            task.dataset.classes,
            torch.ones_like,
            task.model,
            remote=True,
            training=task.training,
        )
        Course(method).setup(plan)
        return client_pipeline(method, round.number, dict(jobs[0].inbox))

    def train_chunk(
        self, pipeline: Pipeline, round: Round, expected: Any, jobs: Sequence[Job]
    ) -> Any:
        return super().train_chunk(self.at_site(round, jobs), round, expected, jobs)

    def personalised(self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]) -> Any:
        return super().personalised(self.at_site(round, jobs), round, jobs)


@pytest.mark.parametrize(
    "expression",
    [
        "stages(fedavg:2, fedrep)",
        "stages(fedavg:2, fedproto)",
        "stages(fedavg:1, stages(fedavg:2, apfl))",
        "stages(fedavg:2, partialfed(cooling=0.5))",
        "stages(fedavg:1, fedavg:2, fedkdmr(ramp=3))",
        "stages(fedavg:1, stages(fedavg:1, fedkdmr(ramp=3)))",
        "stages(fedavg:auto, fedkdmr(ramp=3), patience=1, improvement=0.9)",
    ],
)
def test_sites_know_when_and_from_which_model_a_stage_began(expression: str) -> None:
    task = small_task()
    runs = []
    for kind in (RowsEngine, AtSites):
        engine = kind(task)
        engine.expression = expression
        schedule = Schedule(rounds=6, participation=1.0, evaluate_every=1, personal_every=1)
        runs.append(Federation(build(expression), task, engine, schedule))
        runs[-1].run()
        assert not any(record["faults"] for record in runs[-1].history)
    assert runs[0].history == runs[1].history
    assert torch.equal(runs[0].model(), runs[1].model())


def test_the_ramp_of_fedkdmr_begins_with_its_stage() -> None:
    run = World(rounds=5).run(build("stages(fedavg:3, fedkdmr(ramp=4))")).federation
    method = run.pipeline.algorithm
    assert isinstance(method, FedKDMR)
    assert [method.weight(number) for number in (4, 5, 6, 8, 9)] == [0, 0.125, 0.25, 0.5, 0.5]


def test_memory_of_a_stage_lasts_to_the_next_one_of_its_kind() -> None:
    """FedProx between two stages of MOON does not change MOON's memory."""
    world = World(rounds=4, participation=1.0)
    run = world.run(build("stages(moon:1, fedprox:2, moon)"))
    assert run.memory(0, "moon_model").shape == (run.federation.task.layout.size,)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("stages()", "stages needs methods"),
        ("stages(fedavg, fedmr)", "each but the last with its last round"),
        ("stages(fedavg:0, fedmr)", "must start at 1 or later and increase"),
        ("stages(fedavg:5, fedmr:5, fedavg)", "must start at 1 or later and increase"),
        ("stages(fedavg:atuo, fedmr)", "did you mean 'auto'"),
        ("stages(fedavg:100, fedmr:auto)", "Remove its :auto"),
        ("stages(fedavg:auto, fedmr, patience=0)", "patience must be at least 1, not 0"),
        ("stages(fedavg:auto, fedmr, improvement=2)", "improvement must be between 0 and 1, not 2"),
        ("stages(fedavg:auto, fedmr, patiense=3)", "did you mean 'patience'"),
        ("stages(0.5, fedmr)", "0.5 is not a method"),
        ("fedavg:100", "is only allowed inside stages"),
    ],
)
def test_methods_that_cannot_be_staged_are_refused(expression: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message) as caught:
        build(expression)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "expression",
    [
        "stages(fedavg:100, fedmr)",
        "stages(fedavg:auto, fedmr, patience=3, improvement=0.02)",
        "stages(fedprox(mu=0.1):auto, fedavg:7, fedmr(unit='segment', fraction=0.5))",
        "stages(stages(fedavg:2, fedmr):5, fedavg)",
    ],
)
def test_an_expression_round_trips(expression: str) -> None:
    method = build(expression)
    assert str(method) == expression
    assert build(str(method)) == method


# --- stages that end automatically ---


def test_a_loss_that_has_stopped_improving_ends_a_stage() -> None:
    nan = float("nan")
    for losses, expected in [
        ([1.0, 0.8, 0.6, 0.4], False),
        ([1.0, 1.0, 1.0, 1.0], True),
        ([1.0, 1.0, 0.95, 0.95], True),
        ([1.0, 1.0, 0.85, 0.85], False),
        ([1.0, 0.5, 0.9, 0.3], False),  # one good round among bad ones does not count
        ([0.5, 0.4, 0.7, 0.9], True),
        ([9.0, 9.0, 1.0, 0.8, 0.6, 0.4], False),  # the last four count
        ([0.1, 1.0, 1.0, 1.0, 1.0], True),
        ([nan, 1.0, 1.0, 1.0], False),
        ([1.0, 1.0, 1.0], False),
        ([], False),
    ]:
        stopped = has_stopped_improving(
            torch.tensor(losses, dtype=torch.float64), patience=2, improvement=0.1
        )
        assert stopped is expected, losses


def held_out(world: World, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of a client's held-out samples and of the others."""
    size = world.sizes[client]
    order = torch.randperm(size, generator=stream(world.seed, "held_out", client=client))
    count = max(1, round(0.1 * size))
    return order[:count], order[count:]


def naive_fedavg_that_waits(
    world: World, selected: list[list[int]]
) -> tuple[list[State], list[float]]:
    """Run FedAvg without the held-out samples.

    Return the models and, for each round, the loss of the download on the held-out samples.
    """
    state, models, losses = world.initial(), [], []
    settings = world.training
    for number, clients in enumerate(selected, start=1):
        total, weight, uploads = 0.0, 0, []
        for client in clients:
            inputs, labels = world.data(client)
            validation, training = held_out(world, client)
            with torch.no_grad():
                loss = F.cross_entropy(
                    world.at(state).eval()(inputs[validation]), labels[validation]
                )
            total, weight = total + float(loss) * len(labels), weight + len(labels)
            module = world.at(state).train()
            optimizer = torch.optim.SGD(
                module.parameters(),
                lr=world.rate(number),
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
            )
            order = batch_order(
                len(training),
                stream(world.seed, "batches", round=number, client=client),
                batch_size=settings.batch_size,
                epochs=settings.epochs,
                smallest=2 if world.norm else 1,
            )
            for index in order:
                optimizer.zero_grad()
                F.cross_entropy(module(inputs[training][index]), labels[training][index]).backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), settings.clip or 1e9)
                optimizer.step()
            uploads.append(copy.deepcopy(module.state_dict()))
        losses.append(total / weight)
        state = average(uploads, shares(world, clients))
        models.append(state)
    return models, losses


def first_round_without_gain(losses: list[float], patience: int, improvement: float) -> int | None:
    for number in range(2 * patience, len(losses) + 1):
        newer = sum(losses[number - patience : number]) / patience
        older = sum(losses[number - 2 * patience : number - patience]) / patience
        if newer > (1 - improvement) * older:
            return number
    return None


def federation(
    task: Task, method: Algorithm, rounds: int, directory: Path | None = None, dropout: float = 0
) -> Federation:
    schedule = Schedule(rounds=rounds, participation=0.5, seed=3, evaluate_every=1, dropout=dropout)
    return Federation(method, task, RowsEngine(task), schedule, directory)


def staged_run(task: Task, directory: Path | None = None) -> Federation:
    method = build(f"stages(fedavg:auto, fedmr, patience=2, improvement={SLOW})")
    return federation(task, method, 7, directory)


def stages_of(run: Federation) -> list[float]:
    """Return the active stage after each round."""
    return [record["stage"] for record in run.history]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("patience", [1, 2])
def test_a_stage_ends_when_the_loss_on_held_out_samples_stops_falling(
    norm: bool, patience: int
) -> None:
    world = World(norm=norm, rounds=8)
    expression = f"stages(fedavg:auto, fedmr, patience={patience}, improvement={SLOW})"
    run = world.run(build(expression))
    models, losses = naive_fedavg_that_waits(world, run.selected)
    switch = first_round_without_gain(losses, patience, SLOW)
    assert switch is not None
    assert 2 * patience <= switch < 8
    assert_same(run.models[:switch], models[:switch])
    repeated = federation(world.task(), build(expression), 8)
    repeated.run()
    assert stages_of(repeated) == [0.0] * (switch - 1) + [1.0] * (
        8 - switch + 1
    )  # after its last round the next method is active
    # From then on it is FedMR from the last model of FedAvg, on all samples.
    expected = average(
        [world.train(models[switch - 1], switch + 1, c)[0] for c in run.selected[switch]],
        [1 / 3] * 3,
    )
    assert_same(run.models[switch : switch + 1], [expected])


def test_the_test_set_does_not_matter() -> None:
    world = World()
    task = world.task()
    changed = Samples(torch.randn_like(task.test.inputs) * 100, task.test.labels.flip(0))
    spoilt = replace(
        task, test=changed, dataset=Dataset("random", task.train, changed, world.classes)
    )
    run, changed_run = staged_run(task), staged_run(spoilt)
    run.run()
    changed_run.run()
    assert stages_of(run) == stages_of(changed_run)
    assert [record["loss"] for record in run.history] != [
        record["loss"] for record in changed_run.history
    ]
    assert torch.equal(run.model(), changed_run.model())


@pytest.mark.parametrize("stop", [1, 3, 4, 5])
def test_a_run_resumed_before_the_switch_equals_an_uninterrupted_one(
    tmp_path: Path, stop: int
) -> None:
    uninterrupted = staged_run(World().task())
    uninterrupted.run()
    halted = staged_run(World().task(), directory=tmp_path)
    for _ in range(stop):
        halted.step()
    halted.save()
    resumed = staged_run(World().task(), directory=tmp_path)
    assert resumed.finished == stop
    resumed.run()
    expected, state = uninterrupted.server_state(), resumed.server_state()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor) or bool(tensor.isnan().any()), name
    assert resumed.history == uninterrupted.history


def test_a_stage_whose_last_round_has_passed_is_skipped() -> None:
    method = build(f"stages(fedavg:auto, fedprox(mu=100):2, fedmr, patience=1, improvement={SLOW})")
    run = federation(World().task(), method, 8)
    run.run()
    assert stages_of(run)[-1] == 2.0
    assert 1.0 not in stages_of(run)


def test_a_round_without_replies_does_not_count() -> None:
    method = build("stages(fedavg:auto, fedmr, patience=1)")
    run = federation(World().task(), method, 4, dropout=1 - 1e-12)
    run.run()
    assert stages_of(run) == [0.0] * 4
    assert len(method.state["losses"]) == 0


def test_clients_with_a_single_sample_take_part() -> None:
    world = World(sizes=(1, 2, 9), participation=1.0)
    run = world.run(build("stages(fedavg:auto, fedmr, patience=3)"))
    assert [record["faults"] for record in run.federation.history] == [[]] * 4


def test_only_stages_with_auto_send_an_extra_message() -> None:
    world = World(rounds=8)
    plain = world.run(build("fedavg")).federation.history[0]
    fixed = world.run(build("stages(fedavg:9, fedmr)")).federation.history[0]
    waits = world.run(build("stages(fedavg:auto, fedmr)")).federation.history[0]
    assert (fixed["bytes_down"], fixed["bytes_up"]) == (plain["bytes_down"], plain["bytes_up"])
    assert waits["bytes_down"] == plain["bytes_down"] + 3 * 16  # the stage and its first round
    assert waits["bytes_up"] == plain["bytes_up"] + 3 * 8  # one loss


def test_auto_is_refused_for_methods_that_share_part_of_a_model() -> None:
    world = World()
    with pytest.raises(InvalidValue, match="clients of fedrep do not exchange one whole model"):
        world.run(Stages([(build("fedrep"), "auto"), (build("fedavg"), None)]))
