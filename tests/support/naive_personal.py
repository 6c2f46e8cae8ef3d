"""A world of a few clients for the personalised methods, run by fedloom and naively.

The naive side trains one client after another on copies of a module. It shares the random order of
the batches and the random choice of the clients with fedloom, and no mathematics. Batch-norm
statistics never leave a client: only parameters are copied and averaged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from batch_order import batch_order
from fedloom.algorithm.method import Method
from fedloom.algorithm.records import INTEGERS
from fedloom.common.randomness import stream
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.rounds.engine import Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from naive_world import FEATURES, SmallWorld

Extra = Callable[[nn.Module], Tensor]
SIZES = (9, 14, 4, 21, 12)
LAYERS = ("lower", "norm", "middle", "head")


class Net(nn.Module):
    """Three layers, with or without batch norm after the first."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.lower = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.middle = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(torch.tanh(self.norm(self.lower(x)))))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


@dataclass
class Moment:
    """The state after a round: the global parameters and each client's next start model."""

    parameters: Tensor
    personal: list[Tensor]


@dataclass
class World(SmallWorld):
    """Clients with labels by different linear rules, so personal and global models differ."""

    participation: float = 0.6
    sizes: tuple[int, ...] = SIZES
    classes = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.participants = max(1, int(self.participation * self.clients + 1e-9))
        self.names = [name for name, _ in self.module.named_parameters()]

    def draw_labels(self, generator: torch.Generator) -> Tensor:
        rules = torch.randn(
            self.clients, FEATURES, self.classes, dtype=torch.float64, generator=generator
        )
        return torch.cat(
            [(self.inputs[rows] @ rules[i]).argmax(1) for i, rows in enumerate(self.owned)]
        )

    def make_net(self) -> nn.Module:
        return Net(self.norm)

    # --- fedloom's side ---

    def run(self, algorithm: Method) -> Run:
        """Run a method by fedloom."""
        task = self.task()
        engine = RowsEngine(task)
        schedule = Schedule(
            rounds=self.rounds, participation=self.participation, seed=self.seed, evaluate_every=100
        )
        federation = Federation(algorithm, task, engine, schedule)
        moments = []
        for _ in range(self.rounds):
            federation.step()
            moments.append(self._moment(federation, engine))
        return Run(
            moments, [record["clients"] for record in federation.history], federation, engine
        )

    def _moment(self, federation: Federation, engine: RowsEngine) -> Moment:
        pipeline, layout = federation.pipeline, engine.task.layout
        upcoming = self.round(federation.finished + 1)
        everybody = tuple(range(self.clients))
        message = pipeline.deploy(upcoming, everybody)
        if layout.integers:
            message[INTEGERS] = federation.integers.unsqueeze(0)
        jobs = [
            Job(
                i,
                None,
                {
                    name: rows[i : i + 1] if len(rows) > 1 else rows
                    for name, rows in message.items()
                },
            )
            for i in everybody
        ]
        personal = [engine.personalised(pipeline, upcoming, [job])[0][1] for job in jobs]
        model = pipeline.model()[: layout.trainable].clone()
        return Moment(model, [row.clone() for row in personal])

    def round(self, number: int) -> Round:
        rate = self.training.learning_rate
        opening = Round(1, self.rounds, self.seed, self.clients, self.participants, rate, rate)
        return self.training.round_at(opening, number)

    # --- the naive side ---

    def fresh(self) -> nn.Module:
        return copy.deepcopy(self.module)

    def batches(
        self,
        client: int,
        number: int,
        purpose: str = "batches",
        *,
        epochs: int | None = None,
        steps: int | None = None,
        times: int = 1,
        drop_last: bool = False,
        data: tuple[Tensor, Tensor] | None = None,
        shuffle: bool = True,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.data(client) if data is None else data
        generator = stream(self.seed, purpose, round=number, client=client) if shuffle else None
        assert self.training.batch_size is not None
        for index in batch_order(
            len(y),
            generator,
            batch_size=times * self.training.batch_size,
            epochs=epochs or self.training.epochs,
            steps=steps,
            drop_last=drop_last,
            smallest=2 if self.norm else 1,
        ):
            yield x[index], y[index]

    def optimizer(
        self, module: nn.Module, rate: float, names: Sequence[str] | None = None
    ) -> torch.optim.SGD:
        chosen = [p for name, p in module.named_parameters() if names is None or name in names]
        t = self.training
        return torch.optim.SGD(chosen, lr=rate, momentum=t.momentum, weight_decay=t.weight_decay)

    def train(
        self,
        module: nn.Module,
        client: int,
        number: int,
        purpose: str = "batches",
        *,
        extra: Extra | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        names: Sequence[str] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        rate: float | None = None,
        data: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Train `module` in place with torch's SGD."""
        module.train()
        optimizer = self.optimizer(module, self.rate(number) if rate is None else rate, names)
        for x, y in self.batches(client, number, purpose, epochs=epochs, steps=steps, data=data):
            total = F.cross_entropy(module(x), y) if loss is None else loss(x, y)
            if extra is not None:
                total = total + extra(module)
            module.zero_grad()
            total.backward()
            if self.training.clip is not None:
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], self.training.clip)
            optimizer.step()


