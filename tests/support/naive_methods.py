"""Naive second computations of the personalised methods with torch's autograd."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedloom.common.randomness import stream
from naive_personal import (
    LAYERS,
    Moment,
    Net,
    Setting,
    World,
    average,
    copy_parameters,
    parameters,
    shared_model,
    squared_distance,
    vector,
)


def added(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


# --- methods around one shared model ---


def fedavg(setting: Setting, *, names: Sequence[str] | None = None) -> list[Moment]:
    world = setting.world
    return shared_model(
        setting, lambda w, s, i, t: world.train(w, i, t), lambda m, i, t: m, names=names
    )


def fedprox(setting: Setting, mu: float) -> list[Moment]:
    world = setting.world
    return shared_model(
        setting,
        lambda w, s, i, t: world.train(w, i, t, extra=lambda m: mu / 2 * squared_distance(m, s)),
        lambda m, i, t: m,
    )


def fine_tuned(
    setting: Setting, *, epochs: int, mu: float = 0.0, scoring_only: bool = False
) -> list[Moment]:
    world = setting.world

    def tune(
        model: nn.Module, sent: nn.Module, i: int, t: int, purpose: str, count: int | None
    ) -> nn.Module:
        world.train(
            model, i, t, purpose, epochs=count, extra=lambda m: mu / 2 * squared_distance(m, sent)
        )
        return model

    def work(start: nn.Module, sent: nn.Module, i: int, t: int) -> None:
        if not scoring_only:
            tune(start, sent, i, t, "finetune", epochs)
        tune(start, sent, i, t, "batches", None)

    def score(model: nn.Module, i: int, t: int) -> nn.Module:
        return tune(model, copy.deepcopy(model), i, t, "finetune", epochs)

    return shared_model(setting, work, score)


def per_fedavg(
    setting: Setting, *, alpha: float, hessian: bool = False, passes: int = 1
) -> list[Moment]:
    """Train with MAML.

    `hessian` uses the exact gradient of the second batch after the step and the Hessian of a third
    batch.
    """
    world = setting.world
    count = 3 if hessian else 2

    def work(start: nn.Module, sent: nn.Module, i: int, t: int) -> None:
        start.train()
        optimizer = world.optimizer(start, world.rate(t))
        for x, y in world.batches(
            i, t, epochs=passes * world.training.epochs, times=count, drop_last=True
        ):
            size = len(y) // count
            batches = [
                (x[k * size : (k + 1) * size], y[k * size : (k + 1) * size]) for k in range(count)
            ]
            params = list(start.parameters())
            inner = torch.autograd.grad(
                F.cross_entropy(start(batches[0][0]), batches[0][1]), params
            )
            stepped = copy.deepcopy(start)
            with torch.no_grad():
                for p, g in zip(stepped.parameters(), inner, strict=True):
                    p.sub_(alpha * g)
            outer = list(
                torch.autograd.grad(
                    F.cross_entropy(stepped(batches[1][0]), batches[1][1]),
                    list(stepped.parameters()),
                )
            )
            for target, source in zip(start.buffers(), stepped.buffers(), strict=True):
                target.copy_(source)
            if hessian:
                gradient = torch.autograd.grad(
                    F.cross_entropy(start(batches[2][0]), batches[2][1]), params, create_graph=True
                )
                product = torch.autograd.grad(gradient, params, grad_outputs=outer)
                outer = [d - alpha * h for d, h in zip(outer, product, strict=True)]
            for p, g in zip(params, outer, strict=True):
                p.grad = g
            if world.training.clip is not None:
                nn.utils.clip_grad_norm_(params, world.training.clip)
            optimizer.step()

    def score(model: nn.Module, i: int, t: int) -> nn.Module:
        world.train(model, i, t, "adapt", steps=1, rate=alpha)
        return model

    return shared_model(setting, work, score)


def fedrep(setting: Setting, *, head_epochs: int) -> list[Moment]:
    world = setting.world
    head = [n for n in world.names if n.startswith("head.")]
    base = [n for n in world.names if n not in head]

    def work(start: nn.Module, sent: nn.Module, i: int, t: int) -> None:
        if head_epochs:
            world.train(start, i, t, "head", names=head, epochs=head_epochs)
        world.train(start, i, t, names=base)

    return shared_model(setting, work, lambda m, i, t: m, names=base)


def pfedme(
    setting: Setting, *, strength: float, rate: float, steps: int, beta: float
) -> list[Moment]:
    world = setting.world
    personal: dict[int, nn.Module] = {}

    def work(start: nn.Module, sent: nn.Module, i: int, t: int) -> nn.Module:
        theta, local = (
            copy.deepcopy(start).train(),
            [p.detach().clone() for p in start.parameters()],
        )
        for x, y in world.batches(i, t):
            for _ in range(steps):
                pulls = sum(
                    (p - w).square().sum() for p, w in zip(theta.parameters(), local, strict=True)
                )
                loss = F.cross_entropy(theta(x), y) + strength / 2 * pulls
                gradients = torch.autograd.grad(loss, list(theta.parameters()))
                with torch.no_grad():
                    for p, g in zip(theta.parameters(), gradients, strict=True):
                        p.sub_(rate * g)
            local = [
                w - world.rate(t) * strength * (w - p.detach())
                for w, p in zip(local, theta.parameters(), strict=True)
            ]
        personal[i] = theta
        result = copy.deepcopy(theta)
        with torch.no_grad():
            for p, w in zip(result.parameters(), local, strict=True):
                p.copy_(w)
        return result

    return shared_model(setting, work, lambda m, i, t: personal.get(i, m), beta=beta)


def ditto(setting: Setting, *, strength: float, epochs: int) -> list[Moment]:
    world = setting.world
    personal: dict[int, nn.Module] = {}

    def work(start: nn.Module, sent: nn.Module, i: int, t: int) -> None:
        model = personal.setdefault(i, world.fresh())
        centre = copy.deepcopy(start)
        world.train(
            model,
            i,
            t,
            "personal",
            epochs=epochs,
            extra=lambda m: strength / 2 * squared_distance(m, centre),
        )
        world.train(start, i, t)

    return shared_model(setting, work, lambda m, i, t: personal.get(i, m))


def fedphp(
    setting: Setting, *, mu: float, transfer: float, deployed: str = "history"
) -> list[Moment]:
    world = setting.world
    history: dict[int, nn.Module] = {}
    local: dict[int, nn.Module] = {}
    selections = [0] * world.clients

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return added(math.e ** (-(x - y).square().sum() / (2 * a)) for a in (10, 15, 20, 50))

    def work(start: nn.Module, sent: nn.Module, i: int, t: int) -> None:
        previous = copy.deepcopy(history.get(i, world.fresh())).eval()

        def loss(x: Tensor, y: Tensor) -> Tensor:
            assert isinstance(start, Net)
            assert isinstance(previous, Net)
            ours, theirs, n = start.features(x), previous.features(x).detach(), len(y)
            logits = start.head(ours)
            pairs = [(a, b) for a in range(n) for b in range(n)]
            distance = added(
                kernel(ours[a], ours[b])
                + kernel(theirs[a], theirs[b])
                - 2 * kernel(ours[a], theirs[b])
                for a, b in pairs
            ) / len(pairs)
            return (1 - transfer) * F.cross_entropy(logits, y) + transfer * distance

        world.train(start, i, t, loss=loss)
        share = min(mu, mu * selections[i] * world.clients / world.participants / world.rounds)
        mixed = copy.deepcopy(start)
        with torch.no_grad():
            for p, q in zip(
                [*mixed.parameters(), *mixed.buffers()],
                [*previous.parameters(), *previous.buffers()],
                strict=True,
            ):
                if p.is_floating_point():
                    p.copy_((1 - share) * p + share * q)
        history[i], local[i] = mixed, start
        selections[i] += 1

    return shared_model(
        setting, work, lambda m, i, t: (history if deployed == "history" else local).get(i, m)
    )


def partialfed(
    setting: Setting,
    *,
    pattern: tuple[int, int],
    temperature: float = 5.0,
    cooling: float = 0.965,
    bias: float = 0.0,
) -> list[Moment]:
    """Run the method without batch norm; weights and logits follow autograd.

    The gradient passes through a straight-through mixture of both sources.
    """
    world = setting.world
    layers = [layer for layer in LAYERS if any(n.startswith(f"{layer}.") for n in world.names)]
    logits = {
        i: torch.tensor([[bias, 0.0]] * len(layers), dtype=torch.float64)
        for i in range(world.clients)
    }
    local: dict[int, nn.Module] = {}
    template = world.fresh()

    def compose(i: int, server_model: nn.Module) -> nn.Module:
        result = copy.deepcopy(local.get(i, server_model))
        for layer, (server_logit, local_logit) in zip(layers, logits[i].tolist(), strict=True):
            if server_logit >= local_logit:
                copy_parameters(
                    server_model, result, [n for n in world.names if n.startswith(f"{layer}.")]
                )
        return result

    def work(start: nn.Module, sent: nn.Module, i: int, t: int) -> nn.Module:
        count = math.ceil(world.sizes[i] / min(4, world.sizes[i])) * world.training.epochs
        uniform = torch.rand(
            (count, len(layers), 2), generator=stream(world.seed, "strategy", round=t, client=i)
        ).double()
        noise = -torch.log(-torch.log(uniform + 1e-20) + 1e-20)
        tau = max(0.05, temperature * cooling ** (t - 1))
        mine = copy.deepcopy(local.get(i, start))
        for step, (x, y) in enumerate(world.batches(i, t)):
            a = logits[i].clone().requires_grad_()
            soft = torch.softmax((a + noise[step]) / tau, 1)
            hard = F.one_hot(soft.argmax(1), 2).double()
            chosen = hard - soft.detach() + soft
            working = {}
            for (name, p), (_, q) in zip(
                start.named_parameters(), mine.named_parameters(), strict=True
            ):
                s = chosen[layers.index(name.split(".")[0])]
                working[name] = s[0] * p + s[1] * q
            loss = F.cross_entropy(functional_call(template, working, (x,)), y)
            sources = [*start.parameters(), *mine.parameters()]
            gradients = torch.autograd.grad(loss, [a, *sources])
            if step % sum(pattern) < pattern[0]:
                with torch.no_grad():
                    for p, g in zip(sources, gradients[1:], strict=True):
                        p.sub_(world.rate(t) * g)
            else:
                logits[i] = (a - world.rate(t) * gradients[0]).detach()
        local[i] = mine
        local[i] = compose(i, start)
        return copy.deepcopy(local[i])

    return shared_model(setting, work, lambda m, i, t: compose(i, m))


# --- methods that mix the clients' models ---


def fedamp(
    setting: Setting, *, alpha: float, strength: float, sigma: float, plain: bool = False
) -> list[Moment]:
    world, init = setting.world, setting.init
    models = [world.fresh() for _ in range(world.clients)]
    moments = []
    for number, _ in enumerate(setting.selected, start=1):
        previous = [copy.deepcopy(model) for model in models]
        for i in range(world.clients):
            pulls = [
                0.0
                if j == i
                else alpha
                / sigma
                * math.exp(-float(squared_distance(previous[i], previous[j]).detach()) / sigma)
                for j in range(world.clients)
            ]
            pulls = [p / max(1.0, sum(pulls)) for p in pulls]
            pulls[i] = 1 - sum(pulls)
            centre = copy.deepcopy(previous[i])
            average(centre, previous, pulls, world.names)
            if init.changes():
                models[i] = init.start(i, number, centre)

            def proximal(m: nn.Module, u: nn.Module = centre) -> Tensor:
                squared = squared_distance(m, u)
                if plain:
                    # The gradient of a norm at zero is zero.
                    return (
                        strength
                        / (2 * alpha)
                        * (squared.sqrt() if squared.item() > 1e-24 else 0 * squared)
                    )
                return strength / (2 * alpha) * squared

            world.train(models[i], i, number, extra=proximal)
            init.keep(i, models[i])
        mean = world.fresh()
        average(mean, models, [1.0] * world.clients, world.names)
        moments.append(Moment(parameters(mean), [vector(model) for model in models]))
    return moments


def fedfomo(setting: Setting, *, most: int, exploration: float = 0.0) -> list[Moment]:
    world = setting.world
    models = [world.fresh() for _ in range(world.clients)]
    reference = [world.fresh() for _ in range(world.clients)]
    uploaded: dict[int, nn.Module] = {}
    order: list[int] = []
    relation: dict[tuple[int, int], float] = {}
    moments = []

    def preference(i: int, j: int) -> float:
        return relation.get((i, j), float(i == j and i in uploaded))

    for number, selected in enumerate(setting.selected, start=1):
        results = {}
        for i in selected:
            x, y = world.data(i)
            shuffled = torch.randperm(len(y), generator=stream(world.seed, "fedfomo", client=i))
            cut = int(0.8 * len(y) + 1e-9)
            train, validation = (x[shuffled[:cut]], y[shuffled[:cut]]), shuffled[cut:]

            def loss(
                model: nn.Module, inputs: Tensor = x[validation], labels: Tensor = y[validation]
            ) -> float:
                model.eval()
                return float(F.cross_entropy(model(inputs), labels).detach())

            valued = sorted(order, key=lambda j: preference(i, j), reverse=True)
            draws = stream(world.seed, "explore", round=number, client=i)
            if float(torch.rand((), generator=draws)) < exploration:
                valued = [order[k] for k in torch.randperm(len(order), generator=draws).tolist()]
            values = {}
            for j in valued[:most]:
                candidate = copy.deepcopy(models[i])  # statistics are the client's own
                copy_parameters(uploaded[j], candidate)
                distance = math.sqrt(float(squared_distance(candidate, reference[i]).detach()))
                current = copy.deepcopy(reference[i])
                values[j] = ((loss(current) - loss(candidate)) / (distance + 1e-5), candidate)
            for j, (value, _) in values.items():
                relation[i, j] = relation.get((i, j), float(i == j)) + value
            positive = {j: v for j, v in values.items() if v[0] > 0}
            if positive:
                average(
                    models[i],
                    [m for _, m in positive.values()],
                    [v for v, _ in positive.values()],
                    world.names,
                )
            reference[i] = copy.deepcopy(models[i])
            world.train(models[i], i, number, data=train)
            results[i] = copy.deepcopy(models[i])
        for i in selected:
            if i not in order:
                order.append(i)
            uploaded[i] = results[i]
        mean = world.fresh()
        average(mean, [uploaded[i] for i in order], [world.sizes[i] for i in order], world.names)
        moments.append(Moment(parameters(mean), _personal_models(world, models, mean, uploaded)))
    return moments


def _personal_models(
    world: World, models: Sequence[nn.Module], mean: nn.Module, trained: dict[int, nn.Module]
) -> list[Tensor]:
    """Return the clients' models; a client without training yet has the global model."""
    personal = []
    for i in range(world.clients):
        model = copy.deepcopy(models[i])
        if i not in trained:
            copy_parameters(mean, model)
        personal.append(vector(model))
    return personal


