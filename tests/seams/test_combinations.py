"""A selection of the harness's cases that contains each pair of factors.

`make chaos` runs all cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from seams.cases import Case, covering_cases, methods, rare_cases
from seams.harness import run_case


@pytest.mark.parametrize("method", methods())
@pytest.mark.filterwarnings("ignore:pfedme")
def test_rounds_are_what_the_definitions_say(method: str, tmp_path: Path) -> None:
    require_definitions(covering_cases(method), tmp_path)


def require_definitions(cases: Sequence[Case], directory: Path) -> None:
    """Require that each round of the cases matches the definitions of methods and wrappers."""
    for number, case in enumerate(cases):
        folder = directory / str(number)
        folder.mkdir()
        try:
            run_case(case, folder)
        except AssertionError as error:
            raise AssertionError(
                f"{case.expression} [{case.attendance}, {case.model}, {case.course}]: {error}"
            ) from error


@pytest.mark.filterwarnings("ignore:pfedme")
def test_rounds_of_the_pairs_that_going_round_does_not_meet_are_as_defined(tmp_path: Path) -> None:
    require_definitions(rare_cases(), tmp_path)
