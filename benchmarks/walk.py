"""Count the functions, modules and calls of fedloom in one round of FedMR on `rows`.

It is the third of three rounds on the digits with `mlp`, with two of 20 clients and an evaluation
at its end.

    python benchmarks/walk.py [--calls]
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import fedloom as fl
from fedloom.engines.rows import RowsEngine

PACKAGE = str(Path(fl.__file__).parent)


def walk() -> Counter[tuple[str, str]]:
    """Return the calls of each named function in the round, by module and name."""
    task = fl.make_task("digits", model="mlp")
    schedule = fl.Schedule(rounds=3, evaluate_every=1)
    federation = fl.Federation(fl.FedMR(), task, RowsEngine(task), schedule)
    federation.step()
    federation.step()
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(PACKAGE)
            and not code.co_name.startswith("<")
        ):
            calls[code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname] += 1

    sys.setprofile(note)
    federation.step()
    sys.setprofile(None)
    return calls


if __name__ == "__main__":
    calls = walk()
    for (module, name), times in calls.most_common() if "--calls" in sys.argv else ():
        print(f"{times:5}  {module}: {name}")
    print(
        f"{len(calls)} functions in {len({module for module, _ in calls})} modules, "
        f"{calls.total()} calls"
    )
