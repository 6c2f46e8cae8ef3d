"""The linear classifier at the top of a model as slices of a row, and functions that fold other
classifiers into it.

The *row rule*: a function that is affine in the features of a linear classifier with a bias is
again such a classifier. So a private head beside the global head, a shift of the features, nearest
prototypes and linear discriminant analysis are all rows of the same architecture, which fedloom
evaluates, saves and deploys like any other row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.algorithm import Cohort
from fedloom.algorithm.records import Plan
from fedloom.common.errors import InvalidValue
from fedloom.flat.layout import TensorSlice, Unit
from fedloom.models.structure import head_name, require_untied_layers

Head = tuple[Tensor, Tensor]
"""Weight `[..., Y, d]` and bias `[..., Y]` of a classifier of d features onto Y classes."""

NEVER = -1e9
"""Added to the output of a class that a client lacks, while it trains."""

MARGIN = 50.0
"""Distance of the output of a class that is never chosen below the mean of the other outputs."""


@dataclass(frozen=True)
class LinearHead:
    """Position of a linear classifier in a row."""

    weight: TensorSlice  # [Y, d]
    bias: TensorSlice | None  # [Y]

    @classmethod
    def of(cls, where: Plan | Cohort, method: str, *, bias: bool = True) -> "LinearHead":
        """Return the head of an architecture.

        Args:
            where: A plan or a cohort, with the architecture and the number of classes (0 if the
                targets are not classes).
            method: Name of the method, with which errors begin.
            bias: Require a bias.

        Returns:
            Positions of weight and bias in a row.

        Raises:
            InvalidValue: The targets are not classes, or the classifier is not linear, has another
                number of outputs than classes, is frozen, or lacks a required bias. For a cohort:
                the model's outputs are not the outputs of the classifier.
        """
        if not where.classes:
            raise InvalidValue(
                f"{method} needs class labels, but the targets of this task are not classes"
            )
        name = head_name(where.module)
        head = where.module.get_submodule(name)
        shown = name or "the model"
        if not isinstance(head, nn.Linear):
            raise InvalidValue(
                f"{method} needs a linear classifier, but {shown} is a {type(head).__name__}"
            )
        if bias and head.bias is None:
            raise InvalidValue(f"{method} needs a classifier with a bias, but {shown} has none")
        require_untied_layers(where.module)
        tensors = {tensor.name: tensor for tensor in where.layout.slices if tensor.layer == name}
        weight, offset = (tensors.get(f"{name}.{kind}".lstrip(".")) for kind in ("weight", "bias"))
        if weight is None or (bias and offset is None):
            raise InvalidValue(
                f"{method} learns from the clients' classifiers, but {name} is frozen"
            )
        if (outputs := weight.shape[0]) != where.classes:
            raise InvalidValue(
                f"{method} needs a classifier with {where.classes} outputs, one for each class, "
                f"but {name} has {outputs}"
            )
        if isinstance(where, Cohort):
            where.require_outputs_of_head(method)
        return cls(weight, offset)

    @property
    def features(self) -> int:
        """d, the number of features."""
        return self.weight.shape[1]

    @property
    def unit(self) -> Unit:
        """The slices of the head in a row."""
        return tuple(entry.slice for entry in (self.weight, self.bias) if entry is not None)

    def get(self, rows: Tensor) -> Head:
        """Return weight and bias as views of `rows [..., P]`."""
        assert self.bias is not None, "call `of` with bias=True"
        return rows[..., self.weight.slice].unflatten(-1, self.weight.shape), rows[
            ..., self.bias.slice
        ]

    def put(self, rows: Tensor, head: Head) -> Tensor:
        """Return a copy of rows with another head.

        Args:
            rows: Models, `[..., P]`.
            head: Weight `[..., Y, d]` and bias `[..., Y]`, broadcast over the rows.

        Returns:
            Models, `[..., P]`.
        """
        result = rows.clone()
        for values, written in zip(self.get(result), head, strict=True):
            values.copy_(written)
        return result


def two_heads(first: Head, second: Head) -> Head:
    """Return the head with the sum of the outputs of two heads.

    Args:
        first: Weight `[..., Y, d]` and bias `[..., Y]`.
        second: Another head on the same features.

    Returns:
        Weight `[..., Y, d]` and bias `[..., Y]`.
    """
    return first[0] + second[0], first[1] + second[1]


def shifted(head: Head, shift: Tensor) -> Head:
    """Return the head with the outputs for features z that `head` has for z + shift.

    Args:
        head: Weight `[..., Y, d]` and bias `[..., Y]`.
        shift: Displacement of the features, `[..., d]`.

    Returns:
        The same weight, and the bias plus the weight times the shift.
    """
    weight, bias = head
    return weight, bias + (weight @ shift.unsqueeze(-1)).squeeze(-1)


def nearest_prototype(prototypes: Tensor, present: Tensor) -> Head:
    """Return the head with the largest output for the nearest prototype.

    Args:
        prototypes: A point of the feature space for each class, `[..., Y, d]`.
        present: False for classes without a prototype, which are never chosen, bool `[..., Y]`.

    Returns:
        W_c = 2 p_c and b_c = -|p_c|^2, so that outputs differ as negative squared distances do.
    """
    return without((2 * prototypes, -prototypes.square().sum(-1)), present)


def without(head: Head, present: Tensor) -> Head:
    """Return a head that never chooses some classes.

    The output of such a class is the mean of the other outputs minus `MARGIN`. So it is never the
    largest output for any features, and the loss of a sample of this class stays moderate.

    Args:
        head: Weight `[..., Y, d]` and bias `[..., Y]`.
        present: False for classes that are never chosen, bool `[..., Y]`.

    Returns:
        Weight `[..., Y, d]` and bias `[..., Y]`.
    """
    shares = present.to(head[1]) / present.sum(-1, keepdim=True).clamp_min(1)
    mean_weight = (shares.unsqueeze(-1) * head[0]).sum(-2, keepdim=True)
    mean_bias = (shares * head[1]).sum(-1, keepdim=True)
    weight = torch.where(present.unsqueeze(-1), head[0], mean_weight)
    return weight, torch.where(present, head[1], mean_bias - MARGIN)


def discriminant(means: Tensor, covariance: Tensor, prior: Tensor) -> Head:
    """Return the head of linear discriminant analysis. Its softmax is the posterior of Gaussian
    classes.

    Args:
        means: Mean of each class, `[..., Y, d]`.
        covariance: Common covariance of the classes, positive definite, `[..., d, d]`.
        prior: Probability of each class, `[..., Y]`; a class of probability 0 is never chosen.

    Returns:
        W_c = S^-1 mu_c and b_c = -mu_c^T S^-1 mu_c / 2 + ln pi_c.
    """
    weight = torch.linalg.solve(covariance, means.mT).mT
    log_prior = prior.clamp_min(torch.finfo(prior.dtype).tiny).log()
    return without((weight, log_prior - (weight * means).sum(-1) / 2), prior > 0)
