"""`fedloom list X --with Y`: how two methods combine, and when their parts act in a round."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import Parameter

import torch
from torch import nn

from fedloom.algorithm.method import Method, algorithms, name_of
from fedloom.algorithm.records import Plan
from fedloom.common.errors import InvalidValue
from fedloom.common.expression import Call, parse
from fedloom.common.randomness import stream
from fedloom.flat.layout import Layout
from fedloom.parts.building import build
from fedloom.parts.course import Course, pipelines
from fedloom.parts.moments import moments_of

INNERMOST = ("fedavg", "fedavg(weighted=false)", "fedmr")
"""Algorithms for parts that are given without one; the first accepted one is shown."""

EXAMPLES = {"noise": 0.8, "radius": 1.0}
"""Values of parameters that some parts require."""

CLIENTS = 20
PARTICIPANTS = 10
ROUNDS = 20


@dataclass(frozen=True)
class Combination:
    """An expression of two methods.

    Attributes:
        expression: Its text.
        reason: The reason why it is refused; "" if it is accepted.
        moments: The moments of a round in which each part acts, by the part's name.
    """

    expression: str
    reason: str
    moments: dict[str, list[str]]


def combinations(first: str, second: str) -> Iterator[Combination]:
    """Yield the ways to combine two methods.

    A part is placed around the other method and, if that method has parts, inside them. Two methods
    without a free place become stages.

    Args:
        first: A name or an expression. A part may lack its method, as in `sparse(share=0.1)`.
        second: A name or an expression, likewise.

    Yields:
        Different expressions, each with the reason if it is refused.

    Raises:
        UnknownName: A name is not registered.
        InvalidValue: One of the two cannot be built on its own.
    """
    calls = [_completed(parse(first)), _completed(parse(second))]
    fitting = [_fitting_plans(call) for call in calls]
    plans = [plan for plan in _plans() if all(plan in accepted for accepted in fitting)] or _plans()
    shown = set()
    for candidates in _candidates(*calls):
        combination = _judged(candidates, plans)
        if combination.expression not in shown:
            shown.add(combination.expression)
            yield combination


def _candidates(first: Call, second: Call) -> Iterator[list[Call]]:
    """Yield, for each order, an expression with one or several innermost algorithms."""
    if not (_is_open(first) or _is_open(second)):
        yield [_staged(first, second, Call("stages"))]
        yield [_staged(second, first, Call("stages"))]
        return
    for outer, inner in ((second, first), (first, second)):
        if _is_open(outer):
            yield [_filled(outer, filled) for filled in _closed(inner)]
        elif _method(outer) is not None:
            yield [_inside(outer, inner)]


def _judged(candidates: Sequence[Call], plans: Sequence[Plan]) -> Combination:
    """Return the first accepted candidate, or the first candidate with the reason against it."""
    sound = [call for call in candidates if _builds(_innermost_part(call))] or candidates
    reasons = {str(call).replace(":'auto'", ":auto"): _refusal(call, plans) for call in sound}
    for expression, reason in reasons.items():
        if not reason:
            return Combination(expression, "", _moments(build(expression)))
    expression, reason = next(iter(reasons.items()))
    return Combination(expression, reason, {})


# --- expressions ---


def _completed(call: Call) -> Call:
    """Return a call with example values for parameters that it requires."""
    parameters = {} if ":" in call.name else algorithms[call.name].parameters
    named = dict(call.named)
    for name, value in EXAMPLES.items():
        if name in parameters and name not in named:
            default = parameters[name].default
            needs_noise = default is None and name == "noise" and "target_epsilon" not in named
            if default is Parameter.empty or needs_noise:
                named[name] = value
    method = _method(call)
    if method is not None and method is not call.named.get("method"):
        return replace(call, positional=(_completed(method), *call.positional[1:]), named=named)
    return replace(call, named=named)


def _is_open(call: Call) -> bool:
    """Return True for a part without its method."""
    if call.name == "stages":
        return not call.positional
    takes = ":" not in call.name and "method" in algorithms[call.name].parameters
    return takes and _method(call) is None


def _method(call: Call) -> Call | None:
    """Return the method inside a part as written; None for algorithms and open parts."""
    if (
        ":" in call.name
        or "method" not in algorithms[call.name].parameters
        or call.name == "stages"
    ):
        return None
    values = (*call.positional[:1], call.named.get("method"))
    return next((value for value in values if isinstance(value, Call)), None)


def _filled(part: Call, method: Call) -> Call:
    """Return an open part around a method."""
    if part.name == "stages":
        return _staged(method, _algorithm(method), part)
    return replace(part, positional=(method, *part.positional))


def _inside(outer: Call, part: Call) -> Call:
    """Return `outer` with an open part around its algorithm."""
    method = _method(outer)
    if method is None:
        return _filled(part, outer)
    inner = _inside(method, part)
    if "method" in outer.named:
        return replace(outer, named={**outer.named, "method": inner})
    return replace(outer, positional=(inner, *outer.positional[1:]))


def _staged(first: Call, then: Call, stages: Call) -> Call:
    return replace(stages, positional=(replace(first, until=ROUNDS // 2), then))


def _closed(call: Call) -> list[Call]:
    """Return a complete method unchanged, or an open part around each innermost algorithm."""
    if not _is_open(call):
        return [call]
    return [_filled(call, parse(text)) for text in INNERMOST]


def _algorithm(call: Call) -> Call:
    """Return the algorithm inside all parts."""
    method = _method(call)
    return call if method is None else _algorithm(method)


def _innermost_part(call: Call) -> Call:
    """Return the innermost part with its algorithm."""
    method = _method(call)
    return call if method is None or _method(method) is None else _innermost_part(method)


# --- accepted expressions ---


def _fitting_plans(call: Call) -> list[Plan]:
    """Return the plans that accept a method on its own.

    Raises its error if the method cannot be built.
    """
    methods = [method for method in _closed(call) if _builds(method)]
    if not methods:
        build(_closed(call)[0])
    return [plan for plan in _plans() if any(not _refusal(method, [plan]) for method in methods)]


def _builds(call: Call) -> bool:
    try:
        build(call)
    except InvalidValue:
        return False
    return True


def _refusal(call: Call, plans: Sequence[Plan]) -> str:
    """Return the reason why the first plan refuses an expression, or "" if a plan accepts it."""
    reasons = []
    for plan in plans:
        try:
            Course(build(call)).setup(plan)
        except InvalidValue as error:
            reasons.append(str(error))
        else:
            return ""
    return reasons[0]


def _moments(method: Method) -> dict[str, list[str]]:
    """Return the moments of each part, outermost first. Stages end between two rounds."""
    moments = {}
    for pipeline in pipelines(method):
        for part in pipeline.parts:
            moments[name_of(part)] = moments_of(part)
    return moments


@cache
def _plans() -> list[Plan]:
    """Return tiny runs: some or all of the clients in each round, without and with batch norm."""
    plans = []
    for norm in (nn.Identity(), nn.BatchNorm1d(4)):
        module = nn.Sequential(nn.Linear(6, 4), norm, nn.ReLU(), nn.Linear(4, 3))
        layout = Layout(module)
        initial = 0.1 * torch.randn(layout.size, generator=stream(0, "combining"))
        plan = Plan(
            layout=layout,
            initial=initial,
            clients=CLIENTS,
            participants=PARTICIPANTS,
            rounds=ROUNDS,
            seed=0,
            classes=3,
            sizes=lambda clients: 5 + clients % 7,
            module=module,
        )
        plans += [plan, replace(plan, participants=CLIENTS)]
    return plans
