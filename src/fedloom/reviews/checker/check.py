"""Checks a method with tiny rounds that run in several ways and must give the same models."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedloom.algorithm import Algorithm
from fedloom.common.errors import (
    FedloomError,
)
from fedloom.parts.building import build
from fedloom.reviews.checker.findings import Finding, Findings
from fedloom.reviews.checker.names import misread_names
from fedloom.reviews.checker.reference import ReferenceRun
from fedloom.reviews.checker.trial import CheckTrial, failure, own_task, sample_of
from fedloom.reviews.checker.ways import in_other_ways
from fedloom.task import Task


@dataclass(frozen=True)
class CheckResult:
    """The findings about a method, and the bytes that it takes by name."""

    method: str
    findings: list[Finding]
    sizes: Mapping[str, float]


def check(algorithm: Algorithm | str, task: Task | None = None) -> Findings:
    """Check a method by running tiny instrumented rounds in several ways.

    It trains three rounds: one client after another and watched line by line, clients together, as
    in worker processes, killed and resumed, and as the beginning of a longer run. Results must
    agree, and the watched run must change nothing in place, draw from no global generator and keep
    nothing where no checkpoint finds it.

    Args:
        algorithm: The method, such as `HalfStep()` or `"umf(my_methods:HalfStep)"`.
        task: A task, of which a small sample is used (default: six clients and a model of 51
            weights).

    Returns:
        The findings; none if the method is sound.

    Raises:
        InvalidValue: The method cannot be made.
        UnknownName: Nothing has that name.
    """
    return Findings(examine(algorithm, task).findings)


def examine(
    algorithm: Algorithm | str, task: Task | None = None, *, compare: bool = True
) -> CheckResult:
    """Check a method as `check` does, and count the bytes of models, messages and memory.

    Args:
        algorithm: The method or its expression.
        task: The task, of which a small sample is used; by default a tiny task.
        compare: Also run the rounds in other ways and compare the states.

    Returns:
        The findings without repeats, and sizes in bytes by name. A method that cannot be made is a
        finding if the line is known.

    Raises:
        FedloomError: The method cannot be made, and the line is not known.
    """
    try:
        method = build(algorithm)
    except FedloomError as error:
        finding = failure(error, "")
        if not finding.location:
            raise
        return CheckResult(str(algorithm), [finding], {})
    trial = CheckTrial(method, own_task() if task is None else sample_of(task))
    reference = ReferenceRun(trial)
    findings = [*misread_names(method), *reference.findings]
    if compare and not findings:
        findings = in_other_ways(trial, reference)
    return CheckResult(str(method), list(dict.fromkeys(findings)), reference.sizes)
