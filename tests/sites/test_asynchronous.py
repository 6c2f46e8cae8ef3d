"""Asynchronous methods over sites use each reply at its arrival, with the figures of a simulation
with equal arrivals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.clock import Clock
from fedloom.rounds.federation import Federation
from fedloom.sites.agreement import deployment
from flower_support import CLIENTS, LocalGrid, flower, nodes, run_config, schedule

ROUNDS = 8
CLOCK = Clock(speed="stragglers(fastest=100, times=8)")


def configured(algorithm: str, folder: Path) -> dict[str, Any]:
    config = run_config(algorithm, folder / "run", rounds=ROUNDS)
    text = (
        config["configuration"]
        .replace("flower_support:NormNet", "mlp(hidden=[8])")
        .replace("personal_every = 5", "")
    )
    return {**config, "configuration": text.replace("evaluate_every = 5", "evaluate_every = 1")}


def simulated(config: dict[str, Any]) -> tuple[Federation, list[set[int]]]:
    """Return the federation on one machine, and for each step the clients that reply."""
    settings = deployment(config)
    task = settings.configuration.task(3)
    federation = Federation(
        build(settings.algorithm), task, RowsEngine(task), replace(schedule(settings), clock=CLOCK)
    )
    busy: set[int] = set()
    arrivals = []
    for _ in range(ROUNDS):
        record, _ = federation.step()
        still_busy = {
            client for client in federation.algorithm.state["client"].tolist() if client >= 0
        }
        arrivals.append((busy | set(record["clients"])) - still_busy)
        busy = still_busy
    return federation, arrivals


class Timed(LocalGrid):
    """A grid that delivers answers exactly in the steps of `arrivals`."""

    arrivals: list[set[int]]
    at: int = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        training = {
            message.metadata.dst_node_id
            for message in self.sent
            if message.metadata.message_type == "train"
        }
        waiting = self.arrivals[self.at] if self.at < len(self.arrivals) else set()
        for number, node in self.nodes.items():
            node.late = number in training and node.config["partition-id"] not in waiting
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            node = self.nodes[reply.metadata.src_node_id]
            if node.config["partition-id"] in waiting and reply.metadata.message_type == "train":
                waiting.discard(node.config["partition-id"])
                if not waiting:
                    self.at += 1
        return replies


@pytest.mark.parametrize(
    "algorithm", ["fedbuff(fedprox, k=2)", "fedasync(fedavg)", "fedmr_async(k=2)"]
)
def test_replies_are_taken_as_they_arrive_with_the_figures_of_the_same_arrivals(
    algorithm: str, tmp_path: Path
) -> None:
    config = configured(algorithm, tmp_path)
    expected, arrivals = simulated(config)
    assert any(len(step) < 3 for step in arrivals)
    grid = Timed(nodes(CLIENTS, tmp_path), config)
    grid.arrivals = [set(step) for step in arrivals]
    federation = flower(config, grid)
    federation.run()
    torch.testing.assert_close(federation.model(), expected.model(), rtol=0, atol=1e-5)
    assert grid.at == ROUNDS
    for record, simulated_record in zip(federation.history, expected.history, strict=True):
        for name in ("clients", "bytes_down", "faults"):
            assert record[name] == simulated_record[name], name
        assert record["accuracy"] == pytest.approx(simulated_record["accuracy"])
        assert "simulated_seconds" not in record
    # The bytes of a reply count in the round of its arrival.
    size = expected.history[0]["bytes_up"] // 3
    assert [record["bytes_up"] for record in federation.history] == [
        size * len(step) for step in arrivals
    ]


def test_a_site_that_fails_is_asked_again_while_others_go_on(tmp_path: Path) -> None:
    config = configured("fedbuff(fedavg, k=2)", tmp_path)
    config["configuration"] = config["configuration"].replace(
        "participation = 0.5", "participation = 1.0"
    )
    grid = LocalGrid(nodes(CLIENTS, tmp_path), config)
    federation = flower(config, grid)
    absent = next(node for node in grid.nodes.values() if node.config["partition-id"] == 5)
    absent.online = False
    for number in range(1, 4):
        record, _ = federation.step()
        assert record["faults"] == [{"client": 5, "reason": "the site is not connected"}]
        assert record["bytes_up"] > 0
        assert federation.finished == number
    absent.online = True
    records = [federation.step()[0] for _ in range(4)]
    assert not any(record["faults"] for record in records)
    assert absent.trained, "it was asked again"
    assert float(federation.algorithm.state["version"]) == 7
