"""A federation over Flower's messages gives the numbers of the rows engine, whatever sites and messages do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from every_method import EVERY_METHOD
from fedloom.algorithm import build
from fedloom.deploy.agreement import deployment, description, layout_digest
from fedloom.engines.flower import FlowerEngine
from fedloom.engines.flower_post import Post
from fedloom.engines.flower_sites import Sites
from fedloom.engines.local import RowsEngine
from fedloom.federation import Federation
from flower_support import LocalGrid, nodes

CLIENTS = 6

CONFIGURATION = """
algorithm = "{algorithm}"
rounds = {rounds}
participation = {participation}
evaluate_every = 5
personal_every = 5
model = "flower_support:NormNet"
seed = 3

[data]
name = "digits"
clients = 6
partition = "dirichlet(0.5)"
local_test = 0.25

[training]
learning_rate = 0.05
momentum = 0.5
steps = 2
batch_size = 8
"""

EVERYBODY = ("apple", "fedamp")


def run_config(algorithm: str, output: Path, rounds: int = 5, **more: Any) -> dict[str, Any]:
    participation = 1.0 if algorithm in EVERYBODY else 0.5
    text = CONFIGURATION.format(algorithm=algorithm, rounds=rounds, participation=participation)
    return {"configuration": text, "output": str(output), **more}


def flower(config: dict[str, Any], grid: LocalGrid) -> Federation:
    """The federation that an app runs, without its directory."""
    settings = deployment(config)
    task = settings.configuration.task(3)
    briefing = {"data": description(task.dataset)}
    same = {"fedloom": fedloom.__version__, "layout": layout_digest(task.layout)}
    sites = Sites(Post(grid, 0.01), CLIENTS, briefing, same)
    sites.wait(CLIENTS, 5)
    engine = FlowerEngine(sites, "0123456789abcdef", briefing, deadline=5)
    return Federation(build(settings.algorithm), task, engine, settings.configuration.schedule)


@pytest.mark.parametrize("algorithm", [method for method in EVERY_METHOD if not method.startswith("secure")])
def test_methods_give_the_numbers_of_the_rows_engine(algorithm: str, tmp_path: Path) -> None:
    config = run_config(algorithm, tmp_path / "run")
    found = flower(config, LocalGrid(nodes(CLIENTS, tmp_path), config))
    found.run()
    settings = deployment(config)
    task = settings.configuration.task(3)
    expected = Federation(build(algorithm), task, RowsEngine(task), settings.configuration.schedule)
    expected.run()
    assert_close(found, expected)
    assert not any(record["faults"] for record in found.history)
    assert found.client_history


def assert_close(found: Federation, expected: Federation) -> None:
    """The same model, the same figures but for the last digits, and exactly the same bytes, clients and faults."""
    torch.testing.assert_close(found.algorithm.model(), expected.algorithm.model(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.integers, expected.integers)
    for one, two in zip(found.history, expected.history, strict=True):
        floats = {name: value for name, value in two.items() if isinstance(value, float)}
        assert {name: one[name] for name in floats} == pytest.approx(floats, rel=1e-4, abs=1e-6)
        assert {n: v for n, v in one.items() if n not in floats} == {n: v for n, v in two.items() if n not in floats}
