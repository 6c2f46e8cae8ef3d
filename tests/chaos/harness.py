"""Run the trials for some minutes and print a table of their outcomes: python
tests/chaos/harness.py --minutes 60

`make test` runs it for some seconds (project/test_chaos.py), `make chaos MINUTES=60` for longer. Equal
seeds give equal draws.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":  # pytest adds this path itself
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from chaos.trials import TRIALS, Wrong, resources


@dataclass
class Tally:
    """The outcomes of one trial's repetitions."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest: float = 0.0
    descriptors: list[int] = field(default_factory=list)  # open after each repetition

    @property
    def tried(self) -> int:
        return self.ends.total() + len(self.wrong)


def run(seconds: float, seed: int, names: list[str] | None = None) -> dict[str, Tally]:
    """Run each trial once, then give more time to trials with more errors."""
    tallies = {name: Tally() for name in names or TRIALS}
    with tempfile.TemporaryDirectory(prefix="fedloom-chaos-") as folder, ExitStack() as stack:
        trials = {name: TRIALS[name](Path(folder) / name) for name in tallies}
        for trial in trials.values():
            stack.callback(trial.close)
        draws = {name: random.Random(f"{name} {seed}") for name in tallies}
        spent = dict.fromkeys(tallies, 0.0)
        end = time.monotonic() + seconds
        while time.monotonic() < end or any(tally.tried == 0 for tally in tallies.values()):
            # First each trial once, then mostly the trials with the most errors.
            name = min(
                spent,
                key=lambda name: (
                    tallies[name].tried > 0,
                    spent[name] / (1 + len(tallies[name].wrong)),
                ),
            )
            began = time.monotonic()
            try:
                tallies[name].ends[trials[name].once(draws[name])] += 1
            except Wrong as error:
                tallies[name].wrong.append(str(error))
            except Exception:  # do not lose the results of the other trials
                tallies[name].wrong.append(traceback.format_exc())
            if leak := leaked(tallies[name]):
                tallies[name].wrong.append(leak)
            took = time.monotonic() - began
            spent[name] += took
            tallies[name].longest = max(tallies[name].longest, took)
    return tallies


SLACK = 3
"""Repetitions of a trial, and descriptors, before those that stay open count as a leak."""


def leaked(tally: Tally) -> str:
    """Return an error if the repetitions of a trial leave more and more descriptors open."""
    tally.descriptors.append(descriptors())
    count = len(tally.descriptors)
    begin, allowed = max(tally.descriptors[:SLACK]), count // 2
    if count <= 2 * SLACK or tally.descriptors[-1] <= begin + allowed:
        return ""
    gc.collect()
    current, tally.descriptors = descriptors(), []
    return (
        f"descriptors: {begin} at first, {current} after {count} repetitions"
        if current > begin + allowed
        else ""
    )


def descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def table(tallies: dict[str, Tally]) -> str:
    lines = ["| trial | tried | wrong | longest, s | how it went |", "|---|---|---|---|---|"]
    for name, tally in tallies.items():
        ends = ", ".join(f"{count} {end}" for end, count in tally.ends.most_common())
        lines.append(
            f"| {name} | {tally.tried} | {len(tally.wrong)} | {tally.longest:.1f} | {ends} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("trials", nargs="*", help=f"all by default: {', '.join(TRIALS)}")
    options = parser.parse_args()
    resources_before = resources(os.getpid())
    tallies = run(60 * options.minutes, options.seed, options.trials or None)
    resources_after = resources(os.getpid())
    print(table(tallies))
    print(
        "held before and after: "
        + ", ".join(
            f"{name} {resources_before[name]} and {resources_after[name]}"
            for name in resources_before
        )
    )
    wrong = [f"{name}: {text}" for name, tally in tallies.items() for text in tally.wrong]
    print("\n".join(wrong))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
