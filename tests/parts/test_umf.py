"""FedUmf against plain loops in which every client trains in every round.

The tests also cover idle clients that a simulation may skip.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedloom.algorithm import Algorithm, Facts, algorithms
from fedloom.algorithm.method import Method
from fedloom.algorithm.records import Message
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import InvalidValue
from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.flat.layout import Layout, Unit
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.parts.umf import Umf
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.state.store import ClientStore, Memory
from naive import State, World, assert_same, average, flat, shares, uniform, zeros

# --- the second computation ---


def naive_umf(
    world: World,
    selected: list[list[int]],
    alpha: float,
    *,
    weighted: bool,
    mu: float = 0.0,
    pool: bool = False,
) -> list[State]:
    """Run FedUmf over FedAvg (uniform or by samples), FedProx (mu) or Indep (pool).

    Every client trains in every round.
    """
    state = world.initial()
    slots = [world.initial() for _ in selected[0]] if pool else []
    stored: dict[int, State] = {}
    previous: list[int] = []
    models = []
    for number, clients in enumerate(selected, start=1):
        ratio = world.rate(number) / world.rate(number - 1) if number > 1 else 1.0
        uploads: dict[int, State] = {}
        for client in range(world.clients):
            chosen = client in clients
            sent = slots[clients.index(client)] if pool and chosen else state
            start = copy.deepcopy(sent)
            if chosen and client not in previous and client in stored:
                for name in world.trained:
                    start[name] = start[name] + alpha * ratio * stored[client][name]

            def pull(parameters: dict[str, nn.Parameter], centre: State = sent) -> None:
                for name, parameter in parameters.items():
                    assert parameter.grad is not None
                    parameter.grad += mu * (parameter.detach() - centre[name])

            trained = world.train(start, number, client, adjust=pull)[0]
            stored[client] = {name: trained[name] - start[name] for name in world.trained}
            if chosen:
                uploads[client] = trained
        replies = [uploads[client] for client in clients]
        if pool:
            slots = replies
            counters = average(replies, uniform(clients))
            for slot in slots:
                slot.update({name: t for name, t in counters.items() if not t.is_floating_point()})
        state = average(replies, shares(world, clients) if weighted else uniform(clients))
        previous = clients
        models.append(state)
    return models


# --- rounds ---

# Clients need different numbers of epochs; otherwise no test would notice a wrong learning-rate
# ratio, since the world decays by 0.9.
LONG = 6


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.4])
@pytest.mark.parametrize("weighted", [False, True])
def test_rounds_equal_plain_loops(norm: bool, alpha: float, weighted: bool) -> None:
    world = World(norm=norm, rounds=LONG)
    run = world.run(Umf(FedAvg(weighted=weighted), alpha=alpha))
    assert_same(run.models, naive_umf(world, run.selected, alpha, weighted=weighted))
    assert_differ(run.models[-1], world.run(FedAvg(weighted=weighted)).models[-1])


def assert_differ(state: State, other_state: State) -> None:
    assert not torch.allclose(state["head.weight"], other_state["head.weight"], atol=1e-4)


def test_a_proximal_term_keeps_the_sent_model_for_its_centre() -> None:
    world = World(rounds=LONG)
    run = world.run(build("umf(fedprox(mu=0.5))"))
    assert_same(run.models, naive_umf(world, run.selected, 1.0, weighted=True, mu=0.5))


def test_idle_clients_train_the_global_model_under_indep() -> None:
    world = World(norm=True, rounds=LONG)
    run = world.run(build("umf(indep)"))
    assert_same(run.models, naive_umf(world, run.selected, 1.0, weighted=False, pool=True))


def test_drifts_of_feddc_include_the_fused_update_and_its_gradients_do_not() -> None:
    """umf(feddc): the local objective is centred on the sent model; start and slot are FedUmf's."""
    world, alpha = World(rounds=LONG, participation=0.45), 0.05
    run = world.run(build(f"umf(feddc(alpha={alpha}))"))
    assert_same(run.models, naive_umf_feddc(world, run.selected, alpha), 1e-8)
    selected = {client for clients in run.selected for client in clients}
    for client in range(world.clients):  # idle clients do not change their drift
        assert ("feddc_drift" in run.engine.store.read(client)) == (client in selected)


