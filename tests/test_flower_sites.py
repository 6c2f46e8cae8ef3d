"""A real federation: SuperLink and SuperNodes as processes on loopback, with TLS and keys, started as a user starts them.

A round takes about ten seconds there, whatever it does, so one federation of three sites and three rounds always runs; those
whose machines are killed run with FEDLOOM_ALL_PLACES=1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, build
from fedloom.deploy.template import write_app
from fedloom.engines.base import Fault, Order, Reply
from fedloom.engines.local import RowsEngine
from fedloom.federation import Federation
from fedloom.files import read_tensors
from fedloom.round import Round
from fedloom.task import Task
from superlink_support import Deployment, deployed, needs_flower, needs_processes

SITES = 3

PATIENCE = 600
"""Seconds for what takes one minute where nothing else runs: no test is about time."""

slow = pytest.mark.skipif(
    os.environ.get("FEDLOOM_ALL_PLACES") != "1", reason="takes minutes: set FEDLOOM_ALL_PLACES=1 to run it"
)

pytestmark = [needs_flower, needs_processes]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("sites")
    with deployed(folder, SITES, lambda site: {"memory": str(folder / f"memory-{site}")}) as found:
        yield found


class Trial:
    """An app in a deployment: what its run writes, and what the same configuration gives on one machine."""

    def __init__(self, deployment: Deployment, name: str, algorithm: str, rounds: int) -> None:
        self.deployment = deployment
        self.app, self.output = deployment.folder / name, deployment.folder / "runs" / name
        changes = [f"algorithm={algorithm}", f"rounds={rounds}", f"data.clients={SITES}", "checkpoint_every=1"]
        self.configuration = write_app(self.app, overrides=changes).configuration

    def start(self) -> int:
        self._asked = [self._trainings(site) for site in range(SITES)]
        return self.deployment.run(self.app, output=str(self.output))

    def rounds(self) -> list[dict[str, Any]]:
        """The figures of the rounds that have ended."""
        metrics = self.output / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def absent(self) -> dict[int, list[int]]:
        """By round, the sites that did not answer."""
        return {one["round"]: [fault["client"] for fault in one["faults"]] for one in self.rounds() if one["faults"]}

    def wait_for_round(self, number: int) -> None:
        self.deployment.wait_until(lambda: len(self.rounds()) >= number, PATIENCE, f"round {number} to end")

    def wait_for_work(self, site: int, number: int) -> None:
        """Wait until a site has been sent its work of a round, where it has been asked to train in all rounds before."""
        wanted = self._asked[site] + number
        self.deployment.wait_until(lambda: self._trainings(site) >= wanted, PATIENCE, f"round {number} at site {site}")

    def _trainings(self, site: int) -> int:
        """How often a site has been asked to train, in this run and before."""
        return (self.deployment.folder / f"site-{site}.log").read_text().count("Receiving: train message")

    def wait(self, run: int) -> None:
        """Wait until a run has ended well."""
        status = self.deployment.wait_for_run(run, PATIENCE, sign=self.output / "result.json")
        assert status == "finished:completed", self.deployment.logs()

    def model(self) -> dict[str, Tensor]:
        return read_tensors(self.output / "model.safetensors")[0]

    def simulated(self, absent: dict[int, list[int]] | None = None) -> Federation:
        """The federation on one machine, where in some rounds some clients are absent."""
        task = self.configuration.task(self.configuration.seed)
        method = build(str(self.configuration.algorithm))
        federation = Federation(method, task, Absences(task, absent or {}), self.configuration.schedule)
        federation.run()
        return federation

    def require_same(self, expected: Federation) -> None:
        """The run's global model and the bytes it counted are those of `expected`."""
        module = expected.task.module(expected.algorithm.model())
        found = self.model()
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
        counted = [(one["bytes_down"], one["bytes_up"], one["clients"]) for one in self.rounds()]
        assert counted == [(one["bytes_down"], one["bytes_up"], one["clients"]) for one in expected.history]


class Absences(RowsEngine):
    """The rows engine, with clients that are absent in some rounds."""

    def __init__(self, task: Task, absent: dict[int, list[int]]) -> None:
        super().__init__(task)
        self.absent = absent

    def train(self, algorithm: Algorithm, round: Round, orders: Sequence[Order]) -> Iterator[Reply | Fault]:
        gone = self.absent.get(round.number, [])
        yield from super().train(algorithm, round, [order for order in orders if order.client not in gone])
        yield from (Fault(order, "absent") for order in orders if order.client in gone)


def test_three_sites_train_the_model_that_one_machine_does(deployment: Deployment) -> None:
    trial = Trial(deployment, "fedmr", "fedmr", rounds=3)
    trial.wait(trial.start())
    expected = trial.simulated()
    trial.require_same(expected)
    assert trial.absent() == {}
    accuracy = [one.get("accuracy") for one in trial.rounds()]
    assert accuracy == pytest.approx([one.get("accuracy") for one in expected.history], abs=0.01)
    page = (trial.output / "report.html").read_text()
    assert "fedmr" in page


@slow
def test_a_site_that_dies_is_absent_until_it_is_back_with_its_memory(deployment: Deployment) -> None:
    trial = Trial(deployment, "scaffold", "scaffold", rounds=5)
    run = trial.start()
    trial.wait_for_work(1, number=2)
    deployment.kill("site-1")
    trial.wait_for_round(2)
    deployment.start_site(1, memory=str(deployment.folder / "memory-1"))
    trial.wait(run)
    absent = trial.absent()
    assert 2 in absent
    assert 5 not in absent, "it was not back by the last round"
    assert all(sites == [1] for sites in absent.values())
    trial.require_same(trial.simulated(absent))


@slow
def test_a_server_that_dies_goes_on_from_its_checkpoint(deployment: Deployment) -> None:
    trial = Trial(deployment, "resumed", "fedmr", rounds=3)
    trial.start()
    trial.wait_for_work(0, number=2)
    deployment.kill("server")
    assert len(trial.rounds()) == 1
    deployment.start_server()
    deployment.wait_for_sites(SITES)
    trial.wait(trial.start())
    assert trial.absent() == {}
    trial.require_same(trial.simulated())
