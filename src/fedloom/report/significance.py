"""Which differences between methods are statistically significant: paired tests over seeds.

A seed fixes the clients' data, the initial model and who takes part, so methods are compared seed
by seed: the differences d_1, ..., d_n over the n seeds that both methods have. Two tests of "no
difference", both two-sided:

* The paired t-test. It assumes that the d are normal, and is undefined where all d are equal.
* The exact sign-flip test (Fisher, The Design of Experiments, 1935, section 21): the share of all
2^n ways to change signs
  for which |sum(d)| is at least what was measured. It assumes only that, without a difference, d
  and -d are equally likely. Its p is never below 2^(1 - n). Beyond 12 seeds it takes a random
  4,096 of them.

Both are corrected for the number of comparisons (Holm, Scandinavian Journal of Statistics 6, 1979),
each measure by itself. Against the best method, which the same figures selected, that number is all
pairs of methods, since any of them might have been the best; against the first it is the other
methods.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedloom.common.randomness import numpy_stream

LEVEL = 0.05  # differences with a corrected p below this are significant
# sign flips that are counted: all of them up to 12 seeds, that many random ones beyond
FLIPS = 2**12

Verdict = Literal["significant", "t-test only", "not significant", "equal"]
"""`significant`: by both tests, or by the exact one where the t-test is undefined; `t-test only`:
by the t-test, with too few seeds for the exact test to reach the level; `equal`: the same figure
with every seed.
"""


@dataclass(frozen=True)
class Difference:
    """One method minus another over the seeds that both have: `mean`, its 95 % interval by the t
    distribution, and the p of both tests, plain and corrected; None where undefined.
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
    """Return every other method minus the reference, over the seeds that both have.

    Args:
        values: A figure by method and seed.
        against: The reference: `best` (by its mean) or `first`.
        higher_is_better: True if the best mean is the highest.

    Returns:
        A difference for each method that shares a seed with the reference. Corrections cover all
        pairs for `best`.

    Source: Holm, Scandinavian Journal of Statistics 6, 1979, for the correction.
    """
    means = {
        method: float(np.mean([*by_seed.values()])) for method, by_seed in values.items() if by_seed
    }
    if len(means) < 2:
        return []
    best = (max if higher_is_better else min)(means, key=lambda method: means[method])
    reference = next(iter(means)) if against == "first" else best
    methods = [method for method in means if method != reference]
    shown = [(method, reference) for method in methods]
    pairs = shown if against == "first" else [*shown, *itertools.combinations(methods, 2)]
    seeds = {
        (left, right): sorted(values[left].keys() & values[right].keys()) for left, right in pairs
    }
    tested = {
        pair: [values[pair[0]][k] - values[pair[1]][k] for k in both]
        for pair, both in seeds.items()
        if both
    }
    t_tests, exacts = (
        [t_test(paired)[0] for paired in tested.values()],
        list(map(sign_flip_test, tested.values())),
    )
    p_values = zip(t_tests, exacts, holm(t_tests), holm(exacts), strict=True)
    return [
        Difference(
            *pair,
            len(paired),
            float(np.mean(paired)),
            *t_test(paired)[1:],
            *p,
            verdict_of(paired, *p[2:], len(tested)),
        )
        for (pair, paired), p in zip(tested.items(), p_values, strict=True)
        if pair in shown
    ]


def t_test(paired: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return the two-sided p of the paired t-test and the 95 % confidence interval of the mean.

    Args:
        paired: Differences of two methods by seed, `[n]`.

    Returns:
        p, and both ends of the interval in the units of the differences. All are None for fewer
        than two seeds or equal differences.
    """
    if len(paired) < 2 or float(np.ptp(paired)) < 1e-12:
        return None, None, None
    from scipy.stats import ttest_1samp

    test = ttest_1samp(paired, 0.0)
    low, high = test.confidence_interval()
    return float(test.pvalue), float(low), float(high)


def sign_flip_test(paired: Sequence[float]) -> float | None:
    """Return the two-sided p of the exact sign-flip test; None with fewer than two seeds."""
    if len(paired) < 2:
        return None
    from scipy.stats import permutation_test

    scaled, draws = np.array(paired) / (max(map(abs, paired)) or 1.0), numpy_stream(0, "sign flips")
    flips: dict[str, Any] = {
        "permutation_type": "samples",
        "n_resamples": FLIPS,
        "random_state": draws,
    }
    # Rounded, so that sums that are equal but for the order of their terms are equal.
    return float(
        permutation_test((scaled,), lambda x, axis: np.mean(x, axis).round(12), **flips).pvalue
    )


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p corrected by Holm's method: the k-th smallest of m times m - k + 1, never below a
    smaller one's, at most 1.
    """
    ascending = sorted(value for value in values if value is not None)
    steps = [min(1.0, (len(values) - rank) * value) for rank, value in enumerate(ascending)]
    corrected = dict(zip(ascending, itertools.accumulate(steps, max), strict=True))
    return [None if value is None else corrected[value] for value in values]


def smallest_exact(seeds: int) -> float:
    """Return the smallest p that the exact test can give with this number of seeds, 2^(1 - n)."""
    return float(2.0 ** (1 - seeds))


def seeds_needed(comparisons: int) -> int:
    """Return the fewest seeds with which the exact test can find one of several corrected
    differences significant.
    """
    return math.floor(1 + math.log2(comparisons / LEVEL)) + 1


def comparisons(methods: int, against: str) -> int:
    """Return how many differences are tested together.

    Args:
        methods: Number of methods, with the reference.
        against: The reference: `best` or `first`.

    Returns:
        m - 1 for `first`, m (m - 1) / 2 for `best`, with m methods.
    """
    return methods - 1 if against == "first" else methods * (methods - 1) // 2


def verdict_of(
    paired: Sequence[float], t: float | None, exact: float | None, family: int
) -> Verdict:
    """Return the verdict on a difference, by the corrected p of both tests.

    Args:
        paired: Differences of two methods by seed, `[n]`.
        t: Corrected p of the t-test; None if it is undefined.
        exact: Corrected p of the sign-flip test; None if it is undefined.
        family: Number of differences tested together.

    Returns:
        One of the verdicts (see `Verdict`), at the level `LEVEL`.
    """
    if not any(abs(value) > 1e-12 for value in paired):
        return "equal"
    if exact is not None and exact < LEVEL and (t is None or t < LEVEL):
        return "significant"
    powerless = family * smallest_exact(len(paired)) >= LEVEL
    return "t-test only" if powerless and t is not None and t < LEVEL else "not significant"
