"""Plants each fault of `planted.py` in a copy of the package, and runs its tests.

    python tests/mutants/harness.py [NUMBER ...]

`make mutants` runs all faults. The exit code is 1 if no test notices a fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":  # pytest adds this folder automatically
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

from mutants.planted import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]

MINUTES = 2.0
"""Most minutes of the chaos harness for one fault."""


def plant(mutant: Mutant, source: Path) -> None:
    """Replace the text of a fault in a copy of the package, `source`."""
    path = source / "fedloom" / mutant.path
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.path} has {mutant.old!r} {text.count(mutant.old)} times"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


def commands(mutant: Mutant) -> list[list[str]]:
    """Return the commands; at least one of them must fail."""
    listed = []
    if mutant.tests:
        tests = [f"tests/{name}" if name.endswith(".py") else name for name in mutant.tests]
        listed.append(["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests])
    if mutant.trials:
        minutes = ["--minutes", str(MINUTES)]
        listed.append(["tests/chaos/harness.py", *minutes, *mutant.trials])
    return listed


def noticed(mutant: Mutant) -> bool:
    """Return True if a command fails with the planted fault."""
    with tempfile.TemporaryDirectory(prefix="fedloom-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        plant(mutant, source)
        environment = {**os.environ, "PYTHONPATH": str(source)}
        for command in commands(mutant):
            ended = subprocess.run(
                [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True
            )
            if ended.returncode == 1:  # tests failed; other codes mean that they did not run
                return True
            if ended.returncode:
                text = (ended.stdout + ended.stderr).decode()[-2000:]
                raise RuntimeError(f"{mutant.name}: {command} did not run:\n{text}")
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, help="positions in the list, from 1")
    chosen = parser.parse_args().numbers or range(1, len(MUTANTS) + 1)
    missed = 0
    for number in chosen:
        mutant, began = MUTANTS[number - 1], time.monotonic()
        found = noticed(mutant)
        missed += not found
        verdict = "noticed" if found else "NOT NOTICED"
        print(
            f"{number:2d} {verdict} after {time.monotonic() - began:.0f} s: {mutant.name}",
            flush=True,
        )
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
