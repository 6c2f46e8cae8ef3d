"""Models with outputs that are not tensors or do not match their classifier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.common.errors import InvalidValue

HEADS = ["fedrod", "fedproto", "pfedfda", "feddbe", "fedgen"]


class Returns(nn.Module):
    """Two linear layers with modified outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.hidden, self.out = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Any:
        logits = self.out(torch.relu(self.hidden(images.flatten(1))))
        if self.kind == "scaled":
            return 5 * logits
        if self.kind == "tuple":
            return logits, logits.sum()
        if self.kind == "dictionary":
            return {"logits": logits}
        return logits


def run(method: str, kind: str, engine: str = "rows") -> list[dict[str, Any]]:
    task = fl.make_task("digits", model=Returns(kind), clients=4, local_test=0.25)
    options: dict[str, Any] = {"rounds": 2, "participation": 1.0, "engine": engine}
    history = fl.run(method, task, quiet=True, **options).history
    return [{name: row[name] for name in row if "loss" in name or "acc" in name} for row in history]


@pytest.mark.parametrize("engine", ["rows", "stacked"])
@pytest.mark.parametrize("kind", ["scaled", "tuple"])
@pytest.mark.parametrize("method", HEADS)
def test_methods_that_change_the_classifier_refuse_other_outputs(
    method: str, kind: str, engine: str
) -> None:
    with pytest.raises(
        InvalidValue, match=f"{method} needs a model that returns the outputs of"
    ) as e:
        run(method, kind, engine)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("method", HEADS)
def test_they_take_models_that_end_with_the_classifier(method: str) -> None:
    run(method, "plain")


@pytest.mark.parametrize("kind", ["tuple", "dictionary"])
@pytest.mark.parametrize("engine", ["rows", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "fedntd(fedavg)", "fedlc(fedavg)", "fedkdmr"])
def test_outputs_that_hold_a_prediction_train_as_the_prediction(
    method: str, engine: str, kind: str
) -> None:
    for plain, held in zip(run(method, "plain"), run(method, kind, engine), strict=True):
        assert held == pytest.approx(plain, abs=1e-4)
