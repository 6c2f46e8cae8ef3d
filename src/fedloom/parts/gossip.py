from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.algorithm.method import Facts, algorithms
from fedloom.algorithm.records import Message, Plan, Replies, Selection
from fedloom.algorithms.sharing import require_everybody
from fedloom.common.round import Round
from fedloom.parts.hooks import Inner, Part


@algorithms.register("gossip")
class Gossip(Part):
    """Train without a server: every client is a node with its own model, and averages it with its
    neighbours.

    In each round all N nodes train from their models, Y, and mix: X <- W Y, with Metropolis weights
    on the `graph`,

        W_ij = 1 / (1 + max(d_i, d_j)) for neighbours i and j,   W_ii = 1 - sum_j W_ij,

    with d the numbers of neighbours. Rows and columns of W have sum 1, so that the mean of the
    models does not change. Nodes without a reply keep their model, and the others mix on the graph
    without them. The global model is the mean of all nodes; a client uses its own. Traffic is
    counted on the edges: each node sends its model to each of its neighbours.
    Source: Xiao and Boyd 2004 (Metropolis weights); Lian et al. 2017 (D-PSGD); Sun et al. 2021
    (DFedAvgM, for its order).
    Use it to study federations without a server.

    Args:
        graph: Nodes in the order of their numbers form a `ring`, a `path`, a `star` around node 0,
            or are all neighbours (`complete`, which is FedAvg with equal weights).
    """

    graph: Literal["ring", "path", "star", "complete"] = "ring"

    needs: ClassVar[Any] = (require_everybody,)
    once: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ("only averages", "no server step")
    facts = Facts(independent=False, fixed_participants=True)

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self.state = {
            "nodes": plan.initial.expand(plan.clients, -1),
            "replied": torch.zeros(plan.clients, dtype=torch.bool),
            "sends": torch.zeros(1, dtype=torch.int64),
        }

    def select(self, round: Round, inner: Inner) -> Selection:
        return Selection(tuple(range(round.clients)))

    def message(self, round: Round, message: Message) -> Message:
        return {**message, "model": self.state["nodes"]}

    def deploy(self, round: Round, clients: tuple[int, ...], message: Message) -> Message:
        mean = message["model"]
        nodes = self.state["nodes"]
        rows = [nodes[client] if client < len(nodes) else mean[0] for client in clients]
        return {**message, "model": torch.stack(rows)}

    def observe(self, round: Round, replies: Replies) -> None:
        nodes = self.state["nodes"]
        clients = replies.clients
        self.state["nodes"] = nodes.index_copy(0, clients.to(nodes.device), replies["model"])
        self.state["replied"] = torch.zeros(len(nodes), dtype=torch.bool).index_fill(
            0, clients, True
        )

    def mix(self, round: Round, algorithm: Algorithm) -> None:
        replied = self.state["replied"]
        neighbours = adjacency(self.graph, len(replied)) & replied & replied.unsqueeze(1)
        nodes = self.state["nodes"]
        nodes = metropolis(neighbours).to(nodes) @ nodes
        algorithm.state["model"] = nodes.mean(0)
        self.state = {
            "nodes": nodes,
            "replied": torch.zeros_like(replied),
            "sends": neighbours.sum().reshape(1),
        }

    def report(self) -> dict[str, float]:
        """Return the bytes on all edges, instead of the traffic with a server."""
        count = int(self.state["sends"]) * self.plan.initial.nbytes
        return {"bytes_down": count, "bytes_up": count}

    def diagnose(self) -> dict[str, float]:
        nodes = self.state["nodes"]
        distance = (nodes - nodes.mean(0)).square().sum(1).mean()
        sends = int(self.state["sends"])
        return {"consensus_distance": float(distance), "edges": sends / 2}


def adjacency(graph: str, nodes: int) -> Tensor:
    """Return True for each pair of neighbours.

    Args:
        graph: Kind of graph, as in `Gossip`.
        nodes: Number of nodes.

    Returns:
        A matrix, bool `[N, N]`, symmetric and False on the diagonal.
    """
    import networkx  # imported here, since its import is slow

    network = {
        "ring": networkx.cycle_graph,
        "path": networkx.path_graph,
        "star": lambda count: networkx.star_graph(count - 1),
        "complete": networkx.complete_graph,
    }[graph](nodes)
    matrix = torch.zeros(nodes, nodes, dtype=torch.bool)
    for node, neighbour in network.edges:
        if node != neighbour:
            matrix[node, neighbour] = matrix[neighbour, node] = True
    return matrix


def metropolis(neighbours: Tensor) -> Tensor:
    """Return the Metropolis weights of a graph, `[N, N]` float64. Rows and columns have sum 1."""
    degrees = neighbours.sum(1)
    largest = torch.maximum(degrees.unsqueeze(0), degrees.unsqueeze(1)).double()
    weights = torch.where(neighbours, 1 / (1 + largest), 0.0)
    return weights + torch.diag(1 - weights.sum(1))
