"""Which differences between methods are real: paired tests over seeds.

A seed fixes the clients' data, the initial model and who takes part, so methods are compared seed by seed: the differences
d_1, ..., d_n over the n seeds that both methods have. Two tests of "no difference", both two-sided:

* The paired t-test, t = mean(d) / (s / sqrt(n)) with n - 1 degrees of freedom. It takes the d to be normal, and so can speak
  with few seeds. It says nothing where all d are equal (s = 0): then no spread is known.
* The exact sign-flip test (Fisher, The Design of Experiments, 1935, section 21): the share of all 2^n ways to change signs
  for which |sum(d)| is at least what was found. It takes nothing for granted but that without a difference d and -d are as
  likely. Its p is never below 2^(1 - n): 0.25 with 3 seeds, 0.031 with 6.

Both are corrected for the number of comparisons (Holm, Scandinavian Journal of Statistics 6, 1979), each measure by itself.
Against the best method, which the same figures chose, that number is all pairs of methods, since any of them might have been
the best; against the first it is the other methods.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedloom.randomness import numpy_stream

LEVEL = 0.05
"""Differences with a p below this are called real."""

EXACT = 16
"""Seeds up to which all sign flips are counted; beyond, `FLIPS` random ones stand for them."""

FLIPS = 100_000

Verdict = Literal["real", "likely", "not shown", "equal"]
"""`real`: both tests (the exact one alone where the t-test says nothing); `likely`: the t-test alone, where there are too few
seeds for the exact test to say anything; `equal`: the same figure with every seed."""


@dataclass(frozen=True)
class Difference:
    """One method minus another in one measure, over the seeds that both have.

    `mean` with its 95 % interval `low` to `high` by the t distribution (None with one seed or without any spread); the p of
    both tests, plain and corrected (None where a test says nothing). Shares, not per cent.
    """

    method: str
    other: str
    seeds: int
    mean: float
    low: float | None
    high: float | None
    t_test: float | None
    exact: float | None
    t_test_corrected: float | None
    exact_corrected: float | None
    verdict: Verdict


Values = Mapping[str, Mapping[int, float]]
"""A figure by method and seed."""


def differences(values: Values, against: str) -> list[Difference]:
    """Every other method minus the reference, in the order of the methods.

    `against` is `best` (the largest mean) or `first`. Methods without a seed in common with the reference are left out.
    """
    methods = [method for method in values if values[method]]
    if len(methods) < 2:
        return []
    reference = (
        methods[0] if against == "first" else max(methods, key=lambda one: float(np.mean([*values[one].values()])))
    )
    wanted = [(method, reference) for method in methods if method != reference]
    family = wanted if against == "first" else _pairs_with(methods, wanted)
    found = {pair: paired(values, *pair) for pair in family}
    tested = [pair for pair in family if len(found[pair]) > 0]
    ts = dict(zip(tested, holm([t_test(found[pair]) for pair in tested]), strict=True))
    exacts = dict(zip(tested, holm([sign_flip_test(found[pair]) for pair in tested]), strict=True))
    return [
        _difference(pair, found[pair], ts[pair], exacts[pair], len(tested)) for pair in wanted if pair in ts
    ]  # fmt: skip


def paired(values: Values, method: str, other: str) -> list[float]:
    """The differences over the seeds that both have, in the order of the seeds."""
    return [values[method][seed] - values[other][seed] for seed in sorted(values[method].keys() & values[other].keys())]


def t_test(found: Sequence[float]) -> float | None:
    """The two-sided p of the paired t-test; None with fewer than two seeds or differences without any spread."""
    if _spreadless(found):
        return None
    t = float(np.mean(found)) / _error(found)
    return float(2 * stats.t.sf(abs(t), len(found) - 1))


def sign_flip_test(found: Sequence[float]) -> float | None:
    """The two-sided p of the exact sign-flip test; None with fewer than two seeds."""
    n = len(found)
    if n < 2:
        return None
    sizes = np.abs(np.asarray(found))
    if n <= EXACT:
        signs = _all_signs(n)
    else:
        drawn = numpy_stream(0, "sign flips").integers(0, 2, (FLIPS, n)) * 2.0 - 1.0
        signs = np.concatenate([np.sign(np.asarray(found))[None, :], drawn])  # what was found is one of the ways
    # The tolerance keeps equal sums equal, in whichever order their digits were lost.
    return float(np.mean(np.abs(signs @ sizes) >= abs(sum(found)) - 1e-12))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p corrected by Holm's method: the k-th smallest of m times m - k + 1, never below a smaller one's, at most 1.

    None counts as one of the m and stays None.
    """
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    known = sorted((value, place) for place, value in enumerate(values) if value is not None)
    for rank, (value, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(values) - rank) * value))
        corrected[place] = largest
    return corrected


def smallest_exact(seeds: int) -> float:
    """The smallest p that the exact test can give with so many seeds, 2^(1 - n)."""
    return float(2.0 ** (1 - seeds))


def seeds_needed(comparisons: int) -> int:
    """The fewest seeds with which the exact test can call one of so many differences real after the correction."""
    return math.floor(1 + math.log2(comparisons / LEVEL)) + 1


def comparisons(methods: int, against: str) -> int:
    """How many differences are tested together."""
    return methods - 1 if against == "first" else methods * (methods - 1) // 2


@lru_cache(maxsize=4)
def _all_signs(n: int) -> npt.NDArray[np.float64]:
    """All ways to choose n signs, `[2^n, n]`."""
    return np.array(list(itertools.product((1.0, -1.0), repeat=n)))


def _pairs_with(methods: Sequence[str], wanted: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """All pairs of methods, with the wanted ones the way round that is wanted."""
    chosen = {frozenset(pair): pair for pair in wanted}
    return [chosen.get(frozenset(pair), pair) for pair in itertools.combinations(methods, 2)]


def _error(found: Sequence[float]) -> float:
    return float(np.std(found, ddof=1)) / math.sqrt(len(found))


def _spreadless(found: Sequence[float]) -> bool:
    return len(found) < 2 or float(np.ptp(found)) < 1e-12


def _difference(
    pair: tuple[str, str], found: Sequence[float], t: float | None, exact: float | None, family: int
) -> Difference:
    mean = float(np.mean(found))
    half = None if _spreadless(found) else float(stats.t.ppf(0.975, len(found) - 1)) * _error(found)
    return Difference(
        *pair,
        len(found),
        mean,
        None if half is None else mean - half,
        None if half is None else mean + half,
        t_test(found),
        sign_flip_test(found),
        t,
        exact,
        _verdict(found, t, exact, family),
    )


def _verdict(found: Sequence[float], t: float | None, exact: float | None, family: int) -> Verdict:
    if not any(abs(value) > 1e-12 for value in found):
        return "equal"
    if exact is not None and exact < LEVEL and (t is None or t < LEVEL):
        return "real"
    powerless = family * smallest_exact(len(found)) >= LEVEL
    return "likely" if powerless and t is not None and t < LEVEL else "not shown"
