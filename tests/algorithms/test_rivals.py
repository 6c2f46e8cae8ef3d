"""Compare methods with stale updates, flat minima and momentum with naive computations in float64.

The naive versions keep a table of all clients' vectors and follow the papers' formulas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.common.randomness import stream
from fedloom.common.training import Training
from fedloom.parts.building import build
from naive import State, World, assert_same, average, flat, shares, uniform, zeros

Rounds = list[list[int]]
Naive = Callable[..., Iterator[State]]
Vectors = dict[int, State]


def displacement(world: World, end: State, start: State) -> State:
    return {name: end[name] - start[name] for name in world.trained}


def total(world: World, vectors: Sequence[State], weights: Sequence[float]) -> State:
    """Return the weighted sum of vectors."""
    result = zeros(world)
    for weight, vector in zip(weights, vectors, strict=True):
        for name in world.trained:
            result[name] = result[name] + weight * vector[name]
    return result


def moved(world: World, state: State, mean: State, *steps: State) -> State:
    """Return `state` plus steps, with the buffers of `mean`."""
    result = dict(mean)
    for name in world.trained:
        result[name] = state[name] + sum(step[name] for step in steps)
    return result


def norm(vector: State) -> Tensor:
    return torch.sqrt(sum((t.square().sum() for t in vector.values()), torch.zeros(())))


def scaled(vector: State, length: float) -> State:
    size = norm(vector)
    return {name: length * t / size if size > 0 else 0 * t for name, t in vector.items()}


# --- stale updates: a table y of the last updates of all clients ---


def stale(world: World, rounds: Rounds, kind: str, beta: float = 1.0) -> Iterator[State]:
    state = world.initial()
    everybody = range(world.clients)
    table: Vectors = {i: zeros(world) for i in everybody}
    rates = dict.fromkeys(everybody, 1.0)
    whole = sum(world.sizes)
    a = [size / whole for size in world.sizes]
    for number, clients in enumerate(rounds, start=1):
        rate = world.rate(number)
        ends = [world.train(state, number, i)[0] for i in clients]
        updates = [displacement(world, end, state) for end in ends]
        mean = average(ends, uniform(clients))
        if kind == "mifa":
            for i, update in zip(clients, updates, strict=True):
                table[i] = total(world, [update], [1 / rate])
            gradients = [table[i] for i in everybody]
            state = moved(world, state, mean, total(world, gradients, [rate / world.clients] * 7))
            yield state
            continue
        weights = a if kind == "fedstale" else [1 / world.clients] * world.clients
        general = total(world, [table[i] for i in everybody], [beta * w for w in weights])
        step = zeros(world)
        for i, update in zip(clients, updates, strict=True):
            omega = 1 / len(clients)
            if kind == "fedstale":
                omega = a[i] / (len(clients) / world.clients)
            old = total(world, [table[i]], [rate / rates[i] if kind == "rescaled" else 1.0])
            for name in world.trained:
                step[name] += omega * (update[name] - beta * old[name])
        if kind == "rescaled":
            ratios = [rate / rates[i] / world.clients for i in everybody]
            general = total(world, [table[i] for i in everybody], ratios)
        for i, update in zip(clients, updates, strict=True):
            table[i], rates[i] = update, rate
        state = moved(world, state, mean, general, step)
        yield state


def clustered(world: World, rounds: Rounds, clusters: int) -> Iterator[State]:
    order = torch.randperm(world.clients, generator=stream(world.seed, "fedvarp clusters"))
    cluster = {int(client): k % clusters for k, client in enumerate(order)}
    state = world.initial()
    table = [zeros(world) for _ in range(clusters)]
    for number, clients in enumerate(rounds, start=1):
        ends = [world.train(state, number, i)[0] for i in clients]
        updates = {i: displacement(world, e, state) for i, e in zip(clients, ends, strict=True)}
        counts = [list(cluster.values()).count(c) / world.clients for c in range(clusters)]
        step = total(world, table, counts)
        for i in clients:
            for name in world.trained:
                step[name] += (updates[i][name] - table[cluster[i]][name]) / len(clients)
        state = moved(world, state, average(ends, uniform(clients)), step)
        for c in range(clusters):
            members = [updates[i] for i in clients if cluster[i] == c]
            if members:
                table[c] = total(world, members, uniform(members))  # type: ignore[arg-type]
        yield state


def adagrad(world: World, rounds: Rounds, rate: float, tau: float) -> Iterator[State]:
    state = world.initial()
    squares = {name: t + tau**2 for name, t in zeros(world).items()}
    for number, clients in enumerate(rounds, start=1):
        mean = average([world.train(state, number, i)[0] for i in clients], shares(world, clients))
        for name in world.trained:
            update = mean[name] - state[name]
            squares[name] = squares[name] + update**2
            mean[name] = state[name] + rate * update / (squares[name].sqrt() + tau)
        state = mean
        yield state


# --- flat minima ---


def slopes(module: nn.Module, x: Tensor, y: Tensor) -> State:
    names = [name for name, _ in module.named_parameters()]
    gradients = torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))
    return dict(zip(names, gradients, strict=True))


def slopes_at(module: nn.Module, x: Tensor, y: Tensor, offset: State) -> State:
    """Return the gradient at the weights plus an offset."""
    ahead = copy.deepcopy(module)
    with torch.no_grad():
        for name, p in ahead.named_parameters():
            p += offset[name]
    result = slopes(ahead, x, y)
    for buffer, later in zip(module.buffers(), ahead.buffers(), strict=True):
        buffer.copy_(later)
    return result


def followed(module: nn.Module, direction: State) -> Tensor:
    """Return a loss whose gradient is `direction`."""
    return sum(
        ((p * direction[name].detach()).sum() for name, p in module.named_parameters()),
        torch.zeros((), dtype=torch.float64),
    )


def sam(module: nn.Module, x: Tensor, y: Tensor, rho: float) -> State:
    gradient = slopes(module, x, y)
    return slopes_at(module, x, y, scaled(gradient, rho)) if rho else gradient


def speed(
    world: World, rounds: Rounds, alpha: float, rho: float, smoo: bool = False
) -> Iterator[State]:
    """Yield the models of FedSpeed, or of FedSMOO with the common perturbation s."""
    state = world.initial()
    history: Vectors = {i: zeros(world) for i in range(world.clients)}
    dual: Vectors = {i: zeros(world) for i in range(world.clients)}
    common = zeros(world)
    for number, clients in enumerate(rounds, start=1):
        ends = []
        for i in clients:

            def loss(
                module: nn.Module,
                x: Tensor,
                y: Tensor,
                step: int,
                i: int = i,
                state: State = state,
                common: State = common,
            ) -> Tensor:
                if smoo:
                    gradient = slopes(module, x, y)
                    u = {n: gradient[n] - dual[i][n] - common[n] for n in gradient}
                    e = scaled(u, rho)
                    dual[i] = {n: dual[i][n] + e[n] - common[n] for n in e}
                    direction = slopes_at(module, x, y, e)
                else:
                    direction = sam(module, x, y, rho)
                for n, p in module.named_parameters():
                    pull = p.detach() - state[n] + history[i][n]
                    direction[n] = direction[n] + alpha * pull
                return followed(module, direction)

            end, _ = world.train(state, number, i, loss=loss)
            history[i] = total(world, [history[i], displacement(world, end, state)], [1, 1])
            ends.append(end)
        if smoo:
            common = scaled(total(world, [dual[i] for i in clients], uniform(clients)), rho)
        mean = average(ends, uniform(clients))
        drift = total(world, list(history.values()), [1 / world.clients] * world.clients)
        state = moved(world, mean, mean, drift)
        yield state


def lesam(world: World, rounds: Rounds, rho: float, previous: str) -> Iterator[State]:
    state = world.initial()
    received: Vectors = {}
    before = state
    for number, clients in enumerate(rounds, start=1):
        ends = []
        for i in clients:
            earlier = received.get(i, state) if previous == "participation" else before
            offset = scaled(displacement(world, earlier, state), rho)

            def loss(
                module: nn.Module, x: Tensor, y: Tensor, step: int, offset: State = offset
            ) -> Tensor:
                return followed(module, slopes_at(module, x, y, offset))

            ends.append(world.train(state, number, i, loss=loss)[0])
            received[i] = state
        before = state
        state = average(ends, uniform(clients))
        yield state


def gloss(
    world: World, rounds: Rounds, rho: float, client_rho: float, beta: float, rate: float
) -> Iterator[State]:
    state, gradient, general = world.initial(), zeros(world), zeros(world)
    dual: Vectors = {i: zeros(world) for i in range(world.clients)}
    for number, clients in enumerate(rounds, start=1):
        sent = moved(world, state, state, scaled(gradient, rho))
        ends = []
        for i in clients:

            def loss(
                module: nn.Module, x: Tensor, y: Tensor, step: int, i: int = i, sent: State = sent
            ) -> Tensor:
                direction = sam(module, x, y, client_rho)
                for n, p in module.named_parameters():
                    pull = (p.detach() - sent[n]) / beta
                    direction[n] = direction[n] - dual[i][n] + pull
                return followed(module, direction)

            ends.append(world.train(sent, number, i, loss=loss)[0])
        updates = [displacement(world, end, sent) for end in ends]
        for i, update in zip(clients, updates, strict=True):
            dual[i] = total(world, [dual[i], update], [1, -1 / beta])
        plain = total(world, updates, uniform(clients))
        general = total(world, [general, plain], [1, -1 / (beta * world.clients)])
        step = total(world, updates, shares(world, clients))
        change = total(world, [step, general], [rate, -beta])
        state = moved(world, state, average(ends, shares(world, clients)), change)
        gradient = total(world, [step], [-1])
        yield state


def gmt(
    world: World, rounds: Rounds, alpha: float, gamma: float, tau: float, beta: float
) -> Iterator[State]:
    state = teacher = world.initial()
    history: Vectors = {i: zeros(world) for i in range(world.clients)}
    for number, clients in enumerate(rounds, start=1):
        ends = []
        for i in clients:
            guide = world.at(teacher).eval()

            def loss(
                module: nn.Module,
                x: Tensor,
                y: Tensor,
                step: int,
                i: int = i,
                guide: nn.Module = guide,
            ) -> Tensor:
                z, z_e = module(x), guide(x).detach()
                divergence = F.kl_div(
                    F.log_softmax(z / tau, 1), F.softmax(z_e / tau, 1), reduction="batchmean"
                )
                linear = followed(module, history[i]) / beta
                return F.cross_entropy(z, y) + gamma * tau**2 * divergence + linear

            end, _ = world.train(state, number, i, loss=loss)
            history[i] = total(world, [history[i], displacement(world, end, state)], [1, 1])
            ends.append(end)
        mean = average(ends, shares(world, clients))
        drift = total(world, list(history.values()), [1 / world.clients] * world.clients)
        state = moved(world, mean, mean, drift)
        teacher = average([teacher, state], [alpha, 1 - alpha])
        yield state


def swa(world: World, rounds: Rounds, rho: float, alpha: float) -> Iterator[State]:
    """Train by hand: each step has its own rate."""
    state = world.initial()
    t = world.training
    for number, clients in enumerate(rounds, start=1):
        ends = []
        for i in clients:
            module = world.at(state).train()
            batches = list(world.batches(number, i))
            optimizer = torch.optim.SGD(
                module.parameters(), momentum=t.momentum, weight_decay=t.weight_decay, lr=1.0
            )
            for k, (x, y) in enumerate(batches):
                rate = world.rate(number)
                optimizer.param_groups[0]["lr"] = rate * (1 - k / len(batches)) + (
                    rho * rate * k / len(batches)
                )
                optimizer.zero_grad()
                F.cross_entropy(module(x), y).backward()
                if t.clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), t.clip)
                optimizer.step()
            ends.append(copy.deepcopy(module.state_dict()))
        mean = average(ends, uniform(clients))
        state = moved(world, state, mean, total(world, [displacement(world, mean, state)], [alpha]))
        yield state


def fisher(world: World, state: State, client: int) -> State:
    """Return the diagonal of the Fisher information, sample by sample and class by class."""
    module, inputs = world.at(state).eval(), world.data(client)[0]
    result = zeros(world)
    for x in inputs:
        chances = F.log_softmax(module(x.unsqueeze(0)), 1)[0]
        for chance in chances:
            slopes_of = torch.autograd.grad(chance, list(module.parameters()), retain_graph=True)
            for name, g in zip(world.trained, slopes_of, strict=True):
                result[name] = result[name] + chance.exp().detach() * g**2 / len(inputs)
    return result


def merged(world: World, rounds: Rounds, floor: float) -> Iterator[State]:
    state = world.initial()
    for number, clients in enumerate(rounds, start=1):
        ends = [world.train(state, number, i)[0] for i in clients]
        state = average(ends, shares(world, clients))
        if number == len(rounds):
            information = [fisher(world, e, i) for e, i in zip(ends, clients, strict=True)]
            above, below = zeros(world), zeros(world)
            for end, f, p in zip(ends, information, shares(world, clients), strict=True):
                size = norm(f)
                for name in world.trained:
                    weight = p * (f[name] / size + floor)
                    above[name] = above[name] + weight * end[name]
                    below[name] = below[name] + weight
            state = {**state, **{name: above[name] / below[name] for name in world.trained}}
        yield state


# --- momentum ---


def momentum(
    world: World, rounds: Rounds, alpha: float, rate: float = 1.0, rho: float = 0.0
) -> Iterator[State]:
    state, general = world.initial(), zeros(world)
    for number, clients in enumerate(rounds, start=1):
        ends, gradients = [], []
        eta = world.rate(number) / (1 - world.training.momentum)
        for i in clients:

            def loss(
                module: nn.Module, x: Tensor, y: Tensor, step: int, general: State = general
            ) -> Tensor:
                gradient = sam(module, x, y, rho)
                return followed(
                    module, {n: alpha * gradient[n] + (1 - alpha) * general[n] for n in gradient}
                )

            end, steps = world.train(state, number, i, loss=loss)
            ends.append(end)
            gradients.append(total(world, [displacement(world, end, state)], [-1 / (steps * eta)]))
        general = total(world, gradients, uniform(clients))
        mean = average(ends, uniform(clients))
        state = moved(world, state, mean, total(world, [displacement(world, mean, state)], [rate]))
        yield state


def acg(world: World, rounds: Rounds, lam: float, beta: float) -> Iterator[State]:
    state, m = world.initial(), zeros(world)
    for number, clients in enumerate(rounds, start=1):
        sent = moved(world, state, state, total(world, [m], [lam]))

        def loss(module: nn.Module, x: Tensor, y: Tensor, step: int, sent: State = sent) -> Tensor:
            near = sum((p - sent[n]).square().sum() for n, p in module.named_parameters())
            return F.cross_entropy(module(x), y) + beta * near

        ends = [world.train(sent, number, i, loss=loss)[0] for i in clients]
        mean = average(ends, uniform(clients))
        m = total(world, [m, displacement(world, mean, sent)], [lam, 1])
        following = moved(world, state, mean, m)
        for name in world.trained:  # m is the server's last step
            torch.testing.assert_close(following[name], mean[name])
        state = following
        yield state


def init(world: World, rounds: Rounds, beta: float, rate: float) -> Iterator[State]:
    state = world.initial()
    last: Vectors = {}
    for number, clients in enumerate(rounds, start=1):
        ends, updates = [], []
        for i in clients:
            away = displacement(world, state, last.get(i, state))
            start = moved(world, state, state, total(world, [away], [beta]))
            last[i] = world.train(start, number, i)[0]
            ends.append(last[i])
            updates.append(displacement(world, last[i], start))
        step = total(world, updates, [rate / len(clients)] * len(clients))
        state = moved(world, state, average(ends, uniform(clients)), step)
        yield state


def orthogonal(gradient: Tensor) -> Tensor:
    if gradient.dim() < 2:  # 1e-13: the bias before batch norm has no gradient but rounding errors
        return gradient / gradient.norm() if gradient.norm() > 1e-13 else 0 * gradient
    u, s, v = torch.linalg.svd(gradient.flatten(1), full_matrices=False)
    kept = s > s.max() * 1e-12
    return (u[:, kept] @ v[kept]).reshape(gradient.shape)


def muon(world: World, rounds: Rounds, alpha: float) -> Iterator[State]:
    state, general = world.initial(), zeros(world)
    running: Vectors = {i: zeros(world) for i in range(world.clients)}
    for number, clients in enumerate(rounds, start=1):
        ends, change = [], zeros(world)
        for i in clients:
            variate = dict(running[i])

            def loss(
                module: nn.Module,
                x: Tensor,
                y: Tensor,
                step: int,
                i: int = i,
                variate: State = variate,
                general: State = general,
            ) -> Tensor:
                gradient = slopes(module, x, y)
                for n in gradient:
                    running[i][n] = (1 - alpha) * running[i][n] + alpha * gradient[n]
                corrected = {n: running[i][n] - variate[n] + general[n] for n in gradient}
                return followed(module, {n: orthogonal(g) for n, g in corrected.items()})

            ends.append(world.train(state, number, i, loss=loss)[0])
            for n in world.trained:
                change[n] += running[i][n] - variate[n]
        general = total(world, [general, change], [1, 1 / world.clients])
        mean = average(ends, uniform(clients))
        share = len(clients) / world.clients
        state = moved(world, state, mean, total(world, [displacement(world, mean, state)], [share]))
        yield state


CASES: list[tuple[str, Naive, dict[str, Any]]] = [
    ("fedvarp", stale, {"kind": "fedvarp"}),
    ("fedvarp(rescale=true)", stale, {"kind": "rescaled"}),
    ("mifa", stale, {"kind": "mifa"}),
    ("fedlaavg", stale, {"kind": "mifa"}),
    ("fedstale", stale, {"kind": "fedstale", "beta": 0.5}),
    ("fedstale(beta=0.0)", stale, {"kind": "fedstale", "beta": 0.0}),
    ("fedstale(beta=1.0)", stale, {"kind": "fedstale", "beta": 1.0}),
    ("cluster_fedvarp(clusters=3)", clustered, {"clusters": 3}),
    ("fedadagrad(learning_rate=0.02)", adagrad, {"rate": 0.02, "tau": 1e-3}),
    ("fedspeed(rho=0.2)", speed, {"alpha": 0.1, "rho": 0.2}),
    ("fedsmoo(rho=0.2)", speed, {"alpha": 0.1, "rho": 0.2, "smoo": True}),
    ("fedlesam(rho=0.2)", lesam, {"rho": 0.2, "previous": "participation"}),
    ("fedlesam(rho=0.2, previous=round)", lesam, {"rho": 0.2, "previous": "round"}),
    ("fedgloss(server_learning_rate=0.8)", gloss, {"rho": 0.15, "client_rho": 0.15, "beta": 10.0, "rate": 0.8}),
    ("fedgmt(beta=2.0)", gmt, {"alpha": 0.95, "gamma": 1.0, "tau": 3.0, "beta": 2.0}),
    ("fedswa", swa, {"rho": 0.1, "alpha": 1.5}),
    ("fedcm(server_learning_rate=0.7)", momentum, {"alpha": 0.1, "rate": 0.7}),
    ("mofedsam", momentum, {"alpha": 0.1, "rho": 0.1}),
    ("fedacg(beta=0.05)", acg, {"lam": 0.85, "beta": 0.05}),
    ("fedinit(server_learning_rate=0.7)", init, {"beta": 0.1, "rate": 0.7}),
    ("fedmuon", muon, {"alpha": 0.9}),
    ("fisher_merge(fedavg)", merged, {"floor": 1e-6}),
]  # fmt: skip


@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "batch-norm"])
@pytest.mark.parametrize(("name", "naive", "options"), CASES, ids=[case[0] for case in CASES])
def test_agrees_with_a_naive_computation(
    name: str, naive: Naive, options: dict[str, Any], with_norm: bool
) -> None:
    world = World(norm=with_norm, rounds=5)
    run = world.run(build(name))
    assert_same(run.models, list(naive(world, run.selected, **options)))


def final(expression: str, **settings: Any) -> Tensor:
    world = World(**settings)
    return flat(world, world.run(build(expression)).models[-1])


EQUAL = (8,) * 7
PLAIN = Training(learning_rate=0.1, batch_size=4)

LIMITS = [
    ("fedvarp", "fedavg(weighted=false)", {"participation": 1.0}),
    ("mifa(rescale=false)", "fedavg(weighted=false)", {"participation": 1.0}),
    ("fedstale(beta=0.3)", "fedavg", {"participation": 1.0, "sizes": EQUAL}),
    ("fedstale(beta=0.0)", "fedavg", {"sizes": EQUAL}),
    ("fedstale(beta=1.0)", "fedvarp", {"sizes": EQUAL}),
    ("cluster_fedvarp(clusters=1)", "fedavg(weighted=false)", {}),
    ("cluster_fedvarp(clusters=7)", "fedvarp", {}),
    ("fedadagrad(learning_rate=2e6, adaptivity=1e6)", "fedavg", {}),
    ("fedspeed(rho=0.0)", "feddyn(alpha=0.1)", {"sizes": EQUAL}),
    ("fedsmoo(rho=0.0)", "feddyn(alpha=0.1)", {"sizes": EQUAL}),
    ("fedlesam(rho=0.0)", "fedavg(weighted=false)", {}),
    ("mofedsam(rho=0.0)", "fedcm", {}),
    ("mofedsam(alpha=1.0)", "fedsam", {"sizes": EQUAL}),
    ("fedgloss(rho=0.0, client_rho=0.1, dual=false)", "fedsam", {}),
    ("fedswa(rho=1.0, alpha=1.0)", "fedavg(weighted=false)", {}),
    ("fedcm(alpha=1.0)", "fedavg(weighted=false)", {}),
    ("fedacg(momentum=0.0, beta=0.1)", "fedprox(mu=0.2)", {"sizes": EQUAL}),
    ("fedinit(beta=0.0)", "fedavg(weighted=false)", {}),
    ("ema(fedprox, alpha=0.0)", "fedprox", {}),
    ("last(fedprox, n=1)", "fedprox", {}),
    ("fisher_merge(fedavg, floor=1e12)", "fedavg", {}),
]


@pytest.mark.parametrize(("expression", "limit", "settings"), LIMITS, ids=[c[0] for c in LIMITS])
def test_limiting_cases(expression: str, limit: str, settings: dict[str, Any]) -> None:
    torch.testing.assert_close(
        final(expression, **settings), final(limit, **settings), rtol=1e-9, atol=1e-9
    )


def test_the_first_step_of_mifa_is_the_share_of_participants() -> None:
    start = flat(World(), World().initial())
    whole = {"rounds": 1, "participation": 3 / 7}
    plain = final("fedavg(weighted=false)", **whole) - start
    first = final("mifa", **whole) - start
    torch.testing.assert_close(first, plain * 3 / 7, rtol=1e-9, atol=1e-12)


def test_the_server_keeps_the_mean_of_the_clients_updates() -> None:
    world = World(rounds=6)
    run = world.run(build("fedvarp"))
    taken = {client for clients in run.selected for client in clients}
    table = [run.memory(client, "stale_update") for client in sorted(taken)]
    mean = torch.stack(table).sum(0) / world.clients
    state = run.federation.pipeline.parts[0].state["mean_update"]
    torch.testing.assert_close(state, mean, rtol=1e-9, atol=1e-12)


def test_longest_idle_selects_clients_that_wait_longest() -> None:
    world = World(rounds=9, participation=3 / 7)
    last = dict.fromkeys(range(world.clients), 0)
    for number, clients in enumerate(world.run(build("fedlaavg")).selected, start=1):
        waiting = [last[client] for client in last if client not in clients]
        assert max(last[client] for client in clients) <= min(waiting)
        last |= dict.fromkeys(clients, number)


def test_adagrad_divides_by_all_squares() -> None:
    world = World(rounds=1)
    start, end = flat(world, world.initial()), final("fedavg", rounds=1)
    step = final("fedadagrad(learning_rate=0.5, adaptivity=1e-12)", rounds=1) - start
    torch.testing.assert_close(step, 0.5 * torch.sign(end - start), rtol=1e-6, atol=1e-6)


def test_the_common_perturbation_of_fedsmoo_has_the_length_rho() -> None:
    world = World(rounds=2)
    run = world.run(build("fedsmoo(rho=0.3)"))
    common = run.federation.pipeline.algorithm.state["perturbation"]
    torch.testing.assert_close(common.norm(), torch.tensor(0.3, dtype=torch.float64))


def test_fedmuon_moves_each_matrix_by_an_orthogonal_step() -> None:
    training = Training(learning_rate=0.25, batch_size=None)
    world = World(rounds=1, participation=1 / 7, training=training)
    run = world.run(build("fedmuon"))
    step = (world.initial()["lower.weight"] - run.models[0]["lower.weight"]) * world.clients
    values = torch.linalg.svdvals(step)
    torch.testing.assert_close(values, torch.full_like(values, 0.25), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("expression", "alpha"), [("ema(fedavg, alpha=0.6)", 0.6)])
def test_a_moving_average_is_evaluated_and_does_not_change_training(
    expression: str, alpha: float
) -> None:
    world = World()
    models = world.run(build("fedavg")).models
    average_model = flat(world, world.initial())
    for averaged, model in zip(world.run(build(expression)).models, models, strict=True):
        average_model = alpha * average_model + (1 - alpha) * flat(world, model)
        torch.testing.assert_close(flat(world, averaged), average_model, rtol=1e-9, atol=1e-9)


def test_the_mean_of_the_last_models() -> None:
    world = World()
    models = [flat(world, model) for model in world.run(build("fedavg")).models]
    for k, averaged in enumerate(world.run(build("last(fedavg, n=2)")).models):
        expected = torch.stack(models[max(0, k - 1) : k + 1]).mean(0)
        torch.testing.assert_close(flat(world, averaged), expected, rtol=1e-9, atol=1e-9)


def test_ca2fl_is_fedvarp_when_all_clients_are_equally_fast() -> None:
    settings: dict[str, Any] = {"training": PLAIN, "participation": 3 / 7}
    torch.testing.assert_close(
        final("ca2fl(k=3)", **settings), final("fedvarp", **settings), rtol=1e-9, atol=1e-9
    )
