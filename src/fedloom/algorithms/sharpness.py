"""Gradients at points beside the weights, for methods that look for flat minima."""

import torch
from torch import Tensor

from fedloom.flat.module import Batch
from fedloom.local.cohort import Cohort, Context
from fedloom.local.optimizer import GradientFn

TINY = 1e-16
"""Added to norms, so that a zero vector has the direction 0."""


def direction(vectors: Tensor) -> Tensor:
    """Return vectors `[k, T]` divided by their norms."""
    lengths: Tensor = vectors.norm(dim=1, keepdim=True)
    return vectors / (lengths + TINY)


def gradient_ahead(
    cohort: Cohort, rows: Tensor, batch: Batch, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient at w + offset, and leave the weights w as they are.

    Args:
        cohort: The clients.
        rows: Models, `[k, P]`; statistics of the model are updated.
        batch: Samples of the clients.
        offset: Displacement, `[k, T]`.

    Returns:
        Losses `[k]` and gradients `[k, T]`.
    """
    weights = rows[:, : cohort.layout.trainable]
    current = weights.clone()
    weights.add_(offset)
    result = cohort.gradient(rows, batch)
    weights.copy_(current)
    return result


def sharp_gradient(cohort: Cohort, rho: float) -> GradientFn:
    """Return SAM's gradient: the one at w + rho g / ||g||, with g the batch's gradient at w.

    Args:
        cohort: The clients.
        rho: Size of the perturbation; 0 gives the gradient at w, in one pass.

    Returns:
        A function for `Cohort.fit`. It returns the losses at w, `[k]`, and the gradients, `[k, T]`.
    """

    def gradient_fn(rows: Tensor, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        loss, gradient = cohort.gradient(rows, batch)
        if rho == 0:
            return loss, gradient
        return loss, gradient_ahead(cohort, rows, batch, rho * direction(gradient))[1]

    return gradient_fn


def normalised(vector: Tensor, length: float) -> Tensor:
    """Return a vector `[T]` scaled to a length; 0 stays 0.

    Args:
        vector: The vector, `[T]`.
        length: Euclidean norm of the result.

    Returns:
        The vector, `[T]`.
    """
    norm: Tensor = torch.linalg.vector_norm(vector)
    return vector * (length / (norm + TINY))
