"""Compare ALA around each method with autograd on full weights, and check limiting cases, recorded
losses and the depth of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import naive_methods as methods
from fedloom.algorithm import algorithms
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import InvalidValue
from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.flat.layout import Layout, Unit
from fedloom.flat.module import FlatModule
from fedloom.local.cohort import Cohort
from fedloom.parts.ala import Ala, FedALA
from fedloom.parts.ala import Blend as LearnedBlend
from fedloom.parts.building import build
from fedloom.parts.codec import Codec
from fedloom.parts.course import pipelines
from fedloom.parts.privacy import Accounted
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from naive_personal import Blend, Moment, Net, Run, Setting, World, assert_same, vector

Method = Callable[..., list[Moment]]
PLAIN = Training(learning_rate=0.1, decay=0.9, epochs=2, batch_size=4)
HEAD = ["head.weight", "head.bias"]
MIDDLE = ["middle.weight", "middle.bias"]
RATES = "rate=20, threshold=0.003, max_epochs=30"
"""A rate that moves the weights of such small models; the initial stage ends by the threshold or by
the maximum.
"""


def require_definition(
    world: World, expression: str, method: Method, names: list[str], **options: Any
) -> tuple[Run, Blend]:
    """Require that a run of the expression gives the models of the naive `method`, and that its
    blend has learned some weights.
    """
    run = world.run(build(expression))
    assert not any(record["faults"] for record in run.federation.history)
    blend = Blend(world, names, rate=20, threshold=0.003, most=30)
    assert_same(run.moments, method(Setting(world, run.selected, blend), **options))
    assert_learned(blend)
    return run, blend


def assert_learned(blend: Blend) -> None:
    """Assert that some weights differ from the upper bound and that no weight is negative."""
    values = torch.cat(
        [w.reshape(-1) for weights in blend.weights.values() for w in weights.values()]
    )
    assert bool((values == 1).any())
    assert bool((values < 0.99).any())
    assert float(values.min()) >= 0


def remembered(run: Run, client: int, kind: str) -> torch.Tensor:
    (tensor,) = [
        t for name, t in run.engine.store.read(client).items() if name.startswith(f"ala_{kind}_")
    ]
    return tensor


# --- against autograd, wrapped around each method ---


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("p", [1, 2])
def test_fedala_equals_autograd(norm: bool, p: int) -> None:
    world = World(norm, rounds=5)
    run, blend = require_definition(
        world, f"fedala(p={p}, {RATES})", methods.fedavg, (HEAD + MIDDLE)[: 2 * p]
    )
    counts = [record["ala_epochs"] for record in run.federation.history if "ala_epochs" in record]
    assert max(counts) > 10 / 3  # mean over three clients; one is in its initial stage
    for i, weights in blend.weights.items():
        stored = remembered(run, i, "weights")
        names = [n for n in world.names if n in blend.names]
        torch.testing.assert_close(
            stored, torch.cat([weights[n].reshape(-1) for n in names]), rtol=1e-8, atol=1e-8
        )


def test_fedala_is_ala_on_fedavg() -> None:
    world = World()
    shorthand, wrapped = (
        world.run(build(f"fedala({RATES})")),
        world.run(build(f"ala(fedavg, {RATES})")),
    )
    assert_same(shorthand.moments, wrapped.moments, 0.0)
    world = World(norm=True)
    shorthand, wrapped = (
        world.run(build("fedala(buffers=average)")),
        world.run(build("ala(fedavg)")),
    )
    assert_same(shorthand.moments, wrapped.moments, 0.0)


def test_fedprox_keeps_its_centre_at_the_download() -> None:
    world = World(rounds=5)
    require_definition(world, f"ala(fedprox(mu=2), {RATES})", methods.fedprox, HEAD, mu=2.0)


def test_ala_on_per_fedavg_equals_autograd() -> None:
    world = World(norm=True, sizes=(9, 14, 11, 21, 12))
    require_definition(
        world, f"ala(per_fedavg(alpha=0.2), {RATES})", methods.per_fedavg, HEAD, alpha=0.2
    )


def test_fedrep_blends_the_top_of_its_base() -> None:
    require_definition(
        World(norm=True, rounds=5),
        f"ala(fedrep(head_epochs=2), {RATES})",
        methods.fedrep,
        MIDDLE,
        head_epochs=2,
    )


def test_ala_on_pfedme_equals_autograd() -> None:
    world = World(norm=True, rounds=5, training=PLAIN)
    inner = "pfedme(regularisation=5, personal_rate=0.05, inner_steps=3)"
    options = {"strength": 5.0, "rate": 0.05, "steps": 3, "beta": 1.0}
    require_definition(world, f"ala({inner}, {RATES})", methods.pfedme, HEAD, **options)


def test_ditto_pulls_towards_the_blend() -> None:
    world = World(norm=True, rounds=5)
    require_definition(
        world,
        f"ala(ditto(regularisation=0.5), {RATES})",
        methods.ditto,
        HEAD,
        strength=0.5,
        epochs=2,
    )


def test_fedamp_starts_from_the_blend_and_pulls_towards_the_download() -> None:
    world = World(participation=1.0)
    options = {"alpha": 0.05, "sigma": 0.5, "strength": 0.04}
    inner = "fedamp(alpha=0.05, sigma=0.5, regularisation=0.04)"
    require_definition(world, f"ala({inner}, {RATES})", methods.fedamp, HEAD, **options)


def test_ala_on_fedphp_equals_autograd() -> None:
    world = World(training=Training(learning_rate=0.1, batch_size=4))
    inner = "fedphp(mu=0.8, transfer=0.4)"
    require_definition(world, f"ala({inner}, {RATES})", methods.fedphp, HEAD, mu=0.8, transfer=0.4)


def test_partialfed_takes_the_blend_for_the_download() -> None:
    world = World(training=PLAIN, rounds=5)
    inner = "partialfed(model_batches=3, strategy_batches=2)"
    require_definition(world, f"ala({inner}, {RATES})", methods.partialfed, HEAD, pattern=(3, 2))


def test_the_variants_of_the_authors_code_equal_autograd() -> None:
    world = World(rounds=5)
    run = world.run(build(f"fedala_code(percent=50, window=4, epochs=3, {RATES})"))
    options: dict[str, Any] = {
        "percent": 50,
        "window": 4,
        "epochs": 3,
        "last_loss": True,
        "contiguous": True,
    }
    blend = Blend(world, HEAD, rate=20, threshold=0.003, most=30, **options)
    assert_same(run.moments, methods.fedavg(Setting(world, run.selected, blend)))
    assert_learned(blend)


# --- limiting cases ---


@pytest.mark.parametrize(
    "inner",
    ["fedavg", "fedprox(mu=0.5)", "scaffold", "feddyn", "feddc", "moon", "umf(feddc)", "fedmr", "stages(fedavg:2, fedmr)",
     "per_fedavg", "fedrep", "ditto", "fedphp", "partialfed", "pfedme(regularisation=5)", "fedavg_c(finetune_epochs=1)"],
)  # fmt: skip
def test_weights_held_at_one_leave_the_inner_method(inner: str) -> None:
    world = World(norm=True, training=Training(learning_rate=0.1, batch_size=4))
    plain, wrapped = (
        world.run(build(inner)),
        world.run(build(f"ala({inner}, rate=0, max_epochs=1)")),
    )
    assert plain.selected == wrapped.selected
    assert_same(wrapped.moments, plain.moments, 1e-9)


def test_weights_held_at_zero_leave_local_training() -> None:
    world = World(participation=1.0)
    run = world.run(build("ala(fedavg, p=3, rate=0, initial_weight=0)"))
    for i, row in enumerate(run.moments[-1].personal):
        model = world.fresh()
        for number in range(1, world.rounds + 1):
            world.train(model, i, number)
        torch.testing.assert_close(row, vector(model))


def test_start_round_switches_blending_on_late() -> None:
    world = World(participation=1.0, rounds=6)
    run, plain = world.run(build(f"fedala(start_round=5, {RATES})")), world.run(build("silobn"))
    assert_same(run.moments[:3], plain.moments[:3], 0.0)
    assert [("ala_epochs" in record) for record in run.federation.history] == [False] * 4 + [
        True
    ] * 2
    assert run.federation.history[4]["ala_epochs"] > 10
    assert run.federation.history[5]["ala_epochs"] == 1


# --- every method accepts the initial model of a part ---

ALREADY_BLENDED = ("ala", "ala_code", "fedala", "fedala_code", "fedah")
"""Methods whose start is blended, which is done once."""


@pytest.mark.parametrize(
    "name",
    sorted(entry.name for entry in algorithms if entry.name not in ALREADY_BLENDED),
)
def test_every_method_uses_the_start_of_a_wrapper_or_is_refused(name: str) -> None:
    expressions = {
        "umf": "umf(fedavg)",
        "stages": "stages(fedavg)",
        "secure": "secure(fedmr)",
        "clustered": "clustered(fedavg)",
        "robust": "robust(fedavg)",
        "quantised": "quantised(fedavg)",
        "sparse": "sparse(fedavg)",
        "lowrank": "lowrank(fedavg)",
        "private": "private(fedavg, noise=1.0)",
        "local_private": "local_private(fedavg, noise=1.0)",
        "dp_sgd": "dp_sgd(fedavg, noise=1.0)",
        "fedntd": "fedntd(fedavg)",
        "fedlc": "fedlc(fedavg)",
        "feddecorr": "feddecorr(fedavg)",
        "power_of_choice": "power_of_choice(fedavg)",
        "fedbuff": "fedbuff(fedavg, k=2)",
        "fedasync": "fedasync(fedavg)",
        "fedmr_async": "fedmr_async(k=2)",
        "gossip": "gossip(fedavg)",
        "norm_bound": "norm_bound(fedavg, radius=0.1)",
        "sign_flip": "sign_flip(fedavg)",
        "partial_work": "partial_work(fedavg)",
        "ca2fl": "ca2fl(k=2)",
        "cluster_fedvarp": "cluster_fedvarp(clusters=2)",
        "ema": "ema(fedavg)",
        "last": "last(fedavg)",
        "longest_idle": "longest_idle(fedavg)",
        "fisher_merge": "fisher_merge(fedavg)",
        "pfedme": "pfedme(regularisation=5)",
        "fedavg_c": "fedavg_c(finetune_epochs=1)",
        "fedprox_c": "fedprox_c(finetune_epochs=1)",
    }
    inner = build(expressions.get(name, name))
    (pipeline,) = pipelines(inner)
    rounds = 8 if pipeline.waits else 3  # until the second reply of a client counts
    norm = not isinstance(inner, Accounted)  # privacy refuses batch norm
    world = World(norm=norm, participation=1.0, rounds=rounds, training=PLAIN)
    if not pipeline.algorithm.facts.one_download:
        with pytest.raises(InvalidValue, match=f"{name}.* do not receive one model"):
            build(Ala(inner))
        return
    if name == "dp_sgd":
        with pytest.raises(
            InvalidValue,
            match="dp_sgd: clients of ala use their samples for more than one local training",
        ):
            build(Ala(inner))
        return
    if isinstance(inner, Codec | Accounted):  # these act after ala in every order
        swapped = replace(build(expressions[name]), method=build(f"ala(fedavg, {RATES})"))
        first, second = world.run(build(f"ala({inner}, {RATES})")), world.run(build(swapped))
        assert_same(first.moments, second.moments, 0.0)
    plain = world.run(build(str(inner)))
    local = world.run(build(f"ala({inner}, rate=0, initial_weight=0, max_epochs=1)"))
    assert not any(record["faults"] for record in local.federation.history)
    assert not torch.allclose(local.moments[-1].parameters, plain.moments[-1].parameters, atol=1e-6)


# --- cost, trace, refusals ---


def test_the_backward_pass_goes_no_deeper_than_the_blended_blocks() -> None:
    world = World(participation=1.0, rounds=2, training=PLAIN)
    reached: list[str] = []
    task = world.task()
    engine = RowsEngine(task)
    learning = False
    train_only = engine.flat_module.train_only

    def watched(units: Unit | None) -> None:
        nonlocal learning
        learning = units is not None
        train_only(units)

    engine.flat_module.train_only = watched  # type: ignore[method-assign]

    def watch(name: str, output: torch.Tensor) -> None:
        # Autograd computes the gradient of an output only if a trained parameter precedes it.
        if learning and output.requires_grad:
            output.register_hook(lambda _: reached.append(name))

    for name in ("lower", "middle", "head"):
        layer = engine.flat_module.module.get_submodule(name)
        layer.register_forward_hook(lambda _, __, output, n=name: watch(n, output))
    schedule = Schedule(rounds=2, participation=1.0, seed=world.seed, evaluate_every=100)
    Federation(build("fedala"), task, engine, schedule).run()
    assert set(reached) == {"head"}


def test_the_loss_of_every_epoch_can_be_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(participation=1.0, rounds=3)
    method = build(f"fedala(epochs=6, {RATES})")
    assert isinstance(method, FedALA)
    losses: dict[tuple[int, int], list[float]] = {}
    record_learning = method.record_learning

    def listen(cohort: Cohort, blend: LearnedBlend) -> None:
        record_learning(cohort, blend)
        if blend.losses:
            clients = enumerate(cohort.clients)
            losses.update(
                {
                    (cohort.round.number, i): [float(loss[k]) for loss in blend.losses]
                    for k, i in clients
                }
            )

    monkeypatch.setattr(method, "record_learning", listen)
    run = world.run(method)
    assert sorted(losses) == [(number, i) for number in (2, 3) for i in range(5)]
    assert all(len(losses[3, i]) == 6 for i in range(5))
    blend = Blend(world, HEAD, rate=20, threshold=0.003, most=30, epochs=6)
    methods.fedavg(Setting(world, run.selected, blend))
    client = run.selected[-1][-1]
    torch.testing.assert_close(torch.tensor(losses[3, client]), torch.tensor(blend.losses))
    figure = run.federation.history[2]
    assert figure["ala_loss"] == pytest.approx(sum(losses[3, i][-1] for i in range(5)) / 5)


def test_memory_holds_only_blended_layers() -> None:
    run = World(participation=1.0).run(build("fedala"))
    sizes = {name: tensor.numel() for name, tensor in run.engine.store.read(0).items()}
    assert sizes == {"ala_model_64_79": 15, "ala_weights_64_79": 15, "ala_learned_64_79": 1}


def test_blending_restarts_when_the_inner_method_changes() -> None:
    world = World(participation=1.0, rounds=5)
    run = world.run(build(f"ala(stages(fedavg:2, fedrep), {RATES})"))
    counts = [record.get("ala_epochs", 0) for record in run.federation.history]
    assert not any(record["faults"] for record in run.federation.history)
    assert counts[1] > 10
    assert counts[2] == 0  # no client has an old base of this method
    assert counts[3] > 10
    assert counts[4] == 1


class Dropping(Net):
    """A network with dropout 0.5 before the classifier."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().features(x), 0.5, self.training)


