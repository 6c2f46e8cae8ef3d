"""A method gives the model and the byte counts of the rows engine over Flower.

The runs have five rounds on the digits data, and three of six clients take part in each round. The
model has batch statistics, integer buffers and dropout. Flower means the functions of its app with
messages as bytes; sites/test_real_sites.py uses real processes. `make test` runs a representative
set of methods, and `make chaos` runs the others. engines/test_conformance.py compares the other
engines.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from every_method import EVERY_METHOD
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.course import pipelines
from fedloom.rounds.federation import Federation
from fedloom.sites.agreement import Deployment, deployment
from flower_support import assert_close, flower, run_config, schedule
from secure_sites import peers

QUICK = [
    "fedavg",
    "fedmr",
    "scaffold",
    "umf(feddc)",
    "ala(fedavg, max_epochs=10)",
    "fedfomo",
    "secure(fedmr)",
    "quantised(sparse(fedavg, share=0.2), down=8)",
]
OTHERS = sorted({*EVERY_METHOD} - {*QUICK})


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        *((method, "NormNet") for method in QUICK),
        ("fedmr", "FrozenNet"),
        *(pytest.param(method, "NormNet", marks=pytest.mark.minutes) for method in OTHERS),
    ],
)
def test_sites_give_the_numbers_of_rows(algorithm: str, model: str, tmp_path: Path) -> None:
    if next(pipelines(build(algorithm))).waits:
        pytest.skip(
            "bytes and counters of batches come with another round: "
            "tests/sites/test_asynchronous.py"
        )
    # sites do not support a poll before a round
    if getattr(build(algorithm), "ask", False):
        algorithm = f"{algorithm.removesuffix(')')}, ask=false)"
    federation = over_flower(algorithm, model, tmp_path)
    # Sites count peer bytes in transit, with envelopes.
    assert_close(federation, on_rows(algorithm, model), except_for={"peer_bytes"})
    assert not any(record["faults"] for record in federation.history)
    assert federation.client_history
    assert federation.history[-1]["bytes_up"] > 0


def on_rows(algorithm: str, model: str) -> Federation:
    settings = settings_of(algorithm, model)
    task = settings.configuration.task(settings.configuration.seed)
    federation = Federation(build(algorithm), task, RowsEngine(task), schedule(settings))
    federation.run()
    return federation


def settings_of(algorithm: str, model: str) -> Deployment:
    return deployment(run_config(algorithm, Path("nowhere"), model=model))


def over_flower(algorithm: str, model: str, folder: Path) -> Federation:
    config = run_config(algorithm, folder / "run", model=model)
    federation = flower(config, peers(folder, config))
    federation.run()
    return federation
