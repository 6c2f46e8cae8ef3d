"""One method object, every place: rows, processes, stacks, Ray and Flower end with the same model and count the same bytes.

Five rounds on the digits, six clients of which three take part in each, a model with statistics, integer buffers and dropout.
Flower is its app's own functions with messages that travel as bytes; real processes are in test_flower_sites.py. A
representative set of methods runs always, all of them with FEDLOOM_ALL_PLACES=1.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from every_method import EVERY_METHOD
from fedloom.algorithm import build
from fedloom.engines.flower.deploy.agreement import Deployment, deployment
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.rounds.engine import Engine
from fedloom.rounds.federation import Federation
from fedloom.task import Task
from flower_support import assert_close, flower, run_config, schedule
from secure_sites import peers

REPRESENTATIVE = [
    "fedavg",
    "fedmr",
    "scaffold",
    "umf(feddc)",
    "ala(fedavg, max_epochs=10)",
    "fedfomo",
    "secure(fedmr)",
    "quantised(sparse(fedavg, share=0.2), down=8)",
]
METHODS = sorted({*REPRESENTATIVE, *EVERY_METHOD}) if os.environ.get("FEDLOOM_ALL_PLACES") == "1" else REPRESENTATIVE


@cache
def task(model: str) -> Task:
    settings = _settings("fedavg", model)
    return settings.configuration.task(settings.configuration.seed)


def _settings(algorithm: str, model: str) -> Deployment:
    return deployment(run_config(algorithm, Path("nowhere"), model=model))


def _in(engine: Engine, algorithm: str, model: str) -> Federation:
    federation = Federation(build(algorithm), task(model), engine, schedule(_settings(algorithm, model)))
    federation.run()
    return federation


@cache
def on_rows(algorithm: str, model: str) -> Federation:
    return _in(RowsEngine(task(model)), algorithm, model)


def _over_flower(algorithm: str, model: str, folder: Path) -> Federation:
    config = run_config(algorithm, folder / "run", model=model)
    federation = flower(config, peers(folder, config))
    federation.run()
    return federation


PLACES = [
    pytest.param("processes", marks=pytest.mark.xdist_group("processes")),
    "stacked",
    pytest.param("ray", marks=pytest.mark.xdist_group("ray")),
    "flower",
]
SHARED = {"processes": "worker_processes", "ray": "ray_actors"}


@pytest.mark.parametrize(("algorithm", "model"), [*((one, "NormNet") for one in METHODS), ("fedmr", "FrozenNet")])
@pytest.mark.parametrize("place", PLACES)
def test_every_place_gives_the_numbers_of_rows(
    place: str, algorithm: str, model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if place == "flower":
        found = _over_flower(algorithm, model, tmp_path)
    else:
        engine = request.getfixturevalue(SHARED[place]) if place in SHARED else StackedEngine(task(model))
        found = _in(engine, algorithm, model)
    expected = on_rows(algorithm, model)
    # What real sites exchange is counted as it is carried, in envelopes.
    assert_close(found, expected, apart={"peer_bytes"} if place == "flower" else set())
    assert not any(record["faults"] for record in found.history)
    assert found.client_history
    assert found.history[-1]["bytes_up"] > 0
