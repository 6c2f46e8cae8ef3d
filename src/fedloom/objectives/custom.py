"""User-defined objectives: a function that returns the loss of each sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fedloom.common.errors import InvalidValue, error_text, quoted
from fedloom.common.expression import Call
from fedloom.common.plugins import found_at
from fedloom.objectives import Metric, Objective, Totals, objectives


@dataclass(frozen=True)
class Custom(Objective):
    """The mean of a user's function, which maps a model's outputs and targets to the loss of each
    sample, `[b]`.
    """

    function: Callable[[Any, Tensor], Tensor]
    metric = Metric("loss", "Loss")

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            text = (
                f"the class {self.function.__name__}"
                if isinstance(self.function, type)
                else quoted(self.function)
            )
            raise InvalidValue(
                f"objective must be a name, 'module:function' or a function, not {text}"
            )

    def sample_losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the loss of each sample, `[b]`.

        Raises:
            InvalidValue: The function fails with an `IndexError`, or returns anything else.
        """
        try:
            # A copy, since the function may change the targets in place.
            losses = self.function(outputs, targets.clone())
        except IndexError as error:
            remedy = "for a loss over classes set metrics=['accuracy']"
            raise InvalidValue(
                f"the objective's function failed: {error_text(error)}; {remedy}"
            ) from error
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            kind = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            remedy = " (PyTorch's losses need reduction='none')" if kind == [] else ""
            raise InvalidValue(
                "the objective's function must return the loss of each sample, [b], "
                f"not {kind}{remedy}"
            )
        if len(losses) != len(targets):
            raise InvalidValue(
                f"the objective's function returned {len(losses)} losses for {len(targets)} "
                "samples: return one for each"
            )
        return losses

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.sample_losses(outputs, targets).mean()

    def statistics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": self.sample_losses(outputs, targets)}

    def outputs(self, targets: Tensor, classes: int, vocabulary: int | None) -> int:
        return classes or (targets.shape[1] if targets.dim() == 2 else 1)

    def strata(self, targets: Tensor) -> Tensor | None:
        return targets if targets.dim() == 1 and targets.dtype == torch.int64 else None

    def shapes(self, outputs: int) -> dict[str, tuple[int, ...]]:
        return {"loss": ()}

    def figures(self, totals: Totals) -> dict[str, Tensor]:
        return {"loss": totals["loss"] / totals["samples"]}


def build_objective(
    expression: str | Callable[..., Any] | Objective, metrics: Sequence[Any] = ()
) -> Objective:
    """Build an objective.

    Args:
        expression: An expression such as `classification(top_k=5)`, a path `module:function`, a
            function that returns the loss of each sample, or an objective.
        metrics: The metrics of the task. With `accuracy` a function is the criterion of a
            classification.

    Returns:
        The objective.

    Raises:
        UnknownName: No objective has this name.
        InvalidValue: The path does not lead to a function or an objective.
    """
    if isinstance(expression, Objective):
        return expression
    if not isinstance(expression, str):
        custom = Custom(expression)
        return (
            objectives["classification"].make(criterion=expression)
            if "accuracy" in list(metrics)
            else custom
        )
    if ":" not in expression.partition("(")[0]:
        return cast(Objective, objectives.build(expression))
    loss = found_at(expression, "objective", "a registered name or 'package.module:function'")
    return build_objective(
        loss() if isinstance(loss, type) and issubclass(loss, Objective) else loss, metrics
    )


def expression_of(objective: Objective) -> str | None:
    """Return the expression that builds an equal objective, or None if the objective has a user's
    function.
    """
    entry = objectives.of(type(objective))
    if entry is None:
        return None
    values = {name: getattr(objective, name) for name in entry.parameters}
    options = {
        name: value for name, value in values.items() if value != entry.parameters[name].default
    }
    return None if any(map(callable, options.values())) else str(Call(entry.name, named=options))
