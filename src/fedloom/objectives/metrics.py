"""Additional metrics: functions of `torchmetrics` by name, or a user's functions.

A metric need not be a sum over samples. It takes all outputs and targets of the global test set or
of one client. Its value over several clients is the mean of the defined values, weighted by the
clients' numbers of samples.
"""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.common.errors import (
    InvalidValue,
    UnknownName,
    first_line,
    import_extra,
    quoted,
    suggestion,
)
from fedloom.common.expression import parse, plain, show
from fedloom.common.plugins import found_at
from fedloom.objectives import Objective, Totals
from fedloom.objectives.multilabel import Multilabel
from fedloom.objectives.regression import Regression

Kind = Literal["multiclass", "multilabel", "regression"]
"""The tasks of `torchmetrics`."""

_RANKINGS = ("auroc", "average_precision")
"""Metrics of the ranking of samples, undefined for a class without samples."""

_PREFIX = "metrics/"
"""Prefix of metrics among the names of the objective's counts."""

_DEFINED = "defined/"
"""Prefix of the numbers of samples for which metrics are defined."""

_TASK_PARAMETERS = {
    "preds",
    "target",
    "task",
    "num_classes",
    "num_labels",
    "num_outputs",
    "validate_args",
}
"""Parameters that users cannot set, since the task determines them."""


@dataclass(frozen=True)
class NamedMetric:
    """A function of outputs and targets, `[n, ...]` each, to one number, and its name in the
    records.
    """

    name: str
    function: Callable[[Tensor, Tensor], Any]

    def value(self, outputs: Tensor, targets: Tensor) -> float | None:
        """Return the figure of some samples.

        Args:
            outputs: The model's outputs, `[n, ...]`.
            targets: The targets, `[n, ...]`.

        Returns:
            The figure; NaN for a model that has diverged; None if the figure is undefined, such as
            a ranking of samples of one class.

        Raises:
            InvalidValue: The metric returned more than one number.
        """
        if not torch.isfinite(outputs).all():
            return math.nan
        with warnings.catch_warnings(action="ignore"):  # about classes without samples
            figure = torch.as_tensor(self.function(outputs, targets))
        if figure.numel() != 1:
            raise InvalidValue(
                f"metrics: {self.name} returned {list(figure.shape)}, not one number. "
                "Many metrics have an option average, such as average='macro'"
            )
        return None if math.isnan(float(figure)) else float(figure)


def counted(
    metrics: Sequence[NamedMetric], outputs: Tensor, targets: Tensor, owner: Tensor | None = None
) -> dict[str, Tensor]:
    """Return metrics as counts that can be added up over samples.

    Args:
        metrics: The metrics.
        outputs: The model's outputs, `[n, ...]`.
        targets: The targets, `[n, ...]`.
        owner: The owner of each sample, `[n]`, for a value of each owner; None for one owner.

    Returns:
        For each sample its owner's value, and 1 if that is defined, else 0 for both; `[n]` float64
        by name.
    """
    groups = torch.zeros(len(targets), dtype=torch.int64) if owner is None else owner
    counts = {
        name: torch.zeros(len(targets), dtype=torch.float64) for name in counted_shapes(metrics)
    }
    for group in groups.unique().tolist():
        mask = groups == group
        samples = outputs[mask.to(outputs.device)], targets[mask.to(targets.device)]
        for metric in metrics:
            value = metric.value(*samples)
            if value is not None:
                counts[_PREFIX + metric.name][mask] = value
                counts[_DEFINED + metric.name][mask] = 1.0
    return counts


