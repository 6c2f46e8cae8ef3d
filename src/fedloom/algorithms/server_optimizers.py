"""FedAvgM, FedAdam, FedYogi, FedExP, FedNova: the server steps along the mean update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import AggregatedReplies, Algorithm, Message, Plan, Replies, algorithms
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.statistics import accumulated_weights, require_sgd
from fedloom.config.fields import BelowOne, Positive, Probability
from fedloom.local.cohort import Cohort
from fedloom.round import Round


@dataclass
class ServerOptimizer(FedAvg, ABC):
    """w <- w_t + step(D_t) with D_t = sum_i p_i (w_i - w_t) over the trainable parameters; statistics are averaged."""

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        trainable = slice(self.layout.trainable)
        current, following = self.state["model"][trainable], aggregate.mean["model"]
        following[trainable] = current + self.step(following[trainable] - current)
        self.state["model"] = following

    @abstractmethod
    def step(self, update: Tensor) -> Tensor:
        """Return the server's displacement `[T]` from the clients' mean update `[T]`."""


@algorithms.register("fedavgm")
@dataclass
class FedAvgM(ServerOptimizer):
    """FedAvg with momentum on the server: v <- momentum v + D_t, w <- w_t + learning_rate v.

    D_t is the mean update of the clients. momentum 0 and learning_rate 1 are FedAvg. Source: Hsu et al. 2019, section 4.3.
    Use it when skewed clients make the server's model swing from round to round.

    Args:
        learning_rate: Server's step size (paper: 1).
        momentum: Server's momentum (paper: 0.9).
    """

    learning_rate: Positive = 1.0
    momentum: BelowOne = 0.9

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["velocity"] = torch.zeros_like(plan.initial[: plan.layout.trainable])

    def step(self, update: Tensor) -> Tensor:
        self.state["velocity"] = self.momentum * self.state["velocity"] + update
        return self.learning_rate * self.state["velocity"]


@algorithms.register("fedadam")
@dataclass
class FedAdam(ServerOptimizer):
    """FedAvg with Adam on the server: m <- b1 m + (1 - b1) D, v <- b2 v + (1 - b2) D^2, w <- w_t + eta m / (sqrt(v) + tau).

    D is the mean update of the clients; v starts at tau^2 and nothing is bias-corrected.
    Source: Reddi et al. 2021, algorithm 2.
    Use it when coordinates need steps of different size, as with embeddings and language models.

    Args:
        learning_rate: eta.
        beta1: b1 (paper: 0.9).
        beta2: b2 (paper: 0.99).
        adaptivity: tau, the least scale of a step (paper: 1e-3).
    """

    learning_rate: Positive = 0.01
    beta1: BelowOne = 0.9
    beta2: Probability = 0.99
    adaptivity: Positive = 1e-3

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        trainable = plan.initial[: plan.layout.trainable]
        self.state["first_moment"] = torch.zeros_like(trainable)
        self.state["second_moment"] = torch.full_like(trainable, self.adaptivity**2)

    def step(self, update: Tensor) -> Tensor:
        mean = self.beta1 * self.state["first_moment"] + (1 - self.beta1) * update
        square = self.second_moment(self.state["second_moment"], update.square())
        self.state |= {"first_moment": mean, "second_moment": square}
        return self.learning_rate * mean / (square.sqrt() + self.adaptivity)

    def second_moment(self, moment: Tensor, square: Tensor) -> Tensor:
        """Return v after an update with the squares `square`."""
        return self.beta2 * moment + (1 - self.beta2) * square


@algorithms.register("fedyogi")
@dataclass
class FedYogi(FedAdam):
    """FedAvg with Yogi on the server: FedAdam, with v <- v - (1 - b2) D^2 sign(v - D^2).

    v thus changes by at most the new squares, however large it is. Source: Reddi et al. 2021, algorithm 2.
    Use it as `fedadam` where a burst of large updates would make Adam's steps small for long.
    """

    def second_moment(self, moment: Tensor, square: Tensor) -> Tensor:
        return moment - (1 - self.beta2) * square * torch.sign(moment - square)


@algorithms.register("fedexp")
@dataclass
class FedExP(Algorithm):
    """FedAvg with an adaptive server step: w <- w_t + eta_g sum_i p_i D_i, with D_i = w_i - w_t and p_i by samples.

    eta_g = max(1, sum_i p_i ||D_i||^2 / (2 (||sum_i p_i D_i||^2 + epsilon_t))) over the trainable parameters, with
    epsilon_t = epsilon (eta_t / eta_1)^2 for learning rates eta; statistics are averaged, not extrapolated. The global
    model is the mean of the server's last two iterates (after round 1 the first alone).
    Source: Jhunjhunwala et al. 2023, algorithm 1 and section 5.
    Use it when FedAvg is stable but slow, and nothing is to be tuned on the server.

    Args:
        epsilon: Addend of the denominator that bounds the step (authors: 0.001 for CIFAR, 0.1 for EMNIST).
        epsilon_by_clients: Multiply epsilon by the number of clients in the round, as the authors' code does.
    """

    epsilon: Positive = 1e-3
    epsilon_by_clients: bool = False

    averages: ClassVar[bool] = False

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["evaluated"] = plan.initial.clone()
        self.state["step"] = torch.ones(1, dtype=plan.initial.dtype, device=plan.initial.device)

    def fold(self, round: Round, replies: Replies) -> AggregatedReplies:
        trainable = slice(self.layout.trainable)
        length = (replies["model"][:, trainable] - self.state["model"][trainable]).square().sum(1)
        return replies.aggregate(mean={"model": replies["model"], "length": length})

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        trainable = slice(self.layout.trainable)
        previous, following = self.state["model"], aggregate.mean["model"]
        mean = following[trainable] - previous[trainable]
        epsilon = self.epsilon * (round.learning_rate / round.initial_learning_rate) ** 2
        if self.epsilon_by_clients:
            epsilon *= aggregate.count
        step = (aggregate.mean["length"] / (2 * (mean.square().sum() + epsilon))).clamp_min(1)
        following[trainable] = previous[trainable] + step * mean
        self.state["model"] = following
        self.state["evaluated"] = following.clone() if round.number == 1 else (previous + following) / 2
        self.state["step"] = step.reshape(1)

    def model(self) -> Tensor:
        return self.state["evaluated"]

    def diagnose(self) -> dict[str, float]:
        return {"server_step": float(self.state["step"])}


@algorithms.register("fednova")
@dataclass
class FedNova(Algorithm):
    """Normalised averaging: w <- w_t + tau_eff sum_i p_i (w_i - w_t) / ||a_i||_1, with tau_eff = sum_i p_i ||a_i||_1.

    ||a_i||_1 is the total weight of the client's gradients in its displacement: its number of steps tau, or with momentum m
    (tau - m (1 - m^tau) / (1 - m)) / (1 - m); it is uploaded beside the model. p_i by samples; statistics are averaged by
    samples. Clients of equal steps give FedAvg.
    Source: Wang et al. 2020, equations 6 and 7 with the tau_eff of section 4.
    Use it when clients take very different numbers of local steps, through unequal data or devices.
    """

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        require_sgd("fednova", plan.training)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (self.layout.size,), "local_weight": (1,)}

    def fold(self, round: Round, replies: Replies) -> AggregatedReplies:
        trainable, local = slice(self.layout.trainable), replies["local_weight"]
        moved = replies["model"][:, trainable] - self.state["model"][trainable]
        # A client without steps has local weight 0 and has not moved: any divisor gives 0.
        return replies.aggregate(mean={**replies.tensors, "step": moved / local.where(local > 0, 1)})

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        trainable, mean = slice(self.layout.trainable), aggregate.mean
        mean["model"][trainable] = self.state["model"][trainable] + mean["local_weight"] * mean["step"]
        self.state["model"] = mean["model"]

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        trained = cohort.fit(inbox["model"])
        weight = accumulated_weights(cohort.training, trained.steps).to(trained.model)
        return {"model": trained.model, "local_weight": weight.unsqueeze(1)}
