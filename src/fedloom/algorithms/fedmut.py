from fedloom.algorithm import Algorithm, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan, Replies
from fedloom.common.fields import Count, NonNegative, Probability
from fedloom.flat.population import mutate


@algorithms.register("fedmut")
class FedMut(Algorithm):
    """Mutated models: slot k receives w_t + radius s_k (w_t - w_{t-1}), with signs s_k drawn for
    each tensor in pairs.

    w_t is the uniform mean of the uploads. Each pair of slots draws +1 and -1 + r, where r = beta
    (1 - min(t0 / mutation_rounds, 1)) and t0 counts the rounds before the one that produced w_t;
    with K odd the last slot receives w_t. So at r = 0 the mutations average to w_t. Only trainable
    parameters mutate; statistics are averaged. Source: Hu et al. 2024 (FedMut), algorithm 1.
    Use it like `fedmr`, for flat minima, where all clients should start close to one global model.

    Args:
        radius: Length of a mutation, as a multiple of the last step (authors: 4); 0 is FedAvg with
            equal weights.
        beta: Skew r of the signs at the start.
        mutation_rounds: Rounds over which r falls to 0.
    """

    radius: NonNegative = 4.0
    beta: Probability = 0.3
    mutation_rounds: Count = 50

    facts = Facts(one_model_each=True, anonymous=True)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["previous"] = plan.initial.clone()

    def send(self, round: Round) -> Message:
        # The mutations follow from the two last means and the round's random stream, so the K
        # models are not stored.
        tensors = [
            tensor.slice
            for tensor in self.plan.layout.slices
            if tensor.stop <= self.plan.layout.trainable
        ]
        skew = self.beta * (
            1 - min(max(self.plan.passed(round.number) - 1, 0) / self.mutation_rounds, 1)
        )
        direction = self.radius * (self.state["model"] - self.state["previous"])
        rows = self.plan.empty_rows(len(round.selected))
        return {
            "model": mutate(
                self.state["model"], direction, rows, tensors, skew, round.stream("mutate")
            )
        }

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        return replies.aggregate(weighted=False)

    def update(self, round: Round, aggregate: Aggregate) -> None:
        self.state = {"model": aggregate.mean["model"], "previous": self.state["model"]}
