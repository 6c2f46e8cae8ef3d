from collections.abc import Mapping

from fedloom.algorithm import Algorithm, Cohort, Facts, Round, algorithms
from fedloom.config.fields import NonNegative
from fedloom.records import Aggregate, Message, Replies, server_model


class ReportsLoss(Algorithm):
    """Base of methods whose clients upload the loss of the received model on all of their samples
    beside their own model.
    """

    facts = Facts(fits_once=False, averages=False)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (self.plan.layout.size,), "loss": ()}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        loss = cohort.loss(server_model(inbox))
        return {"model": cohort.fit(inbox["model"]).model, "loss": loss}


@algorithms.register("qfedavg")
class QFedAvg(ReportsLoss):
    """q-FedAvg: w <- w_t - sum_i F_i^q g_i / sum_i h_i, with g_i = (w_t - w_i) / eta.

    h_i = q F_i^(q - 1) ||g_i||^2 + F_i^q / eta over the trainable parameters, F_i the loss of w_t
    on all of client i's samples + 1e-10, eta the round's learning rate. Statistics are averaged. q
    = 0 is FedAvg with equal weights.
    Traffic: one number more up. Source: Li et al. 2020 (q-FFL), algorithm 2.
    Use it when the worst clients count as much as the mean; momentum makes g_i longer, so leave it
    out or lower q.

    Args:
        q: How much high losses count.
    """

    q: NonNegative = 1.0

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        trainable = slice(self.plan.layout.trainable)
        slopes = (
            self.state["model"][trainable] - replies["model"][:, trainable]
        ) / round.learning_rate
        loss = replies["loss"] + 1e-10
        power = loss**self.q
        bound = self.q * loss ** (self.q - 1) * slopes.square().sum(1) + power / round.learning_rate
        total = {"slope": (power @ slopes).unsqueeze(0), "bound": bound}
        return replies.aggregate(weighted=False, mean={"model": replies["model"]}, total=total)

    def update(self, round: Round, aggregate: Aggregate) -> None:
        trainable, model = slice(self.plan.layout.trainable), aggregate.mean["model"].clone()
        model[trainable] = (
            self.state["model"][trainable] - aggregate.total["slope"] / aggregate.total["bound"]
        )
        self.state["model"] = model
