"""The server half of each algorithm and part in plain loops over downloads and uploads.

A definition receives the answers that the harness records at the client half. It reads only the
parameters of its method. `naive_methods` and similar modules compute the random numbers and the
training of clients.

The definitions of an expression form a chain, `Chain`. Its order is the order in which a reply
passes the components between network and algorithm: codes, noise, attacks, exchanges of layers,
arrivals, then all other parts in the order of the text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.algorithm.method import Method, components, name_of
from fedloom.algorithm.records import SERVER_MODEL, Selection
from fedloom.common.randomness import stream
from fedloom.common.round import Round
from fedloom.flat.layout import Layout
from fedloom.parts.stages import HELD_OUT_LOSS

Message = dict[str, Tensor]
"""Download or upload of one client, without a client axis."""


@dataclass(frozen=True)
class Answer:
    """A client's upload, its download, and its weight in averages."""

    slot: int
    client: int
    weight: float
    sent: Message
    reply: Message


@dataclass
class Setting:
    """The federation as a definition sees it.

    `speeds` are samples per second of the clients, if a clock runs.
    """

    layout: Layout
    module: nn.Module
    initial: Tensor
    sizes: Sequence[int]
    participants: int
    classes: int
    speeds: Sequence[float] = ()
    closes: float = math.inf
    begins: int = 1  # the first round of the method

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def trainable(self) -> int:
        return self.layout.trainable