def naive_umf_feddc(world: World, selected: list[list[int]], alpha: float) -> list[State]:
    count = world.clients
    cloud, general, drift_mean = world.initial(), zeros(world), zeros(world)
    drift = {client: zeros(world) for client in range(count)}
    gradients = {client: zeros(world) for client in range(count)}
    stored: dict[int, State] = {}
    previous: list[int] = []
    models = []
    for number, clients in enumerate(selected, start=1):
        ratio = world.rate(number) / world.rate(number - 1) if number > 1 else 1.0
        uploads, changes = [], []
        for client in [*clients, *(idle for idle in range(count) if idle not in clients)]:
            scale = world.sizes[client] / (sum(world.sizes) / count)
            start = copy.deepcopy(cloud)
            if client in clients and client not in previous and client in stored:
                for name in world.trained:
                    start[name] = start[name] + ratio * stored[client][name]
            centre = {name: cloud[name] - drift[client][name] for name in world.trained}
            shift = {
                name: general[name] / scale - gradients[client][name] for name in world.trained
            }

            def correct(
                parameters: dict[str, nn.Parameter],
                strength: float = alpha / scale,
                centre: State = centre,
                shift: State = shift,
            ) -> None:
                for name, parameter in parameters.items():
                    assert parameter.grad is not None
                    parameter.grad += strength * (parameter.detach() - centre[name]) + shift[name]

            trained, steps = world.train(start, number, client, adjust=correct)
            stored[client] = {name: trained[name] - start[name] for name in world.trained}
            if client not in clients:
                continue
            uploads.append(trained)
            gradient = {
                name: gradients[client][name]
                - general[name] / scale
                + (start[name] - trained[name]) / (steps * world.rate(number))
                for name in world.trained
            }
            changes.append(
                {name: (gradient[name] - gradients[client][name]) * scale for name in world.trained}
            )
            gradients[client] = gradient
            for name in world.trained:
                moved = trained[name] - cloud[name]
                drift[client][name] = drift[client][name] + moved
                drift_mean[name] = drift_mean[name] + moved / count
        for name in world.trained:
            general[name] = general[name] + sum(change[name] for change in changes) / count
        cloud = average(uploads, uniform(clients))
        for name in world.trained:
            cloud[name] = cloud[name] + drift_mean[name]
        previous = clients
        models.append(copy.deepcopy(cloud))
    return models


@pytest.mark.parametrize("inner", ["fedavg", "feddc", "fedmr"])
def test_without_a_share_or_without_idle_clients_it_is_the_inner_method(inner: str) -> None:
    world = World(norm=True)
    assert_same(world.run(build(f"umf({inner}, alpha=0)")).models, world.run(build(inner)).models)
    everybody = World(norm=True, participation=1.0)
    assert_same(everybody.run(build(f"umf({inner})")).models, everybody.run(build(inner)).models, 0)


# --- idle clients that a simulation may skip ---

COMPOSITIONS = [
    "fedavg",
    "fedprox(mu=0.1)",
    "moon(mu=2)",
    "scaffold",
    "feddyn",
    "feddc",
    "fedasam",
    "fedmut",
    "fedmr",
    "stages(fedavg:3, fedmr)",
    "clustered(fedavg, by=size)",
]


@pytest.mark.parametrize(
    "inner", [inner for inner in COMPOSITIONS if inner.partition("(")[0] in algorithms]
)
def test_skipping_idle_clients_not_selected_next_changes_nothing(inner: str) -> None:
    world = World(norm=True, rounds=LONG)
    some, every = (
        world.run(build(f"umf({inner})")),
        world.run(build(f"umf({inner}, simulate_all=true)")),
    )
    for tensors, expected in zip(some.models, every.models, strict=True):
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), name
    assert some.selected == every.selected


def idle_work(method: Method, world: World) -> list[tuple[int, int]]:
    """Return (training clients, idle clients among them) of each round."""
    task = world.task()
    schedule = Schedule(rounds=world.rounds, participation=world.participation, seed=world.seed)
    federation = Federation(method, task, RowsEngine(task), schedule)
    counts = []
    for number in range(1, world.rounds + 1):
        pipeline = federation.pipeline
        opening = pipeline.plan.opening()
        selection = pipeline.select(replace(opening, number=number, selected=()))
        counts.append((len(selection.clients), len(selection.idle)))
        assert federation.step()[0]["clients"] == list(selection.clients)
    return counts


