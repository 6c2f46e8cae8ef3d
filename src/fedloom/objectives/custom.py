"""A loss of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fedloom.config.expression import Call
from fedloom.config.plugins import found_at
from fedloom.errors import InvalidValue
from fedloom.objectives import Metric, Objective, Totals, objectives


@dataclass(frozen=True)
class Custom(Objective):
    """The mean of `function`, which takes what the model returns for b samples and their targets and gives the loss of each,
    `[b]`; judged by that."""

    function: Callable[[Any, Tensor], Tensor]
    metric = Metric("loss", "Loss")

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidValue(
                f"objective must be a name, 'module:function' or a function, not {type(self.function).__name__}"
            )

    def _each(self, outputs: Any, targets: Tensor) -> Tensor:
        found = self.function(outputs, targets)
        if not isinstance(found, Tensor) or found.dim() != 1:
            what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InvalidValue(f"the objective's function must return the loss of each sample, [b], not {what}")
        return found

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self._each(outputs, targets).mean()

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": self._each(outputs, targets)}

    def outputs(self, targets: Tensor, classes: int, vocabulary: int | None) -> int:
        return classes or (targets.shape[1] if targets.dim() == 2 else 1)

    def strata(self, targets: Tensor) -> Tensor | None:
        return targets if targets.dim() == 1 and targets.dtype == torch.int64 else None

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        return {"loss": ()}

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        return {"loss": totals["loss"] / totals["samples"]}


def build_objective(expression: str | Callable[..., Any] | Objective) -> Objective:
    """The objective of an expression such as `regression(loss='huber')`, of `module:function`, or of a function of one's own,
    (outputs, targets) -> the loss of each sample, `[b]`. Raises `InvalidValue` or `UnknownName` for what does not fit."""
    if isinstance(expression, Objective):
        return expression
    if not isinstance(expression, str):
        return Custom(expression)
    path, bracket, _ = expression.partition("(")
    if ":" not in path:
        return cast(Objective, objectives.build(expression))
    if bracket:
        raise InvalidValue(f"objective {expression!r}: a function of your own takes no options here")
    found = found_at(path, "objective", "a registered name or 'package.module:function'")
    made = found() if isinstance(found, type) and issubclass(found, Objective) else found
    return build_objective(made)


def expression_of(objective: Objective) -> str | None:
    """The expression that `objectives` makes this objective of again; None for a function of the user's."""
    for entry in objectives:
        if entry.make is type(objective):
            given = {name: getattr(objective, name) for name in entry.parameters}
            named = {name: value for name, value in given.items() if value != entry.parameters[name].default}
            return str(Call(entry.name, named=named))
    return None
