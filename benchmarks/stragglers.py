"""Stragglers: simulated seconds until the test accuracy is at a target, waiting for all or not.

Twenty clients, of which ten train at a time; the slowest take up to ten times as long as the
fastest (`stragglers(1000, 10)` samples per second, 1 MB/s down, 250 kB/s up). Each line is the mean
and standard deviation over the seeds that reached the target. Every method may send equally many
models: asynchronous ones, which receive k at a time, have 10 / k times the rounds.

    python benchmarks/stragglers.py [--data digits] [--samples N] [--rounds 60] [--seeds 5]
        [--target 0.8]
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch

from fedloom.common.training import Training
from fedloom.data.dataset import make_dataset
from fedloom.report.summary import seconds_to
from fedloom.rounds.clock import Clock
from fedloom.runs.run import run
from fedloom.task.making import make_task

METHODS = {  # with the replies of a round
    "fedavg": 10,
    "fedprox(mu=0.01)": 10,
    "umf(fedavg)": 10,
    "fedbuff(fedavg, k=3)": 3,
    "fedasync(fedavg)": 1,
    "fedmr": 10,
    "fedmr_async(k=3)": 3,
}
CLOCK = Clock(speed="stragglers(1000, 10)", down=1e6, up=2.5e5)


def spread(values: list[float], unit: float = 1.0) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{unit * statistics.fmean(values):.1f} ± {unit * deviation:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits")
    parser.add_argument("--samples", type=int, help="the first so many training samples alone")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = make_dataset(options.data)
    dataset = replace(dataset, train=dataset.train[: options.samples])
    training = Training(
        learning_rate=0.1, epochs=2 if options.data == "digits" else 1, batch_size=20
    )
    print(
        f"| clients' labels | method | s to {options.target:.0%} | seeds | final accuracy, % | "
        "s in all |"
    )
    print("|---|---|---|---|---|---|")
    for partition in ("iid", "dirichlet(0.3)"):
        for method, replies in METHODS.items():
            reached, final, simulated = [], [], []
            for seed in range(options.seeds):
                model = "mlp(hidden=[32])"
                task = make_task(
                    dataset,
                    clients=20,
                    partition=partition,
                    model=model,
                    training=training,
                    seed=seed,
                )
                rounds = options.rounds * 10 // replies
                every = max(1, 3 // replies)
                result = run(
                    method,
                    task,
                    rounds=rounds,
                    participation=0.5,
                    seed=seed,
                    evaluate_every=every,
                    clock=CLOCK,
                )
                seconds_needed = seconds_to(result.summary, options.target)
                reached += [] if seconds_needed is None else [seconds_needed]
                final.append(result.accuracy)
                simulated.append(result.history[-1]["simulated_seconds"])
            to = spread(reached) if reached else "never"
            often = f"{len(reached)} of {options.seeds}"
            print(
                f"| {partition} | {method} | {to} | {often} | {spread(final, 100)} | "
                f"{spread(simulated)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
