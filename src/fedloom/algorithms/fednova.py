from collections.abc import Mapping

from fedloom.algorithm import Algorithm, Cohort, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Replies
from fedloom.algorithms.statistics import accumulated_weights, require_sgd


@algorithms.register("fednova")
class FedNova(Algorithm):
    """Normalised averaging: w <- w_t + tau_eff sum_i p_i (w_i - w_t) / ||a_i||_1, with tau_eff =
    sum_i p_i ||a_i||_1.

    ||a_i||_1 is the total weight of the client's gradients in its displacement: its number of steps
    tau, or with momentum m (tau - m (1 - m^tau) / (1 - m)) / (1 - m); clients upload it with the
    model. p_i by samples; statistics are averaged by samples. Clients with equal numbers of steps
    give FedAvg.
    Source: Wang et al. 2020, equations 6 and 7 with the tau_eff of section 4.
    Use it when clients take very different numbers of local steps, because of unequal data or
    devices.
    """

    needs = (require_sgd,)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (self.plan.layout.size,), "local_weight": (1,)}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        trainable = slice(self.plan.layout.trainable)
        local = replies["local_weight"]
        moved = replies["model"][:, trainable] - self.state["model"][trainable]
        # A client without steps has local weight 0 and no displacement: any divisor gives 0.
        step = moved / local.where(local > 0, 1)
        return replies.aggregate(
            mean={"model": replies["model"], "local_weight": local, "step": step}
        )

    def update(self, round: Round, aggregate: Aggregate) -> None:
        trainable = slice(self.plan.layout.trainable)
        mean = aggregate.mean
        mean["model"][trainable] = (
            self.state["model"][trainable] + mean["local_weight"] * mean["step"]
        )
        self.state["model"] = mean["model"]

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        trained = cohort.fit(inbox["model"])
        weight = accumulated_weights(cohort.training, trained.steps).to(trained.model)
        return {"model": trained.model, "local_weight": weight.unsqueeze(1)}