def counted_shapes(metrics: Iterable[NamedMetric]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one sample's counts of `counted`, by name."""
    names = [metric.name for metric in metrics]
    return {prefix + name: () for name in names for prefix in (_PREFIX, _DEFINED)}


def require_defined(totals: Totals, samples: int) -> None:
    """Raise `InvalidValue` for a metric with a number of defined samples outside 0 to `samples`.

    Args:
        totals: Sums over samples, by name. Entries without the prefix of defined samples are
            ignored.
        samples: Number of samples that were evaluated.
    """
    for name, total in totals.items():
        if name.startswith(_DEFINED) and not 0 <= float(total) <= samples:
            raise InvalidValue(
                f"{name.removeprefix(_DEFINED)} cannot be defined for {float(total):g} of "
                f"{samples} samples"
            )


def figures(objective: Objective, totals: Totals) -> dict[str, Tensor]:
    """Return the objective's figures and the metrics of n clients.

    A metric is the mean over the samples for which it is defined. If these are not all samples,
    `NAME_defined` is their share.

    Args:
        objective: The objective of the task.
        totals: Sums of the clients' counts by name, `[n, ...]` float64, and `samples [n]`.

    Returns:
        Figures by name, `[n]` float64.
    """
    names = [name.removeprefix(_PREFIX) for name in totals if name.startswith(_PREFIX)]
    counts = {
        name: total for name, total in totals.items() if not name.startswith((_PREFIX, _DEFINED))
    }
    values = dict(objective.figures(counts))
    for name in names:
        defined = totals[_DEFINED + name]
        values[name] = totals[_PREFIX + name] / defined
        if bool((defined < totals["samples"]).any()):
            values[f"{name}_defined"] = defined / totals["samples"]
    return values


def build_metrics(
    metrics: Sequence[str | Callable[..., Any]], objective: Objective, outputs: int | None = None
) -> tuple[NamedMetric, ...]:
    """Build metrics.

    Args:
        metrics: Expressions of `torchmetrics`, paths `module:function`, or functions.
        objective: The objective of the task. Its own figures are skipped.
        outputs: Number of outputs of the model, if known. Metrics by name are then tried on a few
            samples.

    Returns:
        The metrics with their names, in the order of `metrics`.

    Raises:
        InvalidValue: A metric is not valid for the task, or two have one name.
    """
    if isinstance(metrics, str):
        raise InvalidValue(f"metrics must be a list, such as [{metrics!r}]")
    built: list[NamedMetric] = []
    for item in (metric for metric in metrics if metric not in objective.figure_names):
        if isinstance(item, str) and ":" not in item.partition("(")[0]:
            metric = _named(item, objective, outputs)
        else:
            function = found_at(item, "metrics") if isinstance(item, str) else item
            if not callable(function):
                kind = type(function).__name__
                raise InvalidValue(
                    f"metrics must be names, 'module:function' or functions, not {kind}"
                )
            metric = NamedMetric(
                str(getattr(function, "__name__", type(function).__name__)), function
            )
        if metric.name in [*objective.figure_names, *(earlier.name for earlier in built)]:
            raise InvalidValue(
                f"metrics: {metric.name!r} is already recorded: remove one of the two"
            )
        built.append(metric)
    return tuple(built)


def _named(expression: str, objective: Objective, outputs: int | None) -> NamedMetric:
    """Build a metric of `torchmetrics` and try it on a few samples, so that a wrong option fails
    before the run.
    """
    call = parse(expression)
    if not (objective.classes or isinstance(objective, Regression | Multilabel)):
        raise InvalidValue(
            f"metrics: {quoted(expression)}: only classification, multilabel and regression have "
            "metrics by name. Give a function (outputs, targets) instead"
        )
    kind: Kind = "multiclass" if objective.classes else "multilabel"
    kind = "regression" if isinstance(objective, Regression) else kind
    functions = _functions(kind)
    name = call.name if call.name in functions else f"{call.name}_score"
    if name not in functions:
        raise UnknownName(
            "metric", call.name, {*functions, *(key.removesuffix("_score") for key in functions)}
        )
    allowed = [
        name
        for name in inspect.signature(functions[name]).parameters
        if name not in _TASK_PARAMETERS
    ]
    for option in ("without a name",) if call.positional else call.named.keys() - set(allowed):
        listed = f"{suggestion(option, allowed)} (it has: {', '.join(allowed)})"
        raise InvalidValue(f"metrics: {call.name} has no option {quoted(option)}{listed}")
    options = {option: plain(value) for option, value in call.named.items()}
    words = [
        value if isinstance(value, str) else f"{option}_{show(value)}"
        for option, value in options.items()
    ]
    # f1_macro, accuracy_top_k_5
    label = re.sub(r"\W+", "_", "_".join([call.name, *words])).strip("_")
    metric = NamedMetric(label, partial(_torchmetric, kind, functions[name], options))
    if outputs is None:
        return metric
    targets = torch.arange(4 * outputs) % outputs
    scores = torch.linspace(0.1, 0.9, 4 * outputs * outputs).reshape(-1, outputs)
    trial = {
        "multiclass": targets,
        "multilabel": F.one_hot(targets, outputs),
        "regression": scores.flip(0).square(),
    }
    try:
        metric.value(scores, trial[kind])
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidValue(f"metrics: {quoted(expression)}: {first_line(error)}") from None
    return metric


def _functions(kind: Kind) -> dict[str, Callable[..., Any]]:
    module = "regression" if kind == "regression" else "classification"
    with warnings.catch_warnings(action="ignore"):
        library = vars(
            import_extra(f"torchmetrics.functional.{module}", "metrics", "metrics by name")
        )
    functions: dict[str, Callable[..., Any]]
    functions = {name: f for name, f in library.items() if inspect.isfunction(f) and name[0] != "_"}
    if kind == "regression":
        return functions
    return {name: f for name, f in functions.items() if "task" in inspect.signature(f).parameters}


def _torchmetric(
    kind: Kind,
    function: Callable[..., Any],
    options: dict[str, Any],
    outputs: Tensor,
    targets: Tensor,
) -> Any:
    """Apply a function of `torchmetrics` to outputs `[n, outputs]` in the form that it needs:
    probabilities, integer targets, one flat column.
    """
    macro = options.get("average", "macro") == "macro"
    if kind != "regression" and function.__name__ in _RANKINGS and macro:
        by_class = _applied(kind, function, {**options, "average": "none"}, outputs, targets)
        return _mean_of_present(kind, by_class, targets)
    return _applied(kind, function, options, outputs, targets)


def _mean_of_present(kind: Kind, values: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of a ranking's `values [classes]` over the classes with and without members
    among the samples.

    `torchmetrics` counts all other classes as 0, but these samples cannot rank them.
    """
    classes = torch.arange(len(values), device=targets.device)
    members = targets.unsqueeze(1) == classes if kind == "multiclass" else targets.bool()
    counts = members.sum(0)
    return values[((counts > 0) & (counts < len(targets))).to(values.device)].mean()


def _applied(
    kind: Kind,
    function: Callable[..., Any],
    options: dict[str, Any],
    outputs: Tensor,
    targets: Tensor,
) -> Any:
    """Apply the function with the arguments for this kind of task."""
    if kind == "multiclass":
        return function(
            outputs.softmax(1), targets, task=kind, num_classes=outputs.shape[1], **options
        )
    if kind == "multilabel":
        return function(
            outputs.sigmoid(), targets.long(), task=kind, num_labels=outputs.shape[1], **options
        )
    outputs, targets = (
        x.reshape(len(x), -1).squeeze(1).contiguous() for x in (outputs, targets.to(outputs.dtype))
    )
    several = outputs.dim() == 2 and "num_outputs" in inspect.signature(function).parameters
    return function(
        outputs, targets, **({"num_outputs": outputs.shape[1]} if several else {}), **options
    )
