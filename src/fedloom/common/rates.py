"""Schedules of the learning rate over the rounds of a run, or over a client's steps in a round.

A schedule is a function (done, total) -> the factor of the rate when `done` of `total` rounds, or
steps, are over.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from fedloom.common.errors import InvalidValue, error_text, quoted
from fedloom.common.expression import Call, parse, plain
from fedloom.common.fields import Count, Probability, Share
from fedloom.common.plugins import found_at
from fedloom.common.registry import Registry

RateSchedule = Callable[[int, int], float]

CONSTANT = "constant"


def _argument(make: object, name: str, value: Any) -> Any:
    return build_rate_schedule(value) if name == "then" else plain(value)


rate_schedules: Registry[Callable[..., RateSchedule]] = Registry(
    "learning-rate schedule", "fedloom.common", argument=_argument
)


@rate_schedules.register(CONSTANT)
def constant() -> RateSchedule:
    """Use a constant rate."""
    return lambda done, total: 1.0


@rate_schedules.register("cosine")
def cosine(*, over: Count | None = None, least: Probability = 0.0) -> RateSchedule:
    """Multiply the rate by least + (1 - least) (1 + cos(pi t / T)) / 2 after t of T steps.

    Steps are rounds, or the local steps of a client.

    Args:
        over: T; by default all rounds or steps.
        least: The factor at the end, in [0, 1].

    Returns:
        A function (finished, total) -> factor, both in rounds or steps.

    Source:
        Loshchilov & Hutter 2017, equation 5, without restarts.
    """
    return lambda done, total: (
        least
        + (1 - least) * (1 + math.cos(math.pi * min(done, over or total) / (over or total))) / 2
    )


@rate_schedules.register("linear")
def linear(*, over: Count | None = None, least: Probability = 0.0) -> RateSchedule:
    """Multiply the rate by 1 - (1 - least) t / T after t of T steps.

    Args:
        over: T; by default all rounds or steps.
        least: The factor after T steps, in [0, 1]; a factor of 0 after `over` rounds is refused.

    Returns:
        A function (finished, total) -> factor, both in rounds or steps.
    """
    return lambda done, total: 1 - (1 - least) * min(done, over or total) / (over or total)


@rate_schedules.register("step")
def step(*, every: Count, factor: Share = 0.1) -> RateSchedule:
    """Multiply the rate by `factor` after every `every` rounds or steps.

    Args:
        every: Rounds or steps between two changes.
        factor: In (0, 1].

    Returns:
        A function (finished, total) -> factor, both in rounds or steps.
    """
    return lambda done, total: factor ** (done // every)


@rate_schedules.register("warmup")
def warmup(*, over: Count, then: RateSchedule = constant()) -> RateSchedule:  # noqa: B008
    """Raise the rate in even steps, then follow another schedule: `warmup(5, then=cosine)`.

    Args:
        over: Rounds or steps of the warm-up; the factor begins at 1/over and is 1 from number
            `over` on.
        then: The schedule that begins after them.

    Returns:
        A function (finished, total) -> factor, both in rounds or steps.

    Source:
        Goyal et al. 2017.
    """
    return lambda done, total: (
        (done + 1) / over if done < over else then(done - over, max(1, total - over))
    )


def build_rate_schedule(expression: str | Call) -> RateSchedule:
    """Return the schedule of an expression or `module:function`.

    Raises:
        UnknownName: The name is not registered.
        InvalidValue: The expression is not valid.
    """
    call = parse(expression) if isinstance(expression, str) else expression
    if not isinstance(call, Call):
        raise InvalidValue(
            f"a learning-rate schedule must be a name or 'module:function', not {quoted(call)}"
        )
    if call.until is not None and not call.positional and not call.named:
        return found_at(
            f"{call.name}:{call.until}", "learning-rate schedule", "a name or 'module:function'"
        )
    return cast(RateSchedule, rate_schedules.build(call))


_built = cache(build_rate_schedule)  # by text


def rate_factor(expression: str, done: int, total: int) -> float:
    """Return the schedule's factor of the rate.

    Args:
        expression: The schedule.
        done: Finished rounds or steps.
        total: All rounds or steps.

    Returns:
        The factor, greater than 0; 1 for a constant rate.

    Raises:
        InvalidValue: The factor is not a positive number.
    """
    if expression == CONSTANT:
        return 1.0
    try:
        factor = float(_built(expression)(done, total))
    except Exception as error:
        reason = f"fails after {done} of {total}: {error_text(error)}"
        raise InvalidValue(f"schedule {quoted(expression)} {reason}") from error
    if not 0 < factor < math.inf:
        reason = f"gives {factor:g} after {done} of {total}: it must be a positive number"
        raise InvalidValue(f"schedule {quoted(expression)} {reason}")
    return factor
