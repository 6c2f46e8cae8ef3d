"""Gossip: local training and mixing with Metropolis weights, compared with plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedloom.algorithm.method import Method
from fedloom.common.errors import InvalidValue
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.gossip import adjacency, metropolis
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from seams.setting import small_task


def federation(
    method: str | Method, *, rounds: int = 3, model: str = "plain", **options: object
) -> Federation:
    task = small_task(model, local_test=0.3)
    schedule = Schedule(rounds, 1.0, seed=3, evaluate_every=1, personal_every=1, **options)  # type: ignore[arg-type]
    made = Federation(build(method), task, RowsEngine(task), schedule)
    made.run()
    return made


def naive_weights(edges: set[tuple[int, int]], nodes: int) -> Tensor:
    """Return 1 / (1 + max(d_i, d_j)) for each edge and the remainder on the diagonal."""
    degree = [sum(node in edge for edge in edges) for node in range(nodes)]
    weights = torch.zeros(nodes, nodes, dtype=torch.float64)
    for first, second in edges:
        weights[first, second] = weights[second, first] = 1 / (
            1 + max(degree[first], degree[second])
        )
    for node in range(nodes):
        weights[node, node] = 1 - sum(
            float(weights[node, other]) for other in range(nodes) if other != node
        )
    return weights


EDGES = {
    "ring": lambda n: {(k, k + 1) for k in range(n - 1)} | {(0, n - 1)},
    "path": lambda n: {(k, k + 1) for k in range(n - 1)},
    "star": lambda n: {(0, k) for k in range(1, n)},
    "complete": lambda n: {(j, k) for k in range(n) for j in range(k)},
}


@pytest.mark.parametrize("graph", EDGES)
def test_metropolis_weights_are_those_of_the_definition_and_keep_the_mean(graph: str) -> None:
    weights = metropolis(adjacency(graph, 7))
    assert torch.allclose(weights, naive_weights(EDGES[graph](7), 7), rtol=0, atol=1e-15)
    ones = torch.ones(7, dtype=torch.float64)
    assert torch.allclose(weights.sum(0), ones)
    assert torch.allclose(weights.sum(1), ones)


def test_the_spectral_gap_of_a_ring_of_16_is_the_published_one() -> None:
    weights = metropolis(adjacency("ring", 16)) - 1 / 16
    second = float(torch.linalg.matrix_norm(weights, 2))
    assert math.isclose(second, 1 / 3 + 2 / 3 * math.cos(2 * math.pi / 16), rel_tol=1e-12)


def test_a_round_mixes_the_models_that_the_nodes_have_trained() -> None:
    """One round trains the nodes as `indep` does and multiplies their models by W."""
    alone = federation("gossip(fedavg, graph=path)", rounds=1)
    task = small_task(local_test=0.3)
    schedule = Schedule(1, 1.0, seed=3)
    pool = Federation(build("indep"), task, RowsEngine(task), schedule)
    pool.step()
    clients = torch.tensor(pool.history[0]["clients"])
    trained = torch.empty_like(pool.server_state()["pool"])
    trained[clients] = pool.server_state()["pool"]
    mixed = naive_weights(EDGES["path"](9), 9) @ trained
    assert torch.allclose(alone.server_state()["nodes"], mixed, rtol=0, atol=1e-12)
    assert torch.allclose(alone.model(), mixed.mean(0), rtol=0, atol=1e-12)


def test_the_complete_graph_is_averaging_with_equal_weights() -> None:
    mixed = federation("gossip(fedavg, graph=complete)")
    averaged = federation("fedavg(weighted=false)")
    assert torch.allclose(mixed.model(), averaged.model(), rtol=0, atol=1e-12)
    assert mixed.history[-1]["consensus_distance"] < 1e-25


def test_bytes_are_those_of_the_edges() -> None:
    ring = federation("gossip(fedavg)")
    size = ring.task.initial.nbytes
    assert [record["bytes_up"] for record in ring.history] == [2 * 9 * size] * 3
    assert [record["bytes_down"] for record in ring.history] == [2 * 9 * size] * 3
    assert ring.history[-1]["edges"] == 9


def test_nodes_that_do_not_reply_keep_their_model_and_the_others_mix_without_them() -> None:
    task = small_task()
    schedule = Schedule(1, 1.0, seed=3, dropout=0.5)
    run = Federation(build("gossip(fedavg)"), task, RowsEngine(task), schedule)
    run.step()
    absent = {fault["client"] for fault in run.history[0]["faults"]}
    assert 0 < len(absent) < 9
    nodes = run.server_state()["nodes"]
    for client in absent:
        assert torch.equal(nodes[client], task.initial)
    present = set(range(9)) - absent
    sends = sum((k + 1) % 9 in present for k in present) * 2
    assert run.history[0]["bytes_up"] == sends * task.initial.nbytes


def test_each_client_uses_its_own_node() -> None:
    run = federation("gossip(fedavg)")
    own = {number: job.inbox["model"][0] for number, _, job in run.personal_tasks()}
    nodes = run.server_state()["nodes"]
    assert all(torch.equal(row, nodes[number]) for number, row in own.items())
    assert "personal_accuracy" in run.history[-1]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("gossip(fedadam)", "needs a server"),
        ("gossip(fedmr)", "needs a server"),
        ("robust(gossip(fedavg))", "has no effect"),
        ("quantised(gossip(fedavg))", "has no effect"),
        ("clustered(gossip(fedavg))", "already selects the clients"),
    ],
)
def test_what_needs_a_server_is_refused(expression: str, reason: str) -> None:
    with pytest.raises(InvalidValue, match=reason):
        build(expression)


def test_all_nodes_take_part() -> None:
    task = small_task()
    with pytest.raises(InvalidValue, match="participation must be 1"):
        Federation(build("gossip(fedavg)"), task, RowsEngine(task), Schedule(1, 0.5))
