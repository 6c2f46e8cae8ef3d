"""What a task's models learn, one kind a file; `objectives` lists them by name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.config.registry import Registry
from fedloom.errors import InvalidValue

Totals = Mapping[str, Tensor]
"""What `Objective.statistics` counts, added up over the samples of n clients: `[n, ...]` float64 by name."""


@dataclass(frozen=True)
class Metric:
    """The figure that models are judged by: its name in the records, what tables call it, whether more is better, and whether
    it is a share, which tables show in %."""

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
        """What follows a value: ` %` after a share."""
        return " %" if self.share else ""

    def text(self, value: float, digits: int = 2) -> str:
        """A value without its unit: a share in per cent with so many digits after the point, else two digits more in all."""
        return f"{100 * value:.{digits}f}" if self.share else f"{value:.{digits + 2}g}"

    def best(self, values: Iterable[float]) -> float | None:
        """The best of the values; None without any."""
        return (max if self.higher_is_better else min)(values, default=None)


ACCURACY = Metric("accuracy", "Accuracy", higher_is_better=True, share=True)
"""The share of samples whose class is found."""


class Objective(ABC):
    """The loss of a batch, and what is counted of each sample to judge a model.

    `outputs` are what the model returns for b samples; of a tuple the first, and of a dictionary `logits`, is the prediction.
    What is counted adds up over samples, so that batches, clients and sites can be judged apart and together.
    """

    metric: ClassVar[Metric]
    classes: ClassVar[bool] = False
    """Whether a target is the number of a class, which some methods and partitions need."""

    @property
    def plain_cross_entropy(self) -> bool:
        """Whether the loss is the mean cross entropy and nothing else, for which models of linear layers have a faster step."""
        return False

    @abstractmethod
    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The mean loss of a batch, a scalar; it also runs under `torch.func.vmap`."""

    @abstractmethod
    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        """What is counted of each of b samples, `[b, ...]` by name."""

    @abstractmethod
    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        """The shape, by name, of what is counted of one sample, for a model that puts out so many numbers."""

    @abstractmethod
    def figures(self, totals: Totals) -> dict[str, Tensor]:
        """The figures of n clients, `[n]` float64 by name; among them `metric` and `loss`. `totals["samples"] [n]` is there
        without being counted."""

    @property
    def figure_names(self) -> list[str]:
        """The names of the figures."""
        totals = {name: torch.ones(1, *shape, dtype=torch.float64) for name, shape in self.shapes(2).items()}
        return list(self.figures({**totals, "samples": torch.ones(1, dtype=torch.float64)}))

    def require_targets(self, targets: Tensor) -> None:  # noqa: B027
        """Raise `InvalidValue` where the data's targets are none that can be learned so."""

    def outputs(self, targets: Tensor, classes: int, vocabulary: int | None) -> int:
        """How many numbers a model puts out for one sample (one token, one pixel)."""
        return classes

    def guess(self, outputs: int) -> float:
        """The loss of a model that knows nothing; with a multiple of it, a run has diverged. Infinite where there is none."""
        return math.inf

    def require_totals(self, totals: Totals) -> None:
        """Raise `InvalidValue` for totals of one client that cannot have been counted."""
        if not all(bool(torch.isfinite(total).all()) for total in totals.values()):
            raise InvalidValue("a figure is not finite")

    def strata(self, targets: Tensor) -> Tensor | None:
        """Whole numbers `[n]` by which partitions that are skewed by label share the samples out; None where there are none."""
        return None


# An objective is a dataclass of options with defaults.
objectives: Registry[Callable[..., Objective]] = Registry("objective", "fedloom.objectives")


@cache
def on_device(values: tuple[float, ...], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The values as a tensor on a device, kept: sending them for every batch would make it wait."""
    return torch.tensor(values, dtype=dtype, device=device)


def masked_cross_entropy(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Mean cross entropy of logits `[b, classes, ...]` over the targets `[b, ...]` that are not `ignored`; 0 where all are."""
    total = F.cross_entropy(logits, targets, ignore_index=ignored, reduction="sum")
    return total / (targets != ignored).sum().clamp_min(1)


def kind_of(tensor: Tensor) -> str:
    """The shape and the type of a tensor, as errors name them: `[8, 3] of float32`."""
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def prediction(outputs: Any) -> Tensor:
    """What a model predicts: its output, the first of several, or `logits` of a dictionary (or what acts as one).

    Raises `InvalidValue` for anything else.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        return cast(Tensor, outputs["logits"])
    if isinstance(outputs, tuple | list) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    what = f"a dictionary of {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else type(outputs).__name__
    raise InvalidValue(
        f"the model returns {what}: wanted a tensor, a tuple that begins with one, or 'logits' in a dictionary"
    )
