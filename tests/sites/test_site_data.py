"""A site loads its data and proves the shortcuts of its engine once for each deployment; changes
and new deployments repeat both.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.data.dataset import make_dataset
from fedloom.engines import proof
from fedloom.rounds.federation import Federation
from fedloom.runs.configuration import Configuration
from fedloom.sites.agreement import deployment
from fedloom.sites.site import Site
from fedloom.sites.site_data import DataAgreement
from flower_support import CLIENTS, LocalGrid, flower, nodes, run_config
from server_support import give_data, own_task

ROUNDS = 4


class Counts:
    """Counts the loads of data by source, and the proofs of shortcuts."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.loads: Counter[str] = Counter()
        self.proofs = 0
        load, make, compare = DataAgreement.dataset, Configuration.task, proof._compared

        def loading(agreement: DataAgreement, source: str, configuration: Configuration) -> Any:
            self.loads[source] += 1
            return load(agreement, source, configuration)

        def making(configuration: Configuration, *arguments: Any, **options: Any) -> Any:
            self.loads["simulated"] += 1
            return make(configuration, *arguments, **options)

        def comparing(*arguments: Any) -> Any:
            self.proofs += 1
            return compare(*arguments)

        patch.setattr(DataAgreement, "dataset", loading)
        patch.setattr(Configuration, "task", making)
        patch.setattr(proof, "_compared", comparing)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


def federation(folder: Path, learning_rate: float = 0.05) -> dict[str, Any]:
    """Return the run configuration of a federation that trains and evaluates all sites in every
    round.
    """
    config = run_config("fedper", folder / "run", rounds=ROUNDS)
    text = config["configuration"].replace("participation = 0.5", "participation = 1.0")
    text = text.replace("personal_every = 5", "personal_every = 1")
    text = text.replace("learning_rate = 0.05", f"learning_rate = {learning_rate}")
    return {**config, "configuration": f"# {folder}\n{text}"}  # no other test has this text


def own_sites(config: dict[str, Any], folder: Path) -> LocalGrid:
    """Return sites with their data and memory in `folder`."""
    grid = LocalGrid(nodes(CLIENTS, folder), config)
    give_data(grid, own_task(deployment(config)), folder)
    return grid


def test_sites_with_data_of_their_own_load_and_prove_once(counts: Counts, tmp_path: Path) -> None:
    config = federation(tmp_path)
    grid = own_sites(config, tmp_path)
    flower(config, grid).run()
    counts.loads.pop("simulated")  # loaded by the server
    assert counts.loads == {str(tmp_path / f"{number}.npz"): 1 for number in range(CLIENTS)}
    assert counts.proofs == CLIENTS
    kinds = Counter(message.metadata.message_type for message in grid.sent)
    assert kinds["train"] == ROUNDS * CLIENTS
    assert kinds["evaluate"] == ROUNDS * CLIENTS


def test_sites_that_share_the_configurations_data_load_and_prove_once(
    counts: Counts, tmp_path: Path
) -> None:
    config = federation(tmp_path)
    flower(config, LocalGrid(nodes(CLIENTS, tmp_path), config)).run()
    assert counts.loads == {"simulated": 2}, "by the server and by the sites"
    assert counts.proofs == 1


def test_federations_that_take_turns_in_a_process_do_not_mix(
    counts: Counts, tmp_path: Path
) -> None:
    def begun(name: str, learning_rate: float) -> Federation:
        folder = tmp_path / name
        folder.mkdir()
        config = federation(folder, learning_rate)
        return flower(config, own_sites(config, folder))

    together = [begun("slow", 0.05), begun("fast", 0.2)]
    for _ in range(ROUNDS):
        for running in together:
            running.step()
    slow, fast = (running.model() for running in together)
    for model, name, learning_rate in ((slow, "slow alone", 0.05), (fast, "fast alone", 0.2)):
        alone = begun(name, learning_rate)
        alone.run()
        assert torch.equal(alone.model(), model)
    assert not torch.equal(slow, fast)
    assert counts.loads.pop("simulated") == 4
    assert set(counts.loads.values()) == {1}


def site_0(folder: Path, data: Path) -> tuple[Site, dict[str, Any]]:
    """Return site 0 with its data file, and the fields of a message to it."""
    node_config = {
        "partition-id": 0,
        "num-partitions": CLIENTS,
        "memory": str(folder),
        "data": str(data),
    }
    words = {"data": DataAgreement.of(make_dataset("digits")).words()}
    return Site.of(federation(folder), node_config), words


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_changed_data_are_loaded_again(kind: str, counts: Counts, tmp_path: Path) -> None:
    data = tmp_path / "data.npz" if kind == "file" else tmp_path / "data"

    def write(count: int) -> None:
        inputs, labels = np.zeros((count, 1, 8, 8), np.float32), np.arange(count) % 10
        if kind == "file":
            np.savez(data, inputs=inputs, labels=labels)
            return
        data.mkdir(exist_ok=True)
        np.save(data / "inputs.npy", inputs)
        np.save(data / "labels.npy", labels)

    for count in (20, 30):
        write(count)
        for _ in range(2):
            site, words = site_0(tmp_path, data)
            task = site.state.task(words, 0)
            assert len(task.train) == count
    assert counts.loads == {str(data): 2}


def test_no_message_sees_the_changes_of_another(tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).random((20, 1, 8, 8), dtype=np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=np.arange(20) % 10)
    site, words = site_0(tmp_path, tmp_path / "data.npz")
    task = site.state.task(words, 0)
    expected, integers = task.initial.clone(), task.initial_integers.clone()
    task.initial.zero_()
    for tensor in task.model.state_dict().values():
        tensor.add_(1)
    repeated = site.state.task(words, 2)
    assert torch.equal(repeated.initial, expected)
    assert torch.equal(repeated.initial_integers, integers)
    assert repeated.partition.sizes[2] == len(task.train) - len(repeated.local_test[2])
