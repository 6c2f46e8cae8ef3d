import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Plan, Replies
from fedloom.common.fields import Positive


@algorithms.register("fedexp")
class FedExP(Algorithm):
    """FedAvg with an adaptive server step: w <- w_t + eta_g sum_i p_i D_i, with D_i = w_i - w_t and
    p_i by samples.

    eta_g = max(1, sum_i p_i ||D_i||^2 / (2 (||sum_i p_i D_i||^2 + epsilon_t))) over the trainable
    parameters, with epsilon_t = epsilon (eta_t / eta_1)^2 for learning rates eta; statistics are
    averaged, not extrapolated. The global model is the mean of the server's last two iterates
    (after round 1 only the first).
    Source: Jhunjhunwala et al. 2023, algorithm 1 and section 5.
    Use it when FedAvg is stable but slow, and the server should need no tuning.

    Args:
        epsilon: Term in the denominator that bounds the step (authors: 0.001 for CIFAR, 0.1 for
            EMNIST).
        epsilon_by_clients: Multiply epsilon by the number of clients in the round, as the authors'
            code does.
    """

    epsilon: Positive = 1e-3
    epsilon_by_clients: bool = False

    facts = Facts(averages=False)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["evaluated"] = plan.initial.clone()
        self.state["step"] = torch.ones(1, dtype=plan.initial.dtype, device=plan.initial.device)

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        trainable = slice(self.plan.layout.trainable)
        length = (replies["model"][:, trainable] - self.state["model"][trainable]).square().sum(1)
        return replies.aggregate(mean={"model": replies["model"], "length": length})

    def update(self, round: Round, aggregate: Aggregate) -> None:
        trainable = slice(self.plan.layout.trainable)
        previous = self.state["model"]
        following = aggregate.mean["model"]
        mean = following[trainable] - previous[trainable]
        epsilon = self.epsilon * (round.learning_rate / round.initial_learning_rate) ** 2
        if self.epsilon_by_clients:
            epsilon *= aggregate.count
        step = (aggregate.mean["length"] / (2 * (mean.square().sum() + epsilon))).clamp_min(1)
        following[trainable] = previous[trainable] + step * mean
        self.state["model"] = following
        self.state["evaluated"] = (
            following.clone() if self.plan.passed(round.number) == 0 else (previous + following) / 2
        )
        self.state["step"] = step.reshape(1)

    def model(self) -> Tensor:
        return self.state["evaluated"]

    def diagnose(self) -> dict[str, float]:
        return {"server_step": float(self.state["step"])}
