"""A method gives the same model and byte counts in each engine.

Engines: rows, processes, stacks, Ray and Flower.

The runs have five rounds on the digits data, and three of six clients take part in each round. The
model has batch statistics, integer buffers and dropout. Flower means the functions of its app with
messages as bytes; sites/test_real_sites.py uses real processes. `make test` runs a representative set
of methods, and `make chaos` runs the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from every_method import EVERY_METHOD
from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.parts.building import build
from fedloom.parts.course import pipelines
from fedloom.rounds.engine import Engine
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.sites.agreement import Deployment, deployment
from fedloom.task import Task
from fedloom.task.making import make_task
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
OTHERS = sorted({*EVERY_METHOD} - {*REPRESENTATIVE})


@cache
def task(model: str) -> Task:
    settings = _settings("fedavg", model)
    return settings.configuration.task(settings.configuration.seed)


def _settings(algorithm: str, model: str) -> Deployment:
    return deployment(run_config(algorithm, Path("nowhere"), model=model))


def _in(engine: Engine, algorithm: str, model: str) -> Federation:
    federation = Federation(
        build(algorithm), task(model), engine, schedule(_settings(algorithm, model))
    )
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


PLACES = ("processes", "stacked", "ray", "flower")
GROUPS = {"processes": "processes", "ray": "waiting"}
SHARED = {"processes": "worker_processes", "ray": "ray_actors"}


QUICK = {"ray": ("fedmr", "umf(feddc)"), "processes": ("fedmr", "umf(feddc)", "secure(fedmr)")}
"""Representative methods in `make test`. test_processes.py runs all methods on another model."""


def _cases() -> Iterator[Any]:
    methods = [*((method, "NormNet") for method in REPRESENTATIVE), ("fedmr", "FrozenNet")]
    for place in PLACES:
        for method, model in [*methods, *((method, "NormNet") for method in OTHERS)]:
            seldom = method in OTHERS or method not in QUICK.get(place, REPRESENTATIVE)
            groups = [pytest.mark.xdist_group(GROUPS[place])] if place in GROUPS else []
            yield pytest.param(
                place, method, model, marks=[pytest.mark.minutes, *groups] if seldom else groups
            )


@pytest.mark.parametrize(("place", "algorithm", "model"), [*_cases()])
def test_every_place_gives_the_numbers_of_rows(
    place: str, algorithm: str, model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if place == "flower" and next(pipelines(build(algorithm))).waits:
        pytest.skip(
            "bytes and counters of batches come with another round: "
            "tests/sites/test_asynchronous.py"
        )
    # sites do not support a poll before a round
    if place == "flower" and getattr(build(algorithm), "ask", False):
        algorithm = f"{algorithm.removesuffix(')')}, ask=false)"
    if place == "flower":
        federation = _over_flower(algorithm, model, tmp_path)
    else:
        engine = (
            request.getfixturevalue(SHARED[place])
            if place in SHARED
            else StackedEngine(task(model))
        )
        federation = _in(engine, algorithm, model)
    expected = on_rows(algorithm, model)
    # Real sites count peer bytes in transit, with envelopes.
    assert_close(federation, expected, except_for={"peer_bytes"} if place == "flower" else set())
    assert not any(record["faults"] for record in federation.history)
    assert federation.client_history
    assert federation.history[-1]["bytes_up"] > 0


WRAPPED = [
    ("quantised(private(fedavg, noise=0.5), bits=8)", "poisson"),
    ("lowrank(local_private(fedmr, noise=0.5), rank=1)", "fixed"),
    ("sparse(dp_sgd(fedbuff(fedprox, k=2), noise=0.5), share=0.2)", "fixed"),
]
"""Privacy, codes and asynchronous steps. They require a model without batch norm."""


@pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=pytest.mark.xdist_group(group)) for place, group in GROUPS.items()],
)
def test_clients_draw_the_same_noise_in_other_processes(
    place: str, request: pytest.FixtureRequest
) -> None:
    training = Training(learning_rate=0.1, batch_size=20)
    digits = make_task("digits", clients=6, model="mlp(hidden=[4])", training=training)

    def model(engine: Engine, method: str, mode: Any) -> Tensor:
        options = Schedule(rounds=2, participation=0.5, participation_mode=mode)
        federation = Federation(build(method), digits, engine, options)
        federation.run()
        assert not any(record["faults"] for record in federation.history)
        return federation.model()

    engine = request.getfixturevalue(SHARED[place])
    for method, mode in WRAPPED:
        assert torch.equal(model(engine, method, mode), model(RowsEngine(digits), method, mode))
