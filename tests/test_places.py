"""One method object, every place: rows, processes, stacks, Ray and Flower end with the same model and count the same bytes.

Five rounds on the digits, six clients of which three take part in each, a model with statistics, integer buffers and dropout.
Flower is its app's own functions with messages that travel as bytes; real processes are in test_flower_sites.py. A
representative set of methods runs always, all of them with FEDLOOM_ALL_PLACES=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import pytest

from every_method import EVERY_METHOD
from fedloom.algorithm import build
from fedloom.engines.base import Engine
from fedloom.engines.flower.deploy.agreement import Deployment, deployment
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.rounds.federation import Federation
from fedloom.task import Task
from flower_support import assert_close, flower, run_config, schedule
from secure_sites import peers

REPRESENTATIVE = ["fedavg", "fedmr", "scaffold", "umf(feddc)", "ala(fedavg, max_epochs=10)", "fedfomo", "secure(fedmr)"]
METHODS = sorted({*REPRESENTATIVE, *EVERY_METHOD}) if os.environ.get("FEDLOOM_ALL_PLACES") == "1" else REPRESENTATIVE


@cache
def task() -> Task:
    settings = _settings("fedavg")
    return settings.configuration.task(settings.configuration.seed)


def _settings(algorithm: str) -> Deployment:
    return deployment(run_config(algorithm, Path("nowhere")))


def _in(engine: Engine, algorithm: str) -> Federation:
    federation = Federation(build(algorithm), task(), engine, schedule(_settings(algorithm)))
    federation.run()
    return federation


@cache
def on_rows(algorithm: str) -> Federation:
    return _in(RowsEngine(task()), algorithm)


class Places:
    """Engines that are started where a test first asks for them, and serve all that follow."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.started: dict[str, Engine] = {}

    def run(self, place: str, algorithm: str) -> Federation:
        if place == "flower":
            return self._over_flower(algorithm)
        if place not in self.started:
            self.started[place] = self.stack.enter_context(closing(ENGINES[place](task())))
        return _in(self.started[place], algorithm)

    def _over_flower(self, algorithm: str) -> Federation:
        folder = self.folder / "".join(letter if letter.isalnum() else "-" for letter in algorithm)
        config = run_config(algorithm, folder / "run")
        federation = flower(config, peers(folder, config))
        federation.run()
        return federation


def _ray(task: Task) -> Engine:
    pytest.importorskip("ray", reason="Ray is not installed")
    from fedloom.engines.ray.driver import RayEngine

    return RayEngine(task, workers=2)


ENGINES: dict[str, Callable[[Task], Engine]] = {"processes": ProcessesEngine, "stacked": StackedEngine, "ray": _ray}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    with ExitStack() as stack:
        yield Places(tmp_path_factory.mktemp("places"), stack)


@pytest.mark.parametrize("algorithm", METHODS)
@pytest.mark.parametrize("place", [*ENGINES, "flower"])
def test_every_place_gives_the_numbers_of_rows(places: Places, place: str, algorithm: str) -> None:
    found, expected = places.run(place, algorithm), on_rows(algorithm)
    # What real sites exchange is counted as it is carried, in envelopes.
    assert_close(found, expected, apart={"peer_bytes"} if place == "flower" else set())
    assert not any(record["faults"] for record in found.history)
    assert found.client_history
    assert found.history[-1]["bytes_up"] > 0
