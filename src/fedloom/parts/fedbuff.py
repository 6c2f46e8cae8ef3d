from dataclasses import field
from typing import cast

import torch
from torch import Tensor

from fedloom.algorithm.method import Method, algorithms
from fedloom.common.fields import Count, NonNegative
from fedloom.parts.stale import StaleReplies


@algorithms.register("fedbuff")
class FedBuff(StaleReplies):
    """FedBuff: buffered asynchronous aggregation. The server makes a step when `k` of C training
    clients have replied.

    With u_i = w_i - w_(t - tau) the update of a client that received a model tau versions ago, the
    inner method receives

        w_t + u_i (1 + tau_i)^-`staleness`

    as the models of these k clients: `fedbuff(fedavg, k=10)` steps by their mean,
    `fedbuff(fedavg(weighted=false))` is the paper's method. Batch-norm statistics move from w_t's
    towards the client's. k = C is the inner method, bit for bit. `simulated_seconds` is the time on
    the clock; see `Arrivals` for rounds.
    Source: Nguyen et al. 2022, "Federated learning with buffered asynchronous aggregation",
    algorithm 1.
    Use it when a few slow clients delay every round.

    Args:
        k: Number of replies in a step (paper: 10).
        staleness: Exponent of the discount (paper: 0.5).
    """

    k: Count = 10
    staleness: NonNegative = 0.5

    def moved(self, model: Tensor, sent: Tensor, rows: Tensor, stale: Tensor) -> Tensor:
        weight = (1 + stale) ** -self.staleness
        trainable = self.plan.layout.trainable
        origin = torch.cat([sent[:, :trainable], model[:, trainable:].expand(len(rows), -1)], 1)
        return torch.where(stale == 0, rows, model + weight * (rows - origin))


def _fedvarp() -> Method:
    return cast(Method, algorithms.build("fedvarp"))


@algorithms.register("ca2fl")
class CA2FL(FedBuff):
    """CA2FL: FedBuff whose step adds the mean y of the last updates of all clients, as FedVARP
    does.

    When k clients have replied, w <- w + y + (1/k) sum_i (D_i - y_i), with D_i the displacement of
    client i from the model that it received, and y_i <- D_i. This is `fedbuff(fedvarp,
    staleness=0)`.
    Source: Wang et al. 2024, algorithm 1; the authors' code is not public.
    Use it when clients differ in speed and in data.
    """

    staleness: NonNegative = 0.0
    method: Method = field(init=False, default_factory=_fedvarp)
