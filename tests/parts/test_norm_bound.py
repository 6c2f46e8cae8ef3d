"""Norm bound: scaling of long updates to the radius, compared with a loop over the uploads."""

from __future__ import annotations

import pytest
import torch

from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from seams.setting import small_task


def federation(expression: str, rounds: int = 1, **options: object) -> Federation:
    task = small_task("norm")
    schedule = Schedule(rounds, 1.0, seed=3, evaluate_every=1, **options)  # type: ignore[arg-type]
    made = Federation(build(expression), task, RowsEngine(task), schedule)
    made.run()
    return made


def test_updates_longer_than_the_radius_are_scaled_and_shorter_ones_stay_bit_for_bit() -> None:
    free = federation("indep")
    initial, uploads = free.task.initial, free.server_state()["pool"]
    lengths = [float((upload - initial).norm()) for upload in uploads]
    radius = sorted(lengths)[4] * 1.0001
    bounded = federation(f"norm_bound(indep, radius={radius})")
    pool = bounded.server_state()["inner0.pool"]
    assert sum(length > radius for length in lengths) == 4
    for upload, row, length in zip(uploads, pool, lengths, strict=True):
        if length > radius:
            assert torch.allclose(
                row, initial + (upload - initial) * radius / length, rtol=0, atol=1e-14
            )
        else:
            assert torch.equal(row, upload)
    assert bounded.history[0]["share_bounded"] == 4 / 9


@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold", "fedmr", "fedrep", "fedbuff(fedavg, k=3)"]
)
def test_a_large_radius_is_the_method_itself(method: str) -> None:
    inside = method.replace("fedavg, k", "norm_bound(fedavg, radius=1e9), k")
    bounded = inside if inside != method else f"norm_bound({method}, radius=1e9)"
    free = federation(method, rounds=3, dropout=0.3)
    assert torch.equal(federation(bounded, rounds=3, dropout=0.3).model(), free.model())


def test_clients_that_do_not_reply_change_nothing() -> None:
    """The slot of a client without a reply retains its download."""
    run = federation("norm_bound(indep, radius=1e-6)", dropout=0.5)
    assert run.history[0]["faults"]
    pool, initial = run.server_state()["inner0.pool"], run.task.initial
    assert float((pool - initial).norm(dim=1).max()) <= 1e-6 * (1 + 1e-9)
