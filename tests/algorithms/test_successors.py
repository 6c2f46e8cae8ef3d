"""Successors of recombination and methods of other libraries against a second computation.

The second computation follows the definitions of the methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.algorithm.records import Plan, Replies
from fedloom.algorithms.afl import on_simplex
from fedloom.algorithms.cfl import bipartition
from fedloom.algorithms.fedcross import FedCross, by_cosine
from fedloom.algorithms.ifca import IFCA
from fedloom.algorithms.qfedavg import QFedAvg
from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.flat.layout import Layout
from fedloom.parts.building import build
from fedloom.parts.course import Course
from fedloom.parts.power_of_choice import PowerOfChoice
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from naive import Net, State, World, assert_same, average, flat, shares, uniform

Rounds = list[list[int]]


# --- terms of the loss ---


def kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return the KL divergence of the softmaxes by a plain loop, as the mean over rows."""
    total = student.new_zeros(())
    for t, s in zip(teacher, student, strict=True):
        p, q = torch.softmax(t / temperature, 0), torch.softmax(s / temperature, 0)
        total = total + sum(p[c] * (p[c].log() - q[c].log()) for c in range(len(p)))
    return total / len(teacher)


def without_label(logits: Tensor, labels: Tensor) -> Tensor:
    """Remove the label's logit from each row."""
    return torch.stack(
        [torch.cat([row[:y], row[y + 1 :]]) for row, y in zip(logits, labels.tolist(), strict=True)]
    )


def trained_with(world: World, rounds: Rounds, term: Callable[..., Any]) -> Iterator[State]:
    """Run FedAvg with `term(world, logits, features, x, y, client, sent)` as each batch's loss."""
    state = world.initial()
    for number, clients in enumerate(rounds, start=1):
        uploads = []
        for client in clients:
            sent = world.at(state).eval()

            def loss(
                module: Net, x: Tensor, y: Tensor, step: int, client: int = client, sent: Any = sent
            ) -> Tensor:
                features = module.features(x)
                logits = module.head(features)
                return term(world, logits, features, x, y, client, sent)

            uploads.append(world.train(state, number, client, loss=loss)[0])
        state = average(uploads, shares(world, clients))
        yield state


def not_true(
    world: World, logits: Tensor, features: Tensor, x: Tensor, y: Tensor, client: int, sent: Any
) -> Tensor:
    teacher = sent(x).detach()
    return F.cross_entropy(logits, y) + 0.7 * 4 * kl(
        without_label(teacher, y), without_label(logits, y), 2.0
    )


def calibrated(
    world: World, logits: Tensor, features: Tensor, x: Tensor, y: Tensor, client: int, sent: Any
) -> Tensor:
    counts = [int((world.data(client)[1] == c).sum()) for c in range(world.classes)]
    total = logits.new_zeros(())
    for row, label in zip(logits, y.tolist(), strict=True):
        scores = {c: row[c] - 0.5 * counts[c] ** -0.25 for c in range(world.classes) if counts[c]}
        total = total + torch.logsumexp(torch.stack(list(scores.values())), 0) - scores[label]
    return total / len(y)


def decorrelated(
    world: World, logits: Tensor, features: Tensor, x: Tensor, y: Tensor, client: int, sent: Any
) -> Tensor:
    loss = F.cross_entropy(logits, y)
    count, width = features.shape
    if count == 1:
        return loss
    columns = [(z - z.mean()) / torch.sqrt(z.var() + 1e-8) for z in features.unbind(1)]
    pairs = [(i, j) for i in range(width) for j in range(width) if i != j]
    return loss + 0.3 * sum((columns[i] @ columns[j]) ** 2 for i, j in pairs) / len(pairs) / count


TERMS = [
    ("fedntd(fedavg, beta=0.7, temperature=2.0)", not_true),
    ("fedlc(fedavg, tau=0.5)", calibrated),
    ("feddecorr(fedavg, beta=0.3)", decorrelated),
]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
@pytest.mark.parametrize(("name", "term"), TERMS, ids=[name for name, _ in TERMS])
def test_terms_agree_with_the_second_computation(
    name: str, term: Callable[..., Any], norm: bool
) -> None:
    world = World(norm=norm)
    run = world.run(build(name))
    assert_same(run.models, list(trained_with(world, run.selected, term)))


