"""CluSamp: compare cluster masses, groups, draws and rounds with a second computation."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, ward
from scipy.spatial.distance import pdist

from fedloom.algorithm.method import Method
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.clustered import (
    CluSamp,
    Clustered,
    Distribution,
    clusters_by_size,
    clusters_of_groups,
    displacement_distances,
    similar_groups,
)
from fedloom.parts.course import Course
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from naive import State, World, assert_same, average, flat

# --- masses ---


def assert_masses(clusters: list[Distribution], sizes: list[int], count: int) -> None:
    """Assert that rows sum to 1 and columns to m p_i, in exact fractions."""
    total = sum(sizes)
    assert len(clusters) == count
    for cluster in clusters:
        assert all(mass > 0 for mass in cluster.values())
        assert sum(Fraction(mass, total) for mass in cluster.values()) == 1
    for client, size in enumerate(sizes):
        assert sum(Fraction(cluster.get(client, 0), total) for cluster in clusters) == Fraction(
            count * size, total
        )


counts_and_sizes = st.lists(st.integers(1, 500), min_size=1, max_size=25).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.integers(1, len(sizes)))
)


@settings(deadline=None, max_examples=60)
@given(counts_and_sizes)
def test_clusters_by_size_have_exact_masses(case: tuple[list[int], int]) -> None:
    sizes, count = case
    clusters = clusters_by_size(sizes, count)
    assert_masses(clusters, sizes, count)
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    flattened = [sizes[client] for cluster in clusters for client in cluster]
    assert flattened == sorted(flattened, reverse=True)  # descending numbers of samples
    assert all(sizes[order[0]] >= size for size in sizes)


def test_clusters_by_size_equal_a_case_worked_by_hand() -> None:
    """Clusters by size equal a case solved by hand.

    10 samples, 2 clusters: masses 12, 6, 2 of 10 each; the heaviest client is in both clusters.
    """
    assert clusters_by_size([1, 6, 3], 2) == [{1: 10}, {1: 2, 2: 6, 0: 2}]


@settings(deadline=None, max_examples=60)
@given(counts_and_sizes, st.integers(0, 10**6), st.booleans())
def test_clusters_by_similarity_have_exact_masses(
    case: tuple[list[int], int], seed: int, nothing_known: bool
) -> None:
    sizes, count = case
    draws = np.random.default_rng(seed)
    points = np.zeros((len(sizes), 3)) if nothing_known else draws.normal(size=(len(sizes), 3))
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    groups = similar_groups(distance, sizes, count)
    assert sorted(client for group in groups for client in group) == list(range(len(sizes)))
    capacity = sum(sizes)
    for group in groups:
        assert len(group) == 1 or sum(sizes[client] for client in group) * count <= capacity
    assert_masses(
        clusters_of_groups(groups, draws.permutation(len(sizes)).tolist(), sizes, count),
        sizes,
        count,
    )


@settings(deadline=None, max_examples=40)
@given(counts_and_sizes.filter(lambda case: len(case[0]) > 1), st.integers(0, 10**6))
def test_groups_equal_a_cut_of_the_tree_at_the_merged_weight(
    case: tuple[list[int], int], seed: int
) -> None:
    """Groups equal a cut by SciPy of a tree that has the weight of each merge as its height.

    The reference cuts the tree in this way.
    """
    sizes, count = case
    points = np.random.default_rng(seed).normal(size=(len(sizes), 3))
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    tree = ward(pdist(distance))
    weights = [float(size) for size in sizes]
    for row in tree:
        weights.append(weights[int(row[0])] + weights[int(row[1])])
        row[2] = weights[-1] * count
    labels = fcluster(tree, sum(sizes), criterion="distance")
    expected = {frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels)}
    assert {frozenset(group) for group in similar_groups(distance, sizes, count)} == expected


def test_similar_clients_share_a_cluster() -> None:
    """Six clients in three directions form three clusters, one for each direction."""
    angles = torch.tensor([0.0, 0.02, 2.0, 2.03, 4.0, 4.01])
    rows = torch.stack([angles.cos(), angles.sin()], dim=1)
    distance = displacement_distances(rows, rows, "cosine").numpy()
    groups = similar_groups(distance, [5] * 6, 3)
    assert sorted(groups) == [[0, 1], [2, 3], [4, 5]]
    clusters = clusters_of_groups(groups, list(range(6)), [5] * 6, 3)
    assert sorted(sorted(cluster) for cluster in clusters) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("distance", ["cosine", "l1", "l2"])
def test_distances_equal_plain_loops(distance: str) -> None:
    a = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    b = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    b[1] = 0
    b[2] = a[0]
    distances = displacement_distances(a, b, distance)
    for i in range(3):
        for j in range(4):
            x, y = a[i].tolist(), b[j].tolist()
            if distance == "l1":
                expected = sum(abs(p - q) for p, q in zip(x, y, strict=True))
            elif distance == "l2":
                expected = sum((p - q) ** 2 for p, q in zip(x, y, strict=True))
            else:
                dot = sum(p * q for p, q in zip(x, y, strict=True))
                lengths = math.hypot(*x) * math.hypot(*y)
                expected = math.acos(max(-1.0, min(1.0, dot / lengths))) if lengths else 0.0
            assert float(distances[i, j]) == pytest.approx(expected, abs=1e-7)


# --- draws ---


def ready(method: Method, world: World) -> Pipeline:
    """Return the pipeline of the first round after the setup of a method."""
    task = world.task()
    schedule = Schedule(rounds=world.rounds, participation=world.participation)
    return Federation(method, task, RowsEngine(task), schedule).pipeline


@pytest.mark.parametrize("by", ["size", "similarity"])
def test_draws_are_unbiased(by: str) -> None:
    """Client i has mean weight m p_i over many rounds."""
    world = World(sizes=(5, 40, 17, 8, 23, 13, 6))
    pipeline = ready(Clustered(FedAvg(), by=by), world)  # type: ignore[arg-type]
    rounds, total = 3000, Counter[int]()
    for number in range(1, rounds + 1):
        selection = pipeline.select(replace(pipeline.plan.opening(), number=number))
        assert selection.weights is not None
        assert sum(selection.weights) == 3
        assert len(set(selection.clients)) == len(selection.clients)
        for client, weight in zip(selection.clients, selection.weights, strict=True):
            total[client] += int(weight)
    for client, size in enumerate(world.sizes):
        mean = 3 * size / sum(world.sizes)
        assert total[client] / rounds == pytest.approx(
            mean, abs=5 * math.sqrt(max(mean, 0.1) / rounds)
        )


def test_a_client_drawn_twice_trains_once_and_weighs_twice() -> None:
    world = World(sizes=(100, 5, 5, 5, 5, 5, 5), rounds=3)
    run = world.run(build("clusamp(by=size)"))
    pipeline = run.federation.pipeline
    opening = replace(pipeline.plan.opening(), seed=world.seed)
    clients = [pipeline.select(replace(opening, number=t)) for t in (1, 2, 3)]
    assert [list(selection.clients) for selection in clients] == run.selected
    assert any(selection.weights and max(selection.weights) >= 2 for selection in clients)
    state, expected = world.initial(), []
    for number, selection in enumerate(clients, start=1):
        assert selection.weights is not None
        uploads = [world.train(state, number, client)[0] for client in selection.clients]
        state = average(uploads, [weight / 3 for weight in selection.weights])
        expected.append(state)
    assert_same(run.models, expected)


def test_weights_by_size_count_samples() -> None:
    world = World(sizes=(100, 5, 5, 5, 5, 5, 5))
    by_mass = ready(CluSamp(by="size"), world)
    by_samples = ready(CluSamp(by="size", weight="size"), world)
    for number in range(1, 20):
        round = replace(by_mass.plan.opening(), number=number)
        draws, sized = by_mass.select(round), by_samples.select(round)
        assert draws.clients == sized.clients
        assert draws.weights is not None
        expected = tuple(
            w * world.sizes[c] for c, w in zip(draws.clients, draws.weights, strict=True)
        )
        assert sized.weights == expected


# --- rounds ---


@pytest.mark.parametrize("distance", ["cosine", "l1", "l2"])
@pytest.mark.parametrize("norm", [False, True])
def test_rounds_of_clusamp_equal_plain_loops(distance: str, norm: bool) -> None:
    world = World(rounds=6, norm=norm)
    run = world.run(build(f"clusamp(distance={distance})"))
    selected, models = naive_clusamp(world, distance)
    assert run.selected == selected
    assert_same(run.models, models)


def naive_clusamp(world: World, distance: str) -> tuple[list[list[int]], list[State]]:
    """Compute selection and averages from the uploads with dense matrices and the random draws of
    the method.
    """
    count, draws = world.clients, 3
    total = sum(world.sizes)
    updates = [
        torch.zeros(len(flat(world, world.initial())), dtype=torch.float64) for _ in range(count)
    ]
    state, selections, models = world.initial(), [], []
    for number in range(1, world.rounds + 1):
        matrix = np.zeros((count, count))
        for i in range(count):
            for j in range(count):
                matrix[i, j] = distance_of(updates[i], updates[j], distance)
        groups = similar_groups(matrix, list(world.sizes), draws)
        order = torch.randperm(
            count, generator=stream(world.seed, "clusters", round=number)
        ).tolist()
        masses = np.zeros((draws, count), dtype=np.int64)
        remaining = np.array(world.sizes) * draws
        heavy = sorted(groups, key=lambda group: (-sum(world.sizes[c] for c in group), group))[
            :draws
        ]
        for k, group in enumerate(heavy):
            for client in group:
                masses[k, client] = min(remaining[client], total)
                remaining[client] -= masses[k, client]
        for client in order:
            for k in range(draws):
                mass = min(remaining[client], total - masses[k].sum())
                masses[k, client] += mass
                remaining[client] -= mass
        generator = stream(world.seed, "select", round=number)
        drawn = []
        for k in range(draws):
            point = int(torch.randint(total, (), generator=generator))
            opening = heavy[k] if k < len(heavy) else []
            line = [*opening, *(client for client in order if client not in opening)]
            for client in line:
                if point < masses[k, client]:
                    drawn.append(client)
                    break
                point -= int(masses[k, client])
        clients = list(dict.fromkeys(drawn))
        uploads = [world.train(state, number, client)[0] for client in clients]
        for client, upload in zip(clients, uploads, strict=True):
            updates[client] = flat(world, upload) - flat(world, state)
        state = average(uploads, [drawn.count(client) / draws for client in clients])
        selections.append(clients)
        models.append(state)
    return selections, models


def distance_of(a: torch.Tensor, b: torch.Tensor, distance: str) -> float:
    if distance == "l1":
        return float(np.abs(a.numpy() - b.numpy()).sum())
    if distance == "l2":
        return float(((a.numpy() - b.numpy()) ** 2).sum())
    lengths = np.linalg.norm(a.numpy()) * np.linalg.norm(b.numpy())
    if a is b or lengths == 0:
        return 0.0
    return float(np.arccos(np.clip(a.numpy() @ b.numpy() / lengths, -1, 1)))


def test_displacements_are_remembered_until_a_client_uploads_again() -> None:
    world = World(rounds=4)
    method = CluSamp()
    run = world.run(method)
    state: State = world.initial()
    expected: dict[int, torch.Tensor] = {}
    for number, clients in enumerate(run.selected, start=1):
        for client in clients:
            expected[client] = flat(world, world.train(state, number, client)[0]) - flat(
                world, state
            )
        state = run.models[number - 1]
    displacements = {
        int(name.removeprefix("displacement")): t
        for name, t in method.state.items()
        if name != "distance"
    }
    assert displacements.keys() == expected.keys()
    for client, tensor in expected.items():
        torch.testing.assert_close(displacements[client], tensor, rtol=1e-9, atol=1e-9)


# --- other methods inside ---


@pytest.mark.parametrize("inner", ["fedmr", "indep", "fedmut", "stages(fedavg:1, fedmr)"])
@pytest.mark.parametrize("by", ["size", "similarity"])
def test_every_model_of_a_pool_gets_a_different_client(inner: str, by: str) -> None:
    world = World(sizes=(200, 5, 5, 5, 5, 5, 5), participation=0.6, rounds=5)
    run = world.run(build(f"clustered({inner}, by={by})"))
    for clients in run.selected[1:] if inner.startswith("stages") else run.selected:
        assert len(clients) == len(set(clients)) == 4
    assert any(0 in clients for clients in run.selected)


def test_a_pool_keeps_its_size_and_its_clients_come_from_their_clusters() -> None:
    world = World(sizes=(10, 9, 8, 7, 6, 5, 4), rounds=5)
    run = world.run(build("clustered(fedmr, by=size)"))
    assert run.federation.server_state()["inner0.pool"].shape[0] == 3
    clusters = clusters_by_size(list(world.sizes), 3)
    for clients in run.selected:  # some order of the slots matches clusters to clients
        draws = [
            [a, b, c] for a in clients for b in clients for c in clients if len({a, b, c}) == 3
        ]
        assert any(
            all(c in cluster for c, cluster in zip(draw, clusters, strict=True)) for draw in draws
        )


def test_a_selection_is_a_function_of_round_and_state() -> None:
    world = World(rounds=3)
    run = world.run(CluSamp())
    pipeline = run.federation.pipeline
    round = replace(pipeline.plan.opening(), number=4)
    selection = pipeline.select(round)
    repeated = Course(CluSamp())
    repeated.setup(run.federation.course.plan)
    repeated.restore(run.federation.server_state())
    assert pipeline.select(round) == selection == repeated.at(4).select(round)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("clustered(clusamp)", "clusamp is allowed only once"),
        ("clustered(power_of_choice(fedavg))", "already selects the clients"),
        ("clustered(fedrep)", "do not exchange one whole model"),
    ],
)
def test_methods_that_cannot_be_clustered_are_refused(expression: str, reason: str) -> None:
    with pytest.raises(InvalidValue, match=reason) as caught:
        ready(build(expression), World())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("by", ["size", "similarity"])
@pytest.mark.parametrize("inner", ["fedavg", "fedmr"])
def test_idle_clients_train_whether_umf_is_inside_or_around(inner: str, by: str) -> None:
    world = World(norm=True, rounds=6)
    inside = world.run(build(f"clustered(umf({inner}), by={by})"))
    around = world.run(build(f"umf(clustered({inner}, by={by}))"))
    assert inside.selected == around.selected
    assert inside.federation.history == around.federation.history
    assert_same(inside.models, around.models, 0)
    assert_differ(inside.models[-1], world.run(build(f"clustered({inner}, by={by})")).models[-1])


def test_umf_in_one_of_several_stages_may_be_clustered() -> None:
    world = World(rounds=4)
    inside = world.run(build("clustered(stages(fedavg:2, umf(fedmr)))"))
    around = world.run(build("stages(clustered(fedavg):2, umf(clustered(fedmr)))"))
    assert inside.selected[:2] == around.selected[:2]
    assert_same(inside.models[:2], around.models[:2], 0)
    idle = [record["bytes_down"] for record in inside.federation.history]
    row = inside.federation.task.layout.size * 8
    assert idle[2:] == [world.clients * row] * 2


def assert_differ(state: State, other_state: State) -> None:
    assert not torch.allclose(state["head.weight"], other_state["head.weight"], atol=1e-4)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("clusamp(by=similar)", "by"),
        ("clusamp(distance=l3)", "distance"),
        ("clusamp(weight=none_at_all)", "weight"),
        ("clustered(fedavgg)", "did you mean 'fedavg'"),
    ],
)
def test_impossible_values_are_refused(expression: str, message: str) -> None:
    with pytest.raises((InvalidValue, KeyError), match=message):
        build(expression)


def test_an_expression_round_trips() -> None:
    for expression in (
        "clusamp",
        "clusamp(distance='l1')",
        "clustered(fedprox(mu=0.1), by='size')",
    ):
        assert str(build(expression)) == expression
        assert build(str(build(expression))) == build(expression)


def test_a_single_client_is_its_own_cluster() -> None:
    world = World(sizes=(9,), participation=1.0, rounds=2)
    assert_same(world.run(CluSamp()).models, world.run(FedAvg()).models)
