from torch import Tensor

from fedloom.algorithm.method import algorithms
from fedloom.algorithm.records import Replies
from fedloom.common.round import Round
from fedloom.parts.stale_updates import StaleUpdates


@algorithms.register("mifa")
class MIFA(StaleUpdates):
    """MIFA: w <- w_t + (1/N) sum_j y_j over all N clients, with the newest update y_i <- D_i of
    each client of the round.

    D_i = w_i - w_t, and y_j is 0 for clients that have not taken part yet: the first step is K/N of
    FedAvg's (equal weights). The step is the mean over all clients in every round, so clients that
    are often absent have the same weight. Clients keep y_i and upload w_i - y_i, so
    that traffic is FedAvg's.
    Source: Gu et al. 2021, algorithm 1, and the authors' code without waiting.
    Use it when the same clients are absent for many rounds.

    Args:
        rescale: Multiply y_i by the change of the learning rate since the client's last update, as
            the authors' code does.
    """

    rescale: bool = True

    def step(self, round: Round, replies: Replies, change: Tensor) -> Tensor:
        share = len(replies) / self.plan.clients
        return self.mean_update(round) + share * change
