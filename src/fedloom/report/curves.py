"""A measure over the rounds as mean and standard deviation over seeds, and few enough points of it to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.config.checks import require_one_of
from fedloom.report.summary import RunSummary

Floats = npt.NDArray[np.float64]

AXES = ("round", "bytes", "seconds")
"""What a curve can be drawn over: the round, the bytes sent (down and up) or the seconds spent until its end."""


@dataclass(frozen=True)
class Curve:
    """A method's curve; all arrays are `[points]`. `std` is the sample deviation over `seeds` runs, 0 for one run."""

    rounds: npt.NDArray[np.int64]
    x: Floats
    mean: Floats
    std: Floats
    seeds: int

    def thinned(self, points: int) -> Curve:
        """About `points` of the measured points: of every stretch its lowest and its highest, and both ends.

        Nothing is smoothed or invented, so no peak and no dip is lost.
        """
        if len(self.x) <= points:
            return self
        keep = {0, len(self.x) - 1}
        for stretch in np.array_split(np.arange(len(self.x)), max(1, points // 2)):
            keep |= {int(stretch[self.mean[stretch].argmin()]), int(stretch[self.mean[stretch].argmax()])}
        index = np.array(sorted(keep))
        return Curve(self.rounds[index], self.x[index], self.mean[index], self.std[index], self.seeds)


def curve(runs: Sequence[RunSummary], measure: str = "accuracy", x: str = "round") -> Curve | None:
    """The curve of one method's `runs` for a figure of its records, such as `accuracy`, `loss` or `pool_cosine`.

    Runs without the measure are left out. A point stands for a round that all the others recorded with a finite value, so
    that a run which stopped early does not bend the mean. None when there is no such round, or when x is `seconds` and a run
    kept no times. Raises `InvalidValue` for an unknown `x`.
    """
    require_one_of("x", x, AXES)
    recorded = [series for run in runs if (series := _series(run, measure))]
    if not recorded:
        return None
    rounds = sorted(set.intersection(*(set(series) for series in recorded)))
    values = np.array([[series[number] for number in rounds] for series in recorded])
    finite = np.isfinite(values).all(0)
    rounds = [number for number, good in zip(rounds, finite, strict=True) if good]
    if not rounds:
        return None
    positions = [_positions(run, x) for run in runs if _series(run, measure)]
    if any(number not in position for position in positions for number in rounds):
        return None
    along = np.array([[position[number] for number in rounds] for position in positions], dtype=np.float64)
    values = values[:, finite]
    std = values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    return Curve(np.array(rounds, dtype=np.int64), along.mean(0), values.mean(0), std, len(values))


def _series(run: RunSummary, measure: str) -> dict[int, float]:
    """The measure by round, where it was recorded."""
    return {int(r["round"]): float(r[measure]) for r in run.records if r.get(measure) is not None}


def _positions(run: RunSummary, x: str) -> dict[int, float]:
    """Where each round stands on the axis `x`: its number, or what was spent until its end."""
    lines = run.timings if x == "seconds" else run.records
    numbers = [int(line["round"]) for line in lines]
    if x == "round":
        return dict(zip(numbers, map(float, numbers), strict=True))
    names = ("seconds",) if x == "seconds" else ("bytes_down", "bytes_up")
    spent = np.cumsum([sum(float(line.get(name, 0)) for name in names) for line in lines])
    return dict(zip(numbers, spent.tolist(), strict=True))
