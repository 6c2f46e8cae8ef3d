"""Settings of local training that are impossible or without effect are refused before the run."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from fedloom.common.errors import InvalidValue
from fedloom.common.optimizers import OptimizerName
from fedloom.common.training import Training


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adam", "momentum": 0.9}, "adam has no momentum"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "rprop has no weight_decay"),
        (
            {"optimizer": "adam", "optimizer_options": {"beta": [0.9, 0.99]}},
            "optimizer_options: adam has no option 'beta': did you mean 'betas'? (it has: "
            "betas, eps, amsgrad",
        ),
        (
            {"optimizer": "adam", "optimizer_options": {"betas": [2, 3]}},
            "adam refuses {'betas': [2, 3]}: Invalid beta",
        ),
        (
            {"optimizer": "adam", "optimizer_options": {"betas": [0.9]}},
            "adam refuses {'betas': [0.9]}",
        ),
        ({"optimizer": "adam", "optimizer_options": {"betas": 0.9}}, "adam refuses {'betas': 0.9}"),
        (
            {"optimizer": "adam", "optimizer_options": {"betas": [0.9, math.nan]}},
            "adam refuses {'betas': [0.9, nan]}: Invalid beta",
        ),
        (
            {"optimizer": "adam", "optimizer_options": {"eps": math.inf}},
            "eps must be finite and neither true nor false, not inf",
        ),
        (
            {"optimizer": "adam", "optimizer_options": {"eps": "small"}},
            "adam refuses {'eps': 'small'}",
        ),
        (
            {"optimizer": "adam", "optimizer_options": {"amsgrad": "no"}},
            "amsgrad must be true or false, not 'no'",
        ),
        ({"optimizer": "adam", "optimizer_options": {"lr": 1.0}}, "adam has no option 'lr'"),
        (
            {"optimizer": "adam", "optimizer_options": {"maximize": True}},
            "adam has no option 'maximize'",
        ),
        ({"optimizer_options": {"nesterov": True}}, "Nesterov momentum requires a momentum"),
        (
            {"momentum": 0.9, "optimizer_options": {"nesterov": True, "dampening": 0.5}},
            "Nesterov momentum requires a momentum and zero dampening",
        ),
        (
            {"momentum": 0.9, "optimizer_options": {"nesterov": 1}},
            "nesterov must be true or false, not 1",
        ),
        (
            {"optimizer": "rprop", "optimizer_options": {"etas": [0.5]}},
            "rprop refuses {'etas': [0.5]}",
        ),
        ({"learning_rate": math.inf}, "learning_rate must be"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"weight_decay": math.inf}, "weight_decay must be"),
        ({"weight_decay": 1e300}, "weight_decay must be"),
    ],
)
def test_settings_that_fail_or_do_nothing_are_refused_in_one_line(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        Training(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("sgd", {"nesterov": True}),
        ("sgd", {"dampening": 0.3}),
        ("adam", {"betas": [0.8, 0.9], "amsgrad": True}),
        ("nadam", {"momentum_decay": 0.01}),
        ("rmsprop", {"centered": True, "alpha": 0.9}),
        ("adagrad", {"initial_accumulator_value": 0.1}),
        ("rprop", {"etas": [0.4, 1.3]}),
    ],
)
def test_the_optimizers_own_options_are_taken(
    optimizer: OptimizerName, options: dict[str, Any]
) -> None:
    momentum = 0.5 if optimizer in ("sgd", "rmsprop") else 0.0
    settings = Training(optimizer=optimizer, momentum=momentum, optimizer_options=options)
    built = settings.torch_optimizer([torch.nn.Parameter(torch.ones(2))], 0.3)
    assert type(built).__name__.lower() == optimizer
    for name, value in {
        **options,
        "lr": 0.3,
        **({"momentum": momentum} if momentum else {}),
    }.items():
        default = built.defaults[name]
        assert (list(default) if isinstance(default, tuple) else default) == value


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_no_optimizer_decays_weights_unless_it_is_told_to(optimizer: OptimizerName) -> None:
    """Weight decay is 0 by default, also for AdamW, although torch has another default."""
    built = Training(optimizer=optimizer).torch_optimizer([torch.nn.Parameter(torch.ones(2))], 0.3)
    assert built.defaults.get("weight_decay", 0) == 0
