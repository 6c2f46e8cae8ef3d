"""Figures of the user's choice beside those of the objective: functions of `torchmetrics` by name, or the user's own.

Unlike what an objective counts, they need not add up over samples: they see everything that is judged together, the global test
set or one client's samples. Over several clients, a figure is the mean of the clients' values, weighted by their samples.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.config.expression import Call, parse, plain, show
from fedloom.config.plugins import found_at
from fedloom.errors import InvalidValue, MissingExtra, UnknownName, first_line, quoted, suggestion
from fedloom.objectives import Objective, Totals
from fedloom.objectives.multilabel import Multilabel
from fedloom.objectives.regression import Regression

Kind = Literal["multiclass", "multilabel", "regression"]
"""How `torchmetrics` calls what is learned."""

_COUNTED = "metrics/"
"""What the names of metrics begin with beside those that the objective counts."""

_SETTLED = {"preds", "target", "task", "num_classes", "num_labels", "num_outputs", "validate_args"}
"""Parameters that are no options: the task says what they are."""


@dataclass(frozen=True)
class NamedMetric:
    """`function(outputs [n, ...], targets [n, ...])`, one number of all samples that are judged together, recorded as `name`."""

    name: str
    function: Callable[[Tensor, Tensor], Any]

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """The figure: 0 where it is not defined (a client with one class alone), NaN of a model that has diverged."""
        if not torch.isfinite(outputs).all():
            return math.nan
        with warnings.catch_warnings(action="ignore"):  # of classes that do not occur
            found = torch.as_tensor(self.function(outputs, targets))
        if found.numel() != 1:
            raise InvalidValue(
                f"metrics: {self.name} gives {list(found.shape)}, not one number: an average is an option of many"
            )
        return 0.0 if math.isnan(float(found)) else float(found)


def counted(
    metrics: Sequence[NamedMetric], outputs: Tensor, targets: Tensor, owner: Tensor | None = None
) -> dict[str, Tensor]:
    """What stands for the metrics beside what the objective counts of n samples: of each its owner's value, `[n]` float64 by
    name. Without `owner [n]`, all samples have one."""
    groups = torch.zeros(len(targets), dtype=torch.int64) if owner is None else owner
    found = {_COUNTED + one.name: torch.zeros(len(targets), dtype=torch.float64) for one in metrics}
    for group in groups.unique().tolist():
        own = groups == group
        for one in metrics:
            found[_COUNTED + one.name][own] = one.value(
                outputs[own.to(outputs.device)], targets[own.to(targets.device)]
            )
    return found


def counted_shapes(metrics: Iterable[NamedMetric]) -> dict[str, tuple[int, ...]]:
    """The shapes, by name, of what `counted` gives of one sample."""
    return {_COUNTED + one.name: () for one in metrics}


def figures(objective: Objective, totals: Totals) -> dict[str, Tensor]:
    """The objective's figures of n clients and the metrics, `[n]` float64 by name."""
    chosen = {name: total for name, total in totals.items() if name.startswith(_COUNTED)}
    found = objective.figures({name: total for name, total in totals.items() if name not in chosen})
    return found | {name.removeprefix(_COUNTED): total / totals["samples"] for name, total in chosen.items()}


def build_metrics(
    given: Sequence[str | Callable[..., Any]], objective: Objective, outputs: int | None = None
) -> tuple[NamedMetric, ...]:
    """The metrics of expressions such as `auroc` or `f1(average='macro')`, of `module:function`, or of functions of one's own,
    (outputs [n, ...], targets [n, ...]) -> a number. Those by name are tried where it is known how many numbers a model puts out.

    Raises `InvalidValue` or `UnknownName` for what does not fit, `MissingExtra` for a name where there is no `torchmetrics`.
    """
    if isinstance(given, str):
        raise InvalidValue(f"metrics must be a list, such as [{given!r}]")
    found: list[NamedMetric] = []
    for one in given:
        metric = (
            _own(one) if not isinstance(one, str) or ":" in one.partition("(")[0] else _named(one, objective, outputs)
        )
        if metric.name in [*objective.figure_names, *(other.name for other in found)]:
            raise InvalidValue(f"metrics: {metric.name!r} is recorded already")
        found.append(metric)
    return tuple(found)


