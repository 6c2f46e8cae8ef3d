"""Extreme values of each numeric parameter.

Each value causes a one-line error at set-up or can be used in rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedloom.algorithm.method import algorithms
from fedloom.common.errors import Diverged, InvalidValue
from seams.cases import needs_method
from seams.setting import LossyEngine, federation, proof_of, small_task

COUNTS = (0, -1, 10**13, 2**62)
NUMBERS = ("0.0", "-0.5", "1e-300", "1e-160", "1e30", "1e300")
INSIDE = {"private": ", noise=0.3", "local_private": ", noise=0.3", "dp_sgd": ", noise=0.3"}
ALWAYS = {"stages"}  # its options appear beside stages


def expressions(name: str) -> Iterator[tuple[str, int]]:
    """Yield each parameter of a method with each number, and the number of rounds to run.

    Counts run zero rounds, because a large count would take too long.
    """
    wraps = needs_method(algorithms[name])
    for parameter in algorithms[name].parameters.values():
        if isinstance(parameter.default, bool | str) or parameter.name in ("method", "local"):
            continue
        counted = isinstance(parameter.default, int)
        for value in COUNTS if counted else NUMBERS:
            options = INSIDE.get(name, "") if parameter.name != "noise" else ""
            yield (
                f"{name}({'fedavg, ' if wraps else ''}{parameter.name}={value}{options})",
                0 if counted else 1,
            )


@pytest.mark.parametrize("name", sorted({entry.name for entry in algorithms} - ALWAYS))
@pytest.mark.filterwarnings("error", "ignore:pfedme")
def test_no_number_ends_in_anything_but_a_line(name: str) -> None:
    task = small_task()
    engine = LossyEngine(task, proof_of(task))
    for expression, rounds in expressions(name):
        try:
            run, _ = federation(expression, task, engine=engine, awaited=9)
            for _ in range(rounds):
                run.step()
        except (InvalidValue, Diverged) as error:
            assert "\n" not in str(error), expression  # noqa: PT017
        except Exception as error:
            raise AssertionError(f"{expression}: {type(error).__name__}: {error}") from error
