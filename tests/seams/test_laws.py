"""Laws for any attendance.

Sums under privacy, the releases that epsilon counts, and the influence of one client on a robust
estimate.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.parts.accounting import epsilon
from fedloom.parts.local_private import LocalPrivate
from fedloom.rounds.clock import Clock
from seams.cases import EVERYBODY, WRAPPERS, methods, pair_refusal
from seams.setting import SIZES, answered, federation, small_task

CLIP = 0.05
SAMPLINGS: dict[str, dict[str, Any]] = {
    "everybody": {"awaited": 9},
    "poisson": {"awaited": 5, "participation_mode": "poisson"},
    "everybody, dropout": {"awaited": 9, "dropout": 0.3},
    "poisson, deadline": {
        "awaited": 5,
        "participation_mode": "poisson",
        "clock": Clock(speed="stragglers(100, 10)", deadline=0.3),
    },
}


# --- privacy ---


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("inner", ["fedavg", "fedavgm(momentum=0.0)", "ala(fedavg)"])
@pytest.mark.parametrize("option", ["", ", quantile=0.5"])
def test_sums_without_one_client_differ_by_at_most_the_clip(
    sampling: str, inner: str, option: str
) -> None:
    expression = f"private({inner}, clip={CLIP}, noise=0{option})"
    everyone, recording = federation(expression, **SAMPLINGS[sampling])
    everyone.step()
    model_before = everyone.model().clone()
    everyone.step()
    present = answered(everyone, recording, 2)
    assert present
    farthest = 0.0
    for absent in present[:3]:
        fewer, _ = federation(expression, **SAMPLINGS[sampling])
        fewer.engine.lost = lambda number, client, absent=absent: (number, client) == (2, absent)  # type: ignore[attr-defined]
        fewer.step()
        torch.testing.assert_close(fewer.model(), model_before)
        clip = fewer.algorithm.bound()  # type: ignore[attr-defined]
        fewer.step()
        expected = everyone.algorithm.plan.participants
        gap = float((everyone.model() - fewer.model()).norm()) * expected
        assert gap <= clip * (1 + 1e-9)
        farthest = max(farthest, gap / clip)
    assert farthest > 0.5, "no update was clipped, so nothing was shown"


@pytest.mark.parametrize(
    "expression",
    [
        "local_private({}, clip=0.05, noise=0)",
        "quantised(local_private({}, clip=0.05, noise=0), bits=8, down=8)",
        "clustered(local_private({}, clip=0.05, noise=0), by=size)",
        "local_private(umf({}), clip=0.05, noise=0)",
        "local_private(ala({}), clip=0.05, noise=0)",
    ],
)
@pytest.mark.parametrize("inner", ["fedavg", "fedmut"])
def test_no_upload_is_farther_from_what_was_sent_than_the_clip(expression: str, inner: str) -> None:
    run, recording = federation(expression.format(inner), rounds=4)
    private = next(method for method in recording.methods if isinstance(method, LocalPrivate))
    for number in range(1, 4):
        run.step()
        for record in recording.of(number, private).values():
            assert float((record.reply["model"] - record.inbox["model"]).norm()) <= CLIP * (
                1 + 1e-9
            )


@pytest.mark.parametrize("awaited", [1, 5])
def test_epsilon_is_that_of_as_many_releases_as_rounds(awaited: int) -> None:
    """Rounds without any client also count as releases."""
    run, _ = federation(
        "private(fedavg, noise=1.0)", awaited=awaited, participation_mode="poisson", rounds=6
    )
    for number in range(1, 6):
        run.step()
        assert run.history[-1]["epsilon"] == pytest.approx(
            epsilon(1.0, awaited / 9, number, 1e-5), rel=1e-9
        )


@pytest.mark.parametrize(
    "wrapper", ["{}", "quantised({})", "clustered({}, by=size)", "robust({}, rule=median)"]
)
@pytest.mark.parametrize("attendance", [{}, {"dropout": 0.4}])
def test_epsilon_is_that_of_the_client_that_uploaded_most(
    wrapper: str, attendance: dict[str, float]
) -> None:
    """Selected clients with lost replies count, because their updates may have been seen."""
    run, _ = federation(wrapper.format("local_private(fedavg, noise=1.0)"), rounds=6, **attendance)
    counts = [0] * len(SIZES)
    for _ in range(1, 6):
        run.step()
        for client in run.history[-1]["clients"]:
            counts[client] += 1
        assert run.history[-1]["epsilon"] == pytest.approx(
            epsilon(0.5, 1.0, max(counts), 1e-5), rel=1e-9
        )


# --- evaluation ---


@pytest.mark.parametrize("method", methods())
@pytest.mark.filterwarnings("ignore:pfedme")
def test_evaluating_changes_no_model_and_serves_clients_that_never_train(method: str) -> None:
    """Evaluation in each round gives the same models as no evaluation, in different wrappers."""
    number = methods().index(method)
    wrappers = [wrapper for wrapper in WRAPPERS if not pair_refusal(method, wrapper)]
    for wrapper in ("none", wrappers[number % len(wrappers)]):
        expression = WRAPPERS[wrapper].format(method)
        everybody = any(name in expression for name in EVERYBODY)
        task = small_task("norm" if "fedbn" in method else "plain", local_test=0.3)
        models = []
        for often in ({"personal_every": 0}, {"personal_every": 1, "evaluate_every": 1}):
            options = (
                {"awaited": 9, "new_clients": 0.0}
                if everybody
                else {"awaited": 7, "new_clients": 0.25}
            )
            run, _ = federation(expression, task, rounds=2, **options, **often)
            run.step()
            run.step()
            models.append(run.model())
        assert torch.equal(*models), expression
        assert everybody or 0 <= run.history[-1]["new_client_accuracy"] <= 1


# --- robust rules ---


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum", "clipping"])
@pytest.mark.parametrize("inner", ["fedavg", "scaffold", "feddc", "fedavgm", "fedmut"])
@pytest.mark.parametrize("lie", [1e30, -1e8, 0.0])
def test_one_client_moves_what_the_server_keeps_by_a_bounded_amount(
    rule: str, inner: str, lie: float
) -> None:
    """False uploads of one client have a bounded effect on the server's state.

    All tensors of the upload are false. After three rounds, the state of the server has an effect.
    """

    def lying(number: int, client: int, reply: dict[str, Tensor]) -> dict[str, Tensor]:
        return (
            {name: torch.full_like(rows, lie) for name, rows in reply.items()}
            if client == 4
            else reply
        )

    largest = []
    for change in (None, lying):
        run, _ = federation(
            f"robust({inner}, rule={rule})", small_task("norm"), awaited=9, change=change
        )
        for _ in range(3):
            run.step()
        state = run.server_state()
        largest.append(
            max(float(tensor.double().abs().max()) for tensor in state.values() if tensor.numel())
        )
    assert largest[1] <= 2 * largest[0] + 1
