"""Unusual models: each model trains or causes a one-line error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import fedloom as fl
from fedloom.common.errors import InvalidValue
from fedloom.data.dataset import Dataset, Samples
from fedloom.objectives.custom import build_objective


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


def run(model: nn.Module, method: str = "fedavg", **options: Any) -> Any:
    task = fl.make_task("digits", model=model, **{"clients": 4, **options})
    return fl.run(method, task, rounds=1, engine="rows", quiet=True)


def weight_normed() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return flat(torch.nn.utils.weight_norm(nn.Linear(64, 10)))


def pruned() -> nn.Module:
    layer = nn.Linear(64, 10)
    prune.l1_unstructured(layer, "weight", 0.5)
    return flat(layer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: flat(nn.LazyLinear(10)), "has no shape yet: pass a batch through it first"),
        (lambda: torch.jit.script(flat(nn.Linear(64, 10))), "compiled by TorchScript"),
        (lambda: flat(nn.Linear(64, 10, device="meta")), "device meta: load its weights first"),
        (weight_normed, "computed from its parameters, such as by torch.nn.utils.weight_norm"),
        (pruned, "computed from its parameters, such as by torch.nn.utils.weight_norm or prune"),
        (lambda: flat(nn.Linear(64, 10)).double(), r"does not accept the data, samples .*float32"),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10)),
            r"samples \[1, 8, 8\] of float32 and 10 classes: .*3 channels",
        ),
        (lambda: flat(nn.Linear(63, 10)), r"samples \[1, 8, 8\] of float32 and 10 classes"),
        (lambda: flat(nn.Linear(64, 7)), "has 7 outputs, too few for the data.*10 classes"),
    ],
)
def test_models_that_cannot_train_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InvalidValue, match=message) as error:
        run(make())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [{"clients": 4.0}, {"clients": True}, {"clients": "4"}, {"seed": 1.5}]
)
def test_numbers_of_a_task_are_whole(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="must be a whole number, not"):
        run(flat(nn.Linear(64, 10)), **options)


def test_training_needs_no_gradients_outside_but_refuses_inference_mode() -> None:
    torch.manual_seed(0)
    model = flat(nn.Linear(64, 10))
    expected = run(model).history[-1]["loss"]
    with torch.no_grad():
        assert run(model).history[-1]["loss"] == expected
    with torch.inference_mode(), pytest.raises(InvalidValue, match=r"leave the block first"):
        run(model)


class Scaled(nn.Module):
    """A linear layer and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.scale = nn.Linear(64, 10), nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.out(images.flatten(1)) * self.scale
        return logits


def test_dp_sgd_takes_parameters_without_dimensions() -> None:
    run(Scaled(), "dp_sgd(fedavg, noise=1)")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda outputs, y: (outputs[:, 0] - y).square()[1:], "1 losses for 2 samples"),
        (lambda outputs, y: (outputs - y).square().mean(1), r"compute with outputs\[:, 0\]"),
    ],
)
def test_losses_of_other_samples_are_refused(loss: Any, message: str) -> None:
    inputs = torch.randn(40, 6)
    data = Samples(inputs, inputs.sum(1))
    given = Dataset("own", data[:30], data[30:], objective=build_objective(loss))
    task = fl.make_task(given, model=nn.Linear(6, 1), clients=3, partition="iid")
    with pytest.raises(InvalidValue, match=message):
        fl.run("fedavg", task, rounds=1, engine="rows", quiet=True)


class ConvolutionalHead(nn.Module):
    """A classifier with a convolution over its complete input, or with an equal linear layer."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        head = nn.Conv2d(4, 10, 6)
        self.head: nn.Module = nn.Linear(144, 10) if linear else head
        with torch.no_grad():
            for own, other in zip(self.head.parameters(), head.parameters(), strict=True):
                own.copy_(other.view(own.shape))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images)
        logits: Tensor = self.head(features.flatten(1) if self.linear else features)
        return logits.flatten(1)


@pytest.mark.parametrize("method", ["fedas", "fedbabu", "fedrep"])
def test_a_convolution_as_classifier_trains_as_the_same_linear_layer(method: str) -> None:
    figures = []
    for linear in (False, True):
        task = fl.make_task("digits", model=ConvolutionalHead(linear), clients=4, local_test=0.25)
        result = fl.run(
            method,
            task,
            rounds=3,
            participation=1.0,
            personal_every=1,
            engine="rows",
            quiet=True,
        )
        figures.append([record["personal_loss"] for record in result.history])
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)


class Tied(nn.Module):
    """A classifier that shares its weights with the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(64, 10), nn.Linear(10, 64)
        self.head = nn.Linear(64, 10)
        self.head.weight = self.first.weight

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.first(images.flatten(1))))
        return logits


@pytest.mark.parametrize("method", ["fedper", "lg_fedavg", "fedrep", "fedbabu", "fedas", "fedgen"])
def test_layers_with_a_common_parameter_are_not_divided(method: str) -> None:
    with pytest.raises(InvalidValue, match=r"'first\.weight' and 'head\.weight' of Tied are one"):
        run(Tied(), method)


def test_wrapped_models_train_as_the_models_inside() -> None:
    torch.manual_seed(0)
    model = flat(nn.Linear(64, 10))
    expected = run(model).model.state_dict()
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        state = run(wrapped).model.state_dict()  # type: ignore[arg-type]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_training_inside_autocast_is_refused() -> None:
    model = flat(nn.Linear(64, 10))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InvalidValue, match=r"models cannot train inside torch\.autocast"),
    ):
        run(model)
