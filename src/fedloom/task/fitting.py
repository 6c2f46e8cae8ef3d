"""Fit data to a task: preprocessing, types and label noise."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fedloom.data.columns import Moments, TableInputs
from fedloom.data.convert import require_finite
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.lazy import LazyInputs
from fedloom.data.noise import LabelNoise
from fedloom.objectives.regression import Regression, Standardised
from fedloom.task import Task


def fitted(
    dataset: Dataset, pool: Samples, test: Samples, rows: Tensor
) -> tuple[Dataset, Samples, Samples]:
    """Fit the preprocessing to the `rows` of `pool` that clients train on; apply it everywhere.

    Args:
        dataset: The data set. Only encodings of tables and standardised targets are fitted.
        pool: Samples of the clients, n of them.
        test: Samples of the global test set.
        rows: Indices in `pool` of the training samples, `[t]`. None of the other samples changes
            the fit.

    Returns:
        The data set with its fitted encoding and objective, then `pool` and `test` in the units of
        the fit.
    """
    encoding = dataset.encoding
    objective = dataset.objective
    if isinstance(encoding, TableInputs):
        if not encoding.is_fitted and len(rows):
            encoding = encoding.fitted(Moments.of(pool.inputs[rows]))
        dataset = replace(dataset, encoding=encoding)
        if encoding.is_fitted:
            pool, test = (
                replace(samples, inputs=encoding.scaled(samples.inputs)) for samples in (pool, test)
            )
    if type(objective) is Regression and dataset.standardise and len(rows):
        moments = Moments.of(pool.labels[rows].reshape(len(rows), -1))
        mean, deviation = (tuple(values.tolist()) for values in (moments.mean, moments.deviation))
        scaled = Standardised(objective.kind, objective.delta, mean, deviation)
        pool, test = (
            replace(samples, labels=scaled.standardised(samples.labels)) for samples in (pool, test)
        )
        dataset = replace(dataset, objective=scaled)
    return dataset, pool, test


def in_type_of(model: nn.Module, samples: Samples) -> Samples:
    """Return the samples with float64 inputs converted to a type of the model's parameters.

    Args:
        model: The model; its parameters may have several types.
        samples: Samples with inputs `[n, ...]`. Lazy inputs and integers stay unchanged.

    Returns:
        The samples, with the type of the model's first floating-point parameter if no parameter has
        float64.

    Raises:
        InvalidValue: An input is NaN or infinite.
    """
    if isinstance(samples.inputs, LazyInputs) or not samples.inputs.is_floating_point():
        return samples
    require_finite(samples.inputs, "inputs")
    types = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    if samples.inputs.dtype != torch.float64 or torch.float64 in types or not types:
        return samples
    return replace(samples, inputs=samples.inputs.to(types[0]))


def mislabelled(task: Task, noise: LabelNoise, seed: int) -> Task:
    """Return the task with label noise in the clients' training samples.

    All test samples have their true labels.

    Args:
        task: The task.
        noise: The label noise.
        seed: Draws the noise.

    Returns:
        A copy of the task, with the correct labels of the training samples in `true_labels`.
    """
    labels = task.train.labels
    noisy = noise.apply(labels.cpu().numpy(), task.partition, task.dataset.classes, seed)
    train = replace(task.train, labels=torch.from_numpy(noisy).to(labels.device))
    return replace(task, train=train, true_labels=labels)
