"""Compare a round of 200 clients on Ray clusters of 1, 2 and 4 local nodes with one process.

A further run kills one node of three in the middle of a round.

    python benchmarks/ray_nodes.py [--clients 200] [--rounds 3]

FedAvg, the MLP 784-200-200-10, ten samples per client in one step. `rows_received` is the number of
models that the driver receives. `same` is True if the last model has the same bits as with one
process.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fedloom.algorithm.records import Exchange
from fedloom.common.round import Round
from fedloom.data import Dataset, Samples
from fedloom.engines.base import LocalEngine
from fedloom.engines.ray.driver import RayEngine
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Answer, FoldedBlock, Job, Result
from fedloom.rounds.federation import Federation, Schedule
from fedloom.task import Task
from fedloom.task.making import make_task
from outcome import tell


def noise(clients: int) -> Task:
    draw = torch.Generator().manual_seed(0)
    train = Samples(torch.rand(10 * clients, 784, generator=draw), torch.arange(10 * clients) % 10)
    return make_task(
        Dataset("noise", train, train[:100], 10), clients=clients, partition="iid", model="mlp",
        training={"learning_rate": 0.05, "batch_size": 10},
    )  # fmt: skip


class Counting(RayEngine):
    """Counts received models and kills a node.

    The node `victim`, if given, is killed after the first model of round 2.
    """

    received = 0
    victim: Any = None
    cluster: Any = None

    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job], fold: Exchange | None = None
    ) -> Iterator[Result]:
        for result in super().train(pipeline, round, jobs, fold):
            self.received += isinstance(result, FoldedBlock) or (
                isinstance(result, Answer) and bool(result.tensors)
            )
            yield result
            if self.victim is not None and round.number == 2:
                self.cluster.remove_node(self.victim, allow_graceful=False)
                self.victim = None


def run(task: Task, engine: LocalEngine, rounds: int) -> Federation:
    federation = Federation(
        build("fedavg"), task, engine, Schedule(rounds, 1.0, evaluate_every=rounds)
    )
    federation.run()
    return federation


def on_nodes(
    task: Task, nodes: int, rounds: int, expected: Federation, kill: bool = False
) -> dict[str, Any]:
    """Make the same run on a cluster of `nodes` nodes beside its head, with one actor on each."""
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        added = [cluster.add_node(num_cpus=2 if kill and k == 0 else 1) for k in range(nodes)]
        engine = Counting(task, workers=nodes, address=cluster.address)
        engine.cluster, engine.victim = cluster, added[-1] if kill else None
        result = run(task, engine, rounds)
        engine.close()
    finally:
        cluster.shutdown()
    times = [timing["seconds"] for timing in result.timings[1:]]
    seconds_expected = statistics.median(timing["seconds"] for timing in expected.timings[1:])
    return {
        "nodes": f"{nodes}, one killed" if kill else nodes,
        "round_s": statistics.median(times),
        "over_one_process": statistics.median(times) / seconds_expected,
        "rows_received": engine.received // rounds,
        "same": torch.equal(result.model(), expected.model()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", default="1,2,4")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    task = noise(chosen.clients)
    expected = run(task, RowsEngine(task), chosen.rounds)
    rows = [
        on_nodes(task, int(nodes), chosen.rounds, expected) for nodes in chosen.nodes.split(",")
    ]
    rows.append(on_nodes(task, 3, chosen.rounds, expected, kill=True))
    tell(f"a round of {chosen.clients} clients on Ray", rows)


if __name__ == "__main__":
    main()
