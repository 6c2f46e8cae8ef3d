"""A real federation: SuperLink and SuperNodes as processes on loopback, with TLS and keys, started
by a user's commands.

Each message takes seconds. `make test` therefore runs one round at three sites with an exchange of
layers, which needs a dozen messages to each site in sequence. `make chaos` runs longer federations
and federations with killed machines.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.sites.keys import make_keys
from site_trial import PATIENCE, Trial, owner_settings
from superlink_support import Deployment, deployed, needs_flower, needs_processes

SITES = 3

pytestmark = [needs_flower, needs_processes]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("sites")
    with deployed(folder, SITES, lambda site: owner_settings(folder, site)) as running:
        yield running


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.minutes)])
def test_three_sites_exchange_layers_and_train_the_regression_that_one_machine_does_though_a_worker_is_killed(
    rounds: int, deployment: Deployment
) -> None:
    changes = [
        "data.name=diabetes",
        "objective=regression(kind=huber)",
        "training.learning_rate=0.02",
    ]
    trial = Trial(
        deployment, f"secure-{rounds}", "secure(fedmr, repeats=1, low=1, high=1)", rounds, *changes
    )
    run = trial.start()
    memory = deployment.folder / "memory-1"
    deployment.wait_until(
        lambda: any(memory.rglob("*.trained")), PATIENCE, "site 1 to have trained"
    )
    for worker in deployment.workers(1):  # the site starts another worker
        os.kill(worker, signal.SIGKILL)
    assert deployment.workers(0)
    status = deployment.wait_for_run(run, rounds * PATIENCE, sign=trial.output / "result.json")
    assert status == "finished:completed", deployment.logs()
    expected = trial.simulated()
    trial.require_same(expected)
    assert trial.absent() == {}
    for figure in ("rmse", "mae", "r2"):
        assert trial.rounds()[-1][figure] == pytest.approx(expected.history[-1][figure], rel=1e-6)
    assert "fedmr" in (trial.output / "report.html").read_text()
    keys = [
        path
        for site in range(SITES)
        for path in Path(deployment.folder / f"memory-{site}").rglob("*.peer")
    ]
    assert keys == [], "keys of an exchange that is over"


@pytest.mark.minutes
def test_a_site_that_dies_is_absent_until_it_is_back_with_its_memory(
    deployment: Deployment,
) -> None:
    trial = Trial(deployment, "scaffold", "scaffold", rounds=5)
    run = trial.start()
    trial.wait_for_work(1, number=2)
    deployment.kill("site-1")
    trial.wait_for_round(2)
    deployment.start_site(1, **owner_settings(deployment.folder, 1))
    trial.wait(run)
    absent = trial.absent()
    assert 2 in absent
    assert 5 not in absent, "it was not back by the last round"
    assert all(sites == [1] for sites in absent.values())
    trial.require_same(trial.simulated(absent))


def test_a_key_that_is_not_registered_is_turned_away(
    deployment: Deployment, tmp_path: Path
) -> None:
    stranger = make_keys(tmp_path, 1)
    assert "Failed to activate SuperNode" in deployment.turned_away(stranger.site(0) / "site.key")


@pytest.mark.minutes
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
