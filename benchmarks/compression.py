"""Compressed traffic: bytes, down and up together, until the test accuracy is 95 %, by code.

Twenty clients, half of them in a round, Dirichlet 1.0. Each line is the mean over the seeds that
reach the accuracy in the given rounds. It also gives the number of these seeds.

    python benchmarks/compression.py [--data digits] [--samples N] [--rounds 150] [--seeds 3]
        [--target 0.95]
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch

from fedloom.common.training import Training
from fedloom.data.dataset import make_dataset
from fedloom.report.summary import bytes_to
from fedloom.runs.run import run
from fedloom.task.making import make_task

METHODS = (
    "fedavg",
    "quantised(fedavg)",
    "quantised(fedavg, down=8)",
    "quantised(fedavg, bits=4, down=8)",
    "quantised(fedavg, bits=2, down=8)",
    "quantised(fedavg, bits=1, down=8)",
    "quantised(fedavg, bits=4, down=4)",
    "sparse(fedavg, share=0.05)",
    "quantised(sparse(fedavg, share=0.05), down=8)",
    "quantised(sparse(fedavg, share=0.01), down=8)",
    "quantised(sparse(fedavg, share=0.05, feedback=false), down=8)",
    "lowrank(fedavg, rank=4)",
    "quantised(lowrank(fedavg, rank=4), down=8)",
    "quantised(fedmr, bits=4, down=8)",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits")
    parser.add_argument("--samples", type=int, help="the first so many training samples alone")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = make_dataset(options.data)
    dataset = replace(dataset, train=dataset.train[: options.samples])
    training = Training(
        learning_rate=0.1, epochs=5 if options.data == "digits" else 1, batch_size=20
    )
    model = "mlp(hidden=[64, 64])" if options.data == "digits" else "mlp(hidden=[200])"
    print(
        f"| method | best accuracy, % | rounds to {options.target:.0%} | MB to "
        f"{options.target:.0%} | bytes of a round |"
    )
    print("|---|---|---|---|---|")
    for method in options.methods:
        rows = []
        for seed in range(options.seeds):
            task = make_task(
                dataset,
                clients=20,
                partition="dirichlet(1.0)",
                model=model,
                training=training,
                seed=seed,
            )
            result = run(
                method, task, rounds=options.rounds, participation=0.5, seed=seed, evaluate_every=1
            )
            record = result.history[-1]
            reached = result.rounds_to(options.target), bytes_to(result.summary, options.target)
            rows.append(
                (100 * result.best_accuracy, *reached, record["bytes_down"] + record["bytes_up"])
            )
        best, rounds, size, seconds = zip(*rows, strict=True)
        counts = [count for count in rounds if count is not None]
        often = "" if len(counts) == len(rows) else f" ({len(counts)} of {len(rows)})"
        to = f"{statistics.fmean(counts):.0f}{often}" if counts else "never"
        sent = (
            f"{statistics.fmean(bytes_sent for bytes_sent in size if bytes_sent is not None) / 1e6:.2f}"
            if counts
            else ""
        )
        print(
            f"| {method} | {statistics.fmean(best):.1f} | {to} | {sent} | {seconds[0]:,} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