def test_idle_clients_train_only_before_a_round_that_selects_them() -> None:
    world = World(rounds=LONG)
    run = world.run(FedAvg())
    expected = [len(set(run.selected[t + 1]) - set(run.selected[t])) for t in range(LONG - 1)]
    assert [idle for _, idle in idle_work(build("umf(fedavg)"), world)] == [*expected, 0]
    assert idle_work(build("umf(fedavg, simulate_all=true)"), world) == [(3, 4)] * LONG


@pytest.mark.parametrize(
    "inner", ["clusamp", "stages(fedavg:auto, fedmr)", "stages(fedavg:2, clusamp)"]
)
def test_all_idle_clients_train_if_the_next_selection_is_unknown(inner: str) -> None:
    world = World(rounds=3)
    assert all(
        busy + idle == world.clients for busy, idle in idle_work(build(f"umf({inner})"), world)
    )


def test_clusamp_under_umf_equals_plain_loops() -> None:
    """Selection by similarity depends on the replies, so no client can be skipped."""
    world = World(rounds=LONG, sizes=(9,) * 7)
    run = world.run(build("umf(clusamp)"))
    # no client drawn twice, so plain weights are right
    assert all(len(clients) == 3 for clients in run.selected)
    assert_same(run.models, naive_umf(world, run.selected, 1.0, weighted=False))


# --- an update older than one round is dropped ---


class Faulty(RowsEngine):
    """Loses idle clients in the rounds listed in `lost`."""

    lost: frozenset[tuple[int, int]] = frozenset()

    def train(self, pipeline, round, jobs):  # type: ignore[no-untyped-def]
        reachable = [
            o for o in jobs if o.slot is not None or (round.number, o.client) not in self.lost
        ]
        return super().train(pipeline, round, reachable)


def test_a_client_that_missed_a_round_has_nothing_to_fuse() -> None:
    world = World(rounds=LONG)
    task = world.task()
    everybody = {
        (number, client) for number in range(1, LONG + 1) for client in range(world.clients)
    }

    def run(lost: set[tuple[int, int]]) -> Tensor:
        engine = Faulty(task)
        engine.lost = frozenset(lost)
        method = build("umf(fedavg, simulate_all=true)")
        schedule = Schedule(rounds=LONG, participation=0.5, seed=world.seed)
        federation = Federation(method, task, engine, schedule)
        federation.run()
        return federation.model()

    plain = FedAvg()
    world.run(plain)
    torch.testing.assert_close(run(everybody), plain.model(), rtol=1e-9, atol=1e-9)
    # An update of round 1 must not be fused later: without idle clients from round 2 on, the result
    # has only the updates of round 1 in round 2.
    late = run({(number, client) for number, client in everybody if number > 1})
    after_two_rounds = naive_umf(
        replace(world, rounds=2), world.run(FedAvg()).selected[:2], 1.0, weighted=True
    )[-1]
    state, selected = after_two_rounds, world.run(FedAvg()).selected
    for number in range(3, LONG + 1):
        clients = selected[number - 1]
        state = average([world.train(state, number, c)[0] for c in clients], shares(world, clients))
    torch.testing.assert_close(late, flat(world, state), rtol=1e-9, atol=1e-9)


