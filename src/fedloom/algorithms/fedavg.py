from fedloom.algorithm import Algorithm, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Replies


@algorithms.register("fedavg")
class FedAvg(Algorithm):
    """Federated averaging: w <- sum_i p_i w_i over the clients of the round.

    p_i = n_i / sum_j n_j, with n_i the number of client i's training samples.
    Source: McMahan et al. 2017, algorithm 1.
    Use it first: it is the baseline of every comparison, and hard to beat when clients are alike.

    Args:
        weighted: Weight clients by their samples; `false` takes p_i = 1/K.
    """

    weighted: bool = True

    @property
    def facts(self) -> Facts:
        return Facts(anonymous=not self.weighted)

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        return replies.aggregate(weighted=self.weighted)
