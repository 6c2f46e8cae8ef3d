"""Measure a round over Flower with and without a worker at each site, with Flower's own
intervals.

A SuperLink and three SuperNodes run as processes on this machine. They train the example of
`fedloom flower init` (the digits, one message per site and round), first without workers, then with
workers. Seconds are per round, without the first round. Processor seconds are per message to a
site. They cover all processes of a site over the whole run, including polling.

    python benchmarks/flower_round.py [--rounds 5] [--method fedmr]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import superlink_support
from site_trial import Trial

SITES = 3


def used(deployment: superlink_support.Deployment) -> float:
    """Return processor seconds of all processes of the sites and their finished child processes."""
    ticks = 0
    for site in range(SITES):
        for pid in deployment.running(f"site-{site}"):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def measured(minutes: int, method: str, rounds: int) -> tuple[float, float]:
    """Return the median seconds per round, and the sites' processor seconds per message."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)

        def settings(site: int) -> dict[str, str | int]:
            return {"memory": str(path / f"memory-{site}"), "worker-minutes": minutes}

        with superlink_support.deployed(path, SITES, settings, hurried=False) as deployment:
            trial, used_before = Trial(deployment, "round", method, rounds), used(deployment)
            run = trial.start()
            trial.wait_for_round(rounds)
            spent = used(deployment) - used_before
            trial.wait(run)
            lines = (trial.output / "timings.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    return statistics.median(seconds[1:]), spent / SITES / rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", default="fedmr")
    arguments = parser.parse_args()
    results = {minutes: measured(minutes, arguments.method, arguments.rounds) for minutes in (0, 5)}
    print("| worker | seconds a round | processor seconds a message |\n|---|---|---|")
    for minutes, (seconds, spent) in results.items():
        print(f"| {'with' if minutes else 'without'} | {seconds:.1f} | {spent:.2f} |")
    print(
        f"\nratio: {results[0][0] / results[5][0]:.2f} in seconds, "
        f"{results[0][1] / results[5][1]:.2f} in processor seconds"
    )


if __name__ == "__main__":
    main()
