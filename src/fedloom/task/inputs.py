"""The data set, the initial model and the settings that the arguments of `make_task` name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedloom.common.errors import InvalidValue, quoted
from fedloom.common.registry import RegistryEntry
from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, DataSpec, make_dataset
from fedloom.data.lazy import LazyInputs
from fedloom.flat.layout import require_copyable
from fedloom.models.build import build_model
from fedloom.models.structure import copied, unwrapped
from fedloom.objectives import Objective
from fedloom.objectives.custom import build_objective
from fedloom.objectives.metrics import build_metrics


def dataset_of(
    data: Any,
    target: str,
    group: str,
    objective: str | Objective | Callable[..., Any] | None,
    metrics: Sequence[str | Callable[..., Any]],
    **options: Any,
) -> Dataset:
    """Return the data set of a name or of the user's data.

    Args:
        data: Name of a data set, or data.
        target: Column of a table to learn.
        group: Column of a table that names the owner of each row.
        objective: Objective in place of the data's objective.
        metrics: Figures that are recorded beside the objective's.
        options: Further roles of a table's columns.

    Returns:
        The data set with its objective and metrics.

    Raises:
        InvalidValue: `target`, `group` or an option is given with a name or a `Dataset`, or an
            objective or a metric does not fit.
    """
    loss = None if objective is None else build_objective(objective, metrics)
    if not isinstance(data, str | Dataset):
        # with Arrow, which takes a while to load
        from fedloom.data.sets.foreign import foreign_dataset

        dataset = foreign_dataset(data, target, group, loss, **options)
    elif target or group or options:
        given = " and ".join(["target and group", *options])
        raise InvalidValue(
            f"{given} name columns of a table: in the name of a data set, as table(target=...)"
        )
    else:
        dataset = make_dataset(data) if isinstance(data, str) else data
    if loss is not None:
        dataset = replace(dataset, objective=loss)
    if not metrics:
        return dataset
    figures = build_metrics(metrics, dataset.objective, dataset.spec.outputs)
    return replace(dataset, metrics=figures)


def with_float_inputs(dataset: Dataset) -> Dataset:
    """Return the data set with whole numbers as float32, unless they are tokens of a vocabulary."""
    if isinstance(dataset.train.inputs, LazyInputs) or dataset.train.inputs.dtype != torch.int64:
        return dataset
    train, test = (
        replace(samples, inputs=samples.inputs.to(torch.float32))
        for samples in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test)


def training_of(options: Mapping[str, Any]) -> Training:
    """Return the settings of local training with these fields."""
    if not isinstance(options, Mapping):
        raise InvalidValue(
            f"training must be a Training or a dictionary of its fields, not {quoted(options)}"
        )
    return Training(**RegistryEntry("training", Training).options((), {**options}))


def initial_module(
    model: str | nn.Module | Callable[..., nn.Module], spec: DataSpec, seed: int
) -> nn.Module:
    """Return a copy of the user's module, or a new module with weights drawn by the seed.

    Args:
        model: A module, the expression of a model, or a function or class that makes a module.
        spec: Shape of the inputs and number of outputs, for models that are made here.
        seed: Draws the initial weights. A module has its weights already, so it ignores the seed.

    Returns:
        A module that shares no tensor with the argument.
    """
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        require_copyable(model)
        return copied(model)
    return unwrapped(build_model(model, spec, seed))
