"""Averages of the server's models over the rounds, for evaluation and deployment."""

from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm.method import algorithms
from fedloom.algorithm.records import Plan
from fedloom.common.fields import BelowOne, Count
from fedloom.common.round import Round
from fedloom.parts.hooks import Inner, Part


class ServerAverage(Part):
    """Evaluates and deploys an average of the server's models; training does not change.

    Args:
        method: Method that makes the models.
    """

    requires: ClassVar[tuple[str, ...]] = ("one model for all",)

    def evaluated(self, model: Tensor) -> Tensor:
        return self.state["average"]


@algorithms.register("ema")
class Ema(ServerAverage):
    """Moving average of the server's models: e <- alpha e + (1 - alpha) w after each round.

    e starts at the initial model, and is evaluated and deployed in place of w. With alpha 0 this is
    the inner method. Training does not change.
    Source: the average of weights in Tarvainen and Valpola 2017, over rounds.
    Use it when the curve of the server's model goes up and down from round to round.

    Args:
        alpha: Decay of the average.
    """

    alpha: BelowOne = 0.9

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self.state["average"] = plan.initial.clone()

    def follow(self, round: Round, model: Tensor) -> None:
        self.state["average"] = torch.lerp(model, self.state["average"], self.alpha)


@algorithms.register("last")
class Last(ServerAverage):
    """Mean of the server's models of the last n rounds.

    It is evaluated and deployed in place of the last model. The server stores n models. With n 1
    this is the inner method. Training does not change.
    Source: the average of iterates in Izmailov et al. 2018, over rounds.
    Use it when the curve of the server's model goes up and down from round to round.

    Args:
        n: Number of models in the mean; before round n, all models.
    """

    n: Count = 5

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self.state["models"] = plan.initial.new_empty(0, plan.layout.size)
        self.state["average"] = plan.initial.clone()

    def follow(self, round: Round, model: Tensor) -> None:
        models = torch.cat([self.state["models"], model.unsqueeze(0)])[-self.n :]
        self.state |= {"models": models, "average": models.mean(0)}
