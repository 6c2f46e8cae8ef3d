"""Invariants of the global-model methods.

In some limits a method equals FedAvg. Other invariants are preserved sums and the transmitted
bytes.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from every_method import EVERY_METHOD
from fedloom.algorithm import Algorithm, algorithms
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.statistics import accumulated_weights, momentum_gain
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import type_hints
from fedloom.common.registry import RegistryEntry
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.flat.population import mutate
from fedloom.parts.building import build
from fedloom.parts.private import Accounted
from fedloom.rounds.engine import Job
from fedloom.rounds.federation import Federation, Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from naive import Run, World, assert_same, average, shares

EQUAL = (8,) * 6
FEDAVG, UNIFORM = "fedavg", "fedavg(weighted=false)"


@pytest.mark.parametrize(
    ("limit", "equivalent", "world"),
    [
        ("fedprox(mu=0)", FEDAVG, World(norm=True)),
        ("moon(mu=0)", FEDAVG, World(norm=True)),
        ("fedmut(radius=0)", UNIFORM, World(norm=True)),
        ("fedsam(rho=0)", FEDAVG, World()),
        ("fedasam(rho=0)", FEDAVG, World()),
        ("fedavgm(momentum=0)", FEDAVG, World(norm=True)),
        ("fedavgm(momentum=0, weighted=false)", UNIFORM, World(norm=True)),
        ("fednova", FEDAVG, World(norm=True, sizes=EQUAL)),
        ("scaffold", UNIFORM, World(norm=True, rounds=1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_limit_is_fedavg(limit: str, equivalent: str, world: World) -> None:
    assert_same(world.run(build(limit)).models, world.run(build(equivalent)).models)


def test_scaffold_with_everybody_and_one_full_step_is_fedavg() -> None:
    # The offsets c - c_i sum to zero over all clients, and a single step causes no drift.
    training = Training(learning_rate=0.1, batch_size=None)
    world = World(participation=1.0, training=training)
    assert_same(world.run(build("scaffold")).models, world.run(build(UNIFORM)).models)


def test_fedexp_steps_at_least_as_far_as_fedavg() -> None:
    world = World()
    method = build("fedexp(epsilon=1e9)")
    run, plain = world.run(method), world.run(build(FEDAVG))
    assert_same(run.models[:1], plain.models[:1])
    halves = [
        average(pair, [0.5, 0.5]) for pair in zip(plain.models[:-1], plain.models[1:], strict=True)
    ]
    assert_same(run.models[1:], halves)
    assert float(method.state["step"]) == 1.0
    assert all(
        record["server_step"] >= 1
        for record in World(norm=True).run(build("fedexp")).federation.history
    )


def test_fedexp_steps_further_where_clients_disagree() -> None:
    history = World(rounds=6).run(build("fedexp(epsilon=1e-9)")).federation.history
    assert max(record["server_step"] for record in history) > 1


@pytest.mark.parametrize("name", ["fedmut(radius=50)", "fedexp(epsilon=1e-9)"])
def test_running_variances_never_fall_below_zero(name: str) -> None:
    for state in World(norm=True, rounds=6).run(build(name)).models:
        assert float(state["norm.running_var"].min()) >= 0
        assert state["norm.num_batches_tracked"].dtype == torch.int64


def remembered(run: Run, world: World, name: str) -> dict[int, torch.Tensor]:
    selected = {client for clients in run.selected for client in clients}
    absent = torch.zeros(run.federation.task.layout.trainable, dtype=torch.float64)
    return {i: run.memory(i, name) if i in selected else absent for i in range(world.clients)}


def test_server_sums_are_the_means_over_all_clients() -> None:
    world = World(norm=True)
    mean = sum(world.sizes) / world.clients
    for name, memory, state, scaled in [
        ("scaffold", "scaffold_variate", "variate", False),
        ("scaffold_feddc", "scaffold_variate", "variate", True),
        ("feddyn", "feddyn_history", "drift", False),
        ("feddc", "feddc_drift", "drift", False),
        ("feddc", "feddc_update", "update", True),
    ]:
        method = build(name)
        memories = remembered(world.run(method), world, memory)
        total = sum(
            tensor * (world.sizes[i] / mean if scaled else 1) for i, tensor in memories.items()
        )
        torch.testing.assert_close(
            method.state[state], total / world.clients, rtol=1e-9, atol=1e-11
        )
        assert float(method.state[state].norm()) > 0


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "feddc"])
def test_idle_clients_stay_out_of_the_sums(name: str) -> None:
    world = World()
    method, task = build(name), world.task()
    engine = RowsEngine(task)
    federation = Federation(method, task, engine, Schedule(rounds=4, participation=0.5))
    record, _ = federation.step()
    memories = {client: copy.deepcopy(engine.store.read(client)) for client in range(world.clients)}
    round = replace(Round(2, 4, 0, world.clients, 3, 0.1, 0.1), selected=(0,))
    inbox = method.send(round)
    jobs = [Job(client, None, inbox) for client in range(world.clients)]
    assert len(list(engine.train(federation.pipeline, round, jobs))) == 7
    for client, tensors in memories.items():
        later_tensors = engine.store.read(client)
        assert later_tensors.keys() >= tensors.keys()
        for key, tensor in later_tensors.items():
            assert torch.equal(tensor, tensors.get(key, torch.zeros_like(tensor)))
    assert set(record["clients"]) == {client for client, tensors in memories.items() if tensors}


@given(
    count=st.integers(1, 9), skew=st.floats(0, 1), radius=st.floats(-5, 5), seed=st.integers(0, 2**31 - 1)
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_mutations_pair_off(count: int, skew: float, radius: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    center, direction = torch.randn(2, 10, dtype=torch.float64, generator=generator)
    tensors = [slice(0, 4), slice(4, 5), slice(5, 8)]
    rows = mutate(center, radius * direction, center.new_empty(count, 10), tensors, skew, generator)
    pairs = count // 2
    for columns in tensors:
        expected = center[columns] + skew * pairs / count * radius * direction[columns]
        torch.testing.assert_close(rows[:, columns].mean(0), expected)
    assert torch.equal(rows[:, 8:], center[8:].expand(count, 2))
    if count % 2:
        assert torch.equal(rows[-1], center)
    rows[0] = 0  # rows must not share memory
    assert count == 1 or bool((rows[1] != 0).all())


def test_fedmut_draws_signs_for_each_tensor_by_itself() -> None:
    tensors = [slice(k, k + 1) for k in range(40)]
    rows = mutate(
        torch.zeros(40), torch.ones(40), torch.empty(4, 40), tensors, 0.0, torch.Generator()
    )
    assert len({tuple(column.tolist()) for column in rows.T}) > 1
    assert bool((rows.sum(0) == 0).all())
    assert bool((rows.abs() == 1).all())


# Per method and client: models of size P in the download, additional numbers in the download, and
# the same for the upload (spec, section 8; FedMR, appendix C.1).
TRAFFIC = {
    "fedavg": (1, 0, 1, 0),
    "fedprox": (1, 0, 1, 0),
    "scaffold": (2, 0, 2, 0),
    "moon": (1, 0, 1, 0),
    "feddyn": (1, 1, 1, 0),  # additional number: the mean number of samples, for alpha_i
    "feddc": (2, 1, 2, 0),
    "fedexp": (1, 0, 1, 0),
    "fedasam": (1, 0, 1, 0),
    "fedsam": (1, 0, 1, 0),
    "fedmut": (1, 0, 1, 0),
    "fednova": (1, 0, 1, 1),  # additional number: the weight of the local steps
    "fedavgm": (1, 0, 1, 0),
    "fedadam": (1, 0, 1, 0),
    "fedyogi": (1, 0, 1, 0),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_bytes_are_those_of_the_communication_table(name: str) -> None:
    world = World(rounds=2)
    run = world.run(build(name))
    size, number, clients = run.federation.task.layout.size, 8, len(run.selected[0])
    down, more_down, up, more_up = TRAFFIC[name]
    for record in run.federation.history:
        assert record["bytes_down"] == clients * number * (down * size + more_down)
        assert record["bytes_up"] == clients * number * (up * size + more_up)


def test_fedgen_sends_its_generator_from_the_second_round_on() -> None:
    world = World(rounds=2)
    method = build("fedgen(generator_steps=1)")
    run = world.run(method)
    size, clients = run.federation.task.layout.size, len(run.selected[0])
    generator = (100 + world.classes) * 512 + 512 + 4 * 512 + 512 * 7 + 7
    assert [r["bytes_down"] for r in run.federation.history] == [
        clients * 8 * size,
        clients * 8 * (size + generator),
    ]
    assert {r["bytes_up"] for r in run.federation.history} == {
        clients * (8 * size + 4 * world.classes)
    }


def test_late_models_are_averaged() -> None:
    world = World(rounds=6)
    # 0.4 * 6 = 2.4: averaging starts in round 3
    run = world.run(build("fedasam(rho=0, swa=true, swa_start=0.4)"))
    state, states = world.initial(), []
    for number, clients in enumerate(run.selected, start=1):
        state = average([world.train(state, number, i)[0] for i in clients], shares(world, clients))
        states.append(state)
    means = [average(states[2:end], [1 / (end - 2)] * (end - 2)) for end in range(3, 7)]
    assert_same(run.models, [*states[:2], *means])


@pytest.mark.parametrize(
    "name", ["scaffold", "scaffold(option=1)", "feddc", "feddyn", "fednova", "fedgen", "moon"]
)
def test_a_client_that_cannot_make_a_step_does_no_harm(name: str) -> None:
    world = World(norm=True, sizes=(1, 6, 9), participation=1.0)
    run = world.run(build(name))
    assert all(not record["faults"] for record in run.federation.history)
    assert all(bool(t.isfinite().all()) for state in run.models for t in state.values())
    for key, tensor in run.engine.store.read(0).items():
        assert key == "moon_model" or float(tensor.abs().max()) < 1


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.5, 0.3, False), (0.9, 0.0, True)],
)
def test_accumulated_weights_are_what_torch_moves_by_on_gradients_of_one(
    momentum: float, dampening: float, nesterov: bool
) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD(
        [weight], lr=1.0, momentum=momentum, dampening=dampening, nesterov=nesterov
    )
    moved = [0.0]
    for _ in range(200):
        weight.grad = -torch.ones_like(weight)
        optimizer.step()
        moved.append(float(weight.detach()))
    options = {"nesterov": nesterov, "dampening": dampening}
    training = Training(momentum=momentum, optimizer_options=options)
    steps = torch.tensor([5, 0, 200, 1])
    assert accumulated_weights(training, steps).tolist() == pytest.approx(
        [moved[int(s)] for s in steps]
    )
    assert moved[200] - moved[199] == pytest.approx(momentum_gain(training))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fedprox(mu=-1)", "mu must be at least 0"),
        ("scaffold(option=3)", "option"),
        ("moon(temperature=0)", "temperature must be greater than 0"),
        ("feddc(alpha=-0.1)", "alpha must be at least 0"),
        ("fedexp(epsilon=0)", "epsilon must be greater than 0"),
        ("fedasam(rho=-0.1)", "rho must be at least 0"),
        ("fedsam(eta=0.1)", "no parameter 'eta'"),
        ("fedmut(beta=2)", "beta must be between 0 and 1"),
        ("fedavgm(momentum=1.0)", r"momentum must be in \[0, 1\)"),
        ("fedadam(adaptivity=0)", "adaptivity must be greater than 0"),
    ],
)
def test_values_that_are_not_allowed_are_named(name: str, text: str) -> None:
    with pytest.raises(InvalidValue, match=text) as caught:
        build(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", list(algorithms), ids=lambda entry: entry.name)
def test_no_method_takes_a_number_that_single_precision_cannot_hold(
    entry: RegistryEntry[type[Algorithm]],
) -> None:
    needed: dict[str, Any] = {"stages": {"stages": [(FedAvg(), None)]}}.get(
        entry.name, {"method": FedAvg(weighted=False)}
    )
    needed |= {"radius": 1.0} if entry.name == "norm_bound" else {}
    needed |= {"noise": 1.0} if issubclass(entry.make, Accounted) else {}
    needed = {name: value for name, value in needed.items() if name in entry.parameters}
    entry.make(**needed)
    for name, hint in type_hints(entry.make).items():
        if "float" in str(hint):
            for value in (1e300, math.inf, -math.inf, math.nan):
                with pytest.raises(InvalidValue, match=name):
                    entry.make(**{**needed, name: value})


@pytest.mark.parametrize("name", ["scaffold", "feddc", "fednova"])
def test_methods_that_read_gradients_off_the_steps_ask_for_sgd(name: str) -> None:
    world = World(training=Training(optimizer="adam"))
    with pytest.raises(InvalidValue, match="optimizer must be sgd, not adam"):
        world.run(build(name))
    assert (
        len(World(training=Training(optimizer="adam")).run(build("scaffold(option=1)")).models) == 4
    )


@pytest.fixture(scope="module")
def digits() -> Task:
    training = Training(learning_rate=0.065, momentum=0.5, epochs=2, batch_size=20)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)
        )
    return make_task(
        "part(of=digits, samples=800)",
        clients=6,
        partition="dirichlet(1.0)",
        model=model,
        training=training,
    )


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_registered_method_learns(name: str, digits: Task) -> None:
    federation = Federation(
        build(name), digits, RowsEngine(digits), Schedule(rounds=4, participation=1.0)
    )
    federation.run()
    losses = [record["training_loss"] for record in federation.history]
    assert losses[-1] < 0.9 * losses[0]
