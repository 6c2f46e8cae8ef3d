import torch
from torch import Tensor

from fedloom.algorithm.method import Facts, algorithms
from fedloom.algorithm.records import Plan, Replies
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count
from fedloom.common.randomness import stream
from fedloom.common.round import Round
from fedloom.parts.hooks import Inner
from fedloom.parts.stale_updates import UsesStaleUpdates


@algorithms.register("cluster_fedvarp")
class ClusterFedVARP(UsesStaleUpdates):
    """ClusterFedVARP: FedVARP with one stored update y_c for each cluster of clients.

    w <- w_t + sum_c (n_c/N) y_c + (1/K) sum_i (D_i - y_c(i)), where D_i = w_i - w_t, and n_c is the
    number of clients of cluster c. Then y_c becomes the mean D_i of its clients of the round, if
    there are any. The clusters are random, of equal size, and fixed. One cluster for each client
    gives FedVARP; one cluster gives FedAvg with equal weights.
    Source: Jhunjhunwala et al. 2022, section 4; clusters as in another implementation.
    Use it as FedVARP where clients cannot store an update.

    Args:
        clusters: Number of clusters.
    """

    clusters: Count = 10

    facts = Facts(anonymous=False)

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        if self.clusters > plan.clients:
            raise InvalidValue(
                f"cluster_fedvarp: clusters must be at most {plan.clients}, the number of clients, "
                f"not {self.clusters}"
            )
        order = torch.randperm(plan.clients, generator=stream(plan.seed, "fedvarp clusters"))
        self._cluster = torch.empty_like(order)
        self._cluster[order] = torch.arange(plan.clients) % self.clusters
        self._shares = self._cluster.bincount().double() / plan.clients
        shape = self.clusters, plan.layout.trainable
        self.state["cluster_updates"] = plan.initial.new_zeros(shape)

    def rewrite(self, round: Round, replies: Replies) -> Replies:
        trainable = slice(self.plan.layout.trainable)
        stored = self.state["cluster_updates"]
        member = self._cluster[replies.clients].to(stored.device)
        sent = replies.sent("model")[:, trainable]
        update = replies["model"][:, trainable] - sent
        general = self._shares.to(stored) @ stored
        rows = replies["model"].clone()
        rows[:, trainable] = sent + general + update - stored[member]
        self.state["cluster_updates"] = _means(update, member, stored)
        return replies.with_rows("model", rows)


def _means(update: Tensor, member: Tensor, stored: Tensor) -> Tensor:
    """Return the mean update of each cluster, or its stored one if it has no update.

    Args:
        update: Updates, `[r, T]`.
        member: Cluster of each update, `[r]`.
        stored: Stored updates, `[C, T]`.
    """
    ones = stored.new_ones(len(member), 1)
    counts = stored.new_zeros(len(stored), 1).index_add_(0, member, ones)
    totals = torch.zeros_like(stored).index_add_(0, member, update)
    return torch.where(counts > 0, totals / counts.clamp_min(1), stored)
