"""Servers that step from the sent model along the plain mean of the clients' updates."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from fedloom.algorithm import Algorithm, Round
from fedloom.algorithm.records import Aggregate, Plan, Replies


class PlainMeanStep(Algorithm, ABC):
    """w <- w_t + r mean_i (w_i - w_t) over the trainable parameters, uniform over the round;
    statistics are averaged.
    """

    @abstractmethod
    def step_length(self, aggregate: Aggregate) -> float:
        """Return r."""

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        return replies.aggregate(weighted=False)

    def update(self, round: Round, aggregate: Aggregate) -> None:
        trainable = slice(self.plan.layout.trainable)
        current = self.state["model"]
        mean = aggregate.mean["model"]
        length = self.step_length(aggregate)
        mean[trainable] = torch.lerp(current[trainable], mean[trainable], length)
        self.state["model"] = mean


class VariateStep(PlainMeanStep):
    """A server that also sends c, the mean over all N clients of their control variates c_i `[T]`.

    Clients upload the changes of their c_i: c <- c + (1/N) sum_i (c_i+ - c_i).
    """

    sends: ClassVar[tuple[str, ...]] = ("model", "variate")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["variate"] = torch.zeros_like(plan.initial[: plan.layout.trainable])

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        layout = self.plan.layout
        return {"model": (layout.size,), "variate": (layout.trainable,)}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        return replies.aggregate(weighted=False, total={"variate": replies["variate"]})

    def update(self, round: Round, aggregate: Aggregate) -> None:
        super().update(round, aggregate)
        change = aggregate.total["variate"] / self.plan.clients
        self.state["variate"] = self.state["variate"] + change