def apple(
    setting: Setting,
    *,
    relation_rate: float,
    mu: float,
    decline: float,
    start: str = "shares",
    pfllib: bool = False,
) -> list[Moment]:
    world = setting.world
    count = world.clients
    shares = torch.tensor(world.sizes, dtype=torch.float64) / sum(world.sizes)
    starts = {
        "shares": shares.expand(count, count),
        "uniform": torch.full((count, count), 1 / count, dtype=torch.float64),
    }
    relation = [q.clone() for q in starts.get(start, torch.eye(count, dtype=torch.float64))]
    cores = [[p.detach().clone() for p in world.fresh().parameters()] for _ in range(count)]
    models = [world.fresh() for _ in range(count)]
    moments = []
    for number, _ in enumerate(setting.selected, start=1):
        end = decline * world.rounds
        hold = (math.cos(math.pi * (number - 1) / end) + 1) / 2 if number - 1 < end else 0.0
        rate = world.rate(number) * (count if pfllib else 1)
        uploads = []
        for i in range(count):
            pool = [[t.clone() for t in core] for core in cores]
            model = models[i].train()
            for x, y in world.batches(i, number):
                q = relation[i].clone().requires_grad_()
                mine = [t.clone().requires_grad_() for t in pool[i]]
                used = [mine if j == i else pool[j] for j in range(count)]
                mixed = [added(q[j] * used[j][k] for j in range(count)) for k in range(len(mine))]
                loss = F.cross_entropy(
                    functional_call(model, dict(zip(world.names, mixed, strict=True)), (x,)), y
                )
                if pfllib:
                    slopes = list(torch.autograd.grad(loss, [*mixed, *mine]))
                    gradients, theirs = slopes[: len(mixed)], slopes[len(mixed) :]
                    products = [
                        added((g * c).mean() for g, c in zip(gradients, used[j], strict=True))
                        / len(gradients)
                        for j in range(count)
                    ]
                    step = torch.stack(products).detach() + hold * mu * (relation[i] - shares)
                else:
                    loss = loss + hold * mu / 2 * (q - shares).square().sum()
                    step, *theirs = torch.autograd.grad(loss, [q, *mine])
                pool[i] = [(c - rate * g).detach() for c, g in zip(mine, theirs, strict=True)]
                relation[i] = relation[i] - relation_rate * step
            with torch.no_grad():
                for k, p in enumerate(model.parameters()):
                    p.copy_(added(relation[i][j] * pool[j][k] for j in range(count)))
            uploads.append([p.detach().clone() for p in model.parameters()] if pfllib else pool[i])
        cores = uploads
        mean = [
            added(float(shares[j]) * cores[j][k] for j in range(count))
            for k in range(len(cores[0]))
        ]
        moments.append(
            Moment(torch.cat([t.reshape(-1) for t in mean]), [vector(model) for model in models])
        )
    return moments
