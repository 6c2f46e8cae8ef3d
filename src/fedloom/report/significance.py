"""Which differences between methods are statistically significant: paired tests over seeds.

A seed fixes the clients' data, the initial model and who takes part, so methods are compared seed by seed: the differences
d_1, ..., d_n over the n seeds that both methods have. Two tests of "no difference", both two-sided:

* The paired t-test. It assumes that the d are normal, and so can reach significance with few seeds. It is undefined where all d
  are equal, since their standard deviation is then 0.
* The exact sign-flip test (Fisher, The Design of Experiments, 1935, section 21): the share of all 2^n ways to change signs
  for which |sum(d)| is at least what was measured. It assumes only that, without a difference, d and -d are equally
  likely. Its p is never below 2^(1 - n): 0.25 with 3 seeds, 0.031 with 6.

Both are corrected for the number of comparisons (Holm, Scandinavian Journal of Statistics 6, 1979), each measure by itself.
Against the best method, which the same figures selected, that number is all pairs of methods, since any of them might have been
the best; against the first it is the other methods.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedloom.randomness import numpy_stream

LEVEL = 0.05
"""Differences with a corrected p below this are significant."""

FLIPS = 2**14
"""Sign flips that are counted: all of them up to 14 seeds, that many random ones beyond."""

Verdict = Literal["significant", "t-test only", "not significant", "equal"]
"""`significant`: by both tests, or by the exact one where the t-test is undefined; `t-test only`: by the t-test, with too few
seeds for the exact test to reach the level; `equal`: the same figure with every seed."""


@dataclass(frozen=True)
class Difference:
    """One method minus another in one measure, over the seeds that both have.

    `mean` with its 95 % confidence interval `low` to `high` by the t distribution, and the p of both tests, plain and corrected;
    None where they are undefined (one seed; for the t distribution also differences without any spread). Shares, not per cent.
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


def differences(values: Values, against: str, higher_is_better: bool = True) -> list[Difference]:
    """Every other method minus the reference, in the order of the methods.

    `against` is `best` (the largest mean, or the smallest where less is better) or `first`. Methods without a seed in common with
    the reference are left out.
    """
    means = {method: float(np.mean([*known.values()])) for method, known in values.items() if known}
    if len(means) < 2:
        return []
    best = (max if higher_is_better else min)(means, key=lambda method: means[method])
    reference = next(iter(means)) if against == "first" else best
    wanted = [(method, reference) for method in means if method != reference]
    pairs = (
        wanted if against == "first" else [*wanted, *itertools.combinations([m for m in means if m != reference], 2)]
    )
    tested = {pair: found for pair in pairs if (found := paired(values, *pair))}
    t_tests, exacts = [t_test(found) for found in tested.values()], [sign_flip_test(found) for found in tested.values()]
    corrected = zip(t_tests, exacts, holm(t_tests), holm(exacts), strict=True)
    results = []
    for (pair, found), (t, exact, t_corrected, exact_corrected) in zip(tested.items(), corrected, strict=True):
        if pair in wanted:
            verdict = _verdict(found, t_corrected, exact_corrected, len(tested))
            interval, mean = confidence_interval(found), float(np.mean(found))
            results.append(
                Difference(*pair, len(found), mean, *interval, t, exact, t_corrected, exact_corrected, verdict)
            )
    return results


def paired(values: Values, method: str, other: str) -> list[float]:
    """The differences over the seeds that both have, in the order of the seeds."""
    return [values[method][seed] - values[other][seed] for seed in sorted(values[method].keys() & values[other].keys())]


def t_test(found: Sequence[float]) -> float | None:
    """The two-sided p of the paired t-test; None with fewer than two seeds or differences without any spread."""
    if _spreadless(found):
        return None
    from scipy.special import stdtr

    return 2 * float(stdtr(len(found) - 1, -abs(np.mean(found)) / _standard_error(found)))


def confidence_interval(found: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 % confidence interval of the mean; None and None where the t-test is undefined."""
    if _spreadless(found):
        return None, None
    from scipy.special import stdtrit

    mean, half = float(np.mean(found)), float(stdtrit(len(found) - 1, 0.975)) * _standard_error(found)
    return mean - half, mean + half


def sign_flip_test(found: Sequence[float]) -> float | None:
    """The two-sided p of the exact sign-flip test; None with fewer than two seeds."""
    if len(found) < 2:
        return None
    signs = _signs(len(found))
    # Rounded, so that equal means stay equal in whichever order they were summed.
    reached = int((np.abs(signs @ found / len(found)).round(12) >= abs(np.mean(found)).round(12)).sum())
    return reached / len(signs) if 2 ** len(found) == len(signs) else (reached + 1) / (len(signs) + 1)


@cache
def _signs(seeds: int) -> npt.NDArray[np.floating]:
    """All ways to change the signs of so many differences, `[2^n, n]`, or `FLIPS` random ones where there are more."""
    if 2**seeds > FLIPS:
        return 1.0 - 2.0 * numpy_stream(0, "sign flips").integers(2, size=(FLIPS, seeds))
    return 1.0 - 2.0 * (np.arange(2**seeds)[:, None] >> np.arange(seeds) & 1)


def _standard_error(found: Sequence[float]) -> float:
    return float(np.std(found, ddof=1)) / math.sqrt(len(found))


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
    """The fewest seeds with which the exact test can find one of so many differences significant after the correction."""
    return math.floor(1 + math.log2(comparisons / LEVEL)) + 1


def comparisons(methods: int, against: str) -> int:
    """How many differences are tested together."""
    return methods - 1 if against == "first" else methods * (methods - 1) // 2


def _spreadless(found: Sequence[float]) -> bool:
    return len(found) < 2 or float(np.ptp(found)) < 1e-12


def _verdict(found: Sequence[float], t: float | None, exact: float | None, family: int) -> Verdict:
    """The verdict on `found`, one of a `family` of differences tested together, by the corrected p of both tests."""
    if not any(abs(value) > 1e-12 for value in found):
        return "equal"
    if exact is not None and exact < LEVEL and (t is None or t < LEVEL):
        return "significant"
    powerless = family * smallest_exact(len(found)) >= LEVEL
    return "t-test only" if powerless and t is not None and t < LEVEL else "not significant"
