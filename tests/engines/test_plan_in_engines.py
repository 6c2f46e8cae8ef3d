"""The client half of a method receives the same plan and round in each engine."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from engine_support import CLIENTS, TASK, jobs
from fedloom.algorithm.records import Plan
from fedloom.common.round import Round
from fedloom.engines.base import LocalEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.parts.pipeline import Pipeline
from fedloom.state.pool_files import PoolFiles
from process_support import Reporting, described

PLAN = Plan(
    layout=TASK.layout,
    initial=TASK.initial,
    clients=CLIENTS,
    participants=5,
    rounds=9,
    seed=11,
    classes=TASK.dataset.classes,
    sizes=TASK.sizes,
    module=TASK.model,
    remote=True,
    poisson=True,
    pools=PoolFiles(budget=1 << 20),
    training=TASK.training,
    awaited=4,
    first_round=2,
)

ROUND = Round(
    number=3,
    rounds=9,
    seed=11,
    clients=CLIENTS,
    participants=5,
    learning_rate=0.2,
    initial_learning_rate=0.4,
    rate_change=0.5,
    selected=tuple(range(CLIENTS)),
    poisson=True,
    closes=7.5,
)


def seen_by_clients(engine: LocalEngine) -> list[dict[str, dict[str, str]]]:
    """Return the plan and the round of each client in this engine."""
    engine.begin(TASK, None)
    method = Reporting()
    method.setup(replace(PLAN))
    _, work = jobs(engine)
    assert len(list(engine.train(Pipeline(method), ROUND, work))) == CLIENTS
    engine.commit()
    texts = [engine.store.read(client)["seen"] for client in range(CLIENTS)]
    return [json.loads(bytes(text.tolist())) for text in texts]


@pytest.mark.parametrize(("values", "kind"), [(PLAN, Plan), (ROUND, Round)])
def test_no_field_has_the_value_that_a_receiver_would_fill_in(values: Any, kind: Any) -> None:
    for field in fields(kind):
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if default is not MISSING:
            value = described(values)[field.name]
            assert value != described(replace(values, **{field.name: default}))[field.name], (
                field.name
            )


@pytest.mark.parametrize(
    "place",
    [
        "rows",
        "stacked",
        pytest.param("processes", marks=pytest.mark.xdist_group("processes")),
        pytest.param("ray", marks=pytest.mark.xdist_group("waiting")),
    ],
)
def test_clients_see_every_field_of_the_plan_and_of_the_round(
    place: str, request: pytest.FixtureRequest
) -> None:
    if place == "rows":
        engine: LocalEngine = RowsEngine(TASK)
    elif place == "stacked":
        engine = StackedEngine(TASK)
    else:
        engine = request.getfixturevalue(
            {"processes": "worker_processes", "ray": "ray_actors"}[place]
        )
    expected = {"plan": described(PLAN), "round": described(ROUND)}
    for seen in seen_by_clients(engine):
        assert seen == expected
