"""Trajectories of one client's models under several methods in one plane.

The tests compare them with the saved models.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import fedloom as fl
from fedloom.cli import main
from fedloom.data.partition import Partition
from fedloom.report.contents import image_figures
from fedloom.runs.config_file import configuration
from fedloom.runs.directory import read_json, write_json
from fedloom.study.comparison import Comparison
from fedloom.study.comparison_result import read_comparison

PLACES = {"fedavg": "fedavg", "ala(fedavg)": "ala-fedavg"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ways")
    job = {
        "name": "ways", "directory": str(folder), "algorithms": list(PLACES), "rounds": 3, "participation": 1.0,
        "record": ["trajectory(client=1, grid=3)"], "model": "logistic", "threads": 1,
        "data": {"clients": 4, "partition": "dirichlet(0.5)"},
    }  # fmt: skip
    assert Comparison.of(configuration(job)).run(lambda event: None) == {}
    return folder


def models(folder: Path) -> torch.Tensor:
    """Load all models of the client, method by method and round by round."""
    files = [
        folder / method_folder / f"seed-0/recorded/round-{number:07d}.safetensors"
        for method_folder in PLACES.values()
        for number in (1, 2, 3)
    ]
    return torch.stack([load_file(file)["trajectory of client 1/model"].double() for file in files])


def test_the_plane_is_that_of_all_models_and_the_surface_the_clients_loss(folder: Path) -> None:
    (trajectory,) = json.loads((folder / "trajectories.json").read_text())["trajectories"]
    assert (trajectory["client"], trajectory["seed"], list(trajectory["methods"])) == (
        1,
        0,
        list(PLACES),
    )
    rows = models(folder)
    centre = rows.mean(0)
    left_vectors, singular, axes = np.linalg.svd((rows - centre).numpy(), full_matrices=False)
    points = np.array(
        [point for method in PLACES for point in trajectory["methods"][method]["points"]]
    )
    assert np.abs(points) == pytest.approx(np.abs(left_vectors[:, :2] * singular[:2]), abs=1e-6)
    assert trajectory["explained"] == pytest.approx(singular[:2] ** 2 / np.sum(singular**2))

    signs = np.sign((points * left_vectors[:, :2]).sum(0))
    point = centre + torch.from_numpy(
        trajectory["x"][2] * signs[0] * axes[0] + trajectory["y"][0] * signs[1] * axes[1]
    )
    task = fl.make_task("digits", clients=4, partition="dirichlet(0.5)", model="logistic")
    mine = Partition.load(folder / "fedavg/seed-0/split.npz")[1]
    inputs, labels = task.train.inputs[mine].flatten(1).double(), task.train.labels[mine]
    weight, bias = point[:640].view(10, 64), point[640:]
    assert trajectory["surface"][0][2] == pytest.approx(
        F.cross_entropy(inputs @ weight.T + bias, labels).item(), rel=1e-5
    )


def test_the_page_draws_both_trajectories_once_also_when_rewritten(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert '<div id="trajectories-1"' in page
    assert '<div id="trajectory-1-' not in page
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text() == page
    drawn = {
        slot.name: slot
        for slot in image_figures(
            [run.labelled for run in read_comparison(folder).with_trajectories()]
        )
    }
    named = [trace.name for trace in drawn["trajectories-1"].variants[""].data if trace.name]
    assert named == list(PLACES)


def test_trajectories_of_other_runs_are_not_shown(folder: Path) -> None:
    file = folder / "trajectories.json"
    original = file.read_text()
    write_json(file, read_json(file, dict) | {"of": "others"})
    try:
        shown = read_comparison(folder).with_trajectories()
    finally:
        file.write_text(original)
    assert not any(
        entry["kind"] == "trajectories" for run in shown for entry in run.summary.recorded
    )
