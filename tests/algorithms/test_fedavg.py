"""Compare FedAvg rounds with plain loops over state dictionaries, one module and one torch
optimizer for each client.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from batch_order import batch_order
from fedavg_support import federation, small_task
from fedloom.common.randomness import stream
from fedloom.flat.module import channels_last
from fedloom.parts.building import build
from fedloom.task import Task


def naive_client(module: nn.Module, task: Task, round: int, client: int, seed: int) -> None:
    """Train one client by a plain SGD loop on the same batches."""
    settings = task.training
    samples = task.samples(client)
    scheduled = settings.schedule == "step(2, factor=0.5)"
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=settings.learning_rate
        * settings.decay ** (round - 1)
        * (0.5 if scheduled and round > 2 else 1),
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.optimizer_options.get("nesterov", False),
    )
    module.train()
    generator = stream(seed, "batches", round=round, client=client)
    order = batch_order(
        len(samples),
        generator,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        steps=settings.steps,
        drop_last=settings.drop_last,
    )
    order = list(order)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(order))
    for index in order:
        optimizer.zero_grad()
        F.cross_entropy(module(samples.inputs[index]), samples.labels[index]).backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), settings.clip)
        optimizer.step()
        if settings.local_schedule == "cosine":
            falling.step()


def naive_fedavg(
    task: Task, rounds: int, seed: int, select: list[list[int]], weighted: bool
) -> nn.Module:
    server = copy.deepcopy(task.model)
    for round in range(1, rounds + 1):
        uploads, sizes = [], []
        for client in select[round - 1]:
            module = copy.deepcopy(server)
            naive_client(module, task, round, client, seed)
            uploads.append(module.state_dict())
            sizes.append(len(task.samples(client)) if weighted else 1)
        averaged = {}
        for name, value in server.state_dict().items():
            if value.is_floating_point():
                averaged[name] = sum(
                    n * u[name] for n, u in zip(sizes, uploads, strict=True)
                ) / sum(sizes)
            else:
                averaged[name] = torch.stack([u[name] for u in uploads]).amax(0)
        server.load_state_dict(averaged)
    return server


SETTINGS: list[dict[str, object]] = [
    {},
    {"momentum": 0.9, "weight_decay": 1e-2, "decay": 0.9},
    {"momentum": 0.9, "optimizer_options": {"nesterov": True}},
    {"steps": 5, "clip": 0.5, "momentum": 0.5},
    {"drop_last": True, "batch_size": None},
    {"momentum": 0.5, "schedule": "step(2, factor=0.5)", "local_schedule": "cosine"},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("weighted", [True, False])
def test_rounds_equal_a_naive_implementation(settings: dict[str, object], weighted: bool) -> None:
    task = small_task(**settings)
    run = federation(build(f"fedavg(weighted={str(weighted).lower()})"), task, 3)
    run.run()
    select = [record["clients"] for record in run.history]
    assert all(len(clients) == 3 for clients in select)
    expected = naive_fedavg(task, 3, 4, select, weighted).state_dict()
    state_dict = task.module(run.model()).state_dict()
    for name in expected:
        if expected[name].is_floating_point():
            torch.testing.assert_close(state_dict[name], expected[name], rtol=1e-5, atol=1e-5)
    counters = task.layout.integer_slices
    assert [int(run.integers[entry.start]) for entry in counters] == [
        int(expected[entry.name]) for entry in counters
    ]


def test_updates_tensor_by_tensor_have_the_bits_of_flat_ones() -> None:
    """Updates tensor by tensor equal flat updates bit for bit.

    Plain SGD updates tensor by tensor. A correction that changes nothing selects the flat path.
    """
    task = small_task(momentum=0.9, weight_decay=1e-2)

    class Corrected(type(build("fedavg"))):  # type: ignore[misc]
        def train(self, cohort, inbox):  # type: ignore[no-untyped-def]
            return {
                "model": cohort.fit(
                    inbox["model"], correction=lambda weights, gradient, context: gradient
                ).model
            }

    plain, flat = federation(build("fedavg"), task, 2), federation(Corrected(), task, 2)
    plain.run()
    flat.run()
    assert torch.equal(plain.model(), flat.model())


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop", "adagrad"])
def test_any_elementwise_optimiser_equals_torchs_on_separate_tensors(optimizer: str) -> None:
    task = small_task(
        optimizer=optimizer, learning_rate=0.01, weight_decay=0.01, optimizer_options={"eps": 1e-6}
    )
    run = federation(build("fedavg"), task, 1, participation=0.01)
    run.run()
    (client,) = run.history[0]["clients"]
    module = copy.deepcopy(task.model)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
    kind = kinds.get(optimizer, torch.optim.Adagrad)
    separate = kind(module.parameters(), lr=0.01, weight_decay=0.01, eps=1e-6)
    samples = task.samples(client)
    generator = stream(4, "batches", round=1, client=client)
    for index in batch_order(len(samples), generator, batch_size=8, epochs=2):
        separate.zero_grad()
        # Use the memory layout of the engine: small gradients depend on it.
        images = channels_last(samples.inputs[index])
        F.cross_entropy(module(images), samples.labels[index]).backward()
        separate.step()
    torch.testing.assert_close(run.model(), task.layout.flatten(module), rtol=1e-4, atol=1e-6)


def test_unequal_clients_weigh_by_their_samples() -> None:
    """Clients weigh by their samples: after one local step from a common start, weighted FedAvg
    over all clients equals a step on the weighted mean gradient.
    """
    task = small_task(batch_size=None, epochs=1)
    plain = copy.deepcopy(task.model)
    run = federation(build("fedavg"), task, 1, participation=1.0)
    run.run()
    gradient = torch.zeros(task.layout.trainable)
    for client in range(task.clients):
        module = copy.deepcopy(plain)
        samples = task.samples(client)
        F.cross_entropy(module(samples.inputs), samples.labels).backward()
        client_gradient = torch.cat(
            [p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]
        )
        gradient += len(samples) / 120 * client_gradient
    expected = task.initial[: task.layout.trainable] - 0.1 * gradient
    torch.testing.assert_close(run.model()[: task.layout.trainable], expected, rtol=1e-5, atol=1e-5)
