"""Compare seconds per round of fedloom and other frameworks, all in one run.

They use the same data, model, batches and number of local steps. Each framework runs in its own
environment and in its best documented setting: pfl with one and with two processes, Flower with one
core per actor. `--environments FOLDER` holds one environment for each: `pfl`, `flower`, `fluke`,
`fedjax`, `flbench`; `--install` makes the missing ones. fedloom and PFLlib run in this environment.
`--sources FOLDER` holds clones of PFLlib and FL-bench, which are no packages. Only fedloom and
these two have FedALA (`--method fedala`, workload `pfllib`).

The frameworks take turns, `--repeats` times. A framework's figure is the minimum over the turns of
the median over its counted rounds. Other work on the machine affects this figure least.

    python benchmarks/peers/compare.py --environments /tmp/peers --install
        [--workloads mlp,cnn,pfl] [--rounds 8] [--repeats 3]
    python benchmarks/peers/compare.py --sources /tmp/clones --workloads pfllib
        --contenders "fedloom;PFLlib" --method fedala
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from outcome import tell  # noqa: E402

PACKAGES = {
    "pfl": ["torch==2.13.0", "pfl[pytorch]==0.6.0"],
    "flower": ["torch==2.13.0", "flwr[simulation]==1.41.0"],
    "fluke": ["torch==2.13.0", "fluke-fl==0.8.1"],
    "fedjax": ["fedjax==0.0.17"],
    "flbench": ["torch==2.13.0", "omegaconf==2.3.0", "scikit-learn", "pandas", "pillow", "rich"],
}
CLONES = {"pfllib": "PFLlib", "flbench": "FL-bench"}

CONTENDERS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    # name: (script, arguments, environment)
    "fedloom": ("fedloom", [], {"FEDLOOM_ENGINE": "default"}),
    "fedloom rows": ("fedloom", [], {"FEDLOOM_ENGINE": "rows"}),
    "pfl, 1 process": ("pfl", ["--processes", "1"], {}),
    "pfl, 2 processes": ("pfl", ["--processes", "2"], {}),
    "flower, 2 actors": ("flower", ["--processes", "2"], {}),
    "fluke": ("fluke", [], {}),
    "fedjax": ("fedjax", [], {}),
    "PFLlib": ("pfllib", [], {}),
    "FL-bench": ("flbench", [], {}),
}


def python(name: str, environments: Path) -> Path:
    """Return the interpreter of a framework's environment."""
    here = name in ("fedloom", "pfllib")
    return Path(sys.executable) if here else environments / name / "bin" / "python"


def install(environments: Path) -> None:
    """Make the missing environments, each with the compared versions."""
    for name, packages in PACKAGES.items():
        if not python(name, environments).exists():
            venv.create(environments / name, with_pip=True)
            subprocess.check_call(
                [python(name, environments), "-m", "pip", "install", "--quiet", *packages]
            )


def measure(name: str, workload: str, arguments: argparse.Namespace) -> dict[str, Any] | str:
    """Return the figures from a framework's script, or the reason for their absence."""
    script, extra, environment = CONTENDERS[name]
    if script in CLONES:
        clone = arguments.sources / CLONES[script]
        if not clone.is_dir():
            return f"no clone in {clone}: set --sources"
        extra = [*extra, "--source", str(clone)]
    interpreter = python(script, arguments.environments)
    if not interpreter.exists():
        return f"no environment {interpreter.parent.parent}: add --install"
    command = [
        interpreter,
        HERE / f"run_{script}.py",
        "--workload",
        workload,
        "--method",
        arguments.method,
        "--rounds",
        arguments.rounds,
        *extra,
    ]
    try:
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=arguments.limit,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        return f"not done in {arguments.limit:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    measurement: dict[str, Any] | str = (
        json.loads(lines[-1]) if lines else (done.stderr.strip().splitlines() or ["nothing"])[-1]
    )
    return measurement


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--environments", type=Path, default=Path("peers"), help="folder of the environments"
    )
    parser.add_argument(
        "--install", action="store_true", help="make the environments that are missing"
    )
    parser.add_argument(
        "--sources", type=Path, default=Path("peers"), help="folder with clones of PFLlib, FL-bench"
    )
    parser.add_argument("--method", choices=("fedavg", "fedala"), default="fedavg")
    parser.add_argument("--workloads", default="mlp,cnn,pfl")
    parser.add_argument("--contenders", default=";".join(CONTENDERS), help="names, separated by ;")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--limit", type=float, default=300, help="seconds after which a framework's turn is ended"
    )
    arguments = parser.parse_args()
    if arguments.install:
        install(arguments.environments)
    names = arguments.contenders.split(";")
    for workload in arguments.workloads.split(","):
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        trouble: dict[str, str] = {}
        for _ in range(arguments.repeats):
            for name in names:
                measurement = measure(name, workload, arguments)
                if isinstance(measurement, str):
                    trouble[name] = measurement
                else:
                    turns[name].append(measurement)
        best = {
            name: min(rows, key=lambda row: row["seconds"]) for name, rows in turns.items() if rows
        }
        base = best.get(names[0], {"seconds": float("nan")})["seconds"]
        rows = [
            {
                "framework": name,
                "seconds_a_round": row["seconds"],
                "over_first": row["seconds"] / base,
                "first_round_s": row["first"],
                "loss": row["loss"],
                "note": row.get("chosen", ""),
            }
            for name, row in sorted(best.items(), key=lambda item: item[1]["seconds"])
        ]
        if rows:
            tell(f"{arguments.method}, workload {workload!r}: seconds a round", rows)
        for name, reason in trouble.items():
            print(f"{name}: {reason}")


if __name__ == "__main__":
    main()
