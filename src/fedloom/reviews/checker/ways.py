"""Other ways of running the rounds; the results must agree with the reference run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fedloom.algorithm.method import needs_total_rounds
from fedloom.algorithm.records import Specs
from fedloom.common.round import Round
from fedloom.engines.pickling import dump, load
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.parts.pipeline import Pipeline
from fedloom.reviews.checker.findings import Finding, source_match
from fedloom.reviews.checker.reference import ReferenceRun
from fedloom.reviews.checker.trial import ROUNDS, CheckTrial, failure
from fedloom.rounds.engine import Answer, Fault, Job
from fedloom.rounds.federation import Federation

T = TypeVar("T")

TOLERANCE = 1e-2
"""Allowed error of clients that advance together, as a share of how far the models have moved."""


class _LockStepEngine(StackedEngine):
    """The stacked engine, which never trains clients one by one instead."""

    def _results(
        self, pipeline: Pipeline, jobs: Sequence[Job], work: Callable[[Sequence[Job]], list[T]]
    ) -> Iterator[T]:
        for chunk in self._chunks(pipeline, jobs):
            yield from work(chunk)


class _ElsewhereEngine(RowsEngine):
    """The rows engine with a method that is sent to each client without its state, as to a worker
    process.
    """

    def train_chunk(
        self, pipeline: Pipeline, round: Round, expected: Specs, jobs: Sequence[Job]
    ) -> list[Answer | Fault]:
        return super().train_chunk(self._sent(pipeline), round, expected, jobs)

    def personalised(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> list[tuple[int, Tensor, Tensor | None]]:
        return super().personalised(self._sent(pipeline), round, jobs)

    def _sent(self, pipeline: Pipeline) -> Pipeline:
        sent: Pipeline = load(*dump(pipeline), task=self.task)
        return sent


_NOT_SEEDED = (
    r"\b(time\.\w+\(.*?\)|[\w.]*(default_rng|Random)\(\)|[\w.]*urandom\(|"
    r"(secrets|uuid|datetime)\.\w+\(|((np|numpy)\.)?random\.\w+\(.*?\))"
)
"""Code that gives something else each time."""


_TOGETHER = "clients that advance together"
_WAYS = {
    "again": (
        "two runs with one seed come to other models: {0} is not of the seed",
        "draw from round.stream('...') or cohort.stream('...')",
    ),
    _TOGETHER: (
        f"{_TOGETHER} come to other models than one by one",
        "treat every row of the leading client axis by itself: no index 0, no mean over all "
        "clients, random numbers from "
        "cohort.stream; what belongs to clients and enters steps goes into context",
    ),
    "in worker processes": (
        "clients in worker processes come to other models than here",
        "train may depend on its inbox, its samples, its memory and the method's fields alone",
    ),
    "killed after a round and resumed": (
        "a run that is killed and resumed comes to another model",
        "what the server must remember goes into self.state, and every draw comes from "
        "round.stream",
    ),
    "as the beginning of a longer run": (
        "the first rounds depend on how many there will be",
        "facts = Facts(needs_total_rounds=True) says so",
    ),
}
"""Ways of running the rounds, the problem where one comes to another state than the reference, and
its remedy.
"""


def in_other_ways(trial: CheckTrial, reference: ReferenceRun) -> list[Finding]:
    """Return the finding of the first way of running the rounds that fails or has another result.

    Args:
        trial: The method and its task.
        reference: The reference run, with one client after another.

    Returns:
        One finding or none. Clients that train together may differ by `TOLERANCE`, all else must be
        equal.
    """
    task = trial.task
    proof = trial.proof
    unseeded, text = source_match(trial.method, _NOT_SEEDED)
    ways: list[tuple[Callable[[], Federation], str]] = [
        (lambda: trial.outcome(RowsEngine(task, proof)), unseeded),
        (lambda: trial.outcome(_LockStepEngine(task, proof)), ""),
        (lambda: trial.outcome(_ElsewhereEngine(task, proof)), ""),
        (trial.resumed, trial.server_location),
    ]
    if not needs_total_rounds(trial.method):
        location = source_match(trial.method, r"\.rounds\b")[0]
        ways.append((lambda: trial.outcome(RowsEngine(task, proof), rounds=2 * ROUNDS), location))
    for (outcome, location), (way, (problem, remedy)) in zip(ways, _WAYS.items(), strict=False):
        try:
            off = _off(
                outcome(),
                reference.federation,
                task.initial,
                TOLERANCE if way == _TOGETHER else 0.0,
            )
        except Exception as error:
            return [replace(failure(error, location or trial.location, f"{way}: "), remedy=remedy)]
        if off:
            problem = f"{problem.format(text or 'a clock or a generator')} ({off})"
            return [Finding(problem, location or trial.location, remedy)]
    return []


def _off(outcome: Federation, expected: Federation, initial: Tensor, tolerance: float = 0.0) -> str:
    """Return how far a federation's states are from those expected, or "" within a share of how far
    these have moved.
    """
    states, references = (
        {**federation.server_state(), "model": federation.model()}
        for federation in (outcome, expected)
    )
    moved = float((references["model"] - initial).abs().max())
    for name, reference in references.items():
        state = states.get(name)
        if state is None or state.shape != reference.shape:
            return f"{name} is {'missing' if state is None else list(state.shape)}"
        if torch.equal(state, reference) or not state.is_floating_point():
            continue
        off = float((state - reference).abs().nan_to_num().max())
        if off > tolerance * max(moved, float(reference.abs().max()) if name != "model" else moved):
            return f"{name} is off by {off:.2g}"
    return ""
