"""Newer personalised methods, compared with plain loops and in limiting cases.

FedBABU, FedRoD, APFL, FedProto, FedDBE, FedPAC, FedAS, pFedFDA and FedAH.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.algorithms.fedpac import head_shares
from fedloom.algorithms.pfedfda import validated_shares
from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream
from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from naive_personal import (
    Blend,
    Moment,
    Net,
    Run,
    Setting,
    World,
    assert_same,
    average,
    copy_parameters,
    parameters,
    shared_model,
    vector,
)

PLAIN = Training(learning_rate=0.1, decay=0.9, epochs=2, batch_size=4)
NEVER = -1e9


def compare(
    world: World, expression: str, method: Callable[..., list[Moment]], **options: Any
) -> Run:
    run = world.run(build(expression))
    assert not any(record["faults"] for record in run.federation.history)
    assert_same(run.moments, method(Setting(world, run.selected), **options), tolerance=1e-9)
    moment = run.moments[-1]
    assert not torch.allclose(moment.personal[0], moment.personal[1], atol=1e-4)
    return run


def label_counts(world: World, client: int) -> Tensor:
    labels = world.data(client)[1]
    return torch.tensor(
        [float((labels == c).sum()) for c in range(world.classes)], dtype=torch.float64
    )


def parts_of(world: World) -> tuple[list[str], list[str]]:
    head = [name for name in world.names if name.startswith("head.")]
    return [name for name in world.names if name not in head], head


def means_by_class(model: Net, x: Tensor, y: Tensor) -> dict[int, Tensor]:
    """Return the mean feature of each class that occurs, in evaluation mode."""
    with torch.no_grad():
        features = copy.deepcopy(model).eval().features(x)
    return {c: torch.stack([z for z, label in zip(features, y.tolist(), strict=True) if label == c]).mean(0)
            for c in sorted(set(y.tolist()))}  # fmt: skip


def with_head(model: nn.Module, weight: Tensor, bias: Tensor) -> nn.Module:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.head.weight.copy_(weight)
        changed.head.bias.copy_(bias)
    return changed


# --- the methods in loops ---


def fedbabu(setting: Setting, *, epochs: int, scope: str = "full") -> list[Moment]:
    world = setting.world
    base, head = parts_of(world)

    def score(model: nn.Module, i: int, t: int) -> nn.Module:
        if epochs:
            names = {"full": world.names, "head": head, "body": base}[scope]
            world.train(model, i, t, "finetune", epochs=epochs, names=names)
        return model

    return shared_model(
        setting, lambda w, s, i, t: world.train(w, i, t, names=base), score, names=base
    )


def fedrod(setting: Setting, *, gamma: float = 1.0) -> list[Moment]:
    world = setting.world
    initial = [p.detach().clone() for p in (world.module.head.weight, world.module.head.bias)]
    private = {i: [p.clone() for p in initial] for i in range(world.clients)}

    def work(start: nn.Module, sent: nn.Module, i: int, t: int) -> None:
        counts = label_counts(world, i)
        prior = torch.tensor([float(n.log()) if n else NEVER for n in counts], dtype=torch.float64)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = start.features(x)
            logits = start.head(z)
            weight, bias = (p.requires_grad_() for p in private[i])
            private_loss = F.cross_entropy(logits.detach() + z.detach() @ weight.T + bias, y)
            slopes = torch.autograd.grad(private_loss, [weight, bias])
            private[i] = [
                (p - world.rate(t) * g).detach()
                for p, g in zip((weight, bias), slopes, strict=True)
            ]
            return F.cross_entropy(logits + gamma * prior, y)

        world.train(start, i, t, loss=loss)

    def score(model: nn.Module, i: int, t: int) -> nn.Module:
        weight, bias = private[i]
        return with_head(model, model.head.weight + weight, model.head.bias + bias)

    return shared_model(setting, work, score)


def mixed(local: nn.Module, personal: nn.Module, share: float) -> nn.Module:
    result = copy.deepcopy(local)
    tensors = [
        [t for t in [*m.parameters(), *m.buffers()] if t.is_floating_point()]
        for m in (result, local, personal)
    ]
    with torch.no_grad():
        for target, a, b in zip(*tensors, strict=True):
            target.copy_((1 - share) * a + share * b)
    return result


def apfl(setting: Setting, *, alpha: float, adaptive: bool = False) -> list[Moment]:
    world = setting.world
    personal = {i: world.fresh() for i in range(world.clients)}
    shares, trained = [alpha] * world.clients, set()

    def work(start: nn.Module, sent: nn.Module, i: int, t: int) -> None:
        trained.add(i)
        start.train()
        for k, (x, y) in enumerate(world.batches(i, t)):
            slopes = torch.autograd.grad(F.cross_entropy(start(x), y), list(start.parameters()))
            with torch.no_grad():
                for p, g in zip(start.parameters(), slopes, strict=True):
                    p.sub_(world.rate(t) * g)
            mixture = mixed(start, personal[i], shares[i]).train()
            slopes = torch.autograd.grad(F.cross_entropy(mixture(x), y), list(mixture.parameters()))
            triples = list(zip(personal[i].parameters(), start.parameters(), slopes, strict=True))
            slope = sum(float(((v - w).detach() * g).sum()) for v, w, g in triples)
            with torch.no_grad():
                for v, _, g in triples:
                    v.sub_(world.rate(t) * shares[i] * g)
                for target, source in zip(personal[i].buffers(), mixture.buffers(), strict=True):
                    target.copy_(source)
            if adaptive and k == 0:
                shares[i] = min(1.0, max(0.0, shares[i] - world.rate(t) * slope))

    return shared_model(
        setting, work, lambda m, i, t: mixed(m, personal[i], shares[i]) if i in trained else m
    )


def prototype_head(
    prototypes: dict[int, Tensor], classes: int, width: int
) -> tuple[Tensor, Tensor]:
    weight, bias = (
        torch.zeros(classes, width, dtype=torch.float64),
        torch.full((classes,), NEVER, dtype=torch.float64),
    )
    for c, p in prototypes.items():
        weight[c], bias[c] = 2 * p, -(p @ p)
    missing = [c for c in range(classes) if c not in prototypes]
    if prototypes and missing:
        weight[missing] = sum(weight[c] for c in prototypes) / len(prototypes)
        bias[missing] = sum(bias[c] for c in prototypes) / len(prototypes) - 50
    return weight, bias


def pulled(z: Tensor, y: Tensor, prototypes: dict[int, Tensor]) -> Tensor:
    """Return the mean square over batch and dimensions.

    Samples of classes without a prototype contribute 0.
    """
    gaps = [
        (z[k] - prototypes[c]).square().sum() if c in prototypes else 0 * z[k].sum()
        for k, c in enumerate(y.tolist())
    ]
    return torch.stack(gaps).sum() / z.numel()


def fedproto(
    setting: Setting, *, strength: float, weighted: bool = False, by_head: bool = False
) -> list[Moment]:
    world = setting.world
    models = [world.fresh() for _ in range(world.clients)]
    prototypes: dict[int, Tensor] = {}
    moments = []
    for number, selected in enumerate(setting.selected, start=1):
        means = {}
        for i in selected:
            sent, model = dict(prototypes), models[i]

            def loss(
                x: Tensor, y: Tensor, model: Any = model, sent: dict[int, Tensor] = sent
            ) -> Tensor:
                z = model.features(x)
                return F.cross_entropy(model.head(z), y) + strength * pulled(z, y, sent)

            world.train(model, i, number, loss=loss)
            means[i] = means_by_class(model, *world.data(i))
        for c in range(world.classes):
            having = [i for i in selected if c in means[i]]
            weights = [float(label_counts(world, i)[c]) if weighted else 1.0 for i in having]
            if having:
                prototypes[c] = sum(
                    w * means[i][c] for w, i in zip(weights, having, strict=True)
                ) / sum(weights)

        def used(model: nn.Module) -> nn.Module:
            return with_head(model, *prototype_head(prototypes, world.classes, 4))

        personal = [vector(model if by_head else used(model)) for model in models]
        moments.append(Moment(parameters(used(world.fresh())), personal))
    return moments


def feddbe(setting: Setting, *, pull: float, beta: float) -> list[Moment]:
    world = setting.world
    models, server = [world.fresh() for _ in range(world.clients)], world.fresh()
    shift = [torch.zeros(4, dtype=torch.float64) for _ in range(world.clients)]
    consensus: Tensor | None = None
    moments = []
    for number, selected in enumerate(setting.selected, start=1):
        running = {}
        for i in selected:
            copy_parameters(server, models[i])
            running[i] = torch.zeros(4, dtype=torch.float64)

            def loss(
                x: Tensor,
                y: Tensor,
                i: int = i,
                model: Any = models[i],
                target: Tensor | None = consensus,
                running: dict[int, Tensor] = running,
                rate: float = world.rate(number),
            ) -> Tensor:
                z = model.features(x)
                moved = (1 - beta) * running[i] + beta * z.mean(0)
                running[i] = moved.detach()
                if target is None:
                    return F.cross_entropy(model.head(z), y)
                m = shift[i].clone().requires_grad_()
                (slope,) = torch.autograd.grad(F.cross_entropy(model.head(z.detach() + m), y), m)
                total = (
                    F.cross_entropy(model.head(z + shift[i]), y)
                    + pull / 2 * (moved - target).square().mean()
                )
                shift[i] = shift[i] - rate * slope
                return total

            world.train(models[i], i, number, loss=loss)
        sizes = [world.sizes[i] for i in selected]
        if consensus is None:
            consensus = sum(n * running[i] for n, i in zip(sizes, selected, strict=True)) / sum(
                sizes
            )
        else:
            average(server, [models[i] for i in selected], sizes, world.names)
        personal = []
        for i in range(world.clients):
            model = copy.deepcopy(models[i])
            copy_parameters(server, model)
            personal.append(
                vector(
                    with_head(
                        model, model.head.weight, model.head.bias + model.head.weight @ shift[i]
                    )
                )
            )
        moments.append(Moment(parameters(server), personal))
    return moments


def best_shares(quadratic: Tensor) -> Tensor:
    """Return the minimum of a' Q a on the simplex.

    Tries each possible set of clients with a nonzero share.
    """
    best, least = torch.zeros(len(quadratic)), float("inf")
    for size in range(1, len(quadratic) + 1):
        for chosen in map(list, itertools.combinations(range(len(quadratic)), size)):
            block = quadratic[chosen][:, chosen]
            x = torch.linalg.solve(block, torch.ones(size, dtype=torch.float64))
            if bool((x >= 0).all()):
                shares = torch.zeros(len(quadratic), dtype=torch.float64)
                shares[chosen] = x / x.sum()
                if (value := float(shares @ quadratic @ shares)) < least:
                    best, least = shares, value
    return best


def fedpac(
    setting: Setting, *, strength: float, head_rate: float, head_epochs: int = 1
) -> list[Moment]:
    world = setting.world
    base, head = parts_of(world)
    own, server = [world.fresh() for _ in range(world.clients)], world.fresh()
    heads = [world.fresh() for _ in range(world.clients)]
    prototypes: dict[int, Tensor] = {}
    moments = []
    for number, selected in enumerate(setting.selected, start=1):
        h, variance, means = {}, {}, {}
        for i in selected:
            copy_parameters(server, own[i], base)
            copy_parameters(heads[i], own[i], head)
            x, y = world.data(i)
            before, shares = means_by_class(own[i], x, y), label_counts(world, i) / len(y)
            with torch.no_grad():
                z = copy.deepcopy(own[i]).eval().features(x)
            h[i] = torch.stack(
                [shares[c] * before.get(c, torch.zeros(4).double()) for c in range(world.classes)]
            )
            squares = [
                z[y == c].square().sum(1).mean() * shares[c] - h[i][c].square().sum()
                for c in before
            ]
            variance[i] = sum(squares) / len(y)
            if head_epochs:
                world.train(
                    own[i], i, number, "head", names=head, epochs=head_epochs, rate=head_rate
                )
            towards = {**before, **prototypes} if prototypes else {}

            def loss(
                x: Tensor, y: Tensor, model: Any = own[i], towards: dict[int, Tensor] = towards
            ) -> Tensor:
                z = model.features(x)
                return F.cross_entropy(model.head(z), y) + strength * pulled(z, y, towards)

            world.train(own[i], i, number, names=base, loss=loss)
            means[i] = means_by_class(own[i], x, y)
        for c in range(world.classes):
            having = [i for i in selected if c in means[i]]
            weights = [float(label_counts(world, i)[c]) for i in having]
            if having:
                prototypes[c] = sum(
                    w * means[i][c] for w, i in zip(weights, having, strict=True)
                ) / sum(weights)
        average(server, [own[i] for i in selected], [world.sizes[i] for i in selected], world.names)
        for i in selected:
            gaps = {j: (h[i] - h[j]).flatten() for j in selected}
            exact = [
                [(gaps[j] @ gaps[k] + (variance[j] if j == k else 0.0)) for k in selected]
                for j in selected
            ]
            quadratic = torch.stack([torch.stack(row) for row in exact])
            shares = best_shares(quadratic)
            shares = torch.where(shares > 1e-3, shares, 0)
            average(heads[i], [own[j] for j in selected], (shares / shares.sum()).tolist(), head)
        personal = []
        for i in range(world.clients):
            whole = copy.deepcopy(own[i])
            copy_parameters(server, whole, base)
            copy_parameters(heads[i], whole, head)
            personal.append(vector(whole))
        moments.append(Moment(parameters(server), personal))
    return moments


def fedas(setting: Setting, *, rate: float) -> list[Moment]:
    world = setting.world
    base, _ = parts_of(world)
    own, server, seen = [world.fresh() for _ in range(world.clients)], world.fresh(), set()
    moments = []
    for number, selected in enumerate(setting.selected, start=1):
        weights = []
        for i in selected:
            x, y = world.data(i)
            towards = means_by_class(own[i], x, y)
            copy_parameters(server, own[i], base)

            def loss(
                x: Tensor, y: Tensor, model: Any = own[i], towards: dict[int, Tensor] = towards
            ) -> Tensor:
                z = model.features(x)
                return sum((z[y == c] - towards[c]).square().mean() for c in set(y.tolist()))

            if i in seen and rate:
                world.train(own[i], i, number, "align", names=base, epochs=1, rate=rate, loss=loss)
            seen.add(i)
            world.train(own[i], i, number)
            scored, trace = copy.deepcopy(own[i]).eval(), 0.0
            for k in range(len(y)):
                one = F.cross_entropy(scored(x[k : k + 1]), y[k : k + 1])
                trace += sum(
                    float(g.square().sum())
                    for g in torch.autograd.grad(one, list(scored.parameters()))
                )
            weights.append(trace / len(y))
        average(server, [own[i] for i in selected], weights, base)
        personal = []
        for i in range(world.clients):
            whole = copy.deepcopy(own[i])
            if i not in seen:
                copy_parameters(server, whole, base)
            personal.append(vector(whole))
        moments.append(Moment(parameters(server), personal))
    return moments


def estimate(
    z: Tensor, y: Tensor, means: Tensor, least: int, ridge: float
) -> tuple[Tensor, Tensor]:
    own = means.clone()
    for c in set(y.tolist()):
        if int((y == c).sum()) >= least:
            own[c] = z[y == c].mean(0)
    scatter = sum(torch.outer(a - own[c], a - own[c]) for a, c in zip(z, y.tolist(), strict=True))
    unit = torch.eye(z.shape[1], dtype=torch.float64)
    return own, scatter / max(len(z) - 1, 1) + ridge * unit


def lda(means: Tensor, covariance: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    width = len(covariance)
    shrunk = (1 - 1e-4) * covariance + 1e-4 * covariance.trace() / width * torch.eye(
        width, dtype=torch.float64
    )
    weight = means @ torch.linalg.inv(shrunk)
    return weight, torch.stack(
        [p.log() - m @ w / 2 for p, m, w in zip(prior, means, weight, strict=True)]
    )


def pfedfda(setting: Setting, *, shares: tuple[float, float], ridge: float) -> list[Moment]:
    world = setting.world
    base, _ = parts_of(world)
    own, server = [world.fresh() for _ in range(world.clients)], world.fresh()
    means = torch.rand(
        world.classes, 4, generator=stream(world.seed, "pfedfda"), dtype=torch.float64
    )
    covariance = torch.eye(4, dtype=torch.float64)

    def mixture(model: Any, i: int) -> tuple[Tensor, Tensor]:
        x, y = world.data(i)
        with torch.no_grad():
            local = estimate(copy.deepcopy(model).eval().features(x), y, means, 2, ridge)
        pairs = zip(shares, local, (means, covariance), strict=True)
        mean, spread = (share * mine + (1 - share) * theirs for share, mine, theirs in pairs)
        return mean, spread

    def prior(i: int) -> Tensor:
        raised = label_counts(world, i) / world.sizes[i] + 1e-4
        return raised / raised.sum()

    moments = []
    for number, selected in enumerate(setting.selected, start=1):
        uploads = []
        for i in selected:
            copy_parameters(server, own[i], base)
            own[i] = with_head(own[i], *lda(means, covariance, prior(i)))
            world.train(own[i], i, number, names=base)
            uploads.append(mixture(own[i], i))
        sizes = [world.sizes[i] for i in selected]
        means, covariance = (
            sum(n * u[k] for n, u in zip(sizes, uploads, strict=True)) / sum(sizes) for k in (0, 1)
        )
        average(server, [own[i] for i in selected], sizes, base)
        personal = []
        for i in range(world.clients):
            whole = copy.deepcopy(own[i])
            copy_parameters(server, whole, base)
            personal.append(vector(with_head(whole, *lda(*mixture(whole, i), prior(i)))))
        even = torch.full((world.classes,), 1 / world.classes, dtype=torch.float64)
        moments.append(
            Moment(parameters(with_head(server, *lda(means, covariance, even))), personal)
        )
    return moments


# --- comparison with the loops ---


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
class TestAgainstLoops:
    @pytest.mark.parametrize("scope", ["full", "head", "body"])
    def test_fedbabu(self, norm: bool, scope: str) -> None:
        expression = f"fedbabu(finetune_epochs=2, finetune_scope={scope})"
        run = compare(World(norm), expression, fedbabu, epochs=2, scope=scope)
        head = run.federation.task.layout.unit(lambda tensor: tensor.layer == "head")
        for columns in head:
            assert torch.equal(
                run.federation.model()[columns], run.federation.task.initial[columns]
            )

    def test_fedrod(self, norm: bool) -> None:
        compare(World(norm), "fedrod(gamma=0.8)", fedrod, gamma=0.8)

    def test_apfl(self, norm: bool) -> None:
        world = World(norm, training=PLAIN)
        compare(world, "apfl(alpha=0.3)", apfl, alpha=0.3)
        compare(world, "apfl(alpha=0.6, adaptive=true)", apfl, alpha=0.6, adaptive=True)

    def test_fedproto(self, norm: bool) -> None:
        compare(World(norm), "fedproto(strength=0.7)", fedproto, strength=0.7)
        compare(World(norm), "fedproto(weighted=true)", fedproto, strength=1.0, weighted=True)
        compare(World(norm), "fedproto(by=head)", fedproto, strength=1.0, by_head=True)

    def test_feddbe(self, norm: bool) -> None:
        compare(World(norm), "feddbe(pull=2.0)", feddbe, pull=2.0, beta=1.0)
        compare(World(norm), "feddbe(pull=3.0, beta=0.3)", feddbe, pull=3.0, beta=0.3)

    def test_fedpac(self, norm: bool) -> None:
        compare(World(norm), "fedpac(strength=0.6)", fedpac, strength=0.6, head_rate=0.1)
        compare(
            World(norm),
            "fedpac(head_rate=0.3, head_epochs=2)",
            fedpac,
            strength=1.0,
            head_rate=0.3,
            head_epochs=2,
        )

    def test_fedas(self, norm: bool) -> None:
        compare(World(norm), "fedas(align_rate=0.05)", fedas, rate=0.05)

    def test_pfedfda(self, norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        given = torch.tensor([0.3, 0.8], dtype=torch.float64)
        monkeypatch.setattr("fedloom.algorithms.pfedfda.validated_shares", lambda *_: given)
        compare(World(norm), "pfedfda", pfedfda, shares=(0.3, 0.8), ridge=1.0)
        compare(World(norm), "pfedfda(ridge=1e-3)", pfedfda, shares=(0.3, 0.8), ridge=1e-3)


def test_fedah_is_ala_on_the_head_of_a_fedrep_whose_heads_travel() -> None:
    world = World(norm=True)
    run = world.run(build("fedah"))
    inner = "fedrep(head_epochs=1, upload_head=true)"
    assert_same(
        run.moments, world.run(build(f"ala({inner}, percent=100, max_epochs=1)")).moments, 1e-12
    )
    blend = Blend(world, parts_of(world)[1], percent=100, most=1)
    work = naive_whole_fedrep(world)
    assert_same(
        run.moments,
        shared_model(Setting(world, run.selected, blend), work, lambda m, i, t: m),
        1e-9,
    )


def naive_whole_fedrep(world: World) -> Callable[[nn.Module, nn.Module, int, int], None]:
    base, head = parts_of(world)

    def work(start: nn.Module, sent: nn.Module, i: int, t: int) -> None:
        world.train(start, i, t, "head", names=head, epochs=1)
        world.train(start, i, t, names=base)

    return work


# --- limiting cases ---


def assert_equal_moments(moments: Sequence[Moment], expected: Sequence[Moment]) -> None:
    assert_same(moments, expected, tolerance=1e-9)


def test_fedbabu_without_tuning_scores_the_base_under_the_initial_head() -> None:
    run = World().run(build("fedbabu(finetune_epochs=0)"))
    for row in run.moments[-1].personal:
        assert torch.equal(row, run.federation.model())


def test_fedrod_of_equal_classes_trains_the_model_of_fedavg() -> None:
    world = replace(World(), sizes=(6, 12, 9, 3, 9))
    world.labels = torch.cat([torch.arange(3).repeat(size // 3) for size in world.sizes])
    run, plain = world.run(build("fedrod")), world.run(build("fedavg"))
    for moment, expected in zip(run.moments, plain.moments, strict=True):
        torch.testing.assert_close(moment.parameters, expected.parameters)


def test_apfl_is_silobn_at_alpha_0_and_local_training_at_alpha_1() -> None:
    world = World(norm=True, training=PLAIN)
    run = world.run(build("apfl(alpha=0)"))
    assert_equal_moments(run.moments, world.run(build("silobn")).moments)
    everyone = World(participation=1.0, training=PLAIN, rounds=3)
    local = [everyone.fresh() for _ in range(everyone.clients)]
    for number in range(1, 4):
        for i, model in enumerate(local):
            everyone.train(model, i, number)
    for row, model in zip(
        everyone.run(build("apfl(alpha=1.0)")).moments[-1].personal, local, strict=True
    ):
        torch.testing.assert_close(row, vector(model), rtol=1e-9, atol=1e-9)


def test_fedproto_by_heads_without_a_pull_is_local_training() -> None:
    world = World(norm=True, participation=1.0, rounds=3)
    run = world.run(build("fedproto(strength=0, by=head)"))
    local = [world.fresh() for _ in range(world.clients)]
    for number in range(1, 4):
        for i, model in enumerate(local):
            world.train(model, i, number)
    for row, model in zip(run.moments[-1].personal, local, strict=True):
        torch.testing.assert_close(row, vector(model), rtol=1e-9, atol=1e-9)


def test_fedproto_names_no_class_that_nobody_has_and_forgets_none() -> None:
    world = World(rounds=6)
    world.labels[world.labels == 2] = 1
    for i in world.owned[0]:
        world.labels[i] = 0
    run = world.run(build("fedproto"))
    assert run.federation.algorithm.state["present"].tolist() == [1, 1, 0]
    for row in run.moments[-1].personal:
        module = run.federation.task.module(row).eval()
        outputs = module(100 * torch.randn(1000, world.inputs.shape[1], dtype=torch.float64))
        assert bool((outputs[:, 2] < outputs[:, :2].amax(1) - 49).all())


def test_feddbe_spends_its_first_round_on_the_consensus() -> None:
    world = World(norm=True)
    run = world.run(build("feddbe(pull=0)"))
    assert torch.equal(run.moments[0].parameters, parameters(world.module))
    shifts = [tensor for name, tensor in run.engine.memory().items() if "shift" in name]
    assert min(float(shift.abs().max()) for shift in shifts) > 0


def test_head_shares_at_both_ends() -> None:
    means = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    noisy = head_shares(means, torch.full((4,), 1e9))
    torch.testing.assert_close(
        noisy, torch.full((4, 4), 0.25, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        head_shares(1e6 * means, torch.ones(4)), torch.eye(4, dtype=torch.float64)
    )
    torch.testing.assert_close(
        head_shares(means, torch.zeros(4)), torch.eye(4, dtype=torch.float64)
    )


def test_fedpac_of_lone_heads_is_fedrep_with_one_head_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(norm=True, training=Training(learning_rate=0.1, epochs=2, batch_size=4))
    monkeypatch.setattr(
        "fedloom.algorithms.fedpac.head_shares", lambda means, _: torch.eye(len(means)).double()
    )
    run, expected = (
        world.run(build("fedpac(strength=0)")),
        world.run(build("fedrep(head_epochs=1)")),
    )
    base = expected.federation.task.layout.unit(lambda tensor: tensor.layer != "head")[0]
    for one, two in zip(run.moments, expected.moments, strict=True):
        torch.testing.assert_close(one.parameters[base], two.parameters[base], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            torch.stack(one.personal), torch.stack(two.personal), rtol=1e-9, atol=1e-9
        )


def test_fedas_without_alignment_and_with_equal_weights_is_fedper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(sizes=(9, 9, 9, 9, 9))
    monkeypatch.setattr(
        "fedloom.algorithms.fedas.fisher_traces", lambda cohort, rows: rows.new_ones(len(rows))
    )
    run = world.run(build("fedas(align_rate=0)"))
    expected = world.run(build("fedper"))
    for one, two in zip(run.moments, expected.moments, strict=True):
        torch.testing.assert_close(one.parameters, two.parameters, rtol=1e-9, atol=1e-9)


def test_clients_of_fedas_that_have_nothing_to_learn_count_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = []
    for trace in (1.0, 0.0):
        monkeypatch.setattr(
            "fedloom.algorithms.fedas.fisher_traces",
            lambda cohort, rows, trace=trace: rows.new_full((len(rows),), trace),
        )
        models.append(World().run(build("fedas")).moments[-1].parameters)
    torch.testing.assert_close(models[1], models[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_pfedfda_at_both_ends(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(participation=1.0)
    monkeypatch.setattr(
        "fedloom.algorithms.pfedfda.validated_shares", lambda *_: torch.full((2,), share).double()
    )
    run = world.run(build("pfedfda"))
    weights = torch.stack([row[-15:-3] for row in run.moments[-1].personal])
    same_head = torch.allclose(weights, weights[:1].expand_as(weights), atol=1e-9)
    assert same_head is (
        share == 0.0
    )  # share 0: the global head up to the prior; share 1: personal heads


def test_pfedfda_validates_the_shares_better_than_a_grid() -> None:
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(3).repeat(8)
    means = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    z = means[labels] + 0.7 * torch.randn(24, 4, generator=generator, dtype=torch.float64)
    received = (
        means + 1.5 * torch.randn(3, 4, generator=generator, dtype=torch.float64),
        torch.eye(4).double(),
    )
    gaussians = torch.cat(received)
    prior = torch.full((3,), 1 / 3, dtype=torch.float64)
    found = validated_shares(z, labels, gaussians, 1e-4, prior)

    def loss(a: float, b: float) -> float:
        total = 0.0
        halves = [torch.arange(24)[torch.arange(24) // 3 % 2 == fold] for fold in (0, 1)]
        for seen, left in (halves, halves[::-1]):
            own = estimate(z[seen], labels[seen], received[0], 2, 1e-4)
            mean, spread = (
                s * m + (1 - s) * g for s, m, g in zip((a, b), own, received, strict=True)
            )
            weight, bias = lda(mean, spread, prior)
            total += float(F.cross_entropy(z[left] @ weight.T + bias, labels[left]))
        return total

    grid = min(loss(a / 10, b / 10) for a in range(11) for b in range(11))
    assert loss(*found.tolist()) <= grid + 1e-3
    assert float(found[0]) > 0.5
    alone = validated_shares(z[:3], labels[:3], gaussians, 1e-4, prior)
    assert alone.tolist() == [0, 0]


# --- engines, resumption, bytes, errors ---

EVERY = ["fedbabu", "fedrod", "apfl", "fedproto", "feddbe", "fedpac", "fedas", "pfedfda", "fedah"]


@pytest.mark.parametrize("expression", EVERY)
def test_engines_agree(expression: str) -> None:
    world = World(norm=True, training=replace(PLAIN, clip=1.0))
    rows = []
    for engine in (RowsEngine, StackedEngine):
        task = world.task()
        local_engine = engine(task)
        federation = Federation(
            build(expression),
            task,
            local_engine,
            Schedule(rounds=3, participation=0.6, seed=world.seed),
        )
        federation.run()
        rows.append([federation.model(), *local_engine.memory().values()])
    for row, stacked_row in zip(*rows, strict=True):
        torch.testing.assert_close(row, stacked_row, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("expression", [*EVERY, "power_of_choice(fedas, candidates=4)"])
def test_a_run_that_stops_goes_on_to_the_same_bytes(expression: str, tmp_path: Path) -> None:
    world = World(norm=True)

    def federation(folder: str) -> Federation:
        task, schedule = world.task(), Schedule(rounds=5, participation=0.6, seed=world.seed)
        return Federation(build(expression), task, RowsEngine(task), schedule, tmp_path / folder)

    for folder in ("straight", "stopped"):
        (tmp_path / folder).mkdir()
    straight, stopped = federation("straight"), federation("stopped")
    straight.run()
    stopped.step()
    stopped.step()
    stopped.save()
    resumed = federation("stopped")
    assert resumed.finished == 2
    resumed.run()
    states = [run.server_state() for run in (resumed, straight)]
    memories = [run.engine.memory() for run in (resumed, straight)]
    for one, other in (states, memories):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert resumed.history == straight.history


@pytest.mark.parametrize(
    ("expression", "down", "up"),
    [
        ("fedbabu", 64, 64), ("fedrod", 79, 79), ("apfl", 79, 79), ("fedproto", 15, 15),
        ("fedpac", 79 + 15, 79 + 28), ("feddbe", 79 + 4, 79), ("fedas", 64, 65), ("pfedfda", 64 + 28, 64 + 28),
        ("fedah", 79, 79),
    ],
)  # fmt: skip
def test_traffic(expression: str, down: int, up: int) -> None:
    world = World(participation=1.0)
    record = world.run(build(expression)).federation.history[-1]
    assert (record["bytes_down"], record["bytes_up"]) == (8 * 5 * down, 8 * 5 * up)


@pytest.mark.parametrize("expression", ["fedrod", "fedproto", "feddbe", "fedpac", "pfedfda"])
def test_a_head_without_a_bias_is_refused(expression: str) -> None:
    world = World()
    world.module.head = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    with pytest.raises(
        InvalidValue, match=rf"^{expression} needs a classifier with a bias, but head has none$"
    ):
        world.run(build(expression))


@pytest.mark.parametrize("expression", ["fedbabu", "fedah", "fedrep(upload_head=true)"])
def test_a_model_that_is_all_classifier_is_refused(expression: str) -> None:
    world = World()
    world.module = nn.Sequential(nn.Linear(5, 3, dtype=torch.float64))
    with pytest.raises(
        InvalidValue, match=r"needs layers under the classifier, but Sequential is a single layer$"
    ):
        world.run(build(expression))


def test_idle_clients_are_sent_the_global_model_also_beside_a_single_participant() -> None:
    world = World(participation=0.2)
    run = world.run(build("umf(fedpac, simulate_all=true)"))
    upcoming = world.round(5)
    pipeline = run.federation.pipeline
    for selected in ((1,), (1, 3)):
        round = replace(upcoming, selected=selected)
        rows = pipeline.open(round, pipeline.select(round)).moved["model"]
        assert len(rows) == len(selected) + 1
        assert torch.equal(rows[-1], pipeline.model())
