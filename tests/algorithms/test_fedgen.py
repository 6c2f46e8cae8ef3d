"""Compare FedGen with a second computation: its generator, its teachers and the three losses of
clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.algorithms.fedgen import FedGen, sameness
from fedloom.algorithms.linear_head import LinearHead
from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream
from fedloom.flat.layout import Layout
from fedloom.parts.building import build
from naive import State, World, assert_same, average, shares

BATCH, STEPS, NOISE, HIDDEN = 6, 5, 3, 8
SMALL = (
    f"generator_batch={BATCH}, generator_steps={STEPS}, noise={NOISE}, hidden={HIDDEN}, "
    "generator_learning_rate=0.01"
)


class Imaginer(nn.Module):
    """The generator in plain layers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(NOISE + classes, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.last = nn.Linear(HIDDEN, 7)
        self.classes = classes

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        codes = F.one_hot(labels, self.classes).double()
        features: Tensor = self.last(
            torch.relu(self.norm(self.first(torch.cat([noise, codes], 1))))
        )
        return features


def fedgen(
    world: World,
    rounds: list[list[int]],
    alpha: float = 0.2,
    beta: float = 0.2,
    teacher: float = 1.0,
    diversity: float = 1.0,
) -> Iterator[State]:
    with torch.random.fork_rng():
        torch.set_rng_state(stream(world.seed, "generator").get_state())
        imaginer = Imaginer(world.classes).double()
    state = world.initial()
    for number, clients in enumerate(rounds, start=1):
        uploads = []
        for i in clients:
            n = world.sizes[i]
            size = min(4, n)
            steps = world.training.epochs * ceil(n / size)
            generator = stream(world.seed, "generator", round=number, client=i)
            classes = torch.randint(world.classes, (steps, BATCH), generator=generator)
            free = torch.rand(steps, BATCH, NOISE, generator=generator).double()
            bound = torch.rand(steps, size, NOISE, generator=generator).double()
            imaginer.eval()

            def loss(
                module: nn.Module,
                x: Tensor,
                y: Tensor,
                step: int,
                classes: Tensor = classes,
                free: Tensor = free,
                bound: Tensor = bound,
            ) -> Tensor:
                logits = module(x)
                with torch.no_grad():
                    target = module.head(imaginer(y, bound[step, : len(y)])).softmax(1)
                    imagined = imaginer(classes[step], free[step])
                predicted = logits.softmax(1)
                divergence = (target * (target.log() - predicted.log())).sum() / len(y)
                taught = F.cross_entropy(module.head(imagined), classes[step])
                return F.cross_entropy(logits, y) + beta * divergence + alpha * taught

            uploads.append(world.train(state, number, i, loss=loss if number > 1 else None)[0])
        teach(world, imaginer, number, clients, uploads, teacher, diversity)
        state = average(uploads, shares(world, clients))
        yield state


def teach(
    world: World,
    imaginer: Imaginer,
    number: int,
    clients: list[int],
    uploads: list[State],
    teacher: float,
    diversity: float,
) -> None:
    counts = {
        i: [int((world.data(i)[1] == c).sum()) for c in range(world.classes)] for i in clients
    }
    qualified = [c for c in range(world.classes) if any(counts[i][c] > 1 for i in clients)]
    imaginer.train()
    optimizer = torch.optim.Adam(imaginer.parameters(), lr=0.01, weight_decay=1e-2)
    generator = stream(world.seed, "generator", round=number)
    for _ in range(STEPS):
        chosen = torch.randint(len(qualified), (BATCH,), generator=generator)
        noise = torch.rand(BATCH, NOISE, generator=generator).double()
        labels = torch.tensor([qualified[int(c)] for c in chosen])
        z = imaginer(labels, noise)
        total = torch.zeros((), dtype=torch.float64)
        for i, state in zip(clients, uploads, strict=True):
            for y, features in zip(labels.tolist(), z, strict=True):
                logits = state["head.weight"] @ features + state["head.bias"]
                share = counts[i][y] / sum(counts[j][y] for j in clients)
                total = total + teacher * share * -logits.log_softmax(0)[y] / BATCH
        distance = (z.unsqueeze(0) - z.unsqueeze(1)).abs().mean(2)
        drawn = (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(2)
        total = total + diversity * torch.exp(-(distance * drawn).mean())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
@pytest.mark.parametrize(
    ("options", "naive"),
    [
        ("", {}),
        (
            ", alpha=10, beta=1, teacher=0.5, diversity=2",
            {"alpha": 10, "beta": 1, "teacher": 0.5, "diversity": 2},
        ),
    ],
)
def test_agrees_with_the_second_computation(
    options: str, naive: dict[str, float], norm: bool
) -> None:
    world = World(norm=norm)
    run = world.run(build(f"fedgen({SMALL}{options})"))
    assert_same(run.models, list(fedgen(world, run.selected, **naive)))


def test_without_losses_of_its_own_it_is_fedavg() -> None:
    world = World(norm=True)
    assert_same(
        world.run(build(f"fedgen({SMALL}, alpha=0, beta=0)")).models,
        world.run(build("fedavg")).models,
    )


def test_without_two_samples_of_a_label_the_generator_is_neither_trained_nor_sent() -> None:
    world = World(sizes=(1, 1, 1, 1))
    method = build(f"fedgen({SMALL})")
    run = world.run(method)
    assert not bool(method.state["generator_trained"])
    assert_same(run.models, world.run(build("fedavg")).models)


def test_sameness_is_one_for_equal_features_and_falls_as_they_spread() -> None:
    noise = torch.rand(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    equal = torch.ones(5, 3, dtype=torch.float64, requires_grad=True)
    assert float(sameness(equal, noise).detach()) == 1.0
    assert float(sameness(noise, noise)) > float(sameness(10 * noise, noise))
    sameness(equal, noise).backward()
    assert bool(torch.isfinite(equal.grad).all())


def test_a_classifier_that_is_no_linear_layer_onto_the_classes_is_refused() -> None:
    convolution = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 4, 1))
    with pytest.raises(InvalidValue, match="needs a linear classifier, but 1 is a Conv1d"):
        LinearHead.of(
            SimpleNamespace(module=convolution, layout=Layout(convolution), classes=4),
            "fedgen",
            bias=False,
        )
    narrow = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(
        InvalidValue, match="a classifier with 4 outputs, one for each class, but 0 has 2"
    ):
        LinearHead.of(
            SimpleNamespace(module=narrow, layout=Layout(narrow), classes=4), "fedgen", bias=False
        )
    free = nn.Sequential(nn.Linear(3, 4, bias=False))
    head = LinearHead.of(
        SimpleNamespace(module=free, layout=Layout(free), classes=4), "fedgen", bias=False
    )
    assert (tuple(head.weight.shape), head.bias) == ((4, 3), None)


def test_a_generator_batch_of_one_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"generator_batch must be between 2 and 1e\+06, not 1"):
        FedGen(generator_batch=1)