LIMITS = [
    ("fedntd(fedavg, beta=0)", "fedavg"),
    ("fedlc(fedavg, tau=0)", "fedavg"),
    ("feddecorr(fedavg, beta=0)", "fedavg"),
    ("fedkdmr(distillation=0)", "fedmr"),
    ("fedcross(alpha=1.0)", "indep"),
    ("fedkdmr(distillation=0, local=fedprox(mu=0.3))", "fedmr(local=fedprox(mu=0.3))"),
    ("fedcross(alpha=1.0, local=moon)", "indep(local=moon)"),
    ("fedcross(alpha=0.3, averaging_rounds=9)", "fedmr(blend=1.0)"),
    ("qfedavg(q=0)", "fedavg(weighted=false)"),
    ("ifca(k=1)", "fedavg(weighted=false)"),
]


@pytest.mark.parametrize(("name", "limit"), LIMITS, ids=[name for name, _ in LIMITS])
def test_limits(name: str, limit: str) -> None:
    world = World(norm=True)
    assert_same(world.run(build(name)).models, world.run(build(limit)).models)


@pytest.mark.parametrize("name", ["afl(rate=0, mean_of_iterates=false)", "cfl(mean_norm=0)"])
def test_limits_of_methods_that_need_everybody(name: str) -> None:
    world = World(norm=True, participation=1.0)
    assert_same(world.run(build(name)).models, world.run(build("fedavg(weighted=false)")).models)


@pytest.mark.parametrize(
    "wrapped",
    [
        "scaffold",
        "moon",
        "fedsam",
        "fedmr",
        "fedrep",
        "ala(fedavg)",
        "umf(fedavg)",
        "stages(fedavg:1, fedmr)",
    ],
)
@pytest.mark.parametrize("term", ["fedntd({}, beta=0)", "feddecorr({}, beta=0)"])
def test_a_term_of_no_weight_changes_no_method(wrapped: str, term: str) -> None:
    world = World()
    assert_same(world.run(build(term.format(wrapped))).models, world.run(build(wrapped)).models)


@pytest.mark.parametrize("wrapped", ["moon", "fedmr(local=fedprox)", "fedper"])
def test_terms_nest_in_any_order(wrapped: str) -> None:
    world = World()
    pair = [
        f"fedntd(feddecorr({wrapped}, beta=0.2), beta=0.5)",
        f"feddecorr(fedntd({wrapped}, beta=0.5), beta=0.2)",
    ]
    nested, swapped = (world.run(build(name)).models for name in pair)
    assert_same(nested, swapped)


def test_two_classes_leave_nothing_to_distil() -> None:
    class Two(World):
        classes = 2

    world = Two()
    assert_same(world.run(build("fedntd(fedavg)")).models, world.run(build("fedavg")).models)


# --- recombination ---


def travelling(
    world: World,
    rounds: Rounds,
    mix: Callable[[int, list[State]], list[State]],
    loss_of: Any = None,
) -> Iterator[State]:
    """Train a pool of models, one per slot; yield their mean after each round.

    `mix(number, uploads)` mixes the models.
    """
    pool = [world.initial() for _ in rounds[0]]
    for number, clients in enumerate(rounds, start=1):
        mean = average(pool, uniform(clients))
        loss = None if loss_of is None else loss_of(number, world.at(mean).eval())
        counters = average(pool, uniform(clients))
        starts = [
            {n: t if t.is_floating_point() else counters[n] for n, t in model.items()}
            for model in pool
        ]
        pool = mix(
            number,
            [world.train(s, number, i, loss=loss)[0] for s, i in zip(starts, clients, strict=True)],
        )
        yield average(pool, uniform(clients))


def sum_over_pairs(one: State, other: State) -> float:
    """The authors' code: sum the cosines of pairs of consecutive tensors, the last one twice."""
    total, here, there = 0.0, [], []
    tensors = [(t.double(), other[n].double()) for n, t in one.items()]  # with counters
    for k, (a, b) in enumerate(tensors):
        if k % 2 == 0:
            here, there = [], []
        here.append(a.flatten())
        there.append(b.flatten())
        if k % 2 == 1:
            total += float(F.cosine_similarity(torch.cat(here), torch.cat(there), 0))
    return total + float(F.cosine_similarity(torch.cat(here), torch.cat(there), 0))


