"""A real federation that exchanges layers: SuperLink and SuperNodes as processes on loopback, with TLS and the sites' own keys.

A round is a dozen messages to each site here, one after another: one round always runs, three with FEDLOOM_ALL_PLACES=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from site_trial import PATIENCE, Trial
from superlink_support import Deployment, deployed, needs_flower, needs_processes

SITES = 3

ROUNDS = 3 if os.environ.get("FEDLOOM_ALL_PLACES") == "1" else 1

pytestmark = [needs_flower, needs_processes]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("sites")

    def settings(site: int) -> dict[str, str | int]:
        keys = folder / "keys" / f"site-{site}"
        return {
            "memory": str(folder / f"memory-{site}"),
            "identity": str(keys / "site.key"),
            "peers": str(keys / "peers.pub"),
            "choices": "rehearsed",
        }

    with deployed(folder, SITES, settings) as found:
        yield found


def test_three_sites_exchange_layers_and_train_the_model_that_one_machine_does(deployment: Deployment) -> None:
    trial = Trial(deployment, "secure", "secure(fedmr, repeats=1, low=1, high=1)", ROUNDS)
    run = trial.start()
    status = deployment.wait_for_run(run, ROUNDS * PATIENCE, sign=trial.output / "result.json")
    assert status == "finished:completed", deployment.logs()
    expected = trial.simulated()
    trial.require_same(expected)
    assert trial.absent() == {}
    kept = [path for site in range(SITES) for path in Path(deployment.folder / f"memory-{site}").rglob("*.peer")]
    assert kept == [], "keys of an exchange that is over"
