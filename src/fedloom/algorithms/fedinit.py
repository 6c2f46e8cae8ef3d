from fedloom.algorithm import Facts, algorithms
from fedloom.algorithm.records import Aggregate, Message, server_model
from fedloom.algorithms.server_step import PlainMeanStep
from fedloom.common.fields import NonNegative, Positive
from fedloom.local.cohort import Cohort


@algorithms.register("fedinit")
class FedInit(PlainMeanStep):
    """FedInit: client i starts at s_i = w_t + beta (w_t - v_i), away from its own last model v_i.

    The first time, s_i = w_t. Server, uniform over the round: w <- w_t + eta_g mean_i (w_i - s_i)
    over the trainable parameters. Clients upload w_t + w_i - s_i, so that traffic is FedAvg's.
    Statistics are averaged. With beta 0 this is FedAvg with equal weights.
    Source: Sun et al. 2023, algorithm 1; there, v_i is the initial model at first.
    Use it when local models differ much and clients can store one.

    Args:
        beta: Distance from the last model (paper: 0.1).
        server_learning_rate: eta_g (paper: 1).
    """

    beta: NonNegative = 0.1
    server_learning_rate: Positive = 1.0

    facts = Facts(anonymous=True)

    def step_length(self, aggregate: Aggregate) -> float:
        return self.server_learning_rate

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        trainable = slice(cohort.layout.trainable)
        sent = server_model(inbox)[:, trainable]
        last = cohort.memory.get("fedinit_model", sent)
        shift = self.beta * (sent - last)
        start = inbox["model"].clone()
        start[:, trainable] += shift
        model = cohort.fit(start).model
        cohort.memory.write("fedinit_model", model[:, trainable].clone(), cohort.uploads)
        upload = model.clone()
        upload[:, trainable] -= shift
        return {"model": upload}
