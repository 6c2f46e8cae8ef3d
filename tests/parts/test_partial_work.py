"""Partial work: stragglers end their local training early.

The reference trains clients one after another, each with its own number of epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.parts.building import build
from naive import Batch, State, World, assert_same, average, shares
from stacked_support import assert_same as assert_same_runs
from stacked_support import federated
from stacked_support import world as stacked_world

EPOCHS = 5
METHODS = ["fedavg", "fedprox(mu=0.3)", "fednova", "scaffold", "fedmr", "moon", "umf(feddc)"]


def epochs_of(world: World, number: int, client: int, probability: float) -> int:
    """Return the epochs of a client: all of them, or 1, ..., E - 1 of a straggler."""
    generator = stream(world.seed, "stragglers", round=number, client=client)
    straggles = torch.rand((), generator=generator, dtype=torch.float64) < probability
    return int(torch.randint(1, EPOCHS, (), generator=generator)) if straggles else EPOCHS


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_stragglers_train_for_fewer_epochs(norm: bool, probability: float) -> None:
    world = World(norm=norm)
    world.training = replace(world.training, epochs=EPOCHS)
    run = world.run(build(f"partial_work(fedavg, stragglers={probability})"))
    model: State = world.initial()
    expected, epochs = [], []
    for number, clients in enumerate(run.selected, start=1):
        states = []
        for client in clients:
            own = World(norm=norm)
            count = epochs_of(world, number, client, probability)
            own.training = replace(world.training, epochs=count)
            states.append(own.train(model, number, client)[0])
            epochs.append(count)
        model = average(states, shares(world, clients))
        expected.append(model)
    assert_same(run.models, expected)
    assert len(set(epochs)) > 2
    assert (EPOCHS in epochs) == (probability < 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("length", "shorter"), [({"epochs": 2}, {"epochs": 1}), ({"steps": 2}, {"steps": 1})]
)
def test_half_of_the_work_is_a_run_of_half_the_length(
    method: str, length: dict[str, int], shorter: dict[str, int]
) -> None:
    whole, half = World(), World()
    whole.training = replace(whole.training, **length)
    half.training = replace(half.training, **shorter)
    partial = whole.run(build(f"partial_work({method}, stragglers=1)")).models
    assert_same(partial, half.run(build(method)).models, tolerance=0)


@pytest.mark.parametrize("method", [*METHODS, "fedgen(generator_steps=2, hidden=4)", "fedrep"])
def test_without_stragglers_a_run_is_that_of_the_method(method: str) -> None:
    models = World().run(build(method)).models
    assert_same(World().run(build(f"partial_work({method}, stragglers=0)")).models, models, 0)


class CutWorld(World):
    """Clients that end their only epoch after a uniform share of its steps."""

    def batches(self, number: int, client: int) -> Iterator[Batch]:
        generator = stream(self.seed, "stragglers", round=number, client=client)
        share = torch.rand(2, generator=generator, dtype=torch.float64)[1]
        everything = list(super().batches(number, client))
        yield from everything[: max(1, round(float(share) * len(everything)))]


def test_one_epoch_ends_at_a_step() -> None:
    world, cut = World(), CutWorld()
    world.training = cut.training = replace(world.training, epochs=1, batch_size=2)
    run = world.run(build("partial_work(fedavg, stragglers=1)"))
    model: State = world.initial()
    expected, steps = [], set()
    for number, clients in enumerate(run.selected, start=1):
        trained = [cut.train(model, number, client) for client in clients]
        steps |= {(client, count) for client, (_, count) in zip(clients, trained, strict=True)}
        model = average([state for state, _ in trained], shares(world, clients))
        expected.append(model)
    assert_same(run.models, expected)
    assert len(steps) > world.clients


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedgen", "apfl"])
def test_clients_in_lock_step_stop_at_their_own_steps(method: str) -> None:
    task = stacked_world()
    expression = f"partial_work({method}, stragglers=0.6)"
    assert_same_runs(
        federated(RowsEngine, task, expression), federated(StackedEngine, task, expression)
    )


def test_epsilon_of_dp_sgd_counts_the_whole_work() -> None:
    world = World(rounds=2)
    accounts = []
    for expression in ("dp_sgd({}, noise=1.0)", "dp_sgd(partial_work({}), noise=1.0)"):
        run = world.run(build(expression.format("fedavg")))
        accounts.append(run.federation.history[-1]["epsilon"])
    assert accounts[0] == accounts[1]


def test_real_sites_are_not_simulated() -> None:
    world = World()
    plan = replace(world.run(build("fedavg")).federation.pipeline.plan, remote=True)
    part = build("partial_work(fedavg)")
    with pytest.raises(InvalidValue, match="partial_work only simulates slow clients"):
        part.setup(plan, None)
