"""A selection of the harness's cases in which every pair of factors occurs; `make chaos` runs all of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from seams.cases import FACTORS, accepted_case, covering_cases, methods, pair_refusal, pairs_of
from seams.harness import run_case
from seams.page import COLUMNS, PAGE, reason_of, row_of


@pytest.mark.parametrize("method", methods())
@pytest.mark.filterwarnings("ignore:pfedme")
def test_rounds_are_what_the_definitions_say(method: str, tmp_path: Path) -> None:
    for number, case in enumerate(covering_cases(method)):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            run_case(case, folder)
        except AssertionError as error:
            raise AssertionError(
                f"{case.expression} [{case.attendance}, {case.model}, {case.course}]: {error}"
            ) from error


@pytest.mark.parametrize("method", methods())
def test_the_page_of_combinations_is_up_to_date(method: str) -> None:
    """Else run tests/seams/page.py."""
    text = PAGE.read_text()
    assert row_of(method) in text
    for wrapper in COLUMNS:
        if pair_refusal(method, wrapper):
            assert f"- {reason_of(method, wrapper)}. Methods: " in text


def test_every_pair_of_values_that_is_not_refused_occurs_in_a_case() -> None:
    covered = {pair for method in methods() for case in covering_cases(method) for pair in pairs_of(case)}
    for first, second in itertools.combinations(FACTORS, 2):
        for pair in itertools.product([first], FACTORS[first], [second], FACTORS[second]):
            if pair not in covered:
                refused = pair_refusal(pair[1], pair[3]) if second == "wrapper" else ""
                assert refused or not accepted_case(**{first: pair[1], second: pair[3]}), pair
