"""Objectives: the loss that models minimise and the figures that rate them. `objectives` lists them
by name.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from fedloom.common.errors import InvalidValue
from fedloom.common.registry import Registry

Answer = Literal["class", "classes", "number", "token", "pixel", "outputs"]
"""Meaning of a model's outputs; `outputs` if only the user knows it."""

Totals = Mapping[str, Tensor]
"""Counts of `Objective.statistics` by name, summed over the samples of each of n clients:
`[n, ...]` float64.
"""


@dataclass(frozen=True)
class Metric:
    """The figure by which models are compared.

    Attributes:
        name: Name in the records.
        title: Name in tables.
        higher_is_better: True for an accuracy, False for an error.
        share: True for a share in [0, 1], shown in %.
    """

    name: str
    title: str
    higher_is_better: bool = False
    share: bool = False

    @property
    def noun(self) -> str:
        """The title inside a sentence: `accuracy`, `RMSE`."""
        word = self.title[1:2].islower()
        return self.title[0].lower() + self.title[1:] if word else self.title

    @property
    def unit(self) -> str:
        """The text after a value: ` %` after a share."""
        return " %" if self.share else ""

    def text(self, value: float, digits: int = 2) -> str:
        """Format a value without its unit.

        Args:
            value: Value of the metric; a share is in [0, 1].
            digits: Number of decimals of a share in per cent. Other values get `digits + 2`
                significant digits.

        Returns:
            The number as text: "97.31" for a share of 0.9731.
        """
        return f"{100 * value:.{digits}f}" if self.share else f"{value:.{digits + 2}g}"

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best value, or None without values."""
        return (max if self.higher_is_better else min)(values, default=None)


ACCURACY = Metric("accuracy", "Accuracy", higher_is_better=True, share=True)
"""Share of samples with a correctly predicted class."""


class Objective(ABC):
    """The loss of a batch, and the counts of each sample from which the figures of models are
    computed.

    The argument `outputs` of the methods is the model's return value for b samples. The prediction
    is its first tensor, or `logits` of a dictionary. Counts are summed over samples, so figures can
    be computed for batches, clients, sites and all samples.
    """

    metric: ClassVar[Metric]
    answer: ClassVar[Answer] = "outputs"
    classes: ClassVar[bool] = False
    """True if targets are class numbers. Some methods and partitions need them."""

    @property
    def plain_cross_entropy(self) -> bool:
        """True if the loss is the unweighted mean cross entropy. Linear models have a faster step
        for it.
        """
        return False

    def in_units(self, values: Tensor) -> Tensor:
        """Return outputs or targets in the units of the data.

        They already are, except in `Standardised`.
        """
        return values

    @abstractmethod
    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch. Must also run under `torch.func.vmap`.

        Args:
            outputs: Return value of the model for b samples.
            targets: Targets of these samples, `[b, ...]`.

        Returns:
            A scalar.
        """

    @abstractmethod
    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        """Return the counts of each sample.

        Args:
            outputs: Return value of the model for b samples.
            targets: Targets of these samples, `[b, ...]`.

        Returns:
            Counts by name, `[b, ...]`.
        """

    @abstractmethod
    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each count of one sample, by name.

        Args:
            outputs: Number of outputs of the model.
        """

    @abstractmethod
    def figures(self, totals: Totals) -> dict[str, Tensor]:
        """Compute the figures of n clients.

        Args:
            totals: Sums of the clients' counts by name, `[n, ...]` float64, and `samples [n]`.

        Returns:
            Figures by name, `[n]` float64 each. They include `loss` and the name of the metric.
        """

    @property
    def figure_names(self) -> list[str]:
        """The names of the figures."""
        totals = {
            name: torch.ones(1, *shape, dtype=torch.float64)
            for name, shape in self.shapes(2).items()
        }
        return list(self.figures({**totals, "samples": torch.ones(1, dtype=torch.float64)}))

    def add_up(
        self, counts: Totals, total: Callable[[Tensor], Tensor], owner: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Sum the counts of n samples or n clients for each of k owners.

        Args:
            counts: Counts by name, `[n, ...]`. Counts of clients include `samples [n]`, since a
                client can have more than one.
            total: Sums `[n, ...]` to `[k, ...]`.
            owner: Owner of each of the n entries, `[n]`; None if all have the same owner.

        Returns:
            Sums by name, `[k, ...]`.
        """
        return {name: total(values) for name, values in counts.items()}

    def require_targets(self, targets: Tensor) -> None:  # noqa: B027
        """Raise `InvalidValue` for targets that the objective cannot use."""

    def outputs(self, targets: Tensor, classes: int, vocabulary: int | None) -> int:
        """Return the number of outputs that a model needs for one sample, one token or one pixel.

        Args:
            targets: Targets of the data set.
            classes: Number of classes; 0 if the targets are not classes.
            vocabulary: Number of tokens, if the data are sequences of tokens.

        Returns:
            Number of outputs; by default the number of classes.
        """
        return classes

    def guess(self, outputs: int) -> float:
        """Return the loss of an untrained model, or infinity if it is unknown.

        A run has diverged if its loss is a multiple of this value.
        """
        return math.inf

    def require_totals(self, totals: Totals) -> None:
        """Raise `InvalidValue` if no samples of a client can have these totals."""
        if not all(bool(torch.isfinite(total).all()) for total in totals.values()):
            raise InvalidValue("a figure is infinite or NaN")

    def strata(self, targets: Tensor) -> Tensor | None:
        """Return the integer stratum of each sample, `[n]`, or None.

        Partitions that are skewed by label distribute the samples by these strata.
        """
        return None


# An objective is a dataclass of options with defaults.
objectives: Registry[Callable[..., Objective]] = Registry("objective", "fedloom.objectives")


@cache
def on_device(
    values: tuple[float, ...], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a cached tensor on a device. A transfer in every batch would make the device wait.

    Args:
        values: Values of the tensor.
        device: Device of the tensor.
        dtype: Type of the tensor; None for PyTorch's default.

    Returns:
        A tensor `[len(values)]`. Later calls return the same tensor, so it must not be changed.
    """
    return torch.tensor(values, dtype=dtype, device=device)


def kind_of(tensor: Tensor) -> str:
    """Describe a tensor in an error: `[8, 3] of float32`."""
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def prediction(outputs: Any) -> Tensor:
    """Return the prediction in a model's outputs: a tensor, the first tensor of a tuple, or
    `logits` of a dictionary.

    Raises:
        InvalidValue: The outputs have none of these forms.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        return cast(Tensor, outputs["logits"])
    if isinstance(outputs, tuple | list) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    kind = (
        f"a dictionary of {', '.join(map(str, outputs))}"
        if isinstance(outputs, Mapping)
        else type(outputs).__name__
    )
    raise InvalidValue(
        f"the model returned {kind}. "
        "Return a tensor, a tuple with a tensor first, or a dictionary with 'logits'"
    )