def crossing(
    world: World,
    partner: str,
    alpha: Callable[[int], float],
    propellers: int = 0,
    pairs: bool = False,
) -> Callable[..., list[State]]:
    def mix(number: int, uploads: list[State]) -> list[State]:
        count, vectors = len(uploads), [flat(world, upload) for upload in uploads]
        mixed = []
        for k, upload in enumerate(uploads):
            peers = [j for j in range(count) if j != k]
            cosine = {j: float(F.cosine_similarity(vectors[k], vectors[j], 0)) for j in peers}
            if pairs:
                cosine = {j: sum_over_pairs(upload, uploads[j]) for j in peers}
            partners = {
                "lowest": [min(peers, key=lambda j: cosine[j])],
                "highest": [max(peers, key=lambda j: cosine[j])],
                "in_order": [(k + (number - 1) % (count - 1) + 1) % count],
            }[partner]
            if propellers:
                partners = [
                    (k + (number - 1 + p) % (count - 1) + 1) % count for p in range(propellers)
                ]
            partner_model = average([uploads[j] for j in partners], uniform(partners))
            a = alpha(number)
            mixed.append(
                {
                    n: a * t + (1 - a) * partner_model[n] if t.is_floating_point() else t
                    for n, t in upload.items()
                }
            )
        return mixed

    return mix


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedcross(alpha=0.7)", {"partner": "lowest", "alpha": lambda number: 0.7}),
        (
            "fedcross(alpha=0.8, partner=highest)",
            {"partner": "highest", "alpha": lambda number: 0.8},
        ),
        (
            "fedcross(alpha=[[1, 0.5], [3, 0.9]], partner=in_order)",
            {"partner": "in_order", "alpha": lambda number: min(0.5 + 0.2 * (number - 1), 0.9)},
        ),
        (
            "fedcross(alpha=0.6, propellers=2, propeller_rounds=9)",
            {"partner": "lowest", "alpha": lambda number: 0.6, "propellers": 2},
        ),
        (
            "fedcross(alpha=0.7, similarity=pairs)",
            {"partner": "lowest", "alpha": lambda number: 0.7, "pairs": True},
        ),
        (
            "fedcross(alpha=0.7, partner=highest, similarity=pairs)",
            {"partner": "highest", "alpha": lambda number: 0.7, "pairs": True},
        ),
    ],
)
def test_fedcross_agrees_with_the_second_computation(
    name: str, options: dict[str, Any], norm: bool
) -> None:
    world = World(norm=norm)
    run = world.run(build(name))
    assert len(run.selected[0]) > 2
    assert_same(run.models, list(travelling(world, run.selected, crossing(world, **options))))


def test_a_model_without_a_reply_counts_batches_as_it_was_sent() -> None:
    seen = []

    class Listening(FedCross):
        def receive(self, round: Round, replies: Replies) -> None:
            seen.append((replies.slots.tolist(), replies.integers))
            super().receive(round, replies)

    task, counts = World(norm=True).task(), []
    schedule = Schedule(rounds=4, participation=1.0, dropout=0.4, seed=3)
    run = Federation(Listening(similarity="pairs"), task, RowsEngine(task), schedule)
    for _ in range(4):
        counts.append(run.integers.clone())
        run.step()
    assert any(len(slots) < task.clients for slots, _ in seen)
    for (slots, integers), sent in zip(seen, counts, strict=True):
        assert integers is not None
        for slot, row in enumerate(integers):
            assert bool((row > sent).all()) if slot in slots else torch.equal(row, sent)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("largest", [False, True])
def test_the_last_pair_counts_twice_where_all_tensors_have_a_partner(
    layers: int, largest: bool
) -> None:
    module = nn.Sequential(*(nn.Linear(3, 3, bias=k < 2) for k in range(layers)))
    method, layout = FedCross(similarity="pairs"), Layout(module)
    method.plan = Plan(layout, layout.flatten(module), 5, 5, 1, 0, 3, torch.ones_like, module)
    pool = torch.randn(
        5, layout.size, generator=torch.Generator().manual_seed(layers), dtype=torch.float64
    )
    states = [layout.tensors(row) for row in pool]
    expected = []
    for k, state in enumerate(states):
        sums = {j: sum_over_pairs(state, other) for j, other in enumerate(states) if j != k}
        expected.append((max if largest else min)(sums, key=lambda j: sums[j]))
    assert by_cosine(pool, method.blocks(layout.size), largest).tolist() == expected
    if layers == 1:  # one block is the whole model
        method.similarity = "whole"
        assert by_cosine(pool, method.blocks(layout.size), largest).tolist() == expected


