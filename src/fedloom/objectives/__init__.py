"""Objectives: what the models of a task learn; `objectives` lists them by name."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from fedloom.config.registry import Registry
from fedloom.errors import InvalidValue

Answer = Literal["class", "classes", "number", "token", "pixel", "outputs"]
"""Kinds of what a model's outputs stand for; `outputs` where only the user knows."""

Totals = Mapping[str, Tensor]
"""Counts of `Objective.statistics` added up over the samples of n clients: `[n, ...]` float64 by
name.
"""


@dataclass(frozen=True)
class Metric:
    """The figure that models are judged by.

    Attributes:
        name: Its name in the records.
        title: Its name in tables.
        higher_is_better: True for an accuracy, False for an error.
        share: True for a share, which tables show in %.
    """

    name: str
    title: str
    higher_is_better: bool = False
    share: bool = False

    @property
    def noun(self) -> str:
        """The title within a sentence: `accuracy`, `RMSE`."""
        word = self.title[1:2].islower()
        return self.title[0].lower() + self.title[1:] if word else self.title

    @property
    def unit(self) -> str:
        """The text after a value: ` %` after a share."""
        return " %" if self.share else ""

    def text(self, value: float, digits: int = 2) -> str:
        """Format a value without its unit: a share in per cent with `digits` decimals, else with
        `digits + 2` digits.
        """
        return f"{100 * value:.{digits}f}" if self.share else f"{value:.{digits + 2}g}"

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of the values, or None if there are none."""
        return (max if self.higher_is_better else min)(values, default=None)


ACCURACY = Metric("accuracy", "Accuracy", higher_is_better=True, share=True)
"""Share of the samples whose class is predicted."""


class Objective(ABC):
    """The loss of a batch, and the counts of each sample by which models are judged.

    `outputs` is what the model returns for b samples; the prediction is its first tensor, or
    `logits` of a dictionary. Counts are added up over samples, so that batches, clients and sites
    can be judged one by one and in all.
    """

    metric: ClassVar[Metric]
    answer: ClassVar[Answer] = "outputs"
    classes: ClassVar[bool] = False
    """True if a target is the number of a class, which some methods and partitions need."""

    @property
    def plain_cross_entropy(self) -> bool:
        """True if the loss is the unweighted mean cross entropy, for which models of linear layers
        have a faster step.
        """
        return False

    def in_units(self, values: Tensor) -> Tensor:
        """Return outputs or targets in the units of the data; those of `Standardised` are in
        others.
        """
        return values

    @abstractmethod
    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, a scalar. Must also run under `torch.func.vmap`."""

    @abstractmethod
    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        """Return the counts of each of b samples, `[b, ...]` by name."""

    @abstractmethod
    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each count of one sample, by name, for a model with `outputs`
        outputs.
        """

    @abstractmethod
    def figures(self, totals: Totals) -> dict[str, Tensor]:
        """Compute the figures of n clients.

        Args:
            totals: The clients' counts by name, `[n, ...]` float64, and `samples [n]`.

        Returns:
            Figures by name, `[n]` float64 each, among them `loss` and the metric's name.
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
        """Add up the counts of n samples, or of n clients, for each of k owners.

        Args:
            counts: Counts by name, `[n, ...]`; `samples [n]` among them for clients, who may hold
                more than one each.
            total: Sums `[n, ...]` to `[k, ...]`.
            owner: The owner of each of the n, `[n]`, or None for one owner of all.
        """
        return {name: total(values) for name, values in counts.items()}

    def require_targets(self, targets: Tensor) -> None:  # noqa: B027
        """Raise `InvalidValue` for targets that cannot be learned."""

    def outputs(self, targets: Tensor, classes: int, vocabulary: int | None) -> int:
        """Return the number of a model's outputs for one sample (one token, one pixel)."""
        return classes

    def guess(self, outputs: int) -> float:
        """Return the loss of an untrained model, or infinity. A run whose loss is a multiple of it
        has diverged.
        """
        return math.inf

    def require_totals(self, totals: Totals) -> None:
        """Raise `InvalidValue` for totals of one client that no samples can have."""
        if not all(bool(torch.isfinite(total).all()) for total in totals.values()):
            raise InvalidValue("a figure is not finite")

    def strata(self, targets: Tensor) -> Tensor | None:
        """Return whole numbers `[n]` by which partitions skewed by label share out the samples, or
        None if there are none.
        """
        return None


# An objective is a dataclass of options with defaults.
objectives: Registry[Callable[..., Objective]] = Registry("objective", "fedloom.objectives")


@cache
def on_device(
    values: tuple[float, ...], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the values as a cached tensor on a device, since sending them for every batch would
    make it wait.
    """
    return torch.tensor(values, dtype=dtype, device=device)


def kind_of(tensor: Tensor) -> str:
    """Describe a tensor in an error: `[8, 3] of float32`."""
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def prediction(outputs: Any) -> Tensor:
    """Return the prediction among a model's outputs: a tensor, the one that a tuple begins with, or
    `logits` of a dictionary.
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
        f"the model returns {kind}: wanted a tensor, a tuple that begins with one, or 'logits' in a dictionary"
    )