class Exploding(FedAvg):
    """Idle clients diverge to infinity."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        model = super().train(cohort, inbox)["model"]
        return {"model": torch.where(cohort.uploads.unsqueeze(1), model, torch.inf)}


def test_an_update_that_is_not_finite_is_forgotten() -> None:
    world = World(rounds=LONG)
    assert_same(world.run(Umf(Exploding())).models, world.run(FedAvg()).models)


def test_memory_that_an_inner_method_writes_for_idle_clients_is_dropped() -> None:
    world = World(rounds=2)
    run = world.run(build("umf(moon, simulate_all=true)"))
    selected = {client for clients in run.selected for client in clients}
    for client in range(world.clients):
        memory = run.engine.store.read(client)
        assert "umf_update" in memory
        assert ("moon_model" in memory) == (client in selected)


def test_what_idle_clients_write_to_shielded_memory_is_forgotten_after_the_round() -> None:
    store = ClientStore()
    store.write(1, {"old": torch.tensor([10.0]), "other": torch.tensor([5.0])})
    memory = Memory(store, [0, 1, 2])
    shielded = memory.shielded(torch.tensor([True, False, False]))
    assert shielded.knows("old").tolist() == [False, True, False]
    assert shielded.get("old", torch.zeros(1, 1)).flatten().tolist() == [0, 10, 0]
    shielded["old"] = torch.tensor([[1.0], [2.0], [3.0]])
    # within the round, all clients see their own
    assert shielded.get("old", torch.zeros(1, 1)).flatten().tolist() == [1, 2, 3]
    assert shielded.knows("old").all()
    memory["outer"] = torch.tensor([[7.0], [8.0], [9.0]])
    memory.commit()
    assert {name: t.tolist() for name, t in store.read(0).items()} == {"old": [1.0], "outer": [7.0]}
    assert {n: t.tolist() for n, t in store.read(1).items()} == {
        "old": [10.0],
        "other": [5.0],
        "outer": [8.0],
    }
    assert {name: t.tolist() for name, t in store.read(2).items()} == {"outer": [9.0]}


# --- traffic ---


def test_every_client_is_counted_as_a_receiver_and_the_selected_as_senders() -> None:
    world = World(rounds=2)
    plain, fused = world.run(build("feddc")), world.run(build("umf(feddc)"))
    for plain_record, fused_record in zip(
        plain.federation.history, fused.federation.history, strict=True
    ):
        assert fused_record["bytes_down"] * 3 == plain_record["bytes_down"] * world.clients
        assert fused_record["bytes_up"] == plain_record["bytes_up"]


def test_a_pool_counts_one_model_for_each_receiver() -> None:
    world = World(rounds=1)
    run = world.run(build("umf(fedmr)"))
    row = run.federation.task.layout.size * 8
    assert run.federation.history[0]["bytes_down"] == world.clients * row


# --- errors ---


class Parted(FedAvg):
    """Sends half a model."""

    def send(self, round):  # type: ignore[no-untyped-def]
        return {"model": self.state["model"][:3].unsqueeze(0)}

    def shared(self, module: nn.Module, layout: Layout) -> Unit:
        return (slice(0, 3),)


class Many(FedAvg):
    facts = Facts(one_download=False)


class Addressed(FedAvg):
    def send(self, round):  # type: ignore[no-untyped-def]
        return {
            "model": self.state["model"].unsqueeze(0),
            "note": torch.zeros(len(round.selected), 1),
        }


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (Parted(), "do not exchange one whole"),
        (Many(), "do not receive one model"),
        (Addressed(), "receives a different 'note'"),
    ],
)
def test_methods_that_do_not_start_from_one_model_are_refused(
    inner: Algorithm, reason: str
) -> None:
    with pytest.raises(InvalidValue, match=reason) as caught:
        World().run(Umf(inner))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["fedrep", "fedfomo"])
def test_personalised_methods_without_one_start_are_refused(name: str) -> None:
    assert name in algorithms
    with pytest.raises(InvalidValue, match=rf"umf: clients of {name} "):
        World().run(build(f"umf(stages(fedavg:2, {name}))"))


@pytest.mark.parametrize("expression", ["umf(umf(fedavg))", "umf(stages(umf(fedavg):2, fedmr))"])
def test_an_update_is_not_fused_twice(expression: str) -> None:
    with pytest.raises(InvalidValue, match="only once"):
        build(expression)


@pytest.mark.parametrize("alpha", ["1.5", "-0.1"])
def test_alpha_is_a_share(alpha: str) -> None:
    with pytest.raises(InvalidValue, match="alpha"):
        build(f"umf(fedavg, alpha={alpha})")


def test_an_expression_round_trips() -> None:
    for expression in (
        "umf(fedavg)",
        "umf(stages(fedavg:50, fedmr), alpha=0.5, simulate_all=true)",
    ):
        assert str(build(expression)) == expression
        assert build(str(build(expression))) == build(expression)


def test_fusion_speeds_up_learning() -> None:
    """FedUmf needs fewer rounds than FedAvg if few of many similar clients train (its Table 1)."""
    world = World(
        rounds=12,
        participation=0.1,
        sizes=(20,) * 20,
        training=Training(learning_rate=0.1, batch_size=5),
    )
    task = world.task()
    world.labels = (
        world.inputs @ torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).double()
    ).argmax(1)
    losses = {}
    for expression in ("fedavg", "umf(fedavg)"):
        task = world.task()
        federation = Federation(
            build(expression), task, RowsEngine(task), Schedule(rounds=12, participation=0.1)
        )
        federation.run()
        losses[expression] = federation.history[-1]["loss"]
    assert losses["umf(fedavg)"] < losses["fedavg"] < math.log(4)
