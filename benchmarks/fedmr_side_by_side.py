"""Make the runs of FedMR's Table 1 (CIFAR-10) through 1,000 rounds, many side by side.

They run on a GPU or on cores. Further groups examine the result at Dirichlet 0.1. Each run is a
`fedloom run` with its own directory below `--directory`. After a stop by `--minutes` or by hand, it
continues from its checkpoint the next time. At the end, every run's figures are one line of
`--record`. The groups, in the order in which they run:

    cnn        FedAvg and FedMR with the CNN, four distributions, two seeds, 1,000 rounds
    resnet     both with ResNet-20, Dirichlet 0.1 and IID, one seed
    ablation   FedMR with the CNN at Dirichlet 0.1 through 500 rounds: layers for tensors,
               weight decay, pixels, smallest client
    others     FedProx, SCAFFOLD, MOON, FedGen and CluSamp with the CNN, Dirichlet 0.1
               and IID, 500 rounds

    python benchmarks/fedmr_side_by_side.py --data FOLDER --groups cnn,ablation --jobs 16
        --device cuda --minutes 9
    # a trial
    python benchmarks/fedmr_side_by_side.py --data FOLDER --groups cnn --jobs 2 --rounds 2
        --minutes 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from fedloom.state.files import slug
from outcome import tell

MR = "fedmr(unit=tensor)"
Options = dict[str, object]

BASE: Options = {
    "model": "fedmr_cnn",
    "rounds": 1000,
    "participation": 0.1,
    "evaluate_every": 10,
    "checkpoint_every": 20,
    "data.clients": 100,
    "training.learning_rate": 0.01,
    "training.momentum": 0.5,
    "training.batch_size": 50,
    "training.epochs": 5,
    "data.partition": "dirichlet(0.1)",
    "data.name": "cifar10(normalise=half)",
    "seed": 0,
}
DISTRIBUTIONS = ("dirichlet(0.1)", "iid", "dirichlet(0.5)", "dirichlet(1.0)")
ABLATION: dict[str, Options] = {
    "tensors": {},
    "layers": {"algorithm": "fedmr(unit=layer)"},
    "weight-decay": {"training.weight_decay": 1e-3},
    "standard-pixels": {"data.name": "cifar10(normalise=standard)"},
    "smallest-client-1": {"data.partition": "dirichlet(0.1, minimum=1)"},
    "class-prior": {"data.partition": "class_prior(0.1)"},
}
OTHERS = ("fedprox(mu=0.01)", "scaffold", "moon(mu=5.0, temperature=0.5)", "fedgen", "clusamp")


def runs(groups: list[str]) -> Iterator[tuple[str, Options]]:
    """Return names and options of the runs of the groups."""
    pairs = {"fedavg": "fedavg", "fedmr": MR}
    if "cnn" in groups:
        for seed, partition, (name, algorithm) in product((0, 1), DISTRIBUTIONS, pairs.items()):
            yield (
                f"cnn-{partition}-{name}-{seed}",
                {"algorithm": algorithm, "data.partition": partition, "seed": seed},
            )
    if "resnet" in groups:
        for partition, (name, algorithm) in product(DISTRIBUTIONS[:2], pairs.items()):
            options: Options = {
                "algorithm": algorithm,
                "data.partition": partition,
                "model": "fedmr_resnet20",
            }
            yield f"resnet20-{partition}-{name}-0", options
    if "ablation" in groups:
        for name, changes in ABLATION.items():
            yield f"ablation-{name}", {"algorithm": MR, "rounds": 500, **changes}
    if "others" in groups:
        for partition, algorithm in product(DISTRIBUTIONS[:2], OTHERS):
            yield (
                f"{algorithm.partition('(')[0]}-{partition}-0",
                {
                    "algorithm": algorithm,
                    "data.partition": partition,
                    "rounds": 500,
                },
            )


def started(name: str, options: Options, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start or continue a run in a process."""
    folder = arguments.directory / name
    settings = {
        **BASE,
        **options,
        "device": arguments.device,
        "engine": arguments.engine,
        "threads": 1,
    }
    settings["rounds"] = min(int(str(settings["rounds"])), arguments.rounds)
    settings["name"] = "run"
    folder.mkdir(parents=True, exist_ok=True)
    table: dict[str, Options] = {"": {}, "data": {}, "training": {}}
    for key, value in settings.items():
        section, _, field = key.rpartition(".")
        table[section][field] = value
    table[""]["directory"] = str(folder)
    lines = [
        line
        for section, fields in table.items()
        for line in ([f"[{section}]"] if section else [])
        + [f"{field} = {json.dumps(v)}" for field, v in fields.items()]
    ]
    (folder / "run.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "FEDLOOM_DATA": str(arguments.data.resolve()),
    }
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fedloom", "run", str(folder / "run.toml"), "--quiet"],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def figures(folder: Path) -> list[dict[str, Any]]:
    """Yield each run below the folder with its rounds and its accuracies, if it was evaluated."""
    lines = []
    for path in sorted(folder.glob("*/**/metrics.jsonl")):
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        accuracies = {
            record["round"]: round(record["accuracy"], 4)
            for record in records
            if "accuracy" in record
        }
        name = path.relative_to(folder).parts[0]
        lines.append({"run": name, "rounds": len(records), "accuracy": accuracies})
    return lines


def main() -> None:
    """Make the runs, `jobs` at a time, then write and print their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10 in it")
    parser.add_argument("--directory", type=Path, default=Path("runs/side_by_side"))
    parser.add_argument(
        "--record", type=Path, help="a jsonl file to write the figures of all runs to"
    )
    parser.add_argument("--groups", default="cnn")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="rows", help="rows or stacked: time both first")
    parser.add_argument("--rounds", type=int, default=1000, help="at most so many")
    parser.add_argument("--minutes", type=float, default=9)
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    waiting, going = (
        [(slug(name), options) for name, options in runs(arguments.groups.split(","))],
        dict[str, subprocess.Popen[bytes]](),
    )
    while (waiting or going) and time.monotonic() < until:
        going = {name: process for name, process in going.items() if process.poll() is None}
        while waiting and len(going) < arguments.jobs:
            name, options = waiting.pop(0)
            going[name] = started(name, options, arguments)
        time.sleep(0.5)
    for process in going.values():
        process.terminate()
    for process in going.values():
        process.wait()
    results = figures(arguments.directory)
    if arguments.record is not None:
        arguments.record.write_text(
            "".join(json.dumps(run) + "\n" for run in results), encoding="utf-8"
        )
    rows = [
        {
            "run": run["run"],
            "rounds": run["rounds"],
            "last": str(list(run["accuracy"].values())[-3:]),
        }
        for run in results
    ]
    if rows:
        tell("FedMR's Table 1, CIFAR-10", rows)
    unfinished = [name for name, _ in waiting] + list(going)
    print(f"unfinished: {', '.join(unfinished) or 'none'}", file=sys.stderr)


if __name__ == "__main__":
    main()