@pytest.mark.parametrize("partner", ["lowest", "highest", "in_order"])
def test_fedcross_of_two_models_is_the_uniform_mean(partner: str) -> None:
    world = World(participation=2 / 7)
    run = world.run(build(f"fedcross(alpha=0.5, partner={partner})"))
    assert len(run.selected[0]) == 2
    assert_same(run.models, world.run(build("fedavg(weighted=false)")).models)


def test_partners_in_order_keep_the_mean_of_the_pool() -> None:
    world = World()
    run = world.run(build("fedcross(alpha=0.4, partner=in_order)"))
    pool = run.federation.algorithm.state["pool"]
    assert float((pool - pool.mean(0)).norm()) > 1e-3
    independent = world.run(build("indep")).models[0]
    assert_same(run.models[:1], [independent])


def test_fedcross_needs_two_models() -> None:
    with pytest.raises(
        InvalidValue, match=r"^fedcross needs at least 2 participants, got 1: raise participation$"
    ):
        World(participation=1 / 7).run(build("fedcross"))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
def test_fedkdmr_agrees_with_the_second_computation(norm: bool) -> None:
    world = World(norm=norm)
    run = world.run(build("fedkdmr(distillation=0.6, temperature=0.5, ramp=2, unit=tensor)"))

    def recombined(number: int, uploads: list[State]) -> list[State]:
        pool = [dict(upload) for upload in uploads]
        generator = stream(world.seed, "recombine", round=number)
        layout = run.federation.task.layout
        for (columns,) in layout.units("tensor", 1.0):
            name = next(entry.name for entry in layout.slices if entry.start == columns.start)
            order = torch.randperm(len(uploads), generator=generator).tolist()
            for k, j in enumerate(order):
                pool[k][name] = uploads[j][name]
        return pool

    def loss_of(number: int, teacher: nn.Module) -> Any:
        a = 0.6 * min((number - 1) / 2, 1.0)

        def loss(module: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
            logits = module(x)
            return (1 - a) * F.cross_entropy(logits, y) + a * 0.25 * kl(
                teacher(x).detach(), logits, 0.5
            )

        return loss

    assert_same(run.models, list(travelling(world, run.selected, recombined, loss_of)))


# --- one global model ---


def mean_loss(world: World, state: State, client: int) -> Tensor:
    inputs, labels = world.data(client)
    with torch.no_grad():
        return F.cross_entropy(world.at(state).eval()(inputs), labels)


def fair(world: World, rounds: Rounds, q: float) -> Iterator[State]:
    state = world.initial()
    for number, clients in enumerate(rounds, start=1):
        eta = world.rate(number)
        uploads = [world.train(state, number, client)[0] for client in clients]
        moves, bound = [], 0.0
        for client, upload in zip(clients, uploads, strict=True):
            loss = float(mean_loss(world, state, client)) + 1e-10
            slope = {n: (state[n] - upload[n]) / eta for n in world.trained}
            moves.append({n: loss**q * g for n, g in slope.items()})
            bound += q * loss ** (q - 1) * float(flat(world, slope).square().sum()) + loss**q / eta
        mean = average(uploads, uniform(clients))
        for name in world.trained:
            mean[name] = state[name] - sum(move[name] for move in moves) / bound
        state = mean
        yield state


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
@pytest.mark.parametrize("q", [0.5, 2.0])
def test_qfedavg_agrees_with_the_second_computation(q: float, norm: bool) -> None:
    world = World(norm=norm)
    run = world.run(build(f"qfedavg(q={q})"))
    assert_same(run.models, list(fair(world, run.selected, q)))


@pytest.mark.parametrize(("q", "scale"), [(12.0, 1e-4), (40.0, 1e-7), (300.0, 1.0), (300.0, 1e3)])
def test_qfedavg_of_extreme_powers_agrees_with_exact_numbers(q: float, scale: float) -> None:
    """Losses with powers below or above all floats equal the results of rational numbers."""
    module = nn.Linear(5, 2)
    layout = Layout(module)
    method, initial = QFedAvg(q=q), torch.zeros(layout.size)
    method.setup(Plan(layout, initial, 40, 40, 1, 0, 2, torch.ones_like, module))
    generator = torch.Generator().manual_seed(7)
    losses = scale * (1 + torch.rand(40, generator=generator))
    moved = torch.randn(40, layout.size, generator=generator)
    clients = torch.arange(40)
    method.receive(
        Round(1, 1, 0, 40, 40, 0.1, 0.1),
        Replies({"model": -moved, "loss": losses}, clients, clients, torch.ones(40)),
    )
    numerator, bound = torch.zeros(layout.size, dtype=torch.float64), Fraction(0)
    exact = [Fraction(float(loss)) + Fraction(1e-10) for loss in losses]
    for loss, row in zip(exact, moved.double(), strict=True):
        steepness = Fraction(float(row @ row)) / Fraction(0.1)
        bound += int(q) * loss ** (int(q) - 1) * steepness + loss ** int(q)
    for loss, row in zip(exact, moved.double(), strict=True):
        numerator += float(loss ** int(q) / bound) * row
    torch.testing.assert_close(method.state["model"].double(), -numerator, rtol=1e-4, atol=0)


def simplex(values: list[float]) -> list[float]:
    """Project on the simplex by bisection of theta in sum max(v - theta, 0) = 1."""
    low, high = min(values) - 1, max(values)
    for _ in range(200):
        theta = (low + high) / 2
        low, high = (theta, high) if sum(max(v - theta, 0) for v in values) > 1 else (low, theta)
    return [max(v - low, 0) for v in values]


def test_the_projection_on_the_simplex_is_the_nearest_point() -> None:
    values = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        on_simplex(values), torch.tensor(simplex(values.tolist()), dtype=torch.float64)
    )


