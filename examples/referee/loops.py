"""Compare FedAvg, SCAFFOLD and FedALA as plain PyTorch loops with fedloom, step by step.

python examples/referee/loops.py

Each loop takes the start, the clients and the batches from fedloom's trace, and writes its own
trace. `mistake` plants a common error. `fedloom paper referee` names the first round, client, step
and tensor with a difference, and the likely cause.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trace_files import Arrays, TraceWriter, read_trace

import fedloom as fl

Weights = dict[str, Tensor]
RATE, DECAY, MOMENTUM, CLIENTS = 0.1, 0.8, 0.5, 6

MISTAKES = {
    "fedavg": (
        "order of batches",
        "momentum kept",
        "equal weights",
        "statistics left",
        "rate does not decay",
    ),
    "scaffold": (
        "sign",
        "divided by participants",
        "steps of all",
        "variate forgotten",
        "server rate",
    ),
    "fedala": ("no blend", "all layers", "begins anew", "not clipped", "rate of the weights"),
}
METHODS = {
    "fedavg": "fedavg",
    "scaffold": "scaffold",
    "fedala": "fedala_code(percent=100, max_epochs=3, rate=20)",
}


class Network(nn.Module):
    """A small network for the digits, with batch norm if a method averages its statistics."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 16), nn.Linear(16, 10)
        self.norm = nn.BatchNorm1d(16, track_running_stats=True) if norm else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.relu(self.norm(self.hidden(inputs.flatten(1)))))
        return logits


def weights_of(net: nn.Module) -> Weights:
    return {name: t.clone() for name, t in net.state_dict().items() if t.is_floating_point()}


def as_weights(arrays: Arrays) -> Weights:
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def mean(replies: list[Weights], shares: list[float]) -> Weights:
    return {
        key: sum((s * r[key] for s, r in zip(shares, replies, strict=True)), torch.zeros(()))
        for key in replies[0]
    }


class Loop:
    """Common parts of the three loops: data, fedloom's trace, local training, the written trace."""

    def __init__(self, task: fl.Task, folder: Path, mistake: str) -> None:
        self.task, self.mistake, self.trace = task, mistake, TraceWriter(folder)
        self.net = copy.deepcopy(task.model)
        self.buffers: dict[int, Any] = {}  # momentum, for optimizers that have it

    def batches(self, arrays: Arrays, client: int) -> list[Tensor]:
        steps = sum(name.startswith(f"{client}/") and name.endswith("/samples") for name in arrays)
        batches = [torch.from_numpy(arrays[f"{client}/{step}/samples"]) for step in range(steps)]
        return batches[::-1] if self.mistake == "order of batches" else batches

    def train(
        self,
        client: int,
        start: Weights,
        batches: list[Tensor],
        rate: float,
        correction: Weights | None = None,
    ) -> Weights:
        """Train by SGD with momentum; a correction is added to each gradient."""
        self.net.load_state_dict(start, strict=False)
        self.net.train()
        optimizer = torch.optim.SGD(
            self.net.parameters(), rate, momentum=0.0 if correction is not None else MOMENTUM
        )
        if self.mistake == "momentum kept" and client in self.buffers:
            optimizer.load_state_dict(
                self.buffers[client] | {"param_groups": optimizer.state_dict()["param_groups"]}
            )
        for step, index in enumerate(batches):
            self.trace.add(client, step, "before", weights_of(self.net))
            loss = F.cross_entropy(self.net(self.inputs(index)), self.task.train.labels[index])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for name, parameter in self.net.named_parameters():
                if correction is not None and parameter.grad is not None:
                    parameter.grad += correction[name]
            optimizer.step()
            for role, value in {
                "samples": index,
                "loss": loss.detach(),
                "after": weights_of(self.net),
            }.items():
                self.trace.add(client, step, role, value)
        self.buffers[client] = copy.deepcopy(optimizer.state_dict())
        return weights_of(self.net)

    def inputs(self, index: Tensor) -> Tensor:
        return self.task.dataset.prepare(self.task.train.inputs[index])

    def rounds(self, folder: Path) -> Iterator[tuple[int, list[int], list[int], Arrays, float]]:
        """Yield the rounds of fedloom's trace, with the learning rate of each."""
        for number, clients, sizes, arrays in read_trace(folder):
            decay = 1.0 if self.mistake == "rate does not decay" else DECAY
            yield number, clients, sizes, arrays, RATE * decay ** (number - 1)
            self.trace.end(number, clients, sizes)

    def exchange(self, client: int, stage: str, **roles: Weights) -> None:
        for role, tensors in roles.items():
            self.trace.add(client, stage, role, tensors)


def fedavg(task: fl.Task, theirs: Path, folder: Path, mistake: str = "") -> None:
    loop, model = Loop(task, folder, mistake), weights_of(task.model)
    for _, clients, sizes, arrays, rate in loop.rounds(theirs):
        replies = []
        for client in clients:
            loop.exchange(client, "in", model=model)
            replies.append(loop.train(client, model, loop.batches(arrays, client), rate))
            loop.exchange(client, "out", model=replies[-1])
        counts = [1] * len(clients) if mistake == "equal weights" else sizes
        before, model = model, mean(replies, [count / sum(counts) for count in counts])
        if mistake == "statistics left":
            model |= {name: tensor for name, tensor in before.items() if "running" in name}
        loop.trace.add("server", "end", "model", model)


