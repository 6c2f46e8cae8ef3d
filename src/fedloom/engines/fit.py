"""Checks that a model accepts the data and has the outputs that the objective needs."""

from typing import Any

import torch
from torch import Tensor, nn

from fedloom.common.errors import InvalidValue, error_text
from fedloom.common.randomness import preserved_generator
from fedloom.data.dataset import Dataset, Samples
from fedloom.models.structure import copied
from fedloom.objectives import Objective, kind_of, prediction
from fedloom.objectives.custom import Custom


def require_fit(module: nn.Module, dataset: Dataset, samples: Samples) -> None:
    """Pass two samples through a model in evaluation mode, and compute their loss.

    Args:
        module: The model. The check uses a copy with the same parameters.
        dataset: The data set, with its objective and classes.
        samples: Training samples. Without samples nothing is checked.

    Raises:
        InvalidValue: If the model does not accept the samples, or the loss does not accept the
            outputs of the model.
    """
    if not len(samples):
        return
    few = samples[torch.arange(min(2, len(samples)), device=samples.labels.device)]
    inputs = dataset.prepare(few.inputs).clone()
    data = f"samples {kind_of(inputs[0])}"
    data += f" and {dataset.classes} classes" if dataset.classes else ""
    kind = type(module).__name__
    trial = copied(module, {id(tensor): tensor for tensor in module.parameters()}).eval()
    with torch.enable_grad(), preserved_generator(inputs.device):
        try:
            outputs = trial(inputs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise InvalidValue(
                f"the model {kind} does not accept the data, {data}: {error_text(error)}"
            ) from error
        predicted = prediction(outputs)
        if isinstance(dataset.objective, Custom):
            _require_losses_by_sample(dataset.objective, predicted, few.labels)
        _require_gradient(dataset.objective, outputs, few.labels)
        if not dataset.objective.classes or predicted.dim() != 2:
            return
        if predicted.shape[1] < dataset.classes:
            count = predicted.shape[1]
            raise InvalidValue(
                f"the model {kind} has {count} outputs, too few for the data, {data}"
            )


def _require_gradient(objective: Objective, outputs: Any, targets: Tensor) -> None:
    """Raise `InvalidValue` if the user's loss cannot be differentiated by the outputs."""
    function = getattr(objective, "function", getattr(objective, "criterion", None))
    if not callable(function) or not prediction(outputs).requires_grad:
        return
    if not objective.loss(outputs, targets).requires_grad:
        remedy = "compute the loss with torch, without detach(), item() or no_grad()"
        raise InvalidValue(f"the objective's function returned a loss without gradient: {remedy}")


def _require_losses_by_sample(objective: Custom, outputs: Tensor, targets: Tensor) -> None:
    """Raise `InvalidValue` if outputs `[b, 1]` and targets `[b]` were broadcast to all pairs."""
    if outputs.shape != (2, 1) or targets.dim() != 1:
        return
    both = objective.sample_losses(outputs, targets)
    first = objective.sample_losses(outputs[:1], targets[:1])
    if not torch.allclose(both[:1], first, rtol=1e-3, equal_nan=True):
        raise InvalidValue(
            "the objective's function pairs outputs [b, 1] with the targets [b] of other samples: "
            "compute with outputs[:, 0]"
        )