def agnostic(world: World, rounds: Rounds, rate: float) -> Iterator[State]:
    state, weights, iterates = world.initial(), [1 / world.clients] * world.clients, []
    for number, clients in enumerate(rounds, start=1):
        uploads = {client: world.train(state, number, client)[0] for client in clients}
        losses = [float(mean_loss(world, state, client)) for client in range(world.clients)]
        state = average([uploads[client] for client in range(world.clients)], weights)
        weights = simplex([w + rate * loss for w, loss in zip(weights, losses, strict=True)])
        iterates.append(state)
        yield average(iterates, uniform(iterates))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
def test_afl_agrees_with_the_second_computation(norm: bool) -> None:
    world = World(norm=norm, participation=1.0)
    run = world.run(build("afl(rate=0.2)"))
    assert_same(run.models, list(agnostic(world, run.selected, 0.2)))


# --- clusters ---


def test_ifca_trains_the_model_of_least_loss_on_each_client() -> None:
    world = World()
    method = build("ifca(k=3)")
    run = world.run(method)
    layout = run.federation.task.layout
    untrained = build("ifca(k=3)")
    Course(untrained).setup(run.federation.pipeline.plan)
    models = [layout_state(world, layout, row) for row in untrained.state["models"]]
    assert len({tuple(flat(world, model).tolist()) for model in models}) == 3
    chosen: set[int] = set()
    for number, clients in enumerate(run.selected, start=1):
        picks = [
            min(range(3), key=lambda j: float(mean_loss(world, models[j], client)))
            for client in clients
        ]
        uploads = [
            world.train(models[j], number, client)[0]
            for j, client in zip(picks, clients, strict=True)
        ]
        for j in set(picks):
            members = [upload for upload, pick in zip(uploads, picks, strict=True) if pick == j]
            models[j] = average(members, uniform(members))
        chosen |= set(picks)
    assert len(chosen) > 1
    for row, model in zip(method.state["models"], models, strict=True):
        torch.testing.assert_close(
            row[: layout.trainable], flat(world, model), rtol=1e-9, atol=1e-9
        )
    assert isinstance(method, IFCA)
    assert method.plan.layout is layout


