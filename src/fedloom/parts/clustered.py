"""CluSamp: draw clients from clusters of similar clients, so that every round represents the
federation.
"""

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import field
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.algorithm.method import Facts, Method, algorithms
from fedloom.algorithm.records import Plan, Replies, Selection
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.round import Round
from fedloom.parts.hooks import Inner, Part

BLOCK_NUMBERS = 1 << 23
"""Numbers of stored displacements that are compared in one block (64 MiB in double precision)."""

Distribution = dict[int, int]
"""Mass of each client: client i has n_i m over all clusters, a full cluster has sum_j n_j. Masses
are integers, since their sums are exact.
"""


@algorithms.register("clustered")
class Clustered(Part):
    """CluSamp's selection for any method: each of the m participants is drawn from a separate
    cluster.

    Cluster k is a distribution W_k over clients with sum_i W_k[i] = 1 and sum_k W_k[i] = m n_i /
    sum_j n_j. Each draw has weight 1/m, so that averages are unbiased; a client drawn c times
    trains once and has weight c/m. Methods that average uniformly ignore weights. If a method has a
    model for each participant (FedMR, Indep, FedMut), the m clients must differ: a draw of an
    already drawn client is repeated among the remaining clients of its cluster, or of all clusters
    if none remains, and weights are equal. The server stores the displacements G_i of the clients
    that took part, and the N x N distances.
    Source: Fraboni et al. 2021.
    Use it when few of many clients take part in a round and each round should contain clients of
    all kinds.

    Args:
        by: `size` fills the clusters one after another with the clients in descending order of
            samples (algorithm 1). `similarity` groups clients by their last displacements G_i
            (trained - sent `[T]`, initially 0) with Ward linkage on the rows of their distances,
            cut where a group would exceed a cluster; the m largest groups open the clusters, and
            the other clients fill them in random order (algorithm 2).
        distance: Distance between displacements: `cosine` (the angle; 0 for a zero vector), `l1` or
            `l2` (squared).
        weight: `uniform`, or `size` to weight a draw by the client's samples (FedMR's code,
            biased).
    """

    by: Literal["similarity", "size"] = "similarity"
    distance: Literal["cosine", "l1", "l2"] = "cosine"
    weight: Literal["uniform", "size"] = "uniform"

    once: ClassVar[bool] = True

    @property
    def facts(self) -> Facts:
        by_size = self.by == "size"
        return Facts(
            fixed_participants=True, independent=False, foreseeable=by_size, anonymous=by_size
        )

    def hooks(self) -> frozenset[str]:
        hooks = super().hooks()
        return hooks if self.by == "similarity" else hooks - {"observe"}

    @property
    def requires(self) -> tuple[str, ...]:
        return ("whole models",) if self.by == "similarity" else ()

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self.sizes: list[int] = plan.sizes(torch.arange(plan.clients)).tolist()
        message = inner.algorithm.send(plan.opening())
        self._sends_each = any(len(rows) > 1 for rows in message.values())
        if self.by == "similarity":
            shape = plan.clients, plan.clients
            self.state["distance"] = torch.zeros(shape, dtype=torch.float64)
        else:
            self._clusters = clusters_by_size(self.sizes, plan.participants)

    def select(self, round: Round, inner: Inner) -> Selection:
        generator = round.stream("select")
        clusters = self.clusters(round)
        if self._sends_each or inner.algorithm.facts.one_model_each:
            return Selection(_draw_distinct(clusters, round.clients, generator))
        drawn = [_draw(cluster, generator) for cluster in clusters]
        clients = tuple(dict.fromkeys(drawn))
        # Averages divide by the sum of the weights, so a weight of c is exactly c/m.
        weights = {client: self.sizes[client] if self.weight == "size" else 1 for client in clients}
        return Selection(
            clients,
            weights=tuple(float(drawn.count(client) * weights[client]) for client in clients),
        )

    def clusters(self, round: Round) -> list[Distribution]:
        """Return the m distributions of a round."""
        if self.by == "size":
            return self._clusters
        groups = similar_groups(self.state["distance"].numpy(), self.sizes, self.plan.participants)
        order = torch.randperm(round.clients, generator=round.stream("clusters")).tolist()
        return clusters_of_groups(groups, order, self.sizes, self.plan.participants)

    def observe(self, round: Round, replies: Replies) -> None:
        trainable = slice(self.plan.layout.trainable)
        moved = replies["model"][:, trainable] - replies.sent("model")[:, trainable]
        clients = replies.clients.tolist()
        for k, client in enumerate(clients):
            self.state[f"displacement{client}"] = moved[k].clone()
        self.state["distance"] = self._updated_distances(clients)

    def _updated_distances(self, clients: list[int]) -> Tensor:
        """Return the N x N distances after new displacements of `clients`. Clients without a
        displacement count as 0.
        """
        result = self.state["distance"].clone()
        displacements = self._displacements(clients)
        origin = torch.zeros_like(displacements[:1])
        rows = displacement_distances(displacements, origin, self.distance).repeat(
            1, self.plan.clients
        )
        stored = [
            client for client in range(self.plan.clients) if f"displacement{client}" in self.state
        ]
        block = max(1, BLOCK_NUMBERS // displacements.shape[1])
        for start in range(0, len(stored), block):
            columns = stored[start : start + block]
            rows[:, columns] = displacement_distances(
                displacements, self._displacements(columns), self.distance
            )
        for client, row in zip(clients, rows.cpu(), strict=True):
            row[client] = 0
            result[client] = result[:, client] = row
        return result

    def _displacements(self, clients: list[int]) -> Tensor:
        return torch.stack([self.state[f"displacement{client}"] for client in clients]).double()


@algorithms.register("clusamp")
class CluSamp(Clustered):
    """CluSamp: FedAvg with participants drawn from clusters of clients with similar updates.

    This is `clustered(fedavg)` with the papers' choices: clusters by the angle between the clients'
    last displacements, and weight 1/m for each draw. Source: Fraboni et al. 2021; FedMR, section 5.
    Use it when few of many different clients take part in a round: it represents the federation
    better than a uniform draw.
    """

    method: Method = field(init=False, default_factory=FedAvg)


def displacement_distances(a: Tensor, b: Tensor, distance: str) -> Tensor:
    """Return the distances between displacements, `[k, c]`.

    Args:
        a: Displacements, `[k, T]`.
        b: Displacements, `[c, T]`.
        distance: `cosine`, `l1` or `l2`. The angle is 0 where a row is zero.

    Returns:
        Distances, `[k, c]`: angles in radians, sums of absolute differences, or squared Euclidean
        distances.
    """
    if distance == "l1":
        return torch.cdist(a, b, p=1)
    if distance == "l2":
        return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()
    lengths = a.norm(dim=1).unsqueeze(1) * b.norm(dim=1)
    cosine = (a @ b.T) / torch.where(lengths == 0, 1, lengths)
    return torch.where(lengths == 0, 0, cosine.clamp(-1, 1).arccos())


def clusters_by_size(sizes: list[int], count: int) -> list[Distribution]:
    """Fill the clusters one after another with clients in descending order of samples (algorithm
    1). A client can be in several.

    Args:
        sizes: Number of samples of each client.
        count: Number of clusters.

    Returns:
        For each cluster, the integer mass of its clients. Every cluster has a mass of sum(sizes).
    """
    clusters: list[Distribution] = [{} for _ in range(count)]
    order = sorted(range(len(sizes)), key=lambda client: (-sizes[client], client))
    _pour(((client, sizes[client] * count) for client in order), clusters, sum(sizes))
    return clusters


def similar_groups(distance: np.ndarray, sizes: list[int], count: int) -> list[list[int]]:
    """Return groups of clients that fit into a cluster: the largest such subtrees of the Ward
    linkage. A client that exceeds a cluster is a separate group.

    Args:
        distance: Distances between clients, `[N, N]`. Its rows are the observations, as in FedMR's
            code.
        sizes: Number of samples of each client.
        count: Number of clusters.

    Returns:
        Groups of client numbers. Each client is in one group.
    """
    # Imported here, since it adds a fifth to the time to import PyTorch.
    from scipy.cluster.hierarchy import to_tree, ward
    from scipy.spatial.distance import pdist

    if len(sizes) == 1:
        return [[0]]
    groups: list[list[int]] = []
    trees = [to_tree(ward(pdist(distance)))]
    while trees:
        tree = trees.pop()
        members = sorted(tree.pre_order())
        if tree.is_leaf() or sum(sizes[client] for client in members) * count <= sum(sizes):
            groups.append(members)
        else:
            trees += [tree.left, tree.right]
    return groups


def clusters_of_groups(
    groups: list[list[int]], order: list[int], sizes: list[int], count: int
) -> list[Distribution]:
    """Open clusters with the heaviest groups, and fill them with the other clients (algorithm 2).

    Args:
        groups: Groups of clients.
        order: Order in which the other clients fill the clusters.
        sizes: Number of samples of each client.
        count: Number of clusters.

    Returns:
        For each cluster, the integer mass of its clients. Every cluster has a mass of sum(sizes).
    """
    capacity = sum(sizes)
    mass = {client: size * count for client, size in enumerate(sizes)}
    heaviest = sorted(groups, key=lambda group: (-sum(sizes[client] for client in group), group))[
        :count
    ]
    clusters: list[Distribution] = [{} for _ in range(count)]
    for cluster, group in zip(clusters, heaviest, strict=False):
        for client in group:
            # The rest of a client that exceeds a cluster goes into other clusters.
            cluster[client] = min(mass[client], capacity)
            mass[client] -= cluster[client]
    _pour(((client, mass[client]) for client in order), clusters, capacity)
    return clusters


def _pour(masses: Iterable[tuple[int, int]], clusters: list[Distribution], capacity: int) -> None:
    """Fill the clusters in order, each up to `capacity`, with the clients' masses in order. A
    client can be in several.
    """
    room = [capacity - sum(cluster.values()) for cluster in clusters]
    k = 0
    for client, mass in masses:
        while mass:
            while not room[k]:
                k += 1
            portion = min(mass, room[k])
            clusters[k][client] = clusters[k].get(client, 0) + portion
            room[k] -= portion
            mass -= portion


def _draw(cluster: Distribution, generator: torch.Generator) -> int:
    """Draw a client with a probability proportional to its mass."""
    ends = list(itertools.accumulate(cluster.values()))
    return list(cluster)[bisect.bisect(ends, int(torch.randint(ends[-1], (), generator=generator)))]


def _draw_distinct(
    clusters: list[Distribution], clients: int, generator: torch.Generator
) -> tuple[int, ...]:
    """Draw one client from each cluster, all different, in a random order of slots."""
    taken: dict[int, None] = {}
    for cluster in clusters:
        free = {client: mass for client, mass in cluster.items() if client not in taken}
        if not free:
            free = {client: 1 for client in range(clients) if client not in taken}
        taken[_draw(free, generator)] = None
    drawn = list(taken)
    return tuple(drawn[k] for k in torch.randperm(len(drawn), generator=generator).tolist())
