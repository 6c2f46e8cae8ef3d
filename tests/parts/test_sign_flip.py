"""Sign flip: malicious clients upload the negated update.

The results are compared with the uploads of honest clients.
"""

from __future__ import annotations

import pytest
import torch

from fedloom.common.randomness import stream
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from seams.setting import small_task


def federation(expression: str, model: str = "plain", rounds: int = 1) -> Federation:
    task = small_task(model)
    made = Federation(build(expression), task, RowsEngine(task), Schedule(rounds, 1.0, seed=3))
    made.run()
    return made


def malicious(share: float) -> list[int]:
    """Return round(share N) clients, drawn from the stream of the run's seed."""
    order = torch.randperm(9, generator=stream(3, "malicious")).tolist()
    return order[: round(share * 9)]


@pytest.mark.parametrize("model", ["plain", "norm"])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_malicious_clients_upload_the_flipped_update_of_the_parameters(
    model: str, scale: float
) -> None:
    """The pool of `indep` shows each client's upload; batch-norm statistics are not changed."""
    attacked = federation(f"sign_flip(indep, share=0.4, scale={scale})", model)
    honest = federation("indep", model)
    clients = honest.history[0]["clients"]
    initial, trainable = honest.task.initial, honest.task.layout.trainable
    uploads, uploaded = honest.server_state()["pool"], attacked.server_state()["inner0.pool"]
    assert len(malicious(0.4)) == 4
    for slot, client in enumerate(clients):
        expected = uploads[slot].clone()
        if client in malicious(0.4):
            expected[:trainable] = initial[:trainable] - scale * (
                expected[:trainable] - initial[:trainable]
            )
        assert torch.allclose(uploaded[slot], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("expression", ["sign_flip({}, share=0)", "sign_flip({}, scale=-1)"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedrep", "quantised(fedavg)"])
def test_nobody_malicious_and_a_negative_flip_are_the_clean_run(
    expression: str, method: str
) -> None:
    attacked, clean = federation(expression.format(method), rounds=3), federation(method, rounds=3)
    tolerance = 0.0 if "share=0" in expression else 1e-12
    assert torch.allclose(attacked.model(), clean.model(), rtol=0, atol=tolerance)


def test_the_order_of_parts_does_not_matter() -> None:
    first = federation("robust(sparse(sign_flip(fedprox)), rule=median)", rounds=3)
    second = federation("sparse(sign_flip(robust(fedprox, rule=median)))", rounds=3)
    assert torch.equal(first.model(), second.model())