def layout_state(world: World, layout: Any, row: Tensor) -> State:
    return {
        **world.initial(),
        **{name: tensor.clone() for name, tensor in layout.tensors(row).items()},
    }


def test_cfl_splits_groups_whose_updates_are_orthogonal() -> None:
    updates = torch.zeros(6, 4, dtype=torch.float64)
    updates[[0, 2, 5], 0], updates[[1, 3, 4], 1] = 1.0, 2.0
    group, other_group = bipartition(updates)
    assert (group.tolist(), other_group.tolist()) == ([0, 2, 5], [1, 3, 4])


def test_cfl_agrees_with_the_second_computation() -> None:
    world = World(participation=1.0)
    method = build("cfl(mean_norm=1e9, client_norm=0, first_round=1)")
    world.run(method)
    everybody = list(range(world.clients))
    cluster, models = dict.fromkeys(everybody, 0), {0: world.initial()}
    for number in range(1, world.rounds + 1):
        updates = {}
        for client in everybody:
            upload, _ = world.train(models[cluster[client]], number, client)
            updates[client] = {n: upload[n] - models[cluster[client]][n] for n in world.trained}
        for c in list(models):
            members = [client for client in everybody if cluster[client] == c]
            groups = [members]
            if number > 1 and len(members) > 2:
                groups = complete_linkage(members, {i: flat(world, updates[i]) for i in members})
                for client in groups[1]:
                    cluster[client] = len(models)
                models[len(models)] = models[c]
            for index, group in zip((c, len(models) - 1), groups, strict=False):
                move = {n: sum(updates[i][n] for i in group) / len(group) for n in world.trained}
                models[index] = {n: models[index][n] + move[n] for n in world.trained}
    assert method.state["cluster"].tolist() == [cluster[client] for client in everybody]
    assert len(models) > 2
    for row, c in zip(method.state["models"], models, strict=True):
        torch.testing.assert_close(row, flat(world, models[c]), rtol=1e-9, atol=1e-9)


def complete_linkage(members: list[int], vectors: dict[int, Tensor]) -> list[list[int]]:
    """Join the two groups with the least distance of their farthest members until two remain.

    The result is sorted by first members.
    """
    groups = [[member] for member in members]

    def gap(a: list[int], b: list[int]) -> float:
        return max(1 - float(F.cosine_similarity(vectors[i], vectors[j], 0)) for i in a for j in b)

    while len(groups) > 2:
        a, b = min(
            ((a, b) for k, a in enumerate(groups) for b in groups[k + 1 :]),
            key=lambda pair: gap(*pair),
        )
        groups = [group for group in groups if group not in (a, b)] + [sorted(a + b)]
    return sorted(groups)


# --- selection ---


def candidates(world: World, number: int, count: int) -> list[int]:
    """Return the clients with the largest log(u) / n."""
    uniforms = torch.rand(
        world.clients, generator=stream(world.seed, "candidates", round=number), dtype=torch.float64
    )
    keys = [math.log(float(u)) / n for u, n in zip(uniforms, world.sizes, strict=True)]
    return sorted(range(world.clients), key=lambda i: -keys[i])[:count]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
@pytest.mark.parametrize("samples", [None, 4])
def test_power_of_choice_asks_its_candidates(samples: int | None, norm: bool) -> None:
    world = World(norm=norm)
    run = world.run(build(f"power_of_choice(fedavg, candidates=5, samples={samples or 'none'})"))
    state = world.initial()
    seen = set()
    for number, clients in enumerate(run.selected, start=1):
        losses = {}
        for client in candidates(world, number, 5):
            inputs, labels = world.data(client)
            if samples is not None:
                order = torch.randperm(
                    len(labels), generator=stream(world.seed, "asked", round=number, client=client)
                )
                inputs, labels = inputs[order[:samples]], labels[order[:samples]]
            with torch.no_grad():
                losses[client] = float(F.cross_entropy(world.at(state).eval()(inputs), labels))
        assert clients == sorted(losses, key=lambda i: -losses[i])[: len(clients)]
        state = average(
            [world.train(state, number, client)[0] for client in clients], uniform(clients)
        )
        assert_same([run.models[number - 1]], [state])
        seen.add(tuple(clients))
    assert len(seen) > 1


