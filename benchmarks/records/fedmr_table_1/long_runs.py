"""The runs of one method, one after another, from this folder: `python long_runs.py fedavg` or
`python long_runs.py fedmr`.

It calls the `fedloom` beside the Python that runs it, with one thread, and takes CIFAR-10 from
FEDLOOM_DATA.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

METHODS = {"fedavg": "fedavg", "fedmr": "fedmr(unit=tensor)"}
PARTITIONS = {
    "d01": "dirichlet(0.1)",
    "iid": "iid",
    "d05": "dirichlet(0.5)",
    "d10": "dirichlet(1.0)",
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def main() -> None:
    method = sys.argv[1]
    jobs = [
        (rounds, seed, key, 0.5) for rounds, seed, key in product((500, 1000), (0, 1), PARTITIONS)
    ]
    if method == "fedavg":
        jobs[4:4] = [(500, 0, "d01", 0.9), (500, 0, "iid", 0.9)]
    folder = Path(__file__).parent
    for rounds, seed, key, momentum in jobs:
        options = [
            f"directory=runs/m{str(momentum).replace('.', '')}-{key}-{method}-s{seed}",
            f"algorithm={METHODS[method]}",
            f"data.partition={PARTITIONS[key]}",
            f"seed={seed}",
            f"training.momentum={momentum}",
            f"rounds={rounds}",
            'record=["similarity(every=10)"]',
        ]
        command = [
            str(Path(sys.executable).with_name("fedloom")),
            "run",
            "table1.toml",
            *options,
            "--quiet",
        ]
        subprocess.run(
            command,
            env={**os.environ, **ONE_THREAD},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            check=False,
        )


if __name__ == "__main__":
    main()