@dataclass
class Run:
    """The record of a run by fedloom."""

    moments: list[Moment]
    selected: list[list[int]]
    federation: Federation
    engine: RowsEngine


def vector(module: nn.Module) -> Tensor:
    """Flatten parameters and floating-point buffers into one vector."""
    tensors = [t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()]
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@torch.no_grad()
def copy_parameters(
    source: nn.Module, target: nn.Module, names: Sequence[str] | None = None
) -> None:
    for name, p in source.named_parameters():
        if names is None or name in names:
            target.get_parameter(name).copy_(p)


@torch.no_grad()
def average(
    server: nn.Module, models: Sequence[nn.Module], weights: Sequence[float], names: Sequence[str]
) -> None:
    """Set the server's named parameters to the weighted mean."""
    for name in names:
        terms = [w * model.get_parameter(name) for w, model in zip(weights, models, strict=True)]
        server.get_parameter(name).copy_(torch.stack(terms).sum(0) / sum(weights))


def squared_distance(model: nn.Module, centre: nn.Module) -> Tensor:
    pairs = zip(model.parameters(), centre.parameters(), strict=True)
    return sum(
        ((a - b.detach()).square().sum() for a, b in pairs), torch.zeros((), dtype=torch.float64)
    )


class Overwrite:
    """Local initialisation of most methods: the download replaces the client's parameters."""

    def start(self, client: int, number: int, received: nn.Module) -> nn.Module:
        return copy.deepcopy(received)

    def keep(self, client: int, trained: nn.Module) -> None:
        """Do nothing: this method has no memory."""

    def changes(self) -> bool:
        return False


class Blend(Overwrite):
    """ALA with autograd on W: start = old + (received - old) * W in the named parameters."""

    def __init__(
        self,
        world: World,
        names: Sequence[str],
        *,
        percent: float = 80,
        rate: float = 1.0,
        threshold: float = 0.01,
        window: int = 10,
        most: int = 200,
        epochs: int = 1,
        last_loss: bool = False,
        contiguous: bool = False,
    ) -> None:
        self.world, self.names, self.percent, self.rate = world, list(names), percent, rate
        self.threshold, self.window, self.most, self.epochs = threshold, window, most, epochs
        self.last_loss, self.contiguous = last_loss, contiguous
        self.previous: dict[int, dict[str, Tensor]] = {}
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.began: set[int] = set()
        self.losses: list[float] = []

    def changes(self) -> bool:
        return True

    def keep(self, client: int, trained: nn.Module) -> None:
        self.previous[client] = {
            n: p.detach().clone() for n, p in trained.named_parameters() if n in self.names
        }

    def sample(self, client: int, number: int) -> tuple[Tensor, Tensor]:
        x, y = self.world.data(client)
        count = max(2, int(self.percent / 100 * len(y) + 1e-9))
        generator = stream(self.world.seed, "ala", round=number, client=client)
        if self.contiguous:
            start = int(torch.randint(len(y) - count + 1, (), generator=generator))
            return x[start : start + count], y[start : start + count]
        chosen = torch.randperm(len(y), generator=generator)[:count]
        return x[chosen], y[chosen]

    def start(
        self, client: int, number: int, received: nn.Module, *, trial: bool = False
    ) -> nn.Module:
        result = copy.deepcopy(received)
        if client not in self.previous:
            return result
        previous = self.previous[client]
        downloaded = {
            n: p.detach().clone() for n, p in received.named_parameters() if n in self.names
        }
        stored = self.weights.get(client, {n: torch.ones_like(previous[n]) for n in self.names})
        weights = {n: w.clone().requires_grad_() for n, w in stored.items()}
        # A trial has no effect on the memory; the statistics of the working model are discarded in
        # any case.
        scratch = copy.deepcopy(received).train()
        data, losses = self.sample(client, number), []
        while True:
            pass_losses = []
            for x, y in self.world.batches(client, number, epochs=1, data=data, shuffle=False):
                blended = {
                    n: previous[n] + (downloaded[n] - previous[n]) * weights[n] for n in self.names
                }
                loss = F.cross_entropy(functional_call(scratch, blended, (x,)), y)
                for w, g in zip(
                    weights.values(), torch.autograd.grad(loss, list(weights.values())), strict=True
                ):
                    w.data = (w.data - self.rate * g).clamp(0, 1)
                pass_losses.append(float(loss.detach()))
            losses.append(
                pass_losses[-1] if self.last_loss else sum(pass_losses) / len(pass_losses)
            )
            if client in self.began:
                if len(losses) >= self.epochs:
                    break
            elif len(losses) == self.most or (
                len(losses) > self.window
                and float(torch.tensor(losses[-self.window :]).double().std(correction=0))
                < self.threshold
            ):
                break
        if not trial:
            self.weights[client] = {n: w.detach() for n, w in weights.items()}
            self.began.add(client)
            self.losses = losses
        with torch.no_grad():
            for n, p in result.named_parameters():
                if n in self.names:
                    p.copy_(previous[n] + (downloaded[n] - previous[n]) * weights[n])
        return result

    def preview(self, client: int, number: int, received: nn.Module) -> nn.Module:
        return self.start(client, number, received, trial=True)


