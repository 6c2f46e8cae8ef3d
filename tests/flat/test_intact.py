"""Models and losses that modify their arguments in place do not change the data set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedloom as fl
from fedloom.common.errors import InvalidValue
from fedloom.data.dataset import Dataset, Samples
from fedloom.flat.intact import IntactInputs
from fedloom.serving.predictor import Predictor

FEATURES, CLASSES = 6, 3


class Scaled(nn.Module):
    """A linear model that scales its input, optionally in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.hidden = nn.Linear(FEATURES, 8)
            self.out = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.sub_(0.3).div_(0.4) if self.in_place else (inputs - 0.3) / 0.4
        logits: Tensor = self.out(torch.relu(self.hidden(inputs)))
        return logits


def shifted_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, (targets - 1) % CLASSES, reduction="none")


def shifting_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets.sub_(1).remainder_(CLASSES), reduction="none")


def data() -> Dataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(90, FEATURES, generator=generator)
    labels = inputs[:, :CLASSES].argmax(1)
    return Dataset("own", Samples(inputs[:60], labels[:60]), Samples(inputs[60:], labels[60:]))


@pytest.mark.parametrize("engine", ["rows", "stacked"])
@pytest.mark.parametrize(
    "method", ["fedavg", "fedntd(fedavg())", "per_fedavg", "moon", "fedrod", "qfedavg", "fedasam"]
)
def test_a_model_that_changes_its_input_trains_as_one_that_does_not(
    method: str, engine: str
) -> None:
    results = []
    for in_place in (False, True):
        dataset = data()
        before = dataset.train.inputs.clone(), dataset.test.inputs.clone()
        task = fl.make_task(
            dataset, model=Scaled(in_place), clients=3, partition="iid", local_test=0.25
        )
        result = fl.run(method, task, rounds=3, participation=1.0, engine=engine, quiet=True)
        assert torch.equal(task.train.inputs, before[0])
        assert torch.equal(dataset.test.inputs, before[1])
        results.append(
            [
                {k: v for k, v in row.items() if isinstance(v, float) and "second" not in k}
                for row in result.history
            ]
        )
    for plain, changed in zip(*results, strict=True):
        assert plain == pytest.approx(changed, abs=1e-6, nan_ok=True)


def test_a_loss_that_changes_its_targets_learns_as_one_that_does_not() -> None:
    results = []
    for loss in (shifted_loss, shifting_loss):
        dataset = data()
        before = dataset.test.labels.clone()
        task = fl.make_task(
            dataset, model=Scaled(False), clients=3, partition="iid", objective=loss,
            metrics=["accuracy"],
        )  # fmt: skip
        result = fl.run("fedavg", task, rounds=3, participation=1.0, quiet=True)
        assert torch.equal(dataset.test.labels, before)
        results.append(result.history[-1]["loss"])
    assert results[0] == pytest.approx(results[1], abs=1e-6)


def test_prediction_leaves_the_callers_tensor_as_it_is() -> None:
    predictor = Predictor(Scaled(True).eval(), data().preprocessing)
    inputs = torch.randn(5, FEATURES)
    before = inputs.clone()
    predictor.predict(inputs)
    assert torch.equal(inputs, before)


def test_changes_only_in_later_calls_are_refused() -> None:
    intact, tensor = IntactInputs(), torch.ones(3)
    intact.call(torch.exp, tensor)
    with pytest.raises(InvalidValue, match=r"changes its input in place in some calls"):
        intact.call(torch.exp_, tensor)


def test_a_function_that_changes_nothing_gets_the_tensor_itself() -> None:
    intact, tensor = IntactInputs(), torch.ones(3)
    intact.call(torch.exp, tensor)
    assert intact.call(lambda given: given, tensor) is tensor