def test_features_are_reused_only_if_no_sample_depends_on_others_or_chance() -> None:
    x = torch.randn(1, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for module, plain in (
        (Net(norm=False), True),
        (Net(norm=True), False),
        (Dropping(norm=False), False),
    ):
        layout = Layout(module.double())
        flat_module = FlatModule(module, layout)
        row = layout.flatten(module).unsqueeze(0)
        random_state = torch.get_rng_state()
        features = flat_module.features(row, x)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert (features is not None) == plain
        if features is not None:
            torch.testing.assert_close(features[0], module.features(x[0]))
        assert torch.equal(row[0], layout.flatten(module))


def test_idle_clients_of_umf_keep_no_learned_weights() -> None:
    world = World(participation=0.4, rounds=5, training=PLAIN)
    few = world.run(build(f"ala(umf(fedavg), {RATES})"))
    all_of_them = world.run(build(f"ala(umf(fedavg, simulate_all=true), {RATES})"))
    assert_same(few.moments, all_of_them.moments, 0.0)
    assert_same(world.run(build(f"umf(ala(fedavg, {RATES}))")).moments[:1], few.moments[:1], 1e-9)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("ala(fedfomo)", "clients of fedfomo do not receive one model"),
        ("ala(stages(fedavg:2, apple))", "apple.* do not receive one model"),
        ("ala(ala(fedavg))", "ala is allowed only once"),
        ("ala(fedavg, p=0)", "p must be at least 1"),
        ("ala(fedavg, p=4)", "p must be at most 3"),
        ("ala(fedrep, p=3)", "p must be at most 2"),
        ("fedala(percent=101)", r"percent must be in \(0, 100\]"),
        ("fedala(method=fedavg)", "no parameter 'method'"),
        ("ala", "needs method"),
    ],
)
def test_bad_expressions_are_refused_in_one_line(expression: str, words: str) -> None:
    with pytest.raises(InvalidValue, match=words) as caught:
        World().run(build(expression))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "expression", ["fedala", "fedala(p=2, buffers='average')", "ala(fedprox(mu=0.5), percent=40.0)"]
)
def test_expressions_round_trip(expression: str) -> None:
    assert str(build(expression)) == expression
    assert isinstance(build(expression), Ala)


def test_a_blend_lies_between_its_sources() -> None:
    """The upper block is elementwise between local model and download; lower blocks equal the
    download.
    """
    world = World(participation=1.0, rounds=3)
    run = world.run(build(f"fedala({RATES})"))
    local_heads = [remembered(run, i, "model") for i in range(5)]
    download = run.moments[-1].parameters
    for row, local in zip(run.moments[-1].personal, local_heads, strict=True):
        low, high = torch.minimum(local, download[-15:]), torch.maximum(local, download[-15:])
        assert bool((row[-15:] >= low - 1e-12).all())
        assert bool((row[-15:] <= high + 1e-12).all())
        torch.testing.assert_close(row[:-15], download[:-15])
    assert isinstance(Ala(FedAvg()).method, FedAvg)