def test_asking_costs_the_models_of_candidates_that_do_not_take_part_and_a_number_each() -> None:
    world = World()
    model = sum(p.nbytes for p in world.module.parameters())
    for name, down, up in [
        ("power_of_choice(fedavg, candidates=5)", 5 * model, 3 * model + 5 * 8),
        ("power_of_choice(fedavg, candidates=3)", 3 * model, 3 * model + 3 * 8),
        ("power_of_choice(fedavg, candidates=5, ask=false)", 3 * model, 3 * model),
        ("power_of_choice(scaffold, candidates=5)", (5 + 2 * 3) * model, 2 * 3 * model + 5 * 8),
        ("fedntd(power_of_choice(fedavg, candidates=5))", 5 * model, 3 * model + 5 * 8),
        ("stages(fedavg:1, power_of_choice(fedavg, candidates=5))", 5 * model, 3 * model + 5 * 8),
    ]:
        record = world.run(build(name)).federation.history[-1]
        assert (record["bytes_down"], record["bytes_up"]) == (down, up), name


def test_a_candidate_that_does_not_answer_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    silent = candidates(world, 1, 5)[0]
    heard = PowerOfChoice.answer

    def answer(self: Any, cohort: Any, inbox: Any, inner: Any) -> Any:
        if silent in cohort.clients:
            raise RuntimeError("no answer")
        return heard(self, cohort, inbox, inner)

    monkeypatch.setattr(PowerOfChoice, "answer", answer)
    run = world.run(build("power_of_choice(fedavg, candidates=4)"))
    assert silent not in run.selected[0]
    monkeypatch.setattr(PowerOfChoice, "answer", lambda *_: 1 / 0)
    run = world.run(build("power_of_choice(fedavg, candidates=4)"))
    assert [len(clients) for clients in run.selected] == [3] * world.rounds


def test_sites_are_not_asked() -> None:
    world = World()
    plan = replace(world.run(build("fedavg")).federation.algorithm.plan, remote=True)
    with pytest.raises(
        InvalidValue,
        match=r"^power_of_choice: real sites cannot answer before a round: set ask=false$",
    ):
        Course(build("power_of_choice(fedavg)")).setup(plan)
    Course(build("power_of_choice(fedavg, ask=false)")).setup(plan)


def test_power_of_choice_takes_the_candidates_of_highest_known_loss() -> None:
    world = World()
    run = world.run(build("power_of_choice(fedavg, candidates=5, ask=false)"))
    losses = dict.fromkeys(range(world.clients), math.inf)
    for number, clients in enumerate(run.selected, start=1):
        assert (
            clients
            == sorted(candidates(world, number, 5), key=lambda i: -losses[i])[: len(clients)]
        )
        for client in clients:
            losses[client] = loss_of_round(world, run, number, client)
    expected_losses = torch.tensor(
        [losses[client] for client in range(world.clients)], dtype=torch.float64
    )
    torch.testing.assert_close(run.federation.algorithm.state["losses"], expected_losses)


def loss_of_round(world: World, run: Any, number: int, client: int) -> float:
    """Return the client's mean loss over that round's steps, from fedloom's global model."""
    start = world.initial() if number == 1 else run.models[number - 2]
    steps: list[float] = []

    def loss(module: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        value = F.cross_entropy(module(x), y)
        steps.append(float(value.detach()))
        return value

    world.train(start, number, client, loss=loss)
    return sum(steps) / len(steps)


def test_power_of_choice_with_as_many_candidates_draws_by_size() -> None:
    world = World()
    run = world.run(build("power_of_choice(fedavg, candidates=3)"))
    pipeline = run.federation.pipeline
    counts = torch.zeros(world.clients)
    for number in range(1, 2001):
        round = pipeline.plan.opening()
        object.__setattr__(round, "number", number)
        selected = pipeline.select(round).clients
        counts[list(selected)] += 1
    assert (
        counts[world.sizes.index(max(world.sizes))]
        > 2 * counts[world.sizes.index(min(world.sizes))]
    )
    assert len(run.selected[0]) == 3


def test_power_of_choice_weighs_replies_alike() -> None:
    world = World(norm=True)
    weighted, uniform_weights = (
        world.run(build(f"power_of_choice({inner})")).models
        for inner in ("fedavg", "fedavg(weighted=false)")
    )
    assert_same(weighted, uniform_weights)
