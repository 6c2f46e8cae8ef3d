"""The planted faults of `make mutants` match the code."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom
from mutants.harness import ROOT, commands, plant
from mutants.planted import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_a_change_of_one_place_that_tests_must_notice(
    mutant: Mutant, tmp_path: Path
) -> None:
    source = Path(fedloom.__file__).parent / mutant.path
    copy = tmp_path / "fedloom" / mutant.path
    copy.parent.mkdir(parents=True)
    copy.write_text(source.read_text())
    plant(mutant, tmp_path)
    compile(copy.read_text(), mutant.path, "exec")
    assert copy.read_text() != source.read_text()
    assert commands(mutant)
    for name in mutant.tests:
        assert not name.endswith(".py") or (ROOT / "tests" / name).exists()


def test_a_fault_without_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fedloom").mkdir()
    (tmp_path / "fedloom" / "a.py").write_text("x = 1\nx = 1\n")
    with pytest.raises(ValueError, match="2 times"):
        plant(Mutant("twice", "a.py", "x = 1", "x = 2"), tmp_path)
