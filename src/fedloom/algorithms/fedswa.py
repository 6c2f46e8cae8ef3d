import copy
from dataclasses import replace

from fedloom.algorithm import Facts, algorithms
from fedloom.algorithm.records import Aggregate, Message
from fedloom.algorithms.server_step import PlainMeanStep
from fedloom.algorithms.statistics import require_constant_rate
from fedloom.common.fields import Positive, Share
from fedloom.local.cohort import Cohort


@algorithms.register("fedswa")
class FedSWA(PlainMeanStep):
    """FedSWA: local steps with a falling learning rate, and a longer step of the server.

    Step k = 0 .. tau - 1 of a round has the rate eta (1 - (1 - rho) k / tau). Server, uniform over
    the round: w <- w_t + alpha mean_i (w_i - w_t) over the trainable parameters; statistics are
    averaged. With rho and alpha 1 this is FedAvg with equal weights. Traffic is FedAvg's.
    Source: Liu et al. 2025, algorithm 1. The authors' code differs: its rate falls from 2 eta to 0,
    and alpha is 1.
    Use it like `fedavg` where models overfit their clients: it costs nothing more.

    Args:
        rho: Factor of the rate at the end of a round (paper: 0.1).
        alpha: Server's step (paper: 1.5).
    """

    rho: Share = 0.1
    alpha: Positive = 1.5

    needs = (require_constant_rate,)
    facts = Facts(anonymous=True)

    def step_length(self, aggregate: Aggregate) -> float:
        return self.alpha

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        falling = copy.copy(cohort)
        schedule = f"linear(least={self.rho!r})"
        falling.training = replace(cohort.training, local_schedule=schedule)
        return {"model": falling.fit(inbox["model"]).model}