def scaffold(task: fl.Task, theirs: Path, folder: Path, mistake: str = "") -> None:
    loop, model = Loop(task, folder, mistake), weights_of(task.model)
    variate = {
        name: torch.zeros_like(parameter) for name, parameter in task.model.named_parameters()
    }
    variates = dict.fromkeys(range(CLIENTS), variate)
    for _, clients, _, arrays, rate in loop.rounds(theirs):
        replies, changes = [], []
        for client in clients:
            loop.exchange(client, "in", model=model, variate=variate)
            own, batches = variates[client], loop.batches(arrays, client)
            sign = -1 if mistake == "sign" else 1
            offset = {name: sign * (variate[name] - own[name]) for name in variate}
            trained = loop.train(client, model, batches, rate, offset)
            steps = 20 if mistake == "steps of all" else len(batches)
            new = {
                name: own[name] - variate[name] + (model[name] - trained[name]) / (steps * rate)
                for name in own
            }
            replies.append(trained)
            changes.append({name: new[name] - own[name] for name in new})
            loop.exchange(client, "out", model=trained, variate=changes[-1])
            if mistake != "variate forgotten":
                variates[client] = new
        before, average = model, mean(replies, [1 / len(clients)] * len(clients))
        eta = 0.5 if mistake == "server rate" else 1.0
        model = {name: before[name] + eta * (average[name] - before[name]) for name in before}
        total = mean(
            changes,
            [1 / (len(clients) if mistake == "divided by participants" else CLIENTS)]
            * len(clients),
        )
        variate = {name: variate[name] + total[name] for name in variate}
        loop.trace.add("server", "end", "model", model)
        loop.trace.add("server", "end", "variate", variate)


def fedala(task: fl.Task, theirs: Path, folder: Path, mistake: str = "") -> None:
    loop, model = Loop(task, folder, mistake), weights_of(task.model)
    blends: dict[int, Weights] = {}
    latest: dict[int, Weights] = {}
    for _, clients, sizes, arrays, rate in loop.rounds(theirs):
        replies = []
        for client in clients:
            loop.exchange(client, "in", model=model)
            start = model
            if client in latest and mistake != "no blend":
                start = _blended(loop, client, model, latest[client], blends)
            latest[client] = loop.train(client, start, loop.batches(arrays, client), rate)
            replies.append(latest[client])
            loop.exchange(client, "out", model=replies[-1])
        model = mean(replies, [size / sum(sizes) for size in sizes])
        loop.trace.add("server", "end", "model", model)


def _blended(
    loop: Loop, client: int, model: Weights, old: Weights, blends: dict[int, Weights]
) -> Weights:
    """Learn the blend of the classifier: start = old + (model - old) * W."""
    names = [name for name in model if name.startswith("out") or loop.mistake == "all layers"]
    epochs = 1 if client in blends and loop.mistake != "begins anew" else 3
    if client not in blends or loop.mistake == "begins anew":
        blends[client] = {name: torch.ones_like(model[name]) for name in names}
    weights, step = blends[client], 8.0 if loop.mistake == "rate of the weights" else 20.0
    start = dict(model)
    samples = torch.from_numpy(loop.task.partition[client])
    for _ in range(epochs):
        for index in samples.split(20):
            start |= {name: old[name] + (model[name] - old[name]) * weights[name] for name in names}
            loop.net.load_state_dict(start)
            loop.net.zero_grad()
            F.cross_entropy(loop.net(loop.inputs(index)), loop.task.train.labels[index]).backward()  # type: ignore[no-untyped-call]
            for name in names:
                gradient = loop.net.get_parameter(name).grad
                assert gradient is not None
                weights[name] = weights[name] - step * gradient * (model[name] - old[name])
                if loop.mistake != "not clipped":
                    weights[name] = weights[name].clamp(0, 1)
    return start | {name: old[name] + (model[name] - old[name]) * weights[name] for name in names}


LOOPS: dict[str, Callable[..., None]] = {"fedavg": fedavg, "scaffold": scaffold, "fedala": fedala}


def task_for(method: str) -> fl.Task:
    """Return the digits of six clients."""
    momentum = 0.0 if method == "scaffold" else MOMENTUM
    training = fl.Training(learning_rate=RATE, decay=DECAY, momentum=momentum, batch_size=20)
    torch.manual_seed(0)
    network = Network(norm=method == "fedavg")
    return fl.make_task(
        "digits", clients=CLIENTS, partition="dirichlet(0.5)", model=network, training=training
    )


def main() -> None:
    from fedloom.reviews.evidence.referee import compare
    from fedloom.reviews.evidence.trace import Trace

    for method, loop in LOOPS.items():
        with tempfile.TemporaryDirectory() as folder:
            task, theirs = task_for(method), Path(folder) / "fedloom"
            fl.run(
                METHODS[method],
                task,
                rounds=5,
                participation=0.5,
                record=["steps"],
                directory=theirs,
            )
            for mistake in ("", *MISTAKES[method]):
                ours = Path(folder) / (mistake or "right").replace(" ", "-")
                loop(task, theirs, ours, mistake)
                location, *texts = compare(Trace(theirs), Trace(ours)) or ["the same"]
                print(f"{method}, {mistake or 'as it should be'}: {location}", *texts, sep="\n    ")


if __name__ == "__main__":
    main()