def _own(given: str | Callable[..., Any]) -> NamedMetric:
    function = found_at(given, "metrics") if isinstance(given, str) else given
    if not callable(function):
        raise InvalidValue(f"metrics must be names, 'module:function' or functions, not {type(function).__name__}")
    return NamedMetric(str(getattr(function, "__name__", type(function).__name__)), function)


def _named(expression: str, objective: Objective, outputs: int | None) -> NamedMetric:
    """A function of `torchmetrics`, tried on a few samples, so that an option that it refuses is refused before anything runs."""
    call = parse(expression)
    kind: Kind
    if isinstance(objective, Regression):
        kind = "regression"
    elif objective.classes or isinstance(objective, Multilabel):
        kind = "multiclass" if objective.classes else "multilabel"
    else:
        raise InvalidValue(
            f"metrics: {quoted(expression)}: metrics by name are for classification, multilabel and regression: "
            "give a function (outputs, targets) of your own"
        )
    known = _functions(kind)
    name = call.name if call.name in known else f"{call.name}_score"
    if name not in known:
        raise UnknownName("metric", call.name, sorted({*known, *(one.removesuffix("_score") for one in known)}))
    options = _options(call, known[name])
    metric = NamedMetric(_label(call.name, options), partial(_torchmetric, kind, name, options))
    if outputs is None:
        return metric
    targets = torch.arange(4 * outputs) % outputs
    scores = torch.linspace(0.1, 0.9, 4 * outputs * outputs).reshape(-1, outputs)
    tried = {"multiclass": targets, "multilabel": F.one_hot(targets, outputs), "regression": scores.flip(0).square()}
    try:
        metric.value(scores, tried[kind])
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidValue(f"metrics: {quoted(expression)}: {first_line(error)}") from None
    return metric


def _functions(kind: Kind) -> dict[str, Callable[..., Any]]:
    """The functions of `torchmetrics`, by name, for what is learned."""
    library = _library("regression" if kind == "regression" else "classification")
    found: dict[str, Callable[..., Any]]
    found = {name: one for name, one in vars(library).items() if inspect.isfunction(one) and name[0] != "_"}
    if kind == "regression":
        return found
    return {name: one for name, one in found.items() if "task" in inspect.signature(one).parameters}


def _library(part: str) -> ModuleType:
    try:
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(f"torchmetrics.functional.{part}")
    except ImportError:
        raise MissingExtra("torchmetrics", "metrics", "metrics by name") from None


def _options(call: Call, function: Callable[..., Any]) -> dict[str, Any]:
    allowed = [name for name in inspect.signature(function).parameters if name not in _SETTLED]
    if call.positional:
        raise InvalidValue(f"metrics: {quoted(call, str)}: give options by name, such as {call.name}({allowed[0]}=...)")
    for name in call.named:
        if name not in allowed:
            near = suggestion(name, allowed)
            raise InvalidValue(
                f"metrics: {call.name} has no option {quoted(name)}{near} (it has: {', '.join(allowed)})"
            )
    return {name: plain(value) for name, value in call.named.items()}


def _label(name: str, options: dict[str, Any]) -> str:
    """What a metric is called in the records: `f1_macro`, `accuracy_top_k_5`."""
    parts = [value if isinstance(value, str) else f"{option}_{show(value)}" for option, value in options.items()]
    return re.sub(r"\W+", "_", "_".join([name, *parts])).strip("_")


def _torchmetric(kind: Kind, name: str, options: dict[str, Any], outputs: Tensor, targets: Tensor) -> Any:
    """Metric of logits or numbers `[n, outputs]` as `torchmetrics` wants them: probabilities, whole numbers, one column flat."""
    function = getattr(_library("regression" if kind == "regression" else "classification"), name)
    if kind == "multiclass":
        return function(outputs.softmax(1), targets, task=kind, num_classes=outputs.shape[1], **options)
    if kind == "multilabel":
        return function(outputs.sigmoid(), targets.long(), task=kind, num_labels=outputs.shape[1], **options)
    found, wanted = (one.reshape(len(one), -1).squeeze(1).contiguous() for one in (outputs, targets.to(outputs.dtype)))
    several = found.dim() == 2 and "num_outputs" in inspect.signature(function).parameters
    return function(found, wanted, **({"num_outputs": found.shape[1]} if several else {}), **options)
