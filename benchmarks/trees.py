"""Compare the speed of two source trees, round by round, on the twelve workloads of `rule.py`.

    git worktree add /tmp/old COMMIT
    python benchmarks/trees.py /tmp/old . [--workloads mlp,cnn] [--rounds 11] [--threads 1]

Each tree has one process per workload, with the tree's own `benchmarks/rule.py`. They train a round
in turn, so that other work on the machine hits both alike. `rows` and `stacked` are the new tree's
processor time over the old one's: the median of the ratios of neighbouring rounds, after a warm-up.
`before_s` and `after_s` are the seconds of a round of the faster engine, the least of all rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from outcome import tell
from rule import WORKLOADS, engines_of

ENGINES = ("rows", "stacked")
WORKER = """
import sys, time, torch, rule

name, threads, *engines = sys.argv[1:]
rule.keep_pages()
torch.set_num_threads(int(threads))
make, method, participation = rule.WORKLOADS[name]
task = make()
schedule = rule.Schedule(rule.ROUNDS, participation, evaluate_every=rule.ROUNDS)
made = {engine: rule.make_engine(engine, task, schedule) for engine in engines}
runs = {e: rule.Federation(rule.build(method), task, made[e], schedule) for e in engines}
print("ready", flush=True)
with rule.using_threads(rule.step_threads(task)):
    for line in sys.stdin:
        began = time.process_time()
        runs[line.strip()].step()
        print(time.process_time() - began, flush=True)
for engine in made.values():
    engine.close()
"""
"""It takes all names from `rule.py`, since the modules of the trees may differ."""


class Tree:
    """A process that trains rounds of one workload with the code of one tree."""

    def __init__(self, path: Path, workload: str, threads: int, engines: list[str]) -> None:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = f"{path / 'src'}{os.pathsep}{path / 'benchmarks'}"
        environment["OMP_NUM_THREADS"] = str(threads)
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, workload, str(threads), *engines],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("a process ended: try its workload with `benchmarks/rule.py`")
        return answer

    def round(self, engine: str) -> float:
        """Train a round, and return its seconds of processor time."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{engine}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self.process.communicate()


def measure(trees: tuple[Path, Path], workload: str, rounds: int, threads: int) -> dict[str, Any]:
    """Return one line of the table."""
    _, method, _ = WORKLOADS[workload]
    engines = engines_of(method)
    old, new = [Tree(path, workload, threads, engines) for path in trees]
    row: dict[str, Any] = {"workload": workload, **dict.fromkeys(ENGINES)}
    fastest: list[tuple[float, float]] = []
    for engine in engines:
        pairs = [(old.round(engine), new.round(engine)) for _ in range(rounds + 1)][1:]
        row[engine] = statistics.median(after / before for before, after in pairs)
        before, after = zip(*pairs, strict=True)
        fastest.append((min(before), min(after)))
    old.close()
    new.close()
    before_s, after_s = zip(*fastest, strict=True)
    row |= {"before_s": min(before_s), "after_s": min(after_s)}
    print(*row.values(), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    trees = given.old.resolve(), given.new.resolve()
    rows = [
        measure(trees, workload, given.rounds, given.threads)
        for workload in given.workloads.split(",")
    ]
    tell("the new tree's processor time over the old one's", rows)


if __name__ == "__main__":
    main()
