"""Compare FedMR and Indep with plain loops over state dictionaries; check limiting cases and
invariants of recombination.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.algorithm import algorithms
from fedloom.algorithm.records import Plan, Replies, Selection
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedmr import FedMR, Indep, auto_blend, blend_at
from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream
from fedloom.engines.rows import RowsEngine
from fedloom.flat.layout import Layout
from fedloom.flat.population import mean_cosine_similarity, recombine_, total_variance
from fedloom.parts.building import build
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from naive import State, World, assert_same, average, shares, uniform

# --- the second computation: lists of state dictionaries ---


def layers_of(state: State, order: list[str]) -> list[list[str]]:
    """Return the names of the floating-point tensors of each layer, in the order of the module."""
    names = [name for name in state if state[name].is_floating_point()]
    return [
        layer_names
        for layer in order
        if (layer_names := [n for n in names if n.rpartition(".")[0] == layer])
    ]


def naive_units(world: World, unit: str, fraction: float) -> list[list[str]]:
    state = world.initial()
    if unit == "tensor":
        buffers = [name for name, b in world.module.named_buffers() if b.is_floating_point()]
        return [[name] for name in world.trained + buffers]
    layers = layers_of(state, [name for name, _ in world.module.named_modules()])
    if unit == "layer":
        return layers
    share, count = Fraction(str(fraction)), len(layers)
    segments: dict[int, list[str]] = {}
    for j, names in enumerate(layers, start=1):
        segments.setdefault(math.ceil(j / (share * count)), []).extend(names)
    return [segments[s] for s in sorted(segments)]


def naive_recombine(
    models: list[State], units: list[list[str]], generator: torch.Generator
) -> list[State]:
    result = [{name: tensor.clone() for name, tensor in model.items()} for model in models]
    for names in units:
        source = torch.randperm(len(models), generator=generator).tolist()
        for k, donor in enumerate(source):
            for name in names:
                result[k][name] = models[donor][name].clone()
    return result


Train = Callable[[State, int, int], State]


def naive_fedmr(
    world: World,
    selected: list[list[int]],
    units: list[list[str]],
    *,
    absent: list[set[int]] | None = None,
    train: Train | None = None,
    blend: Callable[[int], float] = lambda number: 0.0,
    tolerance: float | None = None,
) -> list[State]:
    """Return the global model after each round.

    `tolerance` selects the share of averaging as `blend="auto"` does.
    """

    parameters = [name for name, _ in world.at(world.initial()).named_parameters()]

    def variance(models: list[State]) -> float:
        center = average(models, uniform(range(len(models))))
        distances = [
            float(((model[n] - center[n]) ** 2).sum()) for model in models for n in parameters
        ]
        return sum(distances) / len(models)

    pool = [world.initial() for _ in selected[0]]
    models = []
    for number, clients in enumerate(selected, start=1):
        missing = absent[number - 1] if absent else set()
        sent, uploads = list(pool), []
        for k, client in enumerate(clients):
            if client not in missing:
                run = (
                    train(pool[k], number, client)
                    if train
                    else world.train(pool[k], number, client)[0]
                )
                pool[k] = run
                uploads.append(run)
        trained = pool
        pool = naive_recombine(pool, units, stream(world.seed, "recombine", round=number))
        for name, tensor in world.initial().items():
            # All models receive the maximum of the batch counters.
            if not tensor.is_floating_point():
                for model in pool:
                    model[name] = torch.stack([upload[name] for upload in uploads]).amax(0)
        mean = average(pool, uniform(clients))
        share = blend(number)
        if tolerance is not None:
            present = [client for client in clients if client not in missing]
            mean = average(uploads, shares(world, present))
            start = world.initial()
            gained = [
                {n: end[n] - begin[n] for n in parameters}
                for end, begin in zip(trained, sent, strict=True)
            ]
            common = sum(float(((mean[n] - start[n]) ** 2).sum()) for n in parameters)
            share = max(0.0, 1 - (tolerance * common) ** 2 / (variance(pool) * variance(gained)))
        for model in pool:
            for name in mean:
                if mean[name].is_floating_point():
                    model[name] = model[name] + share * (mean[name] - model[name])
        models.append(average(pool, uniform(clients)))
    return models


# --- rounds ---


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("unit", "fraction"),
    [("layer", 1.0), ("tensor", 1.0), ("segment", 0.4), ("segment", 0.7), ("segment", 1.0)],
)
def test_rounds_equal_plain_loops(norm: bool, unit: str, fraction: float) -> None:
    world = World(norm=norm)
    run = world.run(FedMR(unit=unit, fraction=fraction))  # type: ignore[arg-type]
    assert_same(run.models, naive_fedmr(world, run.selected, naive_units(world, unit, fraction)))


def test_rounds_of_indep_equal_plain_loops() -> None:
    world = World(norm=True)
    run = world.run(Indep())
    assert_same(run.models, naive_fedmr(world, run.selected, []))


def test_recombination_changes_the_run() -> None:
    world = World()
    mixed, independent = world.run(FedMR()), world.run(Indep())
    # The first mean precedes any training of recombined models.
    assert_same(mixed.models[:1], independent.models[:1])
    assert not torch.allclose(
        mixed.models[-1]["head.weight"], independent.models[-1]["head.weight"], atol=1e-6
    )


def test_a_client_that_drops_out_leaves_its_slot_as_it_was_sent() -> None:
    world = World(norm=True, rounds=6)
    task = world.task()
    schedule = Schedule(rounds=6, participation=0.5, seed=world.seed, dropout=0.4)
    method = FedMR()
    federation = Federation(method, task, RowsEngine(task), schedule)
    models = []
    for _ in range(6):
        federation.step()
        module = world.at(world.initial())
        task.layout.load(module, method.model(), federation.integers)
        models.append(module.state_dict())
    absent = [{fault["client"] for fault in record["faults"]} for record in federation.history]
    assert any(absent)
    assert all(len(missing) < 3 for missing in absent)
    selected = [record["clients"] for record in federation.history]
    assert_same(
        models, naive_fedmr(world, selected, naive_units(world, "layer", 1.0), absent=absent)
    )
    assert len(method.state["pool"]) == 3


def test_one_participant_is_sequential_training() -> None:
    world = World(participation=0.01, norm=True)
    run = world.run(FedMR(unit="tensor"))
    state, expected = world.initial(), []
    for number, (client,) in enumerate(run.selected, start=1):
        state = world.train(state, number, client)[0]
        expected.append(state)
    assert_same(run.models, expected)


def test_a_single_segment_permutes_whole_models() -> None:
    """After one round, the pool of a single segment equals the permuted pool of Indep."""
    world = World(rounds=1)
    single_segment, independent = FedMR(unit="segment", fraction=1.0), Indep()
    world.run(single_segment)
    world.run(independent)
    source = torch.randperm(3, generator=stream(world.seed, "recombine", round=1))
    assert torch.equal(single_segment.state["pool"], independent.state["pool"][source])


def test_two_stages_with_equal_weights_are_fedavg_until_the_switch() -> None:
    world = World(norm=True)
    average_all = world.run(build("fedavg(weighted=false)"))
    staged = world.run(build("stages(fedavg(weighted=false):3, fedmr)"))
    assert_same(staged.models[:3], average_all.models[:3])
    longer = world.run(build("stages(fedavg(weighted=false):4, fedmr)"))
    assert_same(longer.models, average_all.models)
    # The round after the switch starts from one common model, so its mean still equals FedAvg.
    assert_same(staged.models[3:], average_all.models[3:])


def test_the_pool_cosine_is_that_of_the_models() -> None:
    world = World()
    method = FedMR()
    figures = world.run(method).federation.history[-1]
    expected = mean_cosine_similarity(method.state["pool"][:, : method.plan.layout.trainable])
    assert figures["pool_cosine"] == pytest.approx(float(expected))
    assert figures["pool_cosine"] < 1


# --- blend ---


def test_no_blend_is_fedmr_bit_for_bit() -> None:
    world = World(norm=True)
    plain, blended = FedMR(), FedMR(blend=0.0)
    world.run(plain)
    world.run(blended)
    assert torch.equal(plain.state["pool"], blended.state["pool"])


def test_full_blend_is_fedavg_with_equal_weights() -> None:
    world = World(norm=True)
    assert_same(
        world.run(FedMR(blend=1.0)).models, world.run(build("fedavg(weighted=false)")).models
    )


@pytest.mark.parametrize("blend", ["0.3", "[[1, 1.0], [3, 0.0]]"])
def test_blended_rounds_equal_plain_loops(blend: str) -> None:
    world = World(norm=True)
    method = build(f"fedmr(blend={blend})")
    assert str(build(str(method))) == str(method)
    shares = (
        {1: 1.0, 2: 0.5, 3: 0.0, 4: 0.0}
        if blend.startswith("[")
        else dict.fromkeys(range(1, 5), 0.3)
    )
    run = world.run(method)
    units = naive_units(world, "layer", 1.0)
    assert_same(run.models, naive_fedmr(world, run.selected, units, blend=shares.__getitem__))


def test_blend_contracts_the_pool_and_keeps_its_mean() -> None:
    world = World(rounds=1)
    unblended, blended = FedMR(), FedMR(blend=0.5)
    world.run(unblended)
    world.run(blended)
    mean = unblended.model()
    torch.testing.assert_close(blended.model(), mean)
    torch.testing.assert_close(blended.state["pool"] - mean, 0.5 * (unblended.state["pool"] - mean))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("tolerance", [0.05, 0.2])
def test_rounds_with_a_chosen_blend_equal_plain_loops(norm: bool, tolerance: float) -> None:
    world = World(norm=norm)
    run = world.run(FedMR(blend="auto", tolerance=tolerance))
    chosen = [record["blend"] for record in run.federation.history]
    assert 0 < chosen[0] < 1
    assert len(set(chosen)) > 1
    assert_same(
        run.models,
        naive_fedmr(world, run.selected, naive_units(world, "layer", 1.0), tolerance=tolerance),
    )


def test_a_chosen_blend_lies_between_fedavg_and_fedmr() -> None:
    world = World(norm=True)
    fedavg, fedmr, averaging = FedAvg(), FedMR(), FedMR(blend="auto", tolerance=0)
    free = FedMR(blend="auto", tolerance=1e9)
    for method in (fedavg, fedmr, averaging, free):
        world.run(method)
    torch.testing.assert_close(averaging.model(), fedavg.model(), rtol=0, atol=1e-12)
    assert torch.equal(free.state["pool"], fedmr.state["pool"])


@given(
    seed=st.integers(0, 999),
    count=st.integers(1, 6),
    tolerance=st.floats(0, 3),
    scale=st.floats(1e-3, 1e3),
)
@settings(max_examples=50, deadline=None)
def test_a_chosen_blend_bounds_the_spread_and_ignores_scale(
    seed: int, count: int, tolerance: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(count, 7, generator=generator, dtype=torch.float64)
    initial = torch.randn(7, generator=generator, dtype=torch.float64)
    sent = pool + torch.randn(count, 7, generator=generator, dtype=torch.float64)
    average = pool.mean(0)
    share = auto_blend(pool, sent, average, initial, 5, tolerance)
    assert 0 <= share <= 1
    gained = float(total_variance((pool - sent)[:, :5]))
    assert float(total_variance(pool[:, :5], since=sent[:, :5])) == pytest.approx(gained)
    blended, common = (
        pool.lerp(average, share)[:, :5],
        float((average - initial)[:5].square().sum()),
    )
    assert float(total_variance(blended)) * gained <= (tolerance * common) ** 2 * (1 + 1e-9) + 1e-12
    scaled = auto_blend(scale * pool, scale * sent, scale * average, scale * initial, 5, tolerance)
    assert scaled == pytest.approx(share, abs=1e-9)
    units = [(slice(0, 3),), (slice(3, 7),)]
    shuffled, shuffled_sent = (
        recombine_(rows.clone(), units, torch.Generator().manual_seed(seed))
        for rows in (pool, sent)
    )
    assert auto_blend(shuffled, shuffled_sent, average, initial, 5, tolerance) == pytest.approx(
        share, abs=1e-9
    )


@pytest.mark.parametrize(
    ("number", "share"), [(1, 0.8), (2, 0.8), (6, 0.5), (10, 0.2), (15, 0.1), (20, 0.0), (99, 0.0)]
)
def test_a_scheduled_blend_is_linear_between_its_rounds(number: int, share: float) -> None:
    assert blend_at([(2, 0.8), (10, 0.2), (20, 0.0)], number) == pytest.approx(share)


@pytest.mark.parametrize(
    ("blend", "message"),
    [
        ("1.5", "between 0 and 1, not 1.5"),
        ("-0.1", "between 0 and 1"),
        ("[]", "rounds must start at 1"),
        ("[[5, 0.1], [5, 0.2]]", "rounds must start at 1 or later and increase"),
        ("[[0, 0.1]]", "rounds must start at 1 or later and increase"),
        ("[[1, 2.0]]", "share must be between 0 and 1"),
        ("[[1]]", "blend must be"),
        ("aut", "blend must be"),
        ("auto, tolerance=-1", "tolerance must be at least 0"),
    ],
)
def test_an_impossible_blend_is_refused(blend: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message) as caught:
        build(f"fedmr(blend={blend})")
    assert "\n" not in str(caught.value)


# --- local objectives ---


@pytest.mark.parametrize("name", ["fedmr", "indep"])
def test_a_local_objective_trains_the_models_of_the_pool(name: str) -> None:
    world, mu = World(norm=True), 0.3
    run = world.run(build(f"{name}(local=fedprox(mu={mu}))"))

    def train(start: State, number: int, client: int) -> State:
        def pull(parameters: dict[str, nn.Parameter]) -> None:
            for key, parameter in parameters.items():
                assert parameter.grad is not None
                parameter.grad += mu * (parameter.detach() - start[key])

        return world.train(start, number, client, adjust=pull)[0]

    units = naive_units(world, "layer", 1.0) if name == "fedmr" else []
    assert_same(run.models, naive_fedmr(world, run.selected, units, train=train))


def test_plain_training_as_the_local_objective_changes_nothing() -> None:
    world = World()
    assert_same(world.run(build("fedmr(local=fedavg)")).models, world.run(build("fedmr")).models, 0)


def test_a_local_objective_may_use_client_memory() -> None:
    world = World(rounds=6)
    run = world.run(build("fedmr(local=moon(mu=5))"))
    client = run.selected[0][0]
    assert run.memory(client, "moon_model").shape == (run.federation.task.layout.size,)
    assert not torch.allclose(
        run.models[-1]["head.weight"], world.run(FedMR()).models[-1]["head.weight"]
    )


@pytest.mark.parametrize(
    ("local", "reason"),
    [
        ("scaffold", "does not exchange exactly one whole model"),
        ("feddc", "does not exchange exactly one whole model"),
        ("fedexp", "differs from fedavg only on the server"),
        ("fedavgm", "differs from fedavg only on the server"),
        ("fedmr", "differs from fedavg only on the server"),
        ("umf(fedavg)", "local must be a method, such as fedavg"),
        ("stages(fedprox:1, fedavg)", "local must be a method, such as fedavg"),
    ],
)
def test_methods_whose_client_half_needs_more_are_refused(local: str, reason: str) -> None:
    assert local.partition("(")[0] in algorithms
    world = World()
    with pytest.raises(InvalidValue, match=reason) as caught:
        world.run(build(f"fedmr(local={local})"))
    assert local.partition("(")[0] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_local_objective_is_refused_with_the_nearest() -> None:
    with pytest.raises(KeyError, match="did you mean 'fedprox'"):
        build("fedmr(local=fedporx)")


@pytest.mark.parametrize(
    ("expression", "message"), [("fedmr(unit=layr)", "layer"), ("fedmr(fraction=0)", "fraction")]
)
def test_impossible_units_and_fractions_are_refused(expression: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        build(expression)


# --- invariants of recombination on any module ---


@st.composite
def modules(draw: st.DrawFn) -> nn.Module:
    """Draw chains of linear layers and batch norms; some have no bias or affine weights, some are
    nested.
    """
    layers: list[nn.Module] = []
    width = draw(st.integers(1, 4))
    for _ in range(draw(st.integers(1, 4))):
        following = draw(st.integers(1, 4))
        layers.append(nn.Linear(width, following, bias=draw(st.booleans())))
        if draw(st.booleans()):
            layers.append(nn.BatchNorm1d(following, affine=draw(st.booleans())))
        if draw(st.booleans()):
            layers = [nn.Sequential(*layers)]
        width = following
    return nn.Sequential(*layers)


def recombined(module: nn.Module, uploads: Tensor, method: FedMR, seed: int) -> Tensor:
    """Run one round of the server on the given uploads `[K, P]`."""
    layout, count = Layout(module), len(uploads)
    plan = Plan(
        layout,
        layout.flatten(module),
        count,
        count,
        1,
        seed,
        2,
        lambda clients: clients + 1,
        module,
    )
    method.setup(plan)
    every = torch.arange(count)
    exchange = Pipeline(method).open(plan.opening(), Selection(plan.opening().selected))
    method.receive(
        plan.opening(), Replies({"model": uploads.clone()}, every, every, every + 1, exchange)
    )
    return method.state["pool"]


cases = given(
    module=modules(),
    count=st.integers(1, 6),
    unit=st.sampled_from(["layer", "tensor", "segment"]),
    fraction=st.sampled_from([0.1, 0.25, 0.5, 0.7, 1.0]),
    seed=st.integers(0, 10**6),
)


@settings(deadline=None, max_examples=60)
@cases
def test_columns_keep_their_numbers(
    module: nn.Module, count: int, unit: str, fraction: float, seed: int
) -> None:
    size = Layout(module).size
    uploads = torch.randint(
        -1000, 1000, (count, size), generator=torch.Generator().manual_seed(seed)
    ).float()
    method = FedMR(unit=unit, fraction=fraction)  # type: ignore[arg-type]
    pool = recombined(module, uploads, method, seed)
    assert torch.equal(pool.sort(0).values, uploads.sort(0).values)
    assert torch.equal(pool.sum(0), uploads.sum(0))  # exact for integers
    anywhere = torch.full((size,), 7.0)
    assert torch.equal(
        (pool - anywhere).square().double().sum(), (uploads - anywhere).square().double().sum()
    )


@settings(deadline=None, max_examples=60)
@cases
def test_each_unit_of_each_model_is_used_once(
    module: nn.Module, count: int, unit: str, fraction: float, seed: int
) -> None:
    layout = Layout(module)
    # Fill each model with its index.
    uploads = torch.arange(count).float().unsqueeze(1).repeat(1, layout.size)
    method = FedMR(unit=unit, fraction=fraction)  # type: ignore[arg-type]
    pool = recombined(module, uploads, method, seed)
    for unit_slices in layout.units(method.unit, fraction):
        columns = torch.cat([pool[:, unit_slice] for unit_slice in unit_slices], dim=1)
        # Each unit has a single source model.
        assert torch.equal(columns, columns[:, :1].expand_as(columns))
        assert columns[:, 0].sort().values.tolist() == list(range(count))


def test_models_of_the_pool_share_no_storage() -> None:
    world = World()
    method = FedMR()
    federation = world.run(method).federation
    pool = method.state["pool"]
    copy, old_pool = pool.clone(), pool
    pool_rows = [row.data_ptr() for row in pool]
    assert len(set(pool_rows)) == len(pool)
    pool[0] += 1
    assert torch.equal(pool[1:], copy[1:])
    pool[0] -= 1
    federation.algorithm.state["pool"] = pool
    round = method.plan.opening()
    exchange = Pipeline(method).open(round, Selection(round.selected))
    clients = torch.tensor([0, 1])
    method.receive(round, Replies({"model": pool + 5}, clients, clients, torch.ones(2), exchange))
    assert torch.allclose(old_pool, copy)  # the previous state is unchanged
