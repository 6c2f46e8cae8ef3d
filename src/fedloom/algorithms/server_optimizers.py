"""FedAvgM, FedAdam, FedYogi and FedAdagrad: the server takes an optimizer's step along the mean
update.
"""

from abc import ABC, abstractmethod
from dataclasses import field

import torch
from torch import Tensor

from fedloom.algorithm import Round, algorithms
from fedloom.algorithm.records import Aggregate, Plan
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.fields import BelowOne, Positive, Probability


class ServerOptimizer(FedAvg, ABC):
    """w <- w_t + step(D_t) with D_t = sum_i p_i (w_i - w_t) over the trainable parameters;
    statistics are averaged.
    """

    def update(self, round: Round, aggregate: Aggregate) -> None:
        trainable = slice(self.plan.layout.trainable)
        current = self.state["model"][trainable]
        following = aggregate.mean["model"]
        following[trainable] = current + self.step(following[trainable] - current)
        self.state["model"] = following

    @abstractmethod
    def step(self, update: Tensor) -> Tensor:
        """Return the server's displacement `[T]` for the clients' mean update `[T]`."""


@algorithms.register("fedavgm")
class FedAvgM(ServerOptimizer):
    """FedAvg with momentum on the server: v <- momentum v + D_t, w <- w_t + learning_rate v.

    D_t is the mean update of the clients. momentum 0 and learning_rate 1 are FedAvg. Source: Hsu et
    al. 2019, section 4.3.
    Use it when the server's model oscillates from round to round because clients are skewed.

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
class FedAdam(ServerOptimizer):
    """FedAvg with Adam on the server: m <- b1 m + (1 - b1) D, v <- b2 v + (1 - b2) D^2, w <- w_t +
    eta m / (sqrt(v) + tau).

    D is the mean update of the clients; v starts at tau^2, and there is no bias correction.
    Source: Reddi et al. 2021, algorithm 2.
    Use it when coordinates need steps of different size, as with embeddings and language models.

    Args:
        learning_rate: eta.
        beta1: b1 (paper: 0.9).
        beta2: b2 (paper: 0.99).
        adaptivity: tau, which bounds the denominator from below (paper: 1e-3).
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
        """Return v after an update.

        Args:
            moment: v before it, `[T]`.
            square: Squares of the mean update, `[T]`.

        Returns:
            v, `[T]`.
        """
        return self.beta2 * moment + (1 - self.beta2) * square


@algorithms.register("fedyogi")
class FedYogi(FedAdam):
    """FedAvg with Yogi on the server: FedAdam, with v <- v - (1 - b2) D^2 sign(v - D^2).

    So v changes by at most (1 - b2) D^2, even if v is large. Source: Reddi et al. 2021, algorithm
    2.
    Use it like `fedadam` where a few large updates would make Adam's steps small for many rounds.
    """

    def second_moment(self, moment: Tensor, square: Tensor) -> Tensor:
        return moment - (1 - self.beta2) * square * torch.sign(moment - square)


@algorithms.register("fedadagrad")
class FedAdagrad(FedAdam):
    """FedAvg with Adagrad on the server: m <- b1 m + (1 - b1) D, v <- v + D^2, w <- w_t + eta m /
    (sqrt(v) + tau).

    D is the mean update of the clients; v starts at tau^2 and never falls, so steps become smaller.
    Source: Reddi et al. 2021, algorithm 2; the start of v is `fedadam`'s.
    Use it when coordinates are updated rarely and unequally often, as rare words are.

    Args:
        learning_rate: eta.
        beta1: b1 (paper: 0).
        adaptivity: tau, which bounds the denominator from below (paper: 1e-3).
    """

    learning_rate: Positive = 0.1
    beta1: BelowOne = 0.0
    beta2: Probability = field(init=False, default_factory=lambda: 1.0)  # no decay

    def second_moment(self, moment: Tensor, square: Tensor) -> Tensor:
        return moment + square
