"""A naive second computation of federated learning, on copies of a module, tensor by tensor.

It trains one client after another. Tests compare methods with it. It shares the random order of the
batches and the random choice of the clients with fedloom, and no mathematics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from batch_order import batch_order
from fedloom.algorithm.method import Method
from fedloom.common.randomness import stream
from fedloom.engines.rows import RowsEngine
from fedloom.rounds.federation import Federation, Schedule
from naive_world import FEATURES, SmallWorld

State = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Tensor, Tensor, int], Tensor]
Adjust = Callable[[dict[str, nn.Parameter]], None]

SIZES = (5, 11, 17, 8, 23, 13, 6)  # with batches of 4, three clients end on a single sample


class Net(nn.Module):
    """Two layers, with or without batch norm between; `features` returns the classifier's input."""

    def __init__(self, inputs: int, classes: int, norm: bool) -> None:
        super().__init__()
        self.lower = nn.Linear(inputs, 7)
        self.norm = nn.BatchNorm1d(7) if norm else nn.Identity()
        self.head = nn.Linear(7, classes)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.lower(x)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


@dataclass
class World(SmallWorld):
    """Clients with random labels, for methods with one global model."""

    sizes: tuple[int, ...] = SIZES
    classes = 4

    def draw_labels(self, generator: torch.Generator) -> Tensor:
        return torch.randint(self.classes, (len(self.inputs),), generator=generator)

    def make_net(self) -> nn.Module:
        return Net(FEATURES, self.classes, self.norm)

    def run(self, algorithm: Method) -> Run:
        """Run a method by fedloom; return each round's global model and selected clients."""
        task = self.task()
        schedule = Schedule(
            rounds=self.rounds, participation=self.participation, seed=self.seed, evaluate_every=1
        )
        engine = RowsEngine(task)
        federation = Federation(algorithm, task, engine, schedule)
        models = []
        for _ in range(self.rounds):
            federation.step()
            module = copy.deepcopy(self.module)
            task.layout.load(module, federation.model(), federation.integers)
            models.append(copy.deepcopy(module.state_dict()))
        return Run(models, [record["clients"] for record in federation.history], federation, engine)

    def initial(self) -> State:
        return copy.deepcopy(self.module.state_dict())

    def at(self, state: State) -> nn.Module:
        module = copy.deepcopy(self.module)
        module.load_state_dict(state)
        return module

    @property
    def trained(self) -> list[str]:
        return [name for name, _ in self.module.named_parameters()]

    def batches(self, number: int, client: int) -> Iterator[Batch]:
        inputs, labels = self.data(client)
        t = self.training
        generator = stream(self.seed, "batches", round=number, client=client)
        for index in batch_order(
            len(labels),
            generator,
            batch_size=t.batch_size,
            epochs=t.epochs,
            smallest=2 if self.norm else 1,
        ):
            yield inputs[index], labels[index]

    def train(
        self,
        start: State,
        number: int,
        client: int,
        *,
        loss: Loss | None = None,
        adjust: Adjust | None = None,
    ) -> tuple[State, int]:
        """Train one client for a round with torch's SGD; return its state and number of steps."""
        module, t = self.at(start).train(), self.training
        optimizer = torch.optim.SGD(
            module.parameters(),
            lr=self.rate(number),
            momentum=t.momentum,
            weight_decay=t.weight_decay,
        )
        steps = 0
        for x, y in self.batches(number, client):
            optimizer.zero_grad()
            total = F.cross_entropy(module(x), y) if loss is None else loss(module, x, y, steps)
            total.backward()
            if adjust is not None:
                adjust(dict(module.named_parameters()))
            if t.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), t.clip)
            optimizer.step()
            steps += 1
        return copy.deepcopy(module.state_dict()), steps


@dataclass
class Run:
    """The record of a run by fedloom."""

    models: list[State]
    selected: list[list[int]]
    federation: Federation
    engine: RowsEngine

    def memory(self, client: int, name: str) -> Tensor:
        """Return a client's memory as a flat vector."""
        return self.engine.store.read(client)[name]


def shares(world: World, clients: Sequence[int]) -> list[float]:
    """Return the weights p_i, proportional to the numbers of samples."""
    total = sum(world.sizes[i] for i in clients)
    return [world.sizes[i] / total for i in clients]


def uniform(clients: Sequence[int]) -> list[float]:
    return [1 / len(clients)] * len(clients)


def average(states: Sequence[State], weights: Sequence[float]) -> State:
    """Average tensor by tensor; integer buffers take their maximum."""
    result = {}
    for name, example in states[0].items():
        if example.is_floating_point():
            result[name] = sum(
                (w * s[name] for w, s in zip(weights, states, strict=True)),
                torch.zeros_like(example),
            )
        else:
            result[name] = torch.stack([s[name] for s in states]).amax(0)
    return result


def zeros(world: World) -> State:
    """Return a zero for each trainable tensor."""
    return {name: torch.zeros_like(p) for name, p in world.module.named_parameters()}


def flat(world: World, tensors: Mapping[str, Tensor]) -> Tensor:
    """Flatten the trainable tensors into one vector."""
    return torch.cat([tensors[name].reshape(-1) for name in world.trained])


def assert_same(
    states: Sequence[State], expected: Sequence[State], tolerance: float = 1e-9
) -> None:
    """Assert that every tensor of every round agrees."""
    assert len(states) == len(expected)
    for number, (state, reference) in enumerate(zip(states, expected, strict=True), start=1):
        assert state.keys() == reference.keys()
        for name in state:
            torch.testing.assert_close(
                state[name],
                reference[name],
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, k=(number, name): f"{k}: {m}",
            )
