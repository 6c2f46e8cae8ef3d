"""Objectives of the user's own: a function that gives the loss of each sample."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fedloom.config.expression import Call
from fedloom.config.plugins import found_at
from fedloom.errors import InvalidValue, quoted
from fedloom.objectives import Metric, Objective, Totals, objectives


@dataclass(frozen=True)
class Custom(Objective):
    """The mean of a function of a model's outputs and targets to the loss of each sample, `[b]`."""

    function: Callable[[Any, Tensor], Tensor]
    metric = Metric("loss", "Loss")

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            text = f"the class {self.function.__name__}" if isinstance(self.function, type) else quoted(self.function)
            raise InvalidValue(f"objective must be a name, 'module:function' or a function, not {text}")

    def _losses(self, outputs: Any, targets: Tensor) -> Tensor:
        losses = self.function(outputs, targets)
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            kind = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            remedy = " (losses of PyTorch do with reduction='none')" if kind == [] else ""
            raise InvalidValue(f"the objective's function must return the loss of each sample, [b], not {kind}{remedy}")
        return losses

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self._losses(outputs, targets).mean()

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": self._losses(outputs, targets)}

    def outputs(self, targets: Tensor, classes: int, vocabulary: int | None) -> int:
        return classes or (targets.shape[1] if targets.dim() == 2 else 1)

    def strata(self, targets: Tensor) -> Tensor | None:
        return targets if targets.dim() == 1 and targets.dtype == torch.int64 else None

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        return {"loss": ()}

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        return {"loss": totals["loss"] / totals["samples"]}


def build_objective(expression: str | Callable[..., Any] | Objective) -> Objective:
    """Build the objective of `regression(kind=huber)`, of `module:function`, or of a function."""
    if isinstance(expression, Objective):
        return expression
    if not isinstance(expression, str):
        return Custom(expression)
    if ":" not in expression.partition("(")[0]:
        return cast(Objective, objectives.build(expression))
    loss = found_at(expression, "objective", "a registered name or 'package.module:function'")
    return build_objective(loss() if isinstance(loss, type) and issubclass(loss, Objective) else loss)


def expression_of(objective: Objective) -> str | None:
    """Return the expression that builds an equal objective, or None for a function of the user's."""
    entry = objectives.of(type(objective))
    if entry is None:
        return None
    values = {name: getattr(objective, name) for name in entry.parameters}
    options = {name: value for name, value in values.items() if value != entry.parameters[name].default}
    return str(Call(entry.name, named=options))
