from typing import Literal

import torch
from torch import Tensor

from fedloom.algorithm import Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan, server_model
from fedloom.algorithms.server_step import VariateStep
from fedloom.algorithms.statistics import mean_gradient, momentum_gain, require_sgd
from fedloom.common.fields import Positive
from fedloom.flat.module import Batch
from fedloom.local.cohort import Cohort, Context, Trained


@algorithms.register("scaffold")
class Scaffold(VariateStep):
    """SCAFFOLD: local steps follow g - c_i + c, with control variates c_i of the client and c of
    the server, both `[T]`.

    After tau steps from w_t to w_i: option 2 takes c_i+ = c_i - c + (w_t - w_i) / (tau eta), with
    eta / (1 - momentum) for eta, the distance of a step; option 1 takes the gradient of the
    client's whole loss at w_t. Server, uniform over the round: w <- w_t + eta_g mean_i (w_i - w_t),
    c <- c + (1/N) sum_i (c_i+ - c_i). Statistics are averaged.
    Source: Karimireddy et al. 2020, algorithm 1.
    Use it when clients take many local steps on skewed data and take part often; it doubles the
    traffic.

    Args:
        option: Update of the client's variate, 1 or 2 as in the paper.
        server_learning_rate: eta_g (paper: 1).
    """

    option: Literal[1, 2] = 2
    server_learning_rate: Positive = 1.0

    def setup(self, plan: Plan) -> None:
        if self.option == 2:
            require_sgd("scaffold with option 2", plan)
        super().setup(plan)

    def step_length(self, aggregate: Aggregate) -> float:
        return self.server_learning_rate

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        server_variate = inbox["variate"]
        variate = cohort.memory.get("scaffold_variate", torch.zeros_like(server_variate))
        trained = self.descend(cohort, inbox["model"], server_variate - variate)
        if self.option == 1:
            new_variate = full_gradient(cohort, server_model(inbox))
        else:
            followed = self.followed(cohort, inbox["model"], trained)
            new_variate = followed.add_(variate).sub_(server_variate)
        has_trained = (trained.steps > 0).to(new_variate.device).unsqueeze(1)
        new_variate = torch.where(has_trained, new_variate, variate)
        cohort.memory.write("scaffold_variate", new_variate, cohort.uploads)
        return {"model": trained.model, "variate": new_variate - variate}

    def descend(self, cohort: Cohort, start: Tensor, offset: Tensor) -> Trained:
        """Train by steps along g + `offset`.

        Args:
            cohort: The clients.
            start: Models before training, `[k, P]`.
            offset: Added to each gradient, `[k, T]`.

        Returns:
            The trained models, with the number of steps of each client.
        """

        def correct(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
            return gradient.add_(context["offset"])

        return cohort.fit(start, correction=correct, context={"offset": offset})

    def rate(self, round: Round) -> float:
        """Return eta, which divides the displacement of a client."""
        return round.learning_rate

    def followed(self, cohort: Cohort, start: Tensor, trained: Trained) -> Tensor:
        """Return (w_t - w_i) / (tau eta), the mean direction of the local steps.

        Args:
            cohort: The clients.
            start: Models before training, `[k, P]`.
            trained: Result of local training.

        Returns:
            Directions, `[k, T]`.
        """
        count = cohort.layout.trainable
        rate = self.rate(cohort.round) * momentum_gain(cohort.training)
        return mean_gradient(start[:, :count], trained.model[:, :count], trained.steps, rate)


def full_gradient(cohort: Cohort, rows: Tensor) -> Tensor:
    """Return the gradient of each client's mean loss on all its samples.

    Args:
        cohort: The clients.
        rows: Models at which the gradient is taken, `[k, P]`; unchanged.

    Returns:
        Gradients, `[k, T]`.
    """

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
