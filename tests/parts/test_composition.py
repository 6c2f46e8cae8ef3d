"""Every sensible nesting of methods runs, and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from every_method import EVERY_METHOD
from fedloom.common.training import Training
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from naive import World

NESTINGS = [
    "stages(fedprox(mu=0.01):1, fedmr)",
    "stages(fedavg:auto, fedmr, patience=1)",
    "stages(scaffold:1, feddc)",
    "stages(umf(fedavg):1, fedmr)",
    "stages(clusamp:1, fedmr(unit='tensor'))",
    "stages(fedmr(blend=1.0):1, stages(fedmr(blend=[[2, 1.0], [4, 0.0]]):2, indep))",
    "fedmr(local=fedprox(mu=0.01))",
    "fedmr(unit='segment', fraction=0.5, local=moon(mu=1.0), blend=0.2)",
    "clustered(fedmr)",
    "clustered(fedmr, by='size')",
    "clustered(fedmr(local=fedprox(mu=0.01)), distance='l2')",
    "clustered(stages(fedavg:1, fedmr))",
    "clustered(scaffold, by='size')",
    "clustered(fedmut)",
    "umf(fedmr)",
    "umf(fedmut)",
    "umf(feddc)",
    "umf(scaffold, alpha=0.5)",
    "umf(stages(fedavg:1, fedmr))",
    "umf(stages(fedavg:auto, fedmr, patience=1))",
    "umf(clusamp)",
    "umf(clustered(fedmr, by='size'))",
    "umf(fedmr(local=fedprox(mu=0.01)), simulate_all=true)",
    "ala(fedmr)",
    "ala(umf(fedprox(mu=0.1)))",
    "umf(ala(fedavg))",
    "ala(stages(fedavg:1, fedmr))",
    "clustered(ala(fedavg))",
    "stages(ala(fedavg):1, ditto)",
    "quantised(sparse(umf(scaffold), share=0.2), down=4)",
    "stages(lowrank(fedavg, rank=1):2, quantised(fedmr))",
]


def federation(expression: str, directory: Path | None = None, rounds: int = 4) -> Federation:
    task = World(norm=True).task()
    schedule = Schedule(rounds=rounds, participation=0.5, seed=3, evaluate_every=1)
    return Federation(build(expression), task, RowsEngine(task), schedule, directory)


@pytest.mark.parametrize("expression", NESTINGS)
def test_a_nesting_runs_and_resumes_bit_for_bit(expression: str, tmp_path: Path) -> None:
    uninterrupted = federation(expression)
    uninterrupted.run()
    halted = federation(expression, tmp_path)
    halted.step()
    halted.step()
    halted.save()
    resumed = federation(expression, tmp_path)
    assert resumed.finished == 2
    resumed.run()
    assert resumed.history == uninterrupted.history
    assert all(record["faults"] == [] for record in uninterrupted.history)
    expected, state = uninterrupted.server_state(), resumed.server_state()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    expected_memory, memory = uninterrupted.engine.memory(), resumed.engine.memory()
    assert memory.keys() == expected_memory.keys()
    assert all(torch.equal(memory[name], expected_memory[name]) for name in memory)


@pytest.mark.parametrize("expression", NESTINGS)
def test_nested_expressions_round_trip(expression: str) -> None:
    method = build(expression)
    repeated = build(str(method))
    assert repeated == method
    assert str(repeated) == str(method)


EVERY = sorted({*EVERY_METHOD, *NESTINGS})


@pytest.mark.parametrize("expression", EVERY)
def test_a_round_replaces_tensors_and_edits_none_in_place(expression: str) -> None:
    """A round replaces tensors and never edits them, so that the server can undo it at no cost."""
    task = World(norm=True, training=Training(learning_rate=0.05, batch_size=4)).task()
    schedule = Schedule(rounds=3, participation=1.0, seed=3)
    run = Federation(build(expression), task, RowsEngine(task), schedule)
    for _ in range(3):
        state = run.server_state()
        original = {name: tensor.clone() for name, tensor in state.items()}
        run.step()
        for name, tensor in original.items():
            torch.testing.assert_close(
                state[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name
            )


@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "fedprox",
        "moon",
        "clusamp",
        "fedexp",
        "fedasam",
        "fedmut",
        "indep",
        "fedmr",
        "scaffold",
        "fedgen",
    ],
)
def test_traffic_is_that_of_the_table_in_fedmr(name: str) -> None:
    """Traffic equals the table in FedMR, appendix C.1: 2K models.

    SCAFFOLD adds 2K variates and FedGen K generators. The table omits FedGen's class counts.
    """
    world = World(norm=True, sizes=(9,) * 6)
    run = world.run(build(name))
    record = run.federation.history[-1]
    count = len(record["clients"])
    layout, state = run.federation.task.layout, run.federation.server_state()
    down = up = layout.size * 8
    if name == "scaffold":
        down, up = down + layout.trainable * 8, up + layout.trainable * 8
    if name == "fedgen":
        down, up = (
            down + state["generator"].numel() * state["generator"].element_size(),
            up + world.classes * 4,
        )
    counters = run.federation.integers.numel() * 8  # counters of batch norm accompany every model
    assert (record["bytes_down"], record["bytes_up"]) == (
        count * (down + counters),
        count * (up + counters),
    )