def mean_of(rows: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Return sum_k p_k rows[k], with p_k proportional to the weights."""
    weights = [1.0] * len(rows) if weights is None else weights
    total, result = sum(weights), torch.zeros_like(rows[0])
    for row, weight in zip(rows, weights, strict=True):
        result = result + row * (weight / total)
    return result


CODES, NOISE, ATTACKS, EXCHANGES, ARRIVALS, AROUND, LEAF = range(7)
"""Positions of definitions in a chain, from the network to the algorithm."""


class Definition:
    """Base class: one global model for all clients.

    The mean of the uploads, weighted by samples, replaces the model.
    """

    whole = True  # complete models are transmitted, including integer buffers
    place = LEAF

    def __init__(self, method: Method, setting: Setting) -> None:
        self.method: Any = method
        self.setting = setting
        self.server_model = setting.initial.clone()
        self.begin()

    def begin(self) -> None:
        """Create the additional state of the server."""

    def sends(self, round: Round) -> list[Message]:
        """Return the download of each selected client, by slot.

        The harness does not check missing names.
        """
        return [{"model": self.server_model} for _ in round.selected]

    def sends_idle(self, round: Round) -> Message:
        """Return the download of a client that trains without an upload."""
        return {"model": self.server_model}

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        """Update the server with the answers of a round. There is at least one answer."""
        weights = [answer.weight for answer in answers] if self.weighted else None
        self.average(round, [answer.reply["model"] for answer in answers], weights, answers)

    def average(
        self,
        round: Round,
        models: Sequence[Tensor],
        weights: Sequence[float] | None,
        answers: Sequence[Answer],
    ) -> None:
        self.server_model = mean_of(models, weights)

    def finish(self, round: Round) -> None:
        """End a round, with or without answers."""

    def model(self) -> Tensor:
        return self.server_model

    @property
    def weighted(self) -> bool:
        return getattr(self.method, "weighted", True)

    def unlike(
        self,
        round: Round,
        outer: dict[int, Any],
        inner: dict[int, Any],
        refused: Collection[int] = (),
    ) -> str:
        """Return a fault in the client half of a part, or "".

        Args:
            round: The round.
            outer: Records of its clients.
            inner: Records of the next definition in the chain.
            refused: Clients with a rejected reply, which store nothing from the round.
        """
        return ""


# --- one global model ---


class Scaffold(Definition):
    def begin(self) -> None:
        self.variate = torch.zeros_like(self.setting.initial[: self.setting.trainable])

    def sends(self, round: Round) -> list[Message]:
        return [{"model": self.server_model, "variate": self.variate} for _ in round.selected]

    def sends_idle(self, round: Round) -> Message:
        return {"model": self.server_model, "variate": self.variate}

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        mean = mean_of([answer.reply["model"] for answer in answers])
        count = self.setting.trainable
        rate = self.method.server_learning_rate
        mean[:count] = self.server_model[:count] + rate * (mean[:count] - self.server_model[:count])
        self.server_model = mean
        for answer in answers:
            self.variate = self.variate + answer.reply["variate"] / self.setting.clients


class FedDyn(Definition):
    def begin(self) -> None:
        self.drift = torch.zeros_like(self.setting.initial[: self.setting.trainable])

    def sends(self, round: Round) -> list[Message]:
        size = self.setting.initial.new_tensor([sum(self.setting.sizes) / self.setting.clients])
        return [{"model": self.server_model, "mean_size": size} for _ in round.selected]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        count = self.setting.trainable
        mean = mean_of([answer.reply["model"] for answer in answers])
        for answer in answers:
            self.drift = (
                self.drift
                + (answer.reply["model"] - self.server_model)[:count] / self.setting.clients
            )
        mean[:count] = mean[:count] + self.drift
        self.server_model = mean


class FedDC(FedDyn):
    def begin(self) -> None:
        super().begin()
        self.update = torch.zeros_like(self.drift)

    def sends(self, round: Round) -> list[Message]:
        return [{**message, "update": self.update} for message in super().sends(round)]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        super().receive(round, answers)
        for answer in answers:
            self.update = self.update + answer.reply["update"] / self.setting.clients


class FedSpeed(FedDyn):
    def sends(self, round: Round) -> list[Message]:
        return [{"model": self.server_model} for _ in round.selected]


class FedSMOO(FedSpeed):
    def begin(self) -> None:
        super().begin()
        self.common = torch.zeros_like(self.drift)

    def sends(self, round: Round) -> list[Message]:
        return [{**message, "perturbation": self.common} for message in super().sends(round)]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        super().receive(round, answers)
        total = mean_of([answer.reply["dual"] for answer in answers])
        length = float(total.norm())
        self.common = self.method.rho * total / length if length else total


class FedGMT(Definition):
    def begin(self) -> None:
        self.drift = torch.zeros_like(self.setting.initial[: self.setting.trainable])
        self.teacher = self.setting.initial.clone()

    def sends(self, round: Round) -> list[Message]:
        return [{"model": self.server_model, "teacher": self.teacher} for _ in round.selected]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        count, alpha = self.setting.trainable, self.method.alpha
        mean = mean_of([a.reply["model"] for a in answers], [a.weight for a in answers])
        for answer in answers:
            moved = (answer.reply["model"] - self.server_model)[:count]
            self.drift = self.drift + moved / self.setting.clients
        mean[:count] = mean[:count] + self.drift
        self.teacher = alpha * self.teacher + (1 - alpha) * mean
        self.server_model = mean


class FedCM(Definition):
    def begin(self) -> None:
        self.momentum = torch.zeros_like(self.setting.initial[: self.setting.trainable])

    def sends(self, round: Round) -> list[Message]:
        return [{"model": self.server_model, "momentum": self.momentum} for _ in round.selected]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        count, rate = self.setting.trainable, self.method.server_learning_rate
        eta = round.learning_rate / (1 - self.method.plan.training.momentum)
        gradients = []
        for answer in answers:
            moved = (self.server_model - answer.reply["model"])[:count]
            steps = float(answer.reply["steps"])
            gradients.append(moved / (steps * eta) if steps else 0 * moved)
        self.momentum = mean_of(gradients)
        mean = mean_of([answer.reply["model"] for answer in answers])
        mean[:count] = (1 - rate) * self.server_model[:count] + rate * mean[:count]
        self.server_model = mean


class FedACG(Definition):
    def begin(self) -> None:
        self.momentum = torch.zeros_like(self.setting.initial[: self.setting.trainable])

    def sends(self, round: Round) -> list[Message]:
        return [self.sends_idle(round) for _ in round.selected]

    def sends_idle(self, round: Round) -> Message:
        model = self.server_model.clone()
        model[: self.setting.trainable] += self.method.momentum * self.momentum
        return {"model": model}

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        mean = mean_of([answer.reply["model"] for answer in answers])
        self.momentum = (mean - self.server_model)[: self.setting.trainable]
        self.server_model = mean


class FedGloSS(Definition):
    def begin(self) -> None:
        zeros = torch.zeros_like(self.setting.initial[: self.setting.trainable])
        self.gradient = zeros
        self.dual = zeros.clone()

    def perturbed(self) -> Tensor:
        model, length = self.server_model.clone(), float(self.gradient.norm())
        if length:
            step = self.method.rho * self.gradient / length
            model[: self.setting.trainable] += step
        return model

    def sends(self, round: Round) -> list[Message]:
        return [{"model": self.perturbed()} for _ in round.selected]

    def sends_idle(self, round: Round) -> Message:
        return {"model": self.perturbed()}

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        count, method, sent = self.setting.trainable, self.method, self.perturbed()
        models = [answer.reply["model"] for answer in answers]
        mean = mean_of(models, [answer.weight for answer in answers])
        update = (mean - sent)[:count]
        plain = (mean_of(models) - sent)[:count]
        self.dual = self.dual - plain / (method.beta * self.setting.clients)
        step = method.server_learning_rate * update - method.beta * self.dual
        mean[:count] = self.server_model[:count] + step
        self.gradient, self.server_model = -update, mean


class Extrapolated(Definition):
    """The plain mean of the uploads, and a step of another length: FedInit, FedSWA, FedLESAM."""

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        count, method = self.setting.trainable, self.method
        names = {"fedinit": "server_learning_rate", "fedswa": "alpha"}
        name = names.get(name_of(method))
        rate = 1.0 if name is None else getattr(method, name)
        mean = mean_of([answer.reply["model"] for answer in answers])
        mean[:count] = (1 - rate) * self.server_model[:count] + rate * mean[:count]
        self.server_model = mean


class FedMuon(Scaffold):
    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        count, clients = self.setting.trainable, self.setting.clients
        mean = mean_of([answer.reply["model"] for answer in answers])
        share = len(answers) / clients
        mean[:count] = (1 - share) * self.server_model[:count] + share * mean[:count]
        self.server_model = mean
        for answer in answers:
            self.variate = self.variate + answer.reply["variate"] / clients


class FedNova(Definition):
    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        count, total = self.setting.trainable, sum(answer.weight for answer in answers)
        mean = mean_of(
            [answer.reply["model"] for answer in answers], [answer.weight for answer in answers]
        )
        effective, direction = 0.0, torch.zeros(count, dtype=mean.dtype)
        for answer in answers:
            local, share = float(answer.reply["local_weight"]), answer.weight / total
            effective += share * local
            if local > 0:
                direction += share * (answer.reply["model"] - self.server_model)[:count] / local
        mean[:count] = self.server_model[:count] + effective * direction
        self.server_model = mean


class FedExP(Definition):
    def begin(self) -> None:
        self.shown = self.setting.initial.clone()

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        count, total = self.setting.trainable, sum(answer.weight for answer in answers)
        mean = mean_of(
            [answer.reply["model"] for answer in answers], [answer.weight for answer in answers]
        )
        update, length = (mean - self.server_model)[:count], 0.0
        for answer in answers:
            drift = (answer.reply["model"] - self.server_model)[:count]
            length += answer.weight / total * float(drift.square().sum())
        epsilon = self.method.epsilon * (round.learning_rate / round.initial_learning_rate) ** 2
        step = max(1.0, length / (2 * (float(update.square().sum()) + epsilon)))
        mean[:count] = self.server_model[:count] + step * update
        self.shown = mean if round.number == self.setting.begins else (self.server_model + mean) / 2
        self.server_model = mean

    def model(self) -> Tensor:
        return self.shown


class ServerOptimizer(Definition):
    def begin(self) -> None:
        count = self.setting.trainable
        self.first = torch.zeros_like(self.setting.initial[:count])
        self.second = torch.full_like(self.first, getattr(self.method, "adaptivity", 0.0) ** 2)

    def average(
        self,
        round: Round,
        models: Sequence[Tensor],
        weights: Sequence[float] | None,
        answers: Sequence[Answer],
    ) -> None:
        mean, count, method = mean_of(models, weights), self.setting.trainable, self.method
        update = (mean - self.server_model)[:count]
        rate = method.learning_rate
        if name_of(method) == "fedavgm":
            self.first = method.momentum * self.first + update
            step = rate * self.first
        else:
            beta1, beta2 = method.beta1, getattr(method, "beta2", 0.0)
            self.first = beta1 * self.first + (1 - beta1) * update
            square = update * update
            if name_of(method) == "fedadam":
                self.second = beta2 * self.second + (1 - beta2) * square
            elif name_of(method) == "fedadagrad":
                self.second = self.second + square
            else:
                self.second = self.second - (1 - beta2) * square * torch.sign(self.second - square)
            step = rate * self.first / (self.second.sqrt() + method.adaptivity)
        mean[:count] = self.server_model[:count] + step
        self.server_model = mean


class QFedAvg(Definition):
    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        count, eta, q = self.setting.trainable, round.learning_rate, self.method.q
        step, bound = torch.zeros_like(self.server_model[:count]), 0.0
        for answer in answers:
            loss = float(answer.reply["loss"]) + 1e-10
            slope = (self.server_model - answer.reply["model"])[:count] / eta
            step = step + loss**q * slope
            bound += q * loss ** (q - 1) * float(slope.square().sum()) + loss**q / eta
        mean = mean_of([answer.reply["model"] for answer in answers])
        mean[:count] = self.server_model[:count] - step / bound
        self.server_model = mean


class AFL(Definition):
    def begin(self) -> None:
        self.shares = [1 / self.setting.clients] * self.setting.clients
        self.mean = self.setting.initial.clone()

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        step, raised = torch.zeros_like(self.server_model), list(self.shares)
        for answer in answers:
            step = step + self.shares[answer.client] * (answer.reply["model"] - self.server_model)
            raised[answer.client] += self.method.rate * float(answer.reply["loss"])
        low, high = min(raised) - 1, max(raised)
        for _ in range(200):  # theta of sum max(v - theta, 0) = 1, by bisection
            theta = (low + high) / 2
            low, high = (
                (theta, high)
                if sum(max(value - theta, 0) for value in raised) > 1
                else (low, theta)
            )
        self.shares = [max(value - low, 0) for value in raised]
        self.server_model = self.server_model + step
        count = round.number - self.setting.begins + 1
        self.mean = self.mean + (self.server_model - self.mean) / count

    def model(self) -> Tensor:
        return self.mean


class IFCA(Definition):
    def begin(self) -> None:
        # The initial values of the other models come from the method.
        self.models = [self.setting.initial.clone(), *self.method.state["models"].clone()[1:]]
        self.chosen = [1] * len(self.models)

    def sends(self, round: Round) -> list[Message]:
        return [{"models": torch.stack(self.models)} for _ in round.selected]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        groups = [
            [a.reply["model"] for a in answers if int(a.reply["choice"]) == j]
            for j in range(len(self.models))
        ]
        self.models = [
            mean_of(group) if group else model
            for group, model in zip(groups, self.models, strict=True)
        ]
        self.chosen = [len(group) for group in groups]

    def model(self) -> Tensor:
        return mean_of(self.models, self.chosen)


class CFL(Definition):
    """CFL before a split. The harness has too few rounds for a split.

    Each client moves by the mean update of the clients that answered.
    """

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        self.server_model = mean_of([answer.reply["model"] for answer in answers])


# --- one model per client ---


class FedMut(Definition):
    def begin(self) -> None:
        self.previous = self.setting.initial.clone()

    def sends(self, round: Round) -> list[Message]:
        method: Any = self.method
        count, generator = len(round.selected), round.stream("mutate")
        paired = count - count % 2
        passed = round.number - self.setting.begins
        skew = method.beta * (1 - min(max(passed - 1, 0) / method.mutation_rounds, 1))
        rows = [self.server_model.clone() for _ in range(count)]
        for entry in self.setting.layout.slices:
            if entry.stop > self.setting.trainable:
                continue
            order = torch.randperm(paired, generator=generator).tolist()
            for slot in range(paired):
                sign = 1.0 if order[slot] % 2 == 0 else skew - 1.0
                piece = slice(entry.start, entry.stop)
                rows[slot][piece] += (
                    sign * method.radius * (self.server_model - self.previous)[piece]
                )
        return [{"model": row} for row in rows]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        self.previous = self.server_model
        self.server_model = mean_of([answer.reply["model"] for answer in answers])


class Pool(Definition):
    """Indep and FedMR."""

    def begin(self) -> None:
        self.pool = [self.setting.initial.clone() for _ in range(self.setting.participants)]

    def sends(self, round: Round) -> list[Message]:
        return [{"model": self.pool[slot]} for slot in range(len(round.selected))]

    def sends_idle(self, round: Round) -> Message:
        return {"model": self.model()}

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        pool_before, pool = self.pool, [row.clone() for row in self.pool]
        for answer in answers:
            pool[answer.slot] = answer.reply["model"].clone()
        self.pool = pool
        if name_of(self.method) in ("fedmr", "fedkdmr", "fedmr_async"):
            self.recombine(round, pool_before, answers)

    def recombine(self, round: Round, pool_before: list[Tensor], answers: Sequence[Answer]) -> None:
        pool, blend = self.pool, self.method.blend
        target = mean_of(pool)
        if blend == "auto":
            target = mean_of(
                [answer.reply["model"] for answer in answers], [answer.weight for answer in answers]
            )
            share = self.chosen_share(pool_before, target)
        else:
            share = share_at(blend, round.number)
        mixed = shuffled(pool, self.setting.layout, round.stream("recombine"))
        self.pool = [(1 - share) * row + share * target for row in mixed]

    def chosen_share(self, pool_before: list[Tensor], average: Tensor) -> float:
        count = self.setting.trainable
        common = float((average - self.setting.initial)[:count].square().sum())
        spread = variance([row[:count] for row in self.pool])
        added = variance(
            [(row - start)[:count] for row, start in zip(self.pool, pool_before, strict=True)]
        )
        if not spread * added:
            return 0.0
        return max(0.0, 1 - (self.method.tolerance * common) ** 2 / (spread * added))

    def model(self) -> Tensor:
        return mean_of(self.pool)


class FedKDMR(Pool):
    def sends(self, round: Round) -> list[Message]:
        method: Any = self.method
        taught = method.distillation > 0 and (not method.ramp or round.number > self.setting.begins)
        return [
            {**message, **({"teacher": self.model()} if taught else {})}
            for message in super().sends(round)
        ]


class FedCross(Pool):
    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        super().receive(round, answers)
        method, pool, mixed = self.method, self.pool, []
        alpha = share_at(method.alpha, round.number)
        for k, row in enumerate(pool):
            directions = [
                model[: self.setting.trainable] / model[: self.setting.trainable].norm()
                for model in pool
            ]
            cosine = {j: float(directions[k] @ directions[j]) for j in range(len(pool)) if j != k}
            partner = {
                "lowest": min(cosine, key=lambda j: cosine[j]),
                "highest": max(cosine, key=lambda j: cosine[j]),
                "in_order": (k + (round.number - 1) % (len(pool) - 1) + 1) % len(pool),
            }[method.partner]
            mixed.append(alpha * row + (1 - alpha) * pool[partner])
        self.pool = mixed


def share_at(blend: float | list[tuple[int, float]], number: int) -> float:
    """Return the share of a round: linear between the pairs and constant outside."""
    if not isinstance(blend, list):
        return float(blend)
    if number <= blend[0][0]:
        return float(blend[0][1])
    for (begin, low), (end, high) in itertools.pairwise(blend):
        if begin <= number <= end:
            return low + (high - low) * (number - begin) / (end - begin)
    return float(blend[-1][1])


def variance(rows: Sequence[Tensor]) -> float:
    """Return (1/K) sum_k |x_k - mean|^2."""
    mean = mean_of(rows)
    return sum(float((row - mean).square().sum()) for row in rows) / len(rows)


def layers_of(layout: Layout) -> list[list[slice]]:
    """Return the slices of each layer from the lowest layer up, grouped by tensor names."""
    groups: dict[str, list[slice]] = {}
    for entry in layout.slices:
        groups.setdefault(entry.name.rpartition(".")[0], []).append(slice(entry.start, entry.stop))
    return list(groups.values())


def shuffled(pool: Sequence[Tensor], layout: Layout, generator: torch.Generator) -> list[Tensor]:
    """Return the models after an independent permutation of each layer."""
    result = [row.clone() for row in pool]
    for unit in layers_of(layout):
        source = torch.randperm(len(pool), generator=generator).tolist()
        for target, origin in enumerate(source):
            for piece in unit:
                result[target][piece] = pool[origin][piece]
    return result


# --- a section of the model remains at the clients ---


class Personal(Definition):
    """The mean of the transmitted tensors, weighted by samples."""

    whole = False

    def begin(self) -> None:
        method, layout = self.method, self.setting.layout
        name, private = name_of(method), set()
        if name in ("fedper", "fedrep", "fedbabu", "fedas", "pfedfda") and not getattr(
            method, "upload_head", False
        ):
            private = {"head"}
        elif name == "lg_fedavg":
            private = {
                layer.rpartition(".")[0] for layer in (entry.name for entry in layout.slices)
            } - {"head"}
        elif name == "fedbn":
            private = {
                n for n, m in self.setting.module.named_modules() if isinstance(m, _BatchNorm)
            }
        end = (
            layout.size if getattr(method, "buffers", "average") == "average" else layout.trainable
        )
        index: list[int] = []
        for entry in layout.slices:
            if entry.name.rpartition(".")[0] not in private and entry.stop <= end:
                index += range(entry.start, entry.stop)
        self.index = torch.tensor(index)

    def sends(self, round: Round) -> list[Message]:
        return [{"model": self.server_model[self.index]} for _ in round.selected]

    def sends_idle(self, round: Round) -> Message:
        return {"model": self.server_model[self.index]}

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        mean = mean_of(
            [answer.reply["model"] for answer in answers], [answer.weight for answer in answers]
        )
        beta = getattr(self.method, "beta", 1.0) if name_of(self.method) == "pfedme" else 1.0
        self.server_model = self.server_model.clone()
        self.server_model[self.index] = (1 - beta) * self.server_model[self.index] + beta * mean


class FedAMP(Personal):
    def begin(self) -> None:
        super().begin()
        self.models = [
            self.setting.initial[self.index].clone() for _ in range(self.setting.clients)
        ]
        self.server_model = self.setting.initial.clone()

    def sends(self, round: Round) -> list[Message]:
        method: Any = self.method
        messages = []
        for client in round.selected:
            pulls = []
            for index in range(self.setting.clients):
                gap = (self.models[client] - self.models[index])[: self.setting.trainable]
                pull = (
                    method.alpha
                    / method.sigma
                    * math.exp(-float(gap.square().sum()) / method.sigma)
                )
                pulls.append(0.0 if index == client else pull)
            pulls = [pull / max(1.0, sum(pulls)) for pull in pulls]
            pulls[client] = 1 - sum(pulls)
            centre = torch.zeros_like(self.models[0])
            for pull, row in zip(pulls, self.models, strict=True):
                centre = centre + pull * row
            messages.append({"model": centre})
        return messages

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.models[answer.client] = answer.reply["model"]
        self.server_model = self.server_model.clone()
        self.server_model[self.index] = mean_of(self.models)


class Apple(Personal):
    def begin(self) -> None:
        super().begin()
        self.cores = [self.setting.initial[self.index].clone() for _ in range(self.setting.clients)]

    def sends(self, round: Round) -> list[Message]:
        sizes = self.setting.initial.new_tensor([float(size) for size in self.setting.sizes])
        return [
            {"cores": torch.stack(self.cores), "shares": sizes / sizes.sum()}
            for _ in round.selected
        ]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.cores[answer.client] = answer.reply["model"]
        self.server_model = self.server_model.clone()
        self.server_model[self.index] = mean_of(
            self.cores, [float(size) for size in self.setting.sizes]
        )


class FedFomo(Personal):
    def begin(self) -> None:
        super().begin()
        self.models: dict[int, Tensor] = {}

    def sends(self, round: Round) -> list[Message]:
        models = list(self.models.values()) or [self.setting.initial[self.index]]
        return [{"models": torch.stack(models)} for _ in round.selected]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.models[answer.client] = answer.reply["model"]
        self.server_model = self.server_model.clone()
        weights = [float(self.setting.sizes[client]) for client in self.models]
        self.server_model[self.index] = mean_of(list(self.models.values()), weights)


class FedAS(Personal):
    """Weighted by the reported Fisher information, or equally if all values are 0."""

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        weights = [float(answer.reply["fisher"]) for answer in answers]
        weights = weights if sum(weights) > 0 else [1.0] * len(weights)
        super().receive(
            round,
            [
                replace(answer, weight=weight)
                for answer, weight in zip(answers, weights, strict=True)
            ],
        )


class FedDBE(Personal):
    """The first round with an answer computes the consensus of the feature means.

    It does not update the model.
    """

    def begin(self) -> None:
        super().begin()
        self.consensus: Tensor | None = None

    def sends(self, round: Round) -> list[Message]:
        consensus_message = {} if self.consensus is None else {"consensus": self.consensus}
        return [{**message, **consensus_message} for message in super().sends(round)]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        if self.consensus is None:
            self.consensus = mean_of(
                [a.reply["mean"] for a in answers], [a.weight for a in answers]
            )
        else:
            super().receive(round, answers)


class Prototypes(Definition):
    """Class means at the server: the mean over the clients that have the class."""

    whole = False

    def begin(self) -> None:
        weight = next(entry for entry in self.setting.layout.slices if entry.name == "head.weight")
        self.classes, self.width = weight.shape
        self.prototypes = [self.setting.initial.new_zeros(self.width) for _ in range(self.classes)]
        self.present = [0.0] * self.classes

    def described(self) -> Message:
        return {
            "prototypes": torch.stack(self.prototypes),
            "present": self.setting.initial.new_tensor(self.present),
        }

    def learn(self, answers: Sequence[Answer], by_samples: bool) -> None:
        for c in range(self.classes):
            having = [answer for answer in answers if float(answer.reply["counts"][c]) > 0]
            if having:
                weights = [
                    float(answer.reply["counts"][c]) if by_samples else 1.0 for answer in having
                ]
                self.prototypes[c] = mean_of(
                    [answer.reply["means"][c] for answer in having], weights
                )
                self.present[c] = 1.0

    def with_head(self, row: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return a model with another classifier."""
        row = row.clone()
        for entry in self.setting.layout.slices:
            if entry.name in ("head.weight", "head.bias"):
                row[entry.start : entry.stop] = (
                    weight if entry.name == "head.weight" else bias
                ).reshape(-1)
        return row


class FedProto(Prototypes):
    """FedProto transmits no weights.

    The global model is the initial model and predicts the class of the nearest prototype.
    """

    def sends(self, round: Round) -> list[Message]:
        return [self.described() for _ in round.selected]

    def sends_idle(self, round: Round) -> Message:
        return self.described()

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        self.learn(answers, self.method.weighted)

    def model(self) -> Tensor:
        if not any(self.present):
            return self.setting.initial
        points = torch.stack(self.prototypes)
        weight, bias = 2 * points, -points.square().sum(1)
        known = torch.tensor(self.present) > 0
        weight[~known], bias[~known] = weight[known].mean(0), bias[known].mean() - 50
        return self.with_head(self.setting.initial, weight, bias)


class FedPAC(Prototypes, Personal):
    """The base is averaged.

    Each client that answers receives the best mixture of the heads for its class means.
    """

    def begin(self) -> None:
        Personal.begin(self)
        Prototypes.begin(self)
        self.head = torch.tensor([k for entry in self.setting.layout.slices if entry.name.startswith("head.")
                                  for k in range(entry.start, entry.stop)])  # fmt: skip
        self.heads = [self.setting.initial[self.head] for _ in range(self.setting.clients)]

    def sends(self, round: Round) -> list[Message]:
        messages = []
        for client in round.selected:
            row = self.server_model.clone()
            row[self.head] = self.heads[client]
            messages.append({"model": row[self.index], **self.described()})
        return messages

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        Personal.receive(self, round, answers)
        self.learn(answers, by_samples=True)
        wholes = []
        for answer in answers:
            row = self.server_model.clone()
            row[self.index] = answer.reply["model"]
            wholes.append(row[self.head])
        for i, answer in enumerate(answers):
            shares = best_mixture(
                [a.reply["shares"] for a in answers],
                [float(a.reply["variance"]) for a in answers],
                i,
            )
            self.heads[answer.client] = mean_of(wholes, shares)


def best_mixture(means: Sequence[Tensor], variances: Sequence[float], client: int) -> list[float]:
    """Return the a on the simplex that minimises sum_j a_j^2 V_j + |h_i - sum_j a_j h_j|^2.

    Solves the problem for each support and selects the best solution.
    """
    count = len(means)
    gaps = torch.stack([(mean - means[client]).reshape(-1).double() for mean in means])
    quadratic = (
        torch.diag(torch.tensor([max(v, 0.0) for v in variances], dtype=torch.float64))
        + gaps @ gaps.T
    )
    quadratic += (1e-12 * float(quadratic.trace()) + 1e-300) * torch.eye(
        count, dtype=torch.float64
    )  # V is 0 for a single sample
    best, shares = math.inf, [0.0] * count
    for size in range(1, count + 1):
        for support in itertools.combinations(range(count), size):
            inner = quadratic[list(support)][:, list(support)]
            solved = torch.linalg.solve(inner, torch.ones(size, dtype=torch.float64))
            solved = solved / solved.sum()
            value = float(solved @ inner @ solved)
            if bool((solved >= 0).all()) and value < best:
                best, shares = (
                    value,
                    [
                        float(solved[support.index(j)]) if j in support else 0.0
                        for j in range(count)
                    ],
                )
    return [share if share > 1e-3 else 0.0 for share in shares]


class PFedFDA(Prototypes, Personal):
    """Base, class means and covariance are averaged by samples.

    The global model is the linear discriminant for these means and this covariance.
    """

    def begin(self) -> None:
        Personal.begin(self)
        Prototypes.begin(self)
        self.means = self.method.state["gaussians"][
            : self.classes
        ].clone()  # the method draws the initial values
        self.covariance = torch.eye(self.width, dtype=self.means.dtype)

    def sends(self, round: Round) -> list[Message]:
        gaussians = torch.cat([self.means, self.covariance])
        return [{**message, "gaussians": gaussians} for message in Personal.sends(self, round)]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        Personal.receive(self, round, answers)
        weights = [answer.weight for answer in answers]
        gaussians = mean_of([answer.reply["gaussians"] for answer in answers], weights)
        self.means, self.covariance = gaussians.split([self.classes, self.width])

    def model(self) -> Tensor:
        means, covariance = (
            self.means.double(),
            self.covariance.double(),
        )  # inverting in single precision loses digits
        shrunk = (1 - 1e-4) * covariance + 1e-4 * covariance.diagonal().mean() * torch.eye(
            self.width
        )
        precision = torch.linalg.inv(shrunk)
        bias = [-float(mean @ precision @ mean) / 2 - math.log(self.classes) for mean in means]
        return self.with_head(
            self.server_model, (means @ precision).to(self.means), self.means.new_tensor(bias)
        )


# --- parts ---


class Wrapped(Definition):
    """Delegates to the next definition in the chain. Clients pass on their input."""

    inner: Definition
    place = AROUND
    at_clients = True  # False for the server half of a part whose client half is another level

    def sends(self, round: Round) -> list[Message]:
        return self.inner.sends(round)

    def sends_idle(self, round: Round) -> Message:
        return self.inner.sends_idle(round)

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        self.inner.receive(round, answers)

    def finish(self, round: Round) -> None:
        self.inner.finish(round)

    def model(self) -> Tensor:
        return self.inner.model()

    def unlike(
        self,
        round: Round,
        outer: dict[int, Any],
        inner: dict[int, Any],
        refused: Collection[int] = (),
    ) -> str:
        for client, record in outer.items():
            if not same_tensors(record.inbox, inner[client].inbox):
                return f"client {client} works on another inbox than it was sent"
        return unlike_replies(outer, inner, refused)


def unlike_replies(outer: dict[int, Any], inner: dict[int, Any], refused: Collection[int]) -> str:
    """Return the client with a reply that a part changed, or ""."""
    for client, record in outer.items():
        if client not in refused and not same_tensors(record.reply, inner[client].reply):
            return f"client {client} uploads another reply than it made"
    return ""


def unlike_rest(outer: dict[int, Any], inner: dict[int, Any]) -> str:
    """Return the client with an inbox that a part changed outside its model, or ""."""
    model = {"model", SERVER_MODEL}
    for client, record in outer.items():
        before = {name: rows for name, rows in record.inbox.items() if name not in model}
        after = {name: rows for name, rows in inner[client].inbox.items() if name not in model}
        if not same_tensors(before, after):
            return f"client {client} works on another message than it was sent"
    return ""


def same_tensors(message: Message, other: Message) -> bool:
    """Return True if two messages have equal contents, except for the stage number."""
    named, named_other = (
        message.keys() - {"@stage", "@initial"},
        other.keys() - {"@stage", "@initial"},
    )
    return named == named_other and all(same_bits(message[name], other[name]) for name in named)


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


class StaleStep(Wrapped):
    """The server half of FedVARP, MIFA and FedStale."""

    at_clients = False

    def begin(self) -> None:
        super().begin()
        self.mean = torch.zeros_like(self.setting.initial[: self.setting.trainable])

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        count, clients, method = self.setting.trainable, self.setting.clients, self.method
        name, mean_size = name_of(method), sum(self.setting.sizes) / clients
        unit = round.learning_rate if method.rescale else 1.0
        beta = method.beta if name == "fedstale" else 1.0
        rewritten, mean = [], self.mean
        for answer in answers:
            sent, row = answer.sent["model"], answer.reply["model"].clone()
            change = (row - sent)[:count]
            size = self.setting.sizes[answer.client] / mean_size if name == "fedstale" else 1.0
            share = {"mifa": len(answers) / clients, "fedstale": size}.get(name, 1.0)
            row[:count] = sent[:count] + beta * unit * self.mean + share * change
            whole = answer.reply.get("stale_change", change)
            mean = mean + size * whole / (unit * clients)
            rewritten.append(replace(answer, reply={**answer.reply, "model": row}))
        self.mean = mean
        self.inner.receive(round, rewritten)


class StaleUpload(Wrapped):
    """The client half: an upload is the model minus the client's last update."""

    place = NOISE

    def begin(self) -> None:
        super().begin()
        self.last: dict[int, Tensor] = {}

    def unlike(
        self,
        round: Round,
        outer: dict[int, Any],
        inner: dict[int, Any],
        refused: Collection[int] = (),
    ) -> str:
        count, method = self.setting.trainable, self.method
        unit = round.learning_rate if method.rescale else 1.0
        beta = getattr(method, "beta", 1.0)
        for client, record in outer.items():
            if client in refused or not record.uploads:
                continue
            sent = record.inbox.get(SERVER_MODEL, record.inbox["model"])
            expected = inner[client].reply["model"].clone()
            update = (expected - sent)[:count]
            stale = unit * self.last.get(client, torch.zeros_like(update))
            expected[:count] -= beta * stale
            if wrong := difference(record.reply["model"], expected):
                return f"client {client} uploads what is off by {wrong}"
            if "stale_change" in record.reply and difference(
                record.reply["stale_change"], update - stale
            ):
                return f"client {client} uploads another change"
            self.last[client] = update / unit
        return ""


class FisherMerge(Wrapped):
    """The last models are merged by the uploaded information; other rounds stay the same."""

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        if round.number == round.rounds:
            answers = self.merged(answers)
        self.inner.receive(round, answers)

    def merged(self, answers: Sequence[Answer]) -> list[Answer]:
        count = self.setting.trainable
        mean = mean_of([a.reply["model"] for a in answers], [a.weight for a in answers])
        above, below = 0 * mean[:count], 0 * mean[:count]
        for answer in answers:
            information = answer.reply["fisher"]
            length = float(information.norm())
            scaled = information / length if length else information
            weight = answer.weight * (scaled + self.method.floor)
            above = above + weight * answer.reply["model"][:count]
            below = below + weight
        mean[:count] = above / below
        replies = [{k: v for k, v in a.reply.items() if k != "fisher"} for a in answers]
        return [
            replace(answer, reply={**reply, "model": mean})
            for answer, reply in zip(answers, replies, strict=True)
        ]

    def unlike(
        self,
        round: Round,
        outer: dict[int, Any],
        inner: dict[int, Any],
        refused: Collection[int] = (),
    ) -> str:
        """Check all but the information, which other tests compute."""
        plain = {
            client: replace(record, reply={k: v for k, v in record.reply.items() if k != "fisher"})
            for client, record in outer.items()
        }
        return super().unlike(round, plain, inner, refused)


class ClusterFedVARP(Wrapped):
    def begin(self) -> None:
        super().begin()
        clients, clusters = self.setting.clients, self.method.clusters
        order = torch.randperm(
            clients, generator=stream(self.method.plan.seed, "fedvarp clusters")
        ).tolist()
        self.cluster = {client: k % clusters for k, client in enumerate(order)}
        zeros = torch.zeros_like(self.setting.initial[: self.setting.trainable])
        self.stored = [zeros.clone() for _ in range(clusters)]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        count = self.setting.trainable
        general = mean_of([self.stored[c] for c in self.cluster.values()])
        rewritten, groups = [], [[] for _ in self.stored]  # type: ignore[var-annotated]
        for answer in answers:
            c, row = self.cluster[answer.client], answer.reply["model"].clone()
            groups[c].append((row - answer.sent["model"])[:count])
            row[:count] += general - self.stored[c]
            rewritten.append(replace(answer, reply={**answer.reply, "model": row}))
        for c, group in enumerate(groups):
            self.stored[c] = mean_of(group) if group else self.stored[c]
        self.inner.receive(round, rewritten)


class ServerAverage(Wrapped):
    """The moving average, or the mean of the last models."""

    def begin(self) -> None:
        super().begin()
        self.models = [self.setting.initial.clone()]
        self.average = self.models[0]

    def finish(self, round: Round) -> None:
        super().finish(round)
        model = self.inner.model()
        if name_of(self.method) == "ema":
            self.average = self.method.alpha * self.average + (1 - self.method.alpha) * model
        else:
            self.models = [*self.models, model.clone()]
            self.average = mean_of(self.models[1:][-self.method.n :])

    def model(self) -> Tensor:
        return self.average


class Umf(Wrapped):
    def begin(self) -> None:
        super().begin()
        self.updates: dict[int, Tensor] = {}  # of the idle clients in the round before

    def unlike(
        self,
        round: Round,
        outer: dict[int, Any],
        inner: dict[int, Any],
        refused: Collection[int] = (),
    ) -> str:
        count, updates = self.setting.trainable, {}
        for client, record in outer.items():
            start = record.inbox["model"].clone()
            if record.uploads and client in self.updates:
                start[:count] += self.method.alpha * round.rate_change * self.updates[client]
            if wrong := difference(inner[client].inbox["model"], start):
                return f"client {client} starts off by {wrong}"
            if wrong := difference(
                inner[client].inbox[SERVER_MODEL],
                record.inbox.get(SERVER_MODEL, record.inbox["model"]),
            ):
                return f"client {client} takes another model for the server's, off by {wrong}"
            if not record.uploads:
                updates[client] = (inner[client].reply["model"] - start)[:count]
        self.updates = updates
        return unlike_rest(outer, inner) or unlike_replies(outer, inner, refused)


class Ala(Wrapped):
    """Each number of the start is between the client's last model and the download."""

    def begin(self) -> None:
        super().begin()
        self.trained: dict[int, Tensor] = {}

    def unlike(
        self,
        round: Round,
        outer: dict[int, Any],
        inner: dict[int, Any],
        refused: Collection[int] = (),
    ) -> str:
        for client, record in outer.items():
            download, start = record.inbox["model"], inner[client].inbox["model"]
            handed = inner[client].inbox[SERVER_MODEL]
            if wrong := difference(handed, record.inbox.get(SERVER_MODEL, download)):
                return f"client {client} takes another model for the server's, off by {wrong}"
            last_model = self.trained.get(client)
            if last_model is None:
                if wrong := difference(start, download):
                    return f"client {client} starts off by {wrong} in its first round"
            elif len(last_model) == len(start):
                slack = 1e-9 if start.dtype == torch.float64 else 1e-5
                low, high = (
                    torch.minimum(last_model, download) - slack,
                    torch.maximum(last_model, download) + slack,
                )
                if not bool(((start >= low) & (start <= high)).all()):
                    return f"client {client} starts beyond its last model and its download"
            if record.uploads and client not in refused:
                self.trained[client] = inner[client].reply["model"]
        return unlike_rest(outer, inner) or unlike_replies(outer, inner, refused)


class Robust(Wrapped):
    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        method: Any = self.method
        count = len(answers)
        malicious = math.ceil(method.malicious * count - 1e-9)
        krums = "krum" in method.rule
        if count < 2 * malicious + (3 if krums else 1):
            return  # too few to outvote the assumed malicious clients
        center = mean_of([answer.sent["model"] for answer in answers])
        models = [answer.reply["model"] - answer.sent["model"] + center for answer in answers]
        chosen = (
            krum(models, malicious, 1 if method.rule == "krum" else count - malicious)
            if krums
            else []
        )
        estimates: Message = {}
        for name, value in answers[0].reply.items():
            rows = (
                models
                if name == "model"
                else [answer.reply[name].to(models[0].dtype) for answer in answers]
            )
            if chosen:
                estimate = mean_of([rows[k] for k in chosen])
            elif method.rule == "clipping":
                estimate = clipped_mean(
                    rows, center if name == "model" else torch.zeros_like(rows[0]), method.radius
                )
            else:
                trimmed = (count - 1) // 2 if method.rule == "median" else malicious
                columns = torch.stack([row.reshape(-1) for row in rows]).T.tolist()
                inner_values = [sorted(column)[trimmed : count - trimmed] for column in columns]
                estimate = (
                    rows[0]
                    .new_tensor([sum(column) / len(column) for column in inner_values])
                    .reshape(rows[0].shape)
                )
            estimates[name] = estimate.to(value.dtype)
        self.inner.receive(round, [replace(answer, reply=estimates) for answer in answers])


def krum(rows: Sequence[Tensor], malicious: int, chosen: int) -> list[int]:
    """Return the rows with the smallest distances to their K - f - 2 nearest other rows."""
    scores = []
    for k, row in enumerate(rows):
        gaps = sorted(
            float((row - neighbour).square().sum()) for j, neighbour in enumerate(rows) if j != k
        )
        scores.append(sum(gaps[: max(1, len(rows) - malicious - 2)]))
    return sorted(range(len(rows)), key=lambda k: scores[k])[:chosen]


def clipped_mean(rows: Sequence[Tensor], center: Tensor, radius: float | None) -> Tensor:
    """Return the mean of the updates from a center. The radius limits the length of each update."""
    updates = [row - center for row in rows]
    lengths = [float(update.norm()) for update in updates]
    if radius is None:
        middle = sorted(lengths)
        radius = (middle[(len(middle) - 1) // 2] + middle[len(middle) // 2]) / 2
    clipped = [
        update * min(1.0, radius / length) if length else update
        for update, length in zip(updates, lengths, strict=True)
    ]
    return center + mean_of(clipped)


class Private(Wrapped):
    def begin(self) -> None:
        super().begin()
        self.released = 0

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        method: Any = self.method
        if method.clip is None:
            self.inner.receive(round, answers)
            return
        base = self.inner.sends_idle(round)["model"]
        if answers:
            base = mean_of([answer.sent["model"] for answer in answers])
        total = torch.zeros_like(base, dtype=torch.float64)
        for answer in answers:
            update = answer.reply["model"] - answer.sent["model"]
            length = float(update.double().norm())
            total += (update * min(1.0, method.clip / length) if length else update).double()
        noise = torch.randn(
            total.shape, generator=round.stream("privacy noise"), dtype=torch.float64
        )
        total += (method.noise or 0.0) * method.clip * noise
        row = base + (total / self.setting.participants).to(base)
        equal = [
            Answer(slot, slot, 1.0, {"model": base}, {"model": row})
            for slot in range(self.setting.participants)
        ]
        self.inner.receive(round, equal)
        self.released = round.number

    def finish(self, round: Round) -> None:
        if self.method.clip is not None and self.released < round.number:
            self.receive(round, [])
        super().finish(round)


class LocalPrivate(Wrapped):
    place = NOISE

    def unlike(
        self,
        round: Round,
        outer: dict[int, Any],
        inner: dict[int, Any],
        refused: Collection[int] = (),
    ) -> str:
        method: Any = self.method
        for client, record in outer.items():
            if client in refused:
                continue
            expected = inner[client].reply["model"]
            if method.clip is not None:
                sent = inner[client].inbox["model"]
                update = expected - sent
                length = float(update.double().norm())
                update = update.double() * (min(1.0, method.clip / length) if length else 1.0)
                stream = round.stream("privacy noise", client)
                noise = torch.randn(update.shape, generator=stream, dtype=torch.float64)
                expected = sent + (update + method.noise * method.clip * noise).to(sent)
            if wrong := difference(record.reply["model"], expected):
                return f"client {client} uploads what is off by {wrong}"
        return ""


class Coded(Wrapped):
    """Quantised, sparse and low-rank updates."""

    place = CODES

    def begin(self) -> None:
        super().begin()
        self.errors: dict[tuple[int, str], Tensor] = {}

    def sends(self, round: Round) -> list[Message]:
        messages = self.inner.sends(round)
        if getattr(self.method, "down", None) is None:
            return messages
        return [{} for _ in messages]  # `unlike` checks them after decoding

    def sends_idle(self, round: Round) -> Message:
        return (
            {} if getattr(self.method, "down", None) is not None else self.inner.sends_idle(round)
        )

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        if getattr(self.method, "down", None) is not None:  # updates refer to the exact model
            sent = self.inner.sends(round)
            answers = [
                replace(answer, sent={**answer.sent, **sent[answer.slot]}) for answer in answers
            ]
        decoded = [
            replace(answer, reply=self.decoded(answer.reply, answer.sent)) for answer in answers
        ]
        self.inner.receive(round, decoded)

    @property
    def codes(self) -> set[str]:
        """Return the last words in the names of coded tensors."""
        kind = name_of(self.method)
        if kind == "quantised":
            return {"levels", "scales"} if self.method.bits else {"update"}
        return {"indices", "values"} if kind == "sparse" else {"factors"}

    def decoded(self, reply: Message, sent: Message) -> Message:
        """Return the reply of the inner method's clients, up to coding errors."""
        nested = isinstance(self.inner, Coded)
        result: Message = {}
        coded: dict[str, Message] = {}
        for key, value in reply.items():
            name, _, word = key.rpartition(".")
            mine = word in self.codes and (not nested or name.endswith((".values", ".factors")))
            if mine or (word == "rest" and not nested):
                coded.setdefault(name, {})[word] = value
            else:
                result[key] = value
        for name, codes in coded.items():
            uncoded = [codes.pop("rest")] if "rest" in codes else []
            row = torch.cat([self.decode(codes, self.size_of(name, sent)), *uncoded])
            result[name] = row + sent["model"] if name == "model" else row
        return result

    def size_of(self, name: str, sent: Message) -> int:
        count = self.setting.trainable
        if not isinstance(self.inner, Coded):
            return min(len(sent["model"]), count) if name == "model" else count
        size = self.inner.size_of(name.partition(".")[0], sent)
        share = getattr(self.inner.method, "share", None)
        return self.inner.factors(size) if share is None else max(1, int(share * size + 1e-9))

    def factors(self, size: int) -> int:
        rank, total = self.method.rank, 0
        for entry in self.setting.layout.slices:
            if entry.stop <= size:
                high = entry.shape[0] if len(entry.shape) > 1 else 1
                wide = (entry.stop - entry.start) // high
                total += rank * (high + wide) if rank * (high + wide) < high * wide else high * wide
        return total

    def decode(self, codes: Message, size: int) -> Tensor:
        method: Any = self.method
        kind = name_of(method)
        if kind == "quantised":
            if method.bits is None:
                return codes["update"].clone()
            return levels_decoded(
                codes["levels"], codes["scales"], size, method.bits, method.bucket
            )
        if kind == "sparse":
            row = codes["values"].new_zeros(size)
            for index, value in zip(codes["indices"].tolist(), codes["values"], strict=True):
                row[index] += value
            return row
        pieces, offset, factors = [], 0, codes["factors"]
        for entry in self.setting.layout.slices:
            if entry.stop > size:
                continue
            high = entry.shape[0] if len(entry.shape) > 1 else 1
            wide = (entry.stop - entry.start) // high
            if method.rank * (high + wide) < high * wide:
                factor_out = factors[offset : offset + high * method.rank].reshape(
                    high, method.rank
                )
                offset += high * method.rank
                factor_in = factors[offset : offset + wide * method.rank].reshape(wide, method.rank)
                offset += wide * method.rank
                pieces.append((factor_out @ factor_in.T).reshape(-1))
            else:
                pieces.append(factors[offset : offset + high * wide])
                offset += high * wide
        return torch.cat(pieces)

    def unlike(
        self,
        round: Round,
        outer: dict[int, Any],
        inner: dict[int, Any],
        refused: Collection[int] = (),
    ) -> str:
        """Compare the decoded messages with the inner records.

        The download must equal the inbox of the inner clients. The upload must equal their update
        up to coding errors.
        """
        method: Any = self.method
        for client, record in outer.items():
            inbox, sent = record.inbox, inner[client].inbox
            if getattr(method, "down", None) is not None:
                for name in [
                    key.removesuffix(".levels") for key in inbox if key.endswith(".levels")
                ]:
                    size = min(len(sent[name]), self.setting.trainable)
                    row = levels_decoded(
                        inbox[f"{name}.levels"],
                        inbox[f"{name}.scales"],
                        size,
                        method.down,
                        method.bucket,
                    )
                    row = (
                        torch.cat([row, inbox[f"{name}.rest"]]) if f"{name}.rest" in inbox else row
                    )
                    if wrong := difference(sent[name], row):
                        return f"client {client} decodes {name} off by {wrong}"
                    slots = round.selected
                    message = (
                        self.inner.sends(round)[slots.index(client)]
                        if client in slots
                        else self.inner.sends_idle(round)
                    )
                    step = float(
                        (inbox[f"{name}.scales"][:, 1] - inbox[f"{name}.scales"][:, 0]).max()
                    ) / (2**method.down - 1)
                    if name in message and difference(row, message[name]) > 0.5 * step + 1e-6:
                        return f"client {client} was sent {name} off by more than half a level"
            if isinstance(self.inner, Coded) or client in refused:
                continue
            decoded = self.decoded(
                record.reply,
                {"model": torch.zeros_like(inner[client].inbox.get("model", self.setting.initial))},
            )
            for name in decoded:
                if name in record.reply:
                    if not torch.equal(record.reply[name], inner[client].reply[name]):
                        return f"client {client} uploads another {name}"
                    continue
                update = inner[client].reply[name] - (sent["model"] if name == "model" else 0)
                size = min(len(update), self.setting.trainable)
                if name == "model" and (wrong := difference(decoded[name][size:], update[size:])):
                    return f"client {client} uploads statistics off by {wrong}"
                update = update[:size]
                if method_keeps(method):
                    update = update + self.errors.get((client, name), torch.zeros_like(update))
                error = update - decoded[name][:size]
                if wrong := self.lost_too_much(update, error, record.reply, name):
                    return f"client {client}: {wrong}"
                if method_keeps(method) and record.uploads and client not in refused:
                    self.errors[client, name] = error
        return ""

    def lost_too_much(self, update: Tensor, error: Tensor, reply: Message, name: str) -> str:
        method: Any = self.method
        kind, tolerance = name_of(method), 1e-9 if update.dtype == torch.float64 else 1e-5
        if kind == "quantised":
            if method.bits is None:
                return (
                    ""
                    if float(error.abs().max()) <= tolerance
                    else "the update changes without being coded"
                )
            scales = reply[f"{name}.scales"]
            step = float((scales[:, 1] - scales[:, 0]).max()) / (2**method.bits - 1)
            return (
                ""
                if float(error.abs().max()) <= step + tolerance
                else "a number is off by more than one level"
            )
        if kind == "sparse":
            count = max(1, int(method.share * len(update) + 1e-9))
            smallest = float(update.abs().sort(descending=True).values[count - 1])
            wrong = float(error.abs().max()) > smallest + tolerance
            return "a number beyond the share is left out" if wrong else ""
        return (
            "what is left out is longer than the update"
            if float(error.norm()) > float(update.norm()) + tolerance
            else ""
        )


def method_keeps(method: Any) -> bool:
    """Return True if clients store the coding error."""
    return bool(getattr(method, "feedback", False))


def levels_decoded(levels: Tensor, scales: Tensor, size: int, bits: int, bucket: int) -> Tensor:
    """Return a + l (b - a) / (2^bits - 1) for each number."""
    numbers, in_byte = [], 8 // bits
    packed, bounds = levels.tolist(), scales.tolist()
    for k in range(size):
        level = packed[k // in_byte] >> (bits * (k % in_byte)) & (2**bits - 1)
        low, high = bounds[k // bucket]
        numbers.append(low + level * (high - low) / (2**bits - 1))
    return scales.new_tensor(numbers)


class Stages(Wrapped):
    """The current stage with its definitions `inside`. The next stage starts from its model."""

    def begin(self) -> None:
        self.losses: list[float] = []
        self.enter(self.lasting(0, self.setting.begins), self.setting)

    def enter(self, stage: int, setting: Setting) -> None:
        self.stage = stage
        self.inside = definitions(self.method.stages[stage][0], setting)

    @property
    def automatic(self) -> bool:
        """Return True if a condition, not a round number, ends the current stage."""
        return bool(self.method.stages[self.stage][1] == "auto")

    def lasting(self, stage: int, number: int) -> int:
        """Return the first stage, at or after this one, that includes the round."""
        stages = self.method.stages
        while (
            stage < len(stages) - 1
            and isinstance(stages[stage][1], int)
            and stages[stage][1] < number
        ):
            stage += 1
        return stage

    def sends(self, round: Round) -> list[Message]:
        return [self.with_stage(message) for message in self.inner.sends(round)]

    def sends_idle(self, round: Round) -> Message:
        return self.with_stage(self.inner.sends_idle(round))

    def with_stage(self, message: Message) -> Message:
        """Add the stage number if clients cannot compute it from the round."""
        if all(end != "auto" for _, end in self.method.stages):
            return message
        innermost = self.inner
        while isinstance(innermost, Wrapped):
            innermost = innermost.inner
        return {**message, "@stage": torch.tensor([self.stage, innermost.setting.begins])}

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        if self.automatic:
            losses = [answer.reply[HELD_OUT_LOSS].reshape(1).double() for answer in answers]
            self.losses.append(float(mean_of(losses, [answer.weight for answer in answers])))
            answers = [replace(answer, reply=without_loss(answer.reply)) for answer in answers]
        self.inner.receive(round, answers)

    def unlike(
        self,
        round: Round,
        outer: dict[int, Any],
        inner: dict[int, Any],
        refused: Collection[int] = (),
    ) -> str:
        if not self.automatic:
            return super().unlike(round, outer, inner, refused)
        for client, record in outer.items():
            if HELD_OUT_LOSS not in record.reply:
                return f"client {client} returns no loss of held-out samples"
        stripped = {
            client: replace(record, reply=without_loss(record.reply))
            for client, record in outer.items()
        }
        return super().unlike(round, stripped, inner, refused)

    def finish(self, round: Round) -> None:
        method: Any = self.method
        self.inner.finish(round)
        stages, patience = method.stages, method.patience
        stage, over = self.stage, False
        if stages[stage][1] == "auto" and len(self.losses) >= 2 * patience:
            older, newer = self.losses[-2 * patience : -patience], self.losses[-patience:]
            over = sum(newer) >= (1 - method.improvement) * sum(older)
        stage = self.lasting(stage + over, round.number + 1)
        if stage != self.stage:
            model = self.inner.model()
            self.losses = []
            self.enter(stage, replace(self.setting, initial=model.clone(), begins=round.number + 1))


def without_loss(reply: Message) -> Message:
    return {name: tensor for name, tensor in reply.items() if name != HELD_OUT_LOSS}


class NormBound(Wrapped):
    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        bounded = []
        for answer in answers:
            update = answer.reply["model"] - answer.sent["model"]
            share = min(1.0, self.method.radius / max(float(update.double().norm()), 1e-300))
            model = answer.sent["model"] + share * update
            bounded.append(replace(answer, reply={**answer.reply, "model": model}))
        self.inner.receive(round, bounded)


class SignFlip(Wrapped):
    """The malicious clients, selected by the library, upload their negated update."""

    place = ATTACKS

    def unlike(
        self,
        round: Round,
        outer: dict[int, Any],
        inner: dict[int, Any],
        refused: Collection[int] = (),
    ) -> str:
        method: Any = self.method
        expected = {}
        for client, record in inner.items():
            model, sent = record.reply["model"].clone(), record.inbox["model"]
            count = min(len(model), self.setting.trainable)
            if client in method.malicious:
                model[:count] = sent[:count] - method.scale * (model - sent)[:count]
            expected[client] = replace(record, reply={**record.reply, "model": model})
        for client, record in outer.items():
            found, other = record.reply, expected[client].reply
            if client in refused:
                continue
            if found.keys() != other.keys() or any(
                difference(found[name], other[name]) for name in found
            ):
                return f"client {client} uploads another reply than its attack"
        return ""


class Secure(Wrapped):
    place = EXCHANGES

    def sends(self, round: Round) -> list[Message]:
        messages, method = self.inner.sends(round), self.method
        different = len({id(message["model"]) for message in messages}) > 1
        if not method.exchanges("before_train") or not different:
            return messages
        rows = self.exchanged(
            round, [message["model"] for message in messages], round.selected, "before_train"
        )
        return [{**message, "model": row} for message, row in zip(messages, rows, strict=True)]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        if self.method.exchanges("before_upload"):
            clients = [answer.client for answer in answers]
            rows = self.exchanged(
                round, [answer.reply["model"] for answer in answers], clients, "before_upload"
            )
            answers = [
                replace(answer, reply={**answer.reply, "model": row})
                for answer, row in zip(answers, rows, strict=True)
            ]
        self.inner.receive(round, answers)

    def exchanged(
        self, round: Round, rows: Sequence[Tensor], clients: Sequence[int], when: str
    ) -> list[Tensor]:
        """Return the rows after the exchange between these clients, as the library draws it."""
        result = [row.clone() for row in rows]
        sources = self.method.rehearse(round, clients, when).sources
        for unit, source in zip(layers_of(self.setting.layout), sources, strict=True):
            for target, origin in enumerate(source):
                for piece in unit:
                    result[target][piece] = rows[origin][piece]
        return result


@dataclass
class UnderWay:
    """Work of a client without an arrived reply."""

    until: float
    answer: Answer
    version: int
    slot: int


class Buffered(Wrapped):
    """FedBuff and FedAsync: the first k replies form a step, and each step is a version."""

    place = ARRIVALS

    def begin(self) -> None:
        super().begin()
        self.under_way: list[UnderWay] = []
        self.now, self.version = 0.0, 0

    @property
    def goal(self) -> int:
        return getattr(self.method, "k", 1)

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        free = [
            slot
            for slot in range(self.setting.participants)
            if all(u.slot != slot for u in self.under_way)
        ]
        for answer in answers:
            speeds = self.setting.speeds
            took = self.setting.sizes[answer.client] / speeds[answer.client] if speeds else 1.0
            self.under_way.append(
                UnderWay(self.now + took, answer, self.version, free[answer.slot])
            )

    def arrived(self) -> list[UnderWay]:
        closes = self.now + self.setting.closes
        order = sorted(self.under_way, key=lambda work: (work.until, work.answer.client))
        taken = [work for work in order[: self.goal] if work.until <= closes]
        waits = math.isfinite(closes) and len(taken) < min(self.goal, len(order))
        self.now = closes if waits else max([self.now, *(work.until for work in taken)])
        self.under_way = [
            work for work in self.under_way if all(work is not arrival for arrival in taken)
        ]
        return sorted(taken, key=lambda work: work.slot)

    def finish(self, round: Round) -> None:
        taken = self.arrived()
        if taken:
            self.inner.receive(round, [self.moved(slot, work) for slot, work in enumerate(taken)])
            self.version += 1
        self.inner.finish(round)

    def moved(self, slot: int, work: UnderWay) -> Answer:
        method: Any = self.method
        model, sent, reply = (
            self.inner.sends_idle(None)["model"],
            work.answer.sent["model"],
            work.answer.reply["model"],
        )  # type: ignore[arg-type]
        stale, count = self.version - work.version, self.setting.trainable
        discount = (1 + stale) ** -method.staleness
        row = reply
        if name_of(method) == "fedasync":
            row = model + method.alpha * discount * (reply - model)
        elif stale:
            row = model + discount * (reply - torch.cat([sent[:count], model[count:]]))
        return replace(work.answer, slot=slot, reply={"model": row}, sent={"model": model})


class PoolUnderWay(Pool, Buffered):
    """FedMR that recombines the arrived models. This definition covers both part and algorithm."""

    place = LEAF

    def begin(self) -> None:
        Pool.begin(self)
        self.under_way, self.now, self.version = [], 0.0, 0

    def sends(self, round: Round) -> list[Message]:
        free = [
            slot
            for slot in range(self.setting.participants)
            if all(u.slot != slot for u in self.under_way)
        ]
        return [{"model": self.pool[free[slot]]} for slot in range(len(round.selected))]

    def receive(self, round: Round, answers: Sequence[Answer]) -> None:
        Buffered.receive(self, round, answers)

    def finish(self, round: Round) -> None:
        taken = self.arrived()
        if taken:
            rows = shuffled(
                [work.answer.reply["model"] for work in taken],
                self.setting.layout,
                round.stream("recombine"),
            )
            share, mean = share_at(self.method.blend, round.number), mean_of(rows)
            for work, row in zip(taken, rows, strict=True):
                self.pool[work.slot] = (1 - share) * row + share * mean


def difference(tensor: Tensor, reference: Tensor) -> float:
    """Return the distance of two tensors after subtraction of rounding errors in their type."""
    if tensor.shape != reference.shape:
        return math.inf
    if not tensor.numel():
        return 0.0
    gap = float((tensor.double() - reference.double()).abs().max())
    allowed = 1e-9 if tensor.dtype == torch.float64 else 2e-5
    return gap if not gap <= allowed * (1 + float(reference.double().abs().max())) else 0.0


KINDS: dict[str, Callable[[Method, Setting], Definition]] = {
    "scaffold": Scaffold, "scaffold_feddc": Scaffold, "feddyn": FedDyn, "feddc": FedDC,
    "feddc_code": FedDC, "fednova": FedNova, "fedexp": FedExP,
    "fedavgm": ServerOptimizer, "fedadam": ServerOptimizer, "fedyogi": ServerOptimizer,
    "fedmut": FedMut, "indep": Pool, "fedmr": Pool, "fedkdmr": FedKDMR, "fedcross": FedCross,
    "qfedavg": QFedAvg, "afl": AFL, "ifca": IFCA, "cfl": CFL,
    "fedntd": Wrapped, "fedlc": Wrapped, "feddecorr": Wrapped, "power_of_choice": Wrapped,
    "fedmr_async": PoolUnderWay,
    "fedamp": FedAMP, "apple": Apple, "fedfomo": FedFomo, "fedas": FedAS, "feddbe": FedDBE, "fedproto": FedProto,
    "fedpac": FedPAC, "pfedfda": PFedFDA,
    "umf": Umf, "ala": Ala, "ala_code": Ala, "fedala": Ala, "fedala_code": Ala, "fedah": Ala,
     "robust": Robust, "private": Private, "local_private": LocalPrivate,
    "quantised": Coded, "sparse": Coded, "lowrank": Coded, "stages": Stages, "secure": Secure,
    "fedbuff": Buffered, "fedasync": Buffered, "clustered": Wrapped, "clusamp": Wrapped, "dp_sgd": Wrapped,
    "norm_bound": NormBound, "sign_flip": SignFlip,
    "fedspeed": FedSpeed, "fedsmoo": FedSMOO, "fedgmt": FedGMT, "fedcm": FedCM, "mofedsam": FedCM,
    "fedacg": FedACG, "fedgloss": FedGloSS, "fedinit": Extrapolated, "fedswa": Extrapolated,
    "fedlesam": Extrapolated, "fedmuon": FedMuon, "fedadagrad": ServerOptimizer,
    "fedvarp": StaleStep, "mifa": StaleStep, "fedstale": StaleStep, "cluster_fedvarp": ClusterFedVARP,
    "ca2fl": Buffered, "longest_idle": Wrapped, "fedlaavg": Wrapped, "ema": ServerAverage, "last": ServerAverage,
    "fisher_merge": FisherMerge, "partial_work": Wrapped,
}  # fmt: skip
PERSONAL = {
    "fedper", "fedrep", "lg_fedavg", "fedbn", "silobn", "ditto", "pfedme", "fedphp", "per_fedavg", "fedavg_c", "fedprox_c",
    "partialfed", "fedbabu", "fedrod", "apfl",
}  # fmt: skip
AVERAGED = {"fedavg", "fedprox", "moon", "fedsam", "fedasam", "fedgen"}


def definition(method: Method, setting: Setting) -> Definition:
    """Return the definition of one algorithm or part."""
    name = name_of(method)
    if name in KINDS:
        return KINDS[name](method, setting)
    if name in PERSONAL:
        return Personal(method, setting)
    assert name in AVERAGED, (
        f"{name} has no definition in tests/seams/definitions.py: if its server averages whole "
        "models by samples, name it in "
        "AVERAGED; if a part of them, in PERSONAL; else write its server half in plain loops "
        "and name the class in KINDS"
    )
    return Definition(method, setting)


def definitions(method: Any, setting: Setting) -> list[Definition]:
    """Return the definitions of an expression in the order of its text, up to stages."""
    made = [definition(method, setting)]
    if made[0].place != LEAF and not isinstance(made[0], Stages):
        made += definitions(method.method, setting)
    if isinstance(made[0], StaleStep):
        made.insert(0, StaleUpload(method, setting))
    return made


class Chain:
    """The definitions of an expression for the current round, in order of their positions."""

    def __init__(self, method: Method, setting: Setting) -> None:
        self.method = method
        self.made = definitions(method, setting)
        self.link()

    def link(self) -> None:
        self.levels = sorted(unfolded(self.made), key=lambda level: level.place)
        for level, inner in itertools.pairwise(self.levels):
            assert isinstance(level, Wrapped)
            level.inner = inner

    @property
    def first(self) -> Definition:
        return self.levels[0]

    @property
    def leaf(self) -> Definition:
        return self.levels[-1]

    def finish(self, round: Round) -> None:
        """End a round and start the next stage if it is due."""
        self.first.finish(round)
        self.link()

    def rebind(self, method: Method) -> None:
        """Attach the definitions to the method of a resumed run with the same parameters."""
        fresh = dict(enumerate(components(method)))
        pairs = {id(old): fresh[k] for k, old in enumerate(components(self.method))}
        self.method = method
        for level in self.levels:
            level.method = pairs[id(level.method)]


def unfolded(levels: Sequence[Definition]) -> list[Definition]:
    """Return the definitions, with the definitions of the current stage after each `Stages`."""
    result: list[Definition] = []
    for level in levels:
        result.append(level)
        if isinstance(level, Stages):
            result += unfolded(level.inside)
    return result


def weights_of(selection: Selection, sizes: Sequence[int]) -> list[float]:
    """Return the weights of the selected clients, by slot."""
    if selection.weights is not None:
        return list(selection.weights)
    return [float(sizes[client]) for client in selection.clients]
