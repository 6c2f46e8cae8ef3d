"""Compare each global-model method with a second implementation of its definition.

The runs have several rounds with partial participation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.algorithm.records import SERVER_MODEL
from fedloom.common.randomness import stream
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.data import DataSpec
from fedloom.engines.rows import RowsEngine
from fedloom.models.structure import head_name
from fedloom.parts.building import build
from fedloom.rounds.engine import Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task.making import make_task
from model_support import make_model
from naive import Net, State, World, assert_same, average, flat, shares, uniform, zeros

Rounds = list[list[int]]
Naive = Callable[..., Iterator[State]]


def mean_size(world: World) -> float:
    return sum(world.sizes) / world.clients


def fedavg(world: World, rounds: Rounds, weights: Any = shares) -> Iterator[State]:
    state = world.initial()
    for number, clients in enumerate(rounds, start=1):
        state = average(
            [world.train(state, number, i)[0] for i in clients], weights(world, clients)
        )
        yield state


def fedprox(world: World, rounds: Rounds, mu: float, factor: float) -> Iterator[State]:
    state = world.initial()
    for number, clients in enumerate(rounds, start=1):
        anchor = state

        def loss(
            module: nn.Module, x: Tensor, y: Tensor, step: int, anchor: State = anchor
        ) -> Tensor:
            near = sum((p - anchor[name]).square().sum() for name, p in module.named_parameters())
            return F.cross_entropy(module(x), y) + factor * mu * near

        state = average(
            [world.train(state, number, i, loss=loss)[0] for i in clients], shares(world, clients)
        )
        yield state


def scaffold(
    world: World,
    rounds: Rounds,
    option: int = 2,
    rate: float = 1.0,
    scaled: bool = False,
    base: bool = False,
) -> Iterator[State]:
    state, general = world.initial(), zeros(world)
    variates = {i: zeros(world) for i in range(world.clients)}
    for number, clients in enumerate(rounds, start=1):
        uploads, change = [], zeros(world)
        for i in clients:
            a = world.sizes[i] / mean_size(world) if scaled else 1.0

            def adjust(parameters: dict[str, nn.Parameter], i: int = i, a: float = a) -> None:
                for name, p in parameters.items():
                    p.grad += general[name] / a - variates[i][name]

            final, steps = world.train(state, number, i, adjust=adjust)
            eta = world.rate(1 if base else number) / (1 - world.training.momentum)
            slopes = None
            if option == 1:
                slopes, passes = gradients(world, state, i)
                if world.norm:
                    final["norm.num_batches_tracked"] += passes
            for name in world.trained:
                if slopes is not None:
                    variate = slopes[name]
                else:
                    variate = (
                        variates[i][name]
                        - general[name] / a
                        + (state[name] - final[name]) / (steps * eta)
                    )
                change[name] += a * (variate - variates[i][name])
                variates[i][name] = variate
            uploads.append(final)
        mean = average(uploads, [1 / len(uploads)] * len(uploads))
        for name in world.trained:
            mean[name] = state[name] + rate * (mean[name] - state[name])
            general[name] = general[name] + change[name] / world.clients
        state = mean
        yield state


def gradients(world: World, state: State, client: int) -> tuple[State, int]:
    """Return the gradient of the mean loss in training mode and the number of batches."""
    inputs, labels = world.data(client)
    module, total, count, passes = world.at(state).train(), zeros(world), 0, 0
    for start in range(0, len(labels), 4):
        x, y = inputs[start : start + 4], labels[start : start + 4]
        if world.norm and len(y) == 1:
            continue
        module.zero_grad()
        F.cross_entropy(module(x), y, reduction="sum").backward()
        for name, p in module.named_parameters():
            total[name] += p.grad
        count += len(y)
        passes += 1
    return {name: tensor / count for name, tensor in total.items()}, passes


def moon(world: World, rounds: Rounds, mu: float, temperature: float) -> Iterator[State]:
    state, previous = world.initial(), {}
    for number, clients in enumerate(rounds, start=1):
        uploads = []
        for i in clients:
            sent = world.at(state).eval()
            earlier = world.at(previous[i]).eval() if i in previous else None

            def loss(
                module: Net,
                x: Tensor,
                y: Tensor,
                step: int,
                sent: Net = sent,
                earlier: Net | None = earlier,
            ) -> Tensor:
                z = module.features(x)
                total = F.cross_entropy(module.head(z), y)
                if earlier is None:
                    return total
                near, far = (
                    F.cosine_similarity(z, m.features(x).detach()) / temperature
                    for m in (sent, earlier)
                )
                return total + mu * -torch.log(near.exp() / (near.exp() + far.exp())).mean()

            previous[i], _ = world.train(state, number, i, loss=loss)
            uploads.append(previous[i])
        state = average(uploads, shares(world, clients))
        yield state


def drifting(
    world: World,
    rounds: Rounds,
    alpha: float,
    decoupled: bool,
    base: bool = False,
    nominal: bool = False,
) -> Iterator[State]:
    """Yield the models of FedDyn or FedDC.

    The mean of all histories is computed again in each round.
    """
    state, update = world.initial(), zeros(world)
    history = {i: zeros(world) for i in range(world.clients)}
    updates = {i: zeros(world) for i in range(world.clients)}
    for number, clients in enumerate(rounds, start=1):
        uploads, change = [], zeros(world)
        for i in clients:
            a = world.sizes[i] / mean_size(world)

            def loss(
                module: nn.Module,
                x: Tensor,
                y: Tensor,
                step: int,
                i: int = i,
                a: float = a,
                state: State = state,
            ) -> Tensor:
                total = F.cross_entropy(module(x), y)
                for name, p in module.named_parameters():
                    if decoupled:
                        total = (
                            total
                            + alpha / a / 2 * (p - (state[name] - history[i][name])).square().sum()
                        )
                        total = total + (p * (update[name] / a - updates[i][name])).sum()
                    else:
                        total = total + alpha / a / 2 * (p - state[name]).square().sum()
                        total = total + alpha / a * (p * history[i][name]).sum()
                return total

            final, steps = world.train(state, number, i, loss=loss)
            if nominal:
                assert world.training.batch_size is not None
                steps = world.training.epochs * math.ceil(
                    mean_size(world) / world.training.batch_size
                )
            for name in world.trained:
                moved = final[name] - state[name]
                history[i][name] = history[i][name] + moved
                client_update = (
                    updates[i][name]
                    - update[name] / a
                    - moved / (steps * world.rate(1 if base else number))
                )
                change[name] += a * (client_update - updates[i][name])
                updates[i][name] = client_update
            uploads.append(final)
        mean = average(uploads, uniform(clients))
        state = dict(mean)
        for name in world.trained:
            state[name] = mean[name] + sum(h[name] for h in history.values()) / world.clients
            update[name] = update[name] + change[name] / world.clients
        yield state


def fedexp(world: World, rounds: Rounds, epsilon: float, by_clients: bool) -> Iterator[State]:
    state = world.initial()
    for number, clients in enumerate(rounds, start=1):
        uploads = [world.train(state, number, i)[0] for i in clients]
        p, mean = shares(world, clients), average(uploads, shares(world, clients))
        above = sum(
            w * float(sum((u[n] - state[n]).square().sum() for n in world.trained))
            for w, u in zip(p, uploads, strict=True)
        )
        below = float(sum((mean[n] - state[n]).square().sum() for n in world.trained))
        constant = (
            epsilon
            * world.training.decay ** (2 * (number - 1))
            * (len(clients) if by_clients else 1)
        )
        step = max(1.0, above / (2 * (below + constant)))
        following = dict(mean)
        for name in world.trained:
            following[name] = state[name] + step * (mean[name] - state[name])
        halves = average([state, following], [0.5, 0.5])
        yield (
            following
            if number == 1
            else {**halves, **{n: t for n, t in mean.items() if not t.is_floating_point()}}
        )
        state = following


def sharp(world: World, rounds: Rounds, rho: float, eta: float | None) -> Iterator[State]:
    """Yield the models of SAM (`eta` is None) or ASAM on the clients."""
    state = world.initial()
    for number, clients in enumerate(rounds, start=1):
        uploads = []
        for i in clients:

            def loss(module: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
                start = copy.deepcopy(module.state_dict())
                slopes = torch.autograd.grad(
                    F.cross_entropy(module(x), y), list(module.parameters())
                )
                scale = {
                    n: p.detach().abs() + eta
                    if eta is not None and "weight" in n
                    else torch.ones_like(p)
                    for n, p in module.named_parameters()
                }
                scaled = {n: scale[n] * g for n, g in zip(scale, slopes, strict=True)}
                norm = torch.sqrt(sum(t.square().sum() for t in scaled.values())) + 1e-16
                with torch.no_grad():
                    for n, p in module.named_parameters():
                        p += rho * scale[n] * scaled[n] / norm
                ahead = torch.autograd.grad(
                    F.cross_entropy(module(x), y), list(module.parameters())
                )
                with torch.no_grad():
                    for n, p in module.named_parameters():
                        p.copy_(start[n])
                return sum((p * g).sum() for p, g in zip(module.parameters(), ahead, strict=True))

            uploads.append(world.train(state, number, i, loss=loss)[0])
        state = average(uploads, shares(world, clients))
        yield state


def fedmut(
    world: World, rounds: Rounds, radius: float, beta: float, horizon: int
) -> Iterator[State]:
    state = previous = world.initial()
    for number, clients in enumerate(rounds, start=1):
        generator = stream(world.seed, "mutate", round=number)
        models = [copy.deepcopy(state) for _ in clients]
        skew = beta * (1 - min(max(number - 2, 0) / horizon, 1))
        pairs = len(clients) // 2
        for name in world.trained:
            signs = [1.0, -1.0 + skew] * pairs
            order = torch.randperm(2 * pairs, generator=generator).tolist()
            for model, index in zip(models, order, strict=False):
                model[name] = state[name] + radius * signs[index] * (state[name] - previous[name])
        uploads = [world.train(m, number, i)[0] for m, i in zip(models, clients, strict=True)]
        previous, state = state, average(uploads, uniform(clients))
        yield state


def optimizer(world: World, rounds: Rounds, kind: str, weights: Any = shares) -> Iterator[State]:
    state = world.initial()
    momentum, variance = zeros(world), {n: t + 1e-3**2 for n, t in zeros(world).items()}
    for number, clients in enumerate(rounds, start=1):
        mean = average([world.train(state, number, i)[0] for i in clients], weights(world, clients))
        for name in world.trained:
            update = mean[name] - state[name]
            if kind == "fedavgm":
                momentum[name] = 0.9 * momentum[name] + update
                mean[name] = state[name] + 0.7 * momentum[name]
                continue
            momentum[name] = 0.9 * momentum[name] + 0.1 * update
            square = update**2
            if kind == "fedadam":
                variance[name] = 0.99 * variance[name] + 0.01 * square
            else:
                variance[name] = variance[name] - 0.01 * square * torch.sign(
                    variance[name] - square
                )
            mean[name] = state[name] + 0.02 * momentum[name] / (variance[name].sqrt() + 1e-3)
        state = mean
        yield state


def fednova(world: World, rounds: Rounds) -> Iterator[State]:
    state, m = world.initial(), world.training.momentum
    for number, clients in enumerate(rounds, start=1):
        trained = [world.train(state, number, i) for i in clients]
        p, mean = (
            shares(world, clients),
            average([final for final, _ in trained], shares(world, clients)),
        )
        lengths = [(tau - m * (1 - m**tau) / (1 - m)) / (1 - m) for _, tau in trained]
        effective = sum(w * a for w, a in zip(p, lengths, strict=True))
        for name in world.trained:
            steps = [
                w * (f[name] - state[name]) / a
                for w, (f, _), a in zip(p, trained, lengths, strict=True)
            ]
            mean[name] = state[name] + effective * sum(steps)
        state = mean
        yield state


CASES: list[tuple[str, Naive, dict[str, Any]]] = [
    ("fedavg", fedavg, {}),
    ("fedavg(weighted=false)", fedavg, {"weights": lambda world, clients: uniform(clients)}),
    ("fedprox(mu=0.3)", fedprox, {"mu": 0.3, "factor": 0.5}),
    ("fedprox(mu=0.3, prox_factor=1.0)", fedprox, {"mu": 0.3, "factor": 1.0}),
    ("scaffold", scaffold, {}),
    ("scaffold(option=1, server_learning_rate=0.7)", scaffold, {"option": 1, "rate": 0.7}),
    ("scaffold_feddc", scaffold, {"scaled": True, "base": True}),
    ("moon(mu=2.0)", moon, {"mu": 2.0, "temperature": 0.5}),
    ("feddyn(alpha=0.1)", drifting, {"alpha": 0.1, "decoupled": False}),
    ("feddc(alpha=0.1)", drifting, {"alpha": 0.1, "decoupled": True}),
    ("feddc_code(alpha=0.1)", drifting, {"alpha": 0.1, "decoupled": True, "base": True, "nominal": True}),
    ("fedexp", fedexp, {"epsilon": 1e-3, "by_clients": False}),
    ("fedexp(epsilon=1e-7)", fedexp, {"epsilon": 1e-7, "by_clients": False}),
    ("fedexp(epsilon=0.02, epsilon_by_clients=true)", fedexp, {"epsilon": 0.02, "by_clients": True}),
    ("fedsam(rho=0.2)", sharp, {"rho": 0.2, "eta": None}),
    ("fedasam(rho=0.2)", sharp, {"rho": 0.2, "eta": 0.0}),
    ("fedasam(rho=0.2, eta=0.1)", sharp, {"rho": 0.2, "eta": 0.1}),
    ("fedmut", fedmut, {"radius": 4.0, "beta": 0.3, "horizon": 50}),
    ("fedmut(radius=1.0, mutation_rounds=2)", fedmut, {"radius": 1.0, "beta": 0.3, "horizon": 2}),
    ("fedavgm(learning_rate=0.7)", optimizer, {"kind": "fedavgm"}),
    ("fedadam(learning_rate=0.02)", optimizer, {"kind": "fedadam"}),
    ("fedyogi(learning_rate=0.02, weighted=false)", optimizer, {"kind": "fedyogi", "weights": lambda world, c: uniform(c)}),
    ("fednova", fednova, {}),
]  # fmt: skip


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
@pytest.mark.parametrize(("name", "naive", "options"), CASES, ids=[case[0] for case in CASES])
def test_agrees_with_the_second_computation(
    name: str, naive: Naive, options: dict[str, Any], norm: bool
) -> None:
    world = World(norm=norm)
    run = world.run(build(name))
    assert len({client for clients in run.selected for client in clients}) < world.rounds * len(
        run.selected[0]
    )
    assert_same(run.models, list(naive(world, run.selected, **options)))


@pytest.mark.parametrize("name", ["fedprox", "scaffold", "feddyn", "feddc"])
def test_a_wrapper_that_moves_the_start_leaves_the_centre_at_the_download(name: str) -> None:
    world = World(training=Training(learning_rate=0.1, batch_size=4))
    method, task, number, client = build(name), world.task(), 1, 1
    engine = RowsEngine(task)
    federation = Federation(method, task, engine, Schedule(rounds=2, seed=world.seed))
    layout, size = task.layout, world.sizes[client] / mean_size(world)
    generator = torch.Generator().manual_seed(1)
    general = torch.randn(layout.trainable, dtype=torch.float64, generator=generator)
    sent, moved = (
        task.initial,
        task.initial + 0.1 * torch.randn(layout.size, dtype=torch.float64, generator=generator),
    )
    inbox = {
        **method.send(method.plan.opening()),
        "model": moved.unsqueeze(0),
        SERVER_MODEL: sent.unsqueeze(0),
    }
    inbox |= {key: general.unsqueeze(0) for key in ("variate", "update") if key in inbox}
    round = Round(number, 2, world.seed, world.clients, 1, 0.1, 0.1, selected=(client,))
    (reply,) = engine.train(federation.pipeline, round, [Job(client, 0, inbox)])
    assert not federation.history

    centre = layout.tensors(sent)
    offset = layout.tensors(general if name == "scaffold" else general / size)
    pull = {"fedprox": 0.01, "feddyn": 0.01 / size, "feddc": 0.01 / size, "scaffold": 0.0}[name]

    def adjust(parameters: dict[str, nn.Parameter]) -> None:
        for key, p in parameters.items():
            p.grad += pull * (p.detach() - centre[key])
            if name in ("scaffold", "feddc"):
                p.grad += offset[key]

    begin = {key: tensor.clone() for key, tensor in layout.tensors(moved).items()}
    final, steps = world.train(begin, number, client, adjust=adjust)
    end = flat(world, final)
    followed = (moved - end) / (steps * 0.1)
    remembered = {
        "fedprox": {},
        "scaffold": {"scaffold_variate": followed - general},
        "feddyn": {"feddyn_history": end - sent},
        "feddc": {"feddc_drift": end - sent, "feddc_update": followed - general / size},
    }[name]
    torch.testing.assert_close(reply.tensors["model"], end, rtol=1e-9, atol=1e-9)
    engine.commit()
    for key, value in remembered.items():
        torch.testing.assert_close(engine.store.read(client)[key], value, rtol=1e-9, atol=1e-9)


def test_moon_contrasts_on_the_projection_of_a_projected_model() -> None:
    module = make_model("projected", DataSpec((5,), 4), 0, {"model": "logistic", "width": 3})
    assert head_name(module) == "head"
    assert module.head.in_features == 3
    task = make_task(
        "synthetic",
        clients=4,
        model="projected(model=logistic, width=3)",
        training={"learning_rate": 0.1},
    )
    engine = RowsEngine(task)
    federation = Federation(
        build("moon(mu=5.0)"), task, engine, Schedule(rounds=2, participation=1.0)
    )
    plain = Federation(
        build("fedavg"), task, RowsEngine(task), Schedule(rounds=2, participation=1.0)
    )
    federation.run()
    plain.run()
    trained, reference = federation.model(), plain.model()
    changed = {
        entry.layer
        for entry in task.layout.slices
        if not torch.equal(trained[entry.slice], reference[entry.slice])
    }
    assert changed >= {"projection.0", "projection.2"}
