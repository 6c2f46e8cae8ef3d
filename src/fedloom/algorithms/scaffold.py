from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Round, algorithms
from fedloom.algorithms.statistics import mean_gradient, mean_size, momentum_gain, relative_sizes, require_sgd
from fedloom.config.fields import Positive
from fedloom.exchange import Aggregate, Message, Plan, Replies, server_model
from fedloom.flat.module import Batch
from fedloom.local.cohort import Cohort, Context


@algorithms.register("scaffold")
class Scaffold(Algorithm):
    """SCAFFOLD: local steps follow g - c_i + c, with control variates c_i of the client and c of the server, both `[T]`.

    After tau steps from w_t to w_i: option 2 takes c_i+ = c_i - c + (w_t - w_i) / (tau eta), with eta / (1 - momentum) for eta,
    the distance of a step; option 1 takes the gradient of the client's whole loss at w_t. Server, uniform over the round:
    w <- w_t + eta_g mean_i (w_i - w_t), c <- c + (1/N) sum_i (c_i+ - c_i). Statistics are averaged.
    Source: Karimireddy et al. 2020, algorithm 1.
    Use it when clients take many local steps on skewed data, take part often, and traffic may double.

    Args:
        option: Update of the client's variate, 1 or 2 as in the paper.
        server_learning_rate: eta_g (paper: 1).
        size_scaled: Weigh clients by a_i = n_i / mean n as FedDC's code does: they receive c / a_i, the server adds
            a_i (c_i+ - c_i) / N.
        divisor: eta: the round's (`current`) or round 1's (`base`).
    """

    option: Literal[1, 2] = 2
    server_learning_rate: Positive = 1.0
    size_scaled: bool = False
    divisor: Literal["current", "base"] = "current"

    def setup(self, plan: Plan) -> None:
        if self.option == 2:
            require_sgd("scaffold with option 2", plan)
        super().setup(plan)
        self.state["variate"] = torch.zeros_like(plan.initial[: plan.layout.trainable])
        if self.size_scaled:
            self.state["mean_size"] = mean_size(plan)

    def send(self, round: Round) -> Message:
        return {name: tensor.unsqueeze(0) for name, tensor in self.state.items()}

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (self.plan.layout.size,), "variate": (self.plan.layout.trainable,)}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        return replies.aggregate(weighted=False, total={"variate": replies["variate"]})

    def update(self, round: Round, aggregate: Aggregate) -> None:
        trainable = slice(self.plan.layout.trainable)
        current, mean = self.state["model"], aggregate.mean["model"]
        mean[trainable] = torch.lerp(current[trainable], mean[trainable], self.server_learning_rate)
        self.state["model"] = mean
        self.state["variate"] = self.state["variate"] + aggregate.total["variate"] / self.plan.clients

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        start = inbox["model"]
        variate = cohort.memory.get("scaffold_variate", torch.zeros_like(inbox["variate"]))
        size = relative_sizes(cohort, inbox) if "mean_size" in inbox else torch.ones_like(variate[:, :1])
        server_variate = inbox["variate"] / size

        def offset(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
            return gradient.add_(context["offset"])

        trained = cohort.fit(start, correction=offset, context={"offset": server_variate - variate})
        if self.option == 1:
            new_variate = full_gradient(cohort, server_model(inbox))
        else:
            count, round = cohort.layout.trainable, cohort.round
            rate = round.learning_rate if self.divisor == "current" else round.initial_learning_rate
            rate = rate * momentum_gain(cohort.training)
            followed = mean_gradient(start[:, :count], trained.model[:, :count], trained.steps, rate)
            new_variate = followed.add_(variate).sub_(server_variate)
        new_variate = torch.where((trained.steps > 0).to(new_variate.device).unsqueeze(1), new_variate, variate)
        cohort.memory.write("scaffold_variate", new_variate, cohort.uploads)
        return {"model": trained.model, "variate": (new_variate - variate).mul_(size)}


def full_gradient(cohort: Cohort, rows: Tensor) -> Tensor:
    """Return the gradient `[k, T]` of each client's mean loss on all its samples at `rows [k, P]`, which stay as they are."""

    def accumulate(state: dict[str, Tensor], batch: Batch) -> Tensor:
        samples = batch.labels.shape[1]
        loss, gradient = cohort.gradient(state["rows"], batch)
        state["total"].add_(gradient, alpha=samples)
        state["samples"].add_(samples)
        return loss

    total = torch.zeros_like(rows[:, : cohort.layout.trainable])
    state = {"rows": rows.clone(), "total": total, "samples": torch.zeros_like(total[:, :1])}
    cohort.each_batch(accumulate, state, in_order=True)
    return state["total"] / state["samples"].clamp_min(1)