def preview(init: Overwrite, client: int, number: int, received: nn.Module) -> nn.Module:
    """Return the start of a client after a download, without a change to its memory."""
    return (
        init.preview(client, number, received)
        if isinstance(init, Blend)
        else init.start(client, number, received)
    )


@dataclass
class Setting:
    """The input of a naive method: the world, each round's participants, local initialisation."""

    world: World
    selected: list[list[int]]
    init: Overwrite = field(default_factory=Overwrite)


def shared_model(
    setting: Setting,
    work: Callable[[nn.Module, nn.Module, int, int], nn.Module | None],
    score: Callable[[nn.Module, int, int], nn.Module],
    *,
    names: Sequence[str] | None = None,
    beta: float = 1.0,
) -> list[Moment]:
    """Run the rounds that most methods share.

    Each client has its module and loads the named parameters of the server into it. `work(start,
    sent, i, t)` trains `start` in place. `score(model, i, t)` returns the model in use, given the
    full start model of the client.
    """
    world, init = setting.world, setting.init
    names = world.names if names is None else names
    server, models = world.fresh(), [world.fresh() for _ in range(world.clients)]
    moments = []
    for number, selected in enumerate(setting.selected, start=1):
        uploads = []
        for i in selected:
            copy_parameters(server, models[i], names)
            sent = copy.deepcopy(models[i])
            start = init.start(i, number, models[i])
            models[i] = work(start, sent, i, number) or start
            init.keep(i, models[i])
            uploads.append(models[i])
        before_round = world.fresh()
        copy_parameters(server, before_round)
        average(server, uploads, [world.sizes[i] for i in selected], names)
        with torch.no_grad():
            for p, q in zip(server.parameters(), before_round.parameters(), strict=True):
                p.copy_(beta * p + (1 - beta) * q)
        personal = []
        for i in range(world.clients):
            model = copy.deepcopy(models[i])
            copy_parameters(server, model, names)
            personal.append(vector(score(preview(init, i, number + 1, model), i, number + 1)))
        moments.append(Moment(parameters(server), personal))
    return moments


def assert_same(
    moments: Sequence[Moment], expected: Sequence[Moment], tolerance: float = 1e-8
) -> None:
    """Assert that global parameters and every client's model agree after every round."""
    assert len(moments) == len(expected)
    for number, (moment, reference) in enumerate(zip(moments, expected, strict=True), start=1):
        pairs = [
            (moment.parameters, reference.parameters),
            *zip(moment.personal, reference.personal, strict=True),
        ]
        for who, (a, b) in enumerate(pairs, start=-1):
            gap = float((a - b).abs().max())
            assert gap <= tolerance, (
                f"round {number}, {'global' if who < 0 else f'client {who}'}: {gap}"
            )
