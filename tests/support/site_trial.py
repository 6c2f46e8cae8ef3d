"""A federation over the sites of a deployment, and its simulation on one machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Answer, Fault, Job
from fedloom.rounds.federation import Federation
from fedloom.sites.template import write_app
from fedloom.state.tensors import read_tensors
from fedloom.task import Task
from superlink_support import Deployment

PATIENCE = 600
"""Seconds for work of one minute on an idle machine: no test depends on time."""


def owner_settings(folder: Path, site: int) -> dict[str, str | int]:
    """Return the settings of a site's owner.

    They name the folder of the memory and, for exchanges, the site's key and the keys of the
    others.
    """
    keys = folder / "keys" / f"site-{site}"
    return {
        "memory": str(folder / f"memory-{site}"),
        "identity": str(keys / "site.key"),
        "peers": str(keys / "peers.pub"),
        "choices": "rehearsed",
    }


class Trial:
    """An app that trains the example's task by `algorithm`, and its simulation.

    The app runs in a deployment; the simulation has the same configuration. `name` is the name of
    the app and of its output; `overrides` change the task.
    """

    def __init__(
        self, deployment: Deployment, name: str, algorithm: str, rounds: int, *overrides: str
    ) -> None:
        self.deployment = deployment
        self.app, self.output = deployment.folder / name, deployment.folder / "runs" / name
        changes = [
            f"algorithm={algorithm}",
            f"rounds={rounds}",
            f"data.clients={deployment.count}",
            "checkpoint_every=1",
            *overrides,
        ]
        self.configuration = write_app(self.app, overrides=changes)

    def start(self) -> int:
        self._asked = [self._trainings(site) for site in range(self.deployment.count)]
        return self.deployment.run(self.app, output=str(self.output))

    def rounds(self) -> list[dict[str, Any]]:
        """Return the records of the finished rounds."""
        metrics = self.output / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def absent(self) -> dict[int, list[int]]:
        """Return the sites without an answer, by round."""
        return {
            row["round"]: [fault["client"] for fault in row["faults"]]
            for row in self.rounds()
            if row["faults"]
        }

    def wait_for_round(self, number: int) -> None:
        self.deployment.wait_until(
            lambda: len(self.rounds()) >= number, PATIENCE, f"round {number} to end"
        )

    def wait_for_work(self, site: int, number: int) -> None:
        """Wait until a site has received its work of a round.

        The site must have received a train message in every round before.
        """
        count = self._asked[site] + number
        self.deployment.wait_until(
            lambda: self._trainings(site) >= count, PATIENCE, f"round {number} at site {site}"
        )

    def _trainings(self, site: int) -> int:
        """Return the number of train messages to a site, in this run and before."""
        return (
            (self.deployment.folder / f"site-{site}.log")
            .read_text()
            .count("Receiving: train message")
        )

    def wait(self, run: int) -> None:
        """Wait until a run has ended without an error."""
        status = self.deployment.wait_for_run(run, PATIENCE, sign=self.output / "result.json")
        assert status == "finished:completed", self.deployment.logs()

    def model(self) -> dict[str, Tensor]:
        return read_tensors(self.output / "model.safetensors")[0]

    def simulated(self, absent: Mapping[int, Sequence[int]] | None = None) -> Federation:
        """Simulate the federation on one machine, with clients absent in some rounds."""
        task = self.configuration.task(self.configuration.seed)
        method = build(str(self.configuration.algorithm))
        federation = Federation(
            method, task, Absences(task, absent or {}), self.configuration.schedule
        )
        federation.run()
        return federation

    def require_same(self, expected: Federation) -> None:
        """Assert that the run's global model (to the last bit) and counted bytes equal
        `expected`.
        """
        module = expected.task.module(expected.model())
        state = self.model()
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=0)
        counted = [(row["bytes_down"], row["bytes_up"], row["clients"]) for row in self.rounds()]
        assert counted == [
            (row["bytes_down"], row["bytes_up"], row["clients"]) for row in expected.history
        ]


class Absences(RowsEngine):
    """The rows engine, with clients that are absent in some rounds."""

    def __init__(self, task: Task, absent: Mapping[int, Sequence[int]]) -> None:
        super().__init__(task)
        self.absent = absent

    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> Iterator[Answer | Fault]:
        gone = self.absent.get(round.number, [])
        yield from super().train(
            pipeline, round, [task for task in jobs if task.client not in gone]
        )
        gone_before = self.absent.get(round.number - 1, [])  # they receive no message
        for job in jobs:
            if job.client in gone:
                yield Fault(job, "absent", sent=job.client not in gone_before)
