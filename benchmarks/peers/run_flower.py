"""Flower's simulation: the Message API, FedAvg, and Ray actors with one core each.

Flower's documentation advises this for a CPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # its actors import from here

import torch
import torch_models
import workload as w
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


def main() -> None:
    arguments = w.arguments(__doc__ or "")
    os.environ["PEERS_WORKLOAD"] = arguments.workload
    from flower_client import client

    work = w.WORKLOADS[arguments.workload]
    ends: list[float] = []
    arrays: list[ArrayRecord] = []

    class Timed(FedAvg):
        def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
            aggregate = super().aggregate_train(server_round, replies)
            ends.append(w.clock())
            arrays[:] = [aggregate[0]]
            return aggregate

    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        strategy = Timed(
            fraction_train=work.cohort / work.users, fraction_evaluate=0.0, min_train_nodes=1
        )
        initial = ArrayRecord(torch_models.model(arguments.workload).state_dict())
        strategy.start(
            grid=grid, initial_arrays=initial, num_rounds=arguments.warm_up + arguments.rounds
        )

    began = w.clock()
    run_simulation(
        server,
        client,
        num_supernodes=work.users,
        backend_config={
            "client_resources": {"num_cpus": max(1, arguments.cores // arguments.processes)},
            "init_args": {"num_cpus": arguments.cores, "include_dashboard": False},
        },
    )
    module = torch_models.model(arguments.workload)
    module.load_state_dict(arrays[0].to_torch_state_dict())
    probe = (torch.from_numpy(array) for array in work.probe(work.data()))
    loss = torch_models.loss_of(module, *probe)
    w.tell(f"flower, {arguments.processes} actor(s)", ends, began, arguments.warm_up, loss)


if __name__ == "__main__":
    main()
