"""The linear classifier at the top of a model as slices of a row, and what folds into it.

The *row rule*: whatever is affine in the features that enter a linear classifier with a bias is
such a classifier again. So a private head beside the global one, a shift of the features, nearest
prototypes and linear discriminant analysis stay rows of the task's architecture, which are
evaluated, saved and deployed like any other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.algorithm import Cohort
from fedloom.errors import InvalidValue
from fedloom.flat.layout import TensorSlice, Unit
from fedloom.models.structure import head_name
from fedloom.records import Plan

Head = tuple[Tensor, Tensor]
"""Weight `[..., Y, d]` and bias `[..., Y]` of a classifier of d features onto Y classes."""

NEVER = -1e9
"""Added to the output of a class that a client lacks, while it trains."""

MARGIN = 50.0
"""How far the output of a class that is never chosen is below the mean of the others."""


@dataclass(frozen=True)
class LinearHead:
    """Position of a linear classifier in a row."""

    weight: TensorSlice  # [Y, d]
    bias: TensorSlice | None  # [Y]

    @classmethod
    def of(cls, where: Plan | Cohort, method: str, *, bias: bool = True) -> "LinearHead":
        """Return the head of an architecture.

        Args:
            where: A plan or a cohort, with the architecture and the number of classes (0 where
                targets are none).
            method: Name of the method that needs it, with which errors begin.
            bias: Require a bias.

        Raises:
            InvalidValue: The targets are no classes, or the classifier is not linear, not onto the
                classes, frozen, or without a bias that is needed. For a cohort: the model's
                outputs are not those of the classifier.
        """
        if not where.classes:
            raise InvalidValue(f"{method} needs class labels: the targets of this task are none")
        name = head_name(where.module)
        head, shown = where.module.get_submodule(name), name or "the model"
        if not isinstance(head, nn.Linear):
            raise InvalidValue(
                f"{method} needs a linear classifier, but {shown} is a {type(head).__name__}"
            )
        if bias and head.bias is None:
            raise InvalidValue(f"{method} needs a classifier with a bias, and {shown} has none")
        tensors = {tensor.name: tensor for tensor in where.layout.slices if tensor.layer == name}
        weight, offset = (tensors.get(f"{name}.{kind}".lstrip(".")) for kind in ("weight", "bias"))
        if weight is None or (bias and offset is None):
            raise InvalidValue(
                f"{method} learns from the classifiers of the clients, and {name} is frozen"
            )
        if (outputs := weight.shape[0]) != where.classes:
            raise InvalidValue(
                f"{method} needs a classifier onto {where.classes} classes, but {name} has {outputs}"
            )
        if isinstance(where, Cohort):
            where.require_outputs_of_head(method)
        return cls(weight, offset)

    @property
    def features(self) -> int:
        """Return d, the number of features."""
        return self.weight.shape[1]

    @property
    def unit(self) -> Unit:
        """Return the slices of a row that are the head."""
        return tuple(entry.slice for entry in (self.weight, self.bias) if entry is not None)

    def get(self, rows: Tensor) -> Head:
        """Return weight and bias, views of `rows [..., P]`."""
        assert self.bias is not None, "`of` was not asked for a bias"
        return rows[..., self.weight.slice].unflatten(-1, self.weight.shape), rows[
            ..., self.bias.slice
        ]

    def put(self, rows: Tensor, head: Head) -> Tensor:
        """Return a copy of `rows [..., P]` with another head."""
        result = rows.clone()
        for values, written in zip(self.get(result), head, strict=True):
            values.copy_(written)
        return result


def two_heads(first: Head, second: Head) -> Head:
    """Return the head whose outputs are the sums of those of two heads."""
    return first[0] + second[0], first[1] + second[1]


def shifted(head: Head, shift: Tensor) -> Head:
    """Return the head that gives for features z what `head` gives for z + shift, `shift [..., d]`."""
    weight, bias = head
    return weight, bias + (weight @ shift.unsqueeze(-1)).squeeze(-1)


def nearest_prototype(prototypes: Tensor, present: Tensor) -> Head:
    """Return the head whose largest output is that of the nearest prototype.

    Args:
        prototypes: A point of the feature space for each class, `[..., Y, d]`.
        present: False for classes without a prototype, which are never chosen, bool `[..., Y]`.

    Returns:
        W_c = 2 p_c and b_c = -|p_c|^2, so that outputs differ as squared distances do.
    """
    return without((2 * prototypes, -prototypes.square().sum(-1)), present)


def without(head: Head, present: Tensor) -> Head:
    """Return a head that never chooses some classes.

    Their output is the mean of the outputs of the others less `MARGIN`. So it is never the largest
    one, whatever the features are, and the loss of a sample of such a class is of moderate size.

    Args:
        head: Weight `[..., Y, d]` and bias `[..., Y]`.
        present: False for classes that are never chosen, bool `[..., Y]`.
    """
    shares = present.to(head[1]) / present.sum(-1, keepdim=True).clamp_min(1)
    mean_weight = (shares.unsqueeze(-1) * head[0]).sum(-2, keepdim=True)
    mean_bias = (shares * head[1]).sum(-1, keepdim=True)
    weight = torch.where(present.unsqueeze(-1), head[0], mean_weight)
    return weight, torch.where(present, head[1], mean_bias - MARGIN)


def discriminant(means: Tensor, covariance: Tensor, prior: Tensor) -> Head:
    """Return the head of linear discriminant analysis, whose softmax is the posterior of Gaussian
    classes.

    Args:
        means: Mean of each class, `[..., Y, d]`.
        covariance: Covariance that the classes share, positive definite, `[..., d, d]`.
        prior: Probability of each class, `[..., Y]`; a class of probability 0 is never chosen.

    Returns:
        W_c = S^-1 mu_c and b_c = -mu_c^T S^-1 mu_c / 2 + ln pi_c.
    """
    weight = torch.linalg.solve(covariance, means.mT).mT
    log_prior = prior.clamp_min(torch.finfo(prior.dtype).tiny).log()
    return without((weight, log_prior - (weight * means).sum(-1) / 2), prior > 0)
