"""A federation over Flower's messages gives the numbers of the rows engine, for every method."""

from __future__ import annotations

from pathlib import Path

import pytest

from every_method import EVERY_METHOD
from fedloom.algorithm import build
from fedloom.deploy.agreement import deployment
from fedloom.engines.local import RowsEngine
from fedloom.federation import Federation
from flower_support import CLIENTS, LocalGrid, assert_close, flower, nodes, run_config, schedule


@pytest.mark.parametrize("algorithm", [method for method in EVERY_METHOD if not method.startswith("secure")])
def test_methods_give_the_numbers_of_the_rows_engine(algorithm: str, tmp_path: Path) -> None:
    config = run_config(algorithm, tmp_path / "run")
    found = flower(config, LocalGrid(nodes(CLIENTS, tmp_path), config))
    found.run()
    settings = deployment(config)
    task = settings.configuration.task(3)
    expected = Federation(build(algorithm), task, RowsEngine(task), schedule(settings))
    expected.run()
    assert_close(found, expected)
    assert not any(record["faults"] for record in found.history)
    assert found.client_history
