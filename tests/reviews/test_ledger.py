"""Ledger of reproduced exhibits.

Tests the states computed from records, and the records in this repository.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

import blend
import blend_rules
import label_noise
import map as map_study
import mcmahan
import record_runs
import successors
from fedloom.common.errors import InvalidValue
from fedloom.reviews.papers.exhibit_record import ExhibitRecord
from fedloom.reviews.papers.library import exhibit, exhibits
from fedloom.reviews.papers.measure import Measured
from fedloom.reviews.papers.result_table import CellResult
from ledger import STATES, LedgerEntry, ledger, to_markdown
from outcome import append, finished_runs

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORDS = BENCHMARKS / "records" / "papers"
A2 = exhibit("fedumf.table-a2")
CELLS = {cell.row: cell for cell in A2.cells if cell.column == "MNIST IID 15% to 95%"}


def record(values: dict[str, tuple[float | None, float | None]], *left_out: str) -> ExhibitRecord:
    """Return a record of rounds to a target, with mean and deviation by method."""
    results = tuple(
        CellResult(CELLS[row], Measured(mean, std, 3, 3 if mean else 0, 300), left_out)
        for row, (mean, std) in values.items()
    )
    return ExhibitRecord(
        A2.id, "fedloom reproduce fedumf.table-a2", "2026-01-02", {"torch": "2"}, results
    )


def entry(folder: Path, *records: ExhibitRecord) -> LedgerEntry:
    (folder / "reasons.toml").write_text('"fedumf.*" = "because"\n"*" = "no time"\n')
    for number, exhibit_record in enumerate(records):
        (folder / f"{number}.json").write_text(exhibit_record.to_json())
    entries = {entry.exhibit.id: entry for entry in ledger(folder)}
    assert list(entries) == list(exhibits())
    assert (entries["fedmr.table-1"].state, entries["fedmr.table-1"].reason) == (
        "not run",
        "no time",
    )
    return entries[A2.id]


@pytest.mark.parametrize(
    ("values", "left_out", "state"),
    [
        ({"FedAvg": (40.6, 1.0), "FedDC": (22.3, 0.5)}, (), "within"),
        ({"FedAvg": (40.0, None)}, (), "within"),  # no known deviation, but the same value
        ({"FedAvg": (41.0, None)}, (), "differs"),
        ({"FedAvg": (50.0, 1.0), "FedDC": (30.0, 1.0)}, (), "order"),
        ({"FedAvg": (30.0, 1.0), "FedDC": (50.0, 1.0)}, (), "differs"),
        ({"FedAvg": (None, None), "FedDC": (22.0, 1.0)}, (), "order"),  # never reached: last
        ({"FedAvg": (40.6, 1.0)}, ("100 of 300 rounds",), "within"),  # each run reached it before
        ({"FedAvg": (None, None)}, ("100 of 300 rounds",), "partial"),
        ({"FedAvg": (40.6, 1.0)}, ("100 of 300 rounds", "training.momentum=0.5"), "partial"),
    ],
)
def test_states_follow_from_records(
    tmp_path: Path,
    values: dict[str, tuple[float | None, float | None]],
    left_out: tuple[str, ...],
    state: str,
) -> None:
    printed = [
        cell.printed.mean for cell in (CELLS["FedAvg"], CELLS["FedDC"]) if cell.printed is not None
    ]
    assert printed == [40, 22]
    row = entry(tmp_path, record(values, *left_out))
    assert (row.state, row.reason) == (state, "because")
    page = to_markdown([row])
    assert f"| {STATES[state]} | {len(values)} of 264 |" in page
    assert ("because" in page) == (state != "within")


def test_a_later_record_does_not_hide_that_an_earlier_one_differs(tmp_path: Path) -> None:
    row = entry(tmp_path, record({"FedAvg": (40.6, 1.0)}), record({"FedAvg": (60.0, 1.0)}))
    assert (row.state, len(row.judged)) == ("differs", 2)


def test_a_record_comes_back_from_its_file_without_the_folders_of_the_machine(
    tmp_path: Path,
) -> None:
    original = record({"FedAvg": (40.6, 1.0), "FedDC": (None, None)}, "2 of 3 seeds")
    command = (
        "fedloom reproduce fedumf.table-a2 --data 'mnist=/home/me/my data' --directory "
        "/big/disk threads=1"
    )
    path = tmp_path / "one.json"
    path.write_text(
        ExhibitRecord(
            original.exhibit, command, original.date, {}, original.results, "a page"
        ).to_json()
    )
    read = ExhibitRecord.read(path)
    assert read.results == original.results
    assert (
        read.command
        == "fedloom reproduce fedumf.table-a2 --data mnist=FOLDER --directory FOLDER threads=1"
    )
    assert read.source == "a page"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"row": "FedAvgg"},
            "is no record of a table or figure (('FedAvgg', 'MNIST IID 15% to 95%'))",
        ),
        ({"means": 1}, "is no record of a table or figure"),
    ],
)
def test_a_file_that_is_no_record_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    table = json.loads(record({"FedAvg": (40.6, 1.0)}).to_json())
    table["cells"][0] |= change
    (tmp_path / "one.json").write_text(json.dumps(table))
    with pytest.raises(InvalidValue, match=re.escape(message)):
        ExhibitRecord.read(tmp_path / "one.json")


def test_records_of_long_runs_follow_from_their_archive() -> None:
    """Records match their runs, and `left_out` lists the missing rounds of unfinished runs."""
    runs = record_runs.summaries(RECORDS.parent / "fedmr_table_1" / "runs.zip")
    assert len(runs) == 18
    for name, record in record_runs.records(exhibit("fedmr.table-1"), runs, "long_runs.py"):
        assert record.results == ExhibitRecord.read(RECORDS / f"{name}.json").results
        assert {row.cell.row for row in record.results} <= {"FedAvg", "FedMR"}
        for result in record.results:
            assert result.result is not None
            assert (f"{result.result.rounds} of 1,000 rounds" in result.left_out) == (
                result.result.rounds < 1000
            )


def test_a_cell_of_mcmahans_table_has_the_rate_that_the_search_chose() -> None:
    runs = mcmahan.recorded()
    rates = {
        cell.column: cell.setting.training["learning_rate"]
        for cell in exhibit("mcmahan.table-1-2nn").cells
    }
    record = mcmahan.record(runs)
    chosen = {
        column: mcmahan.rate(position) for column, (_, position) in mcmahan.tuned(runs).items()
    }
    assert {column: rates[column] for column in chosen} == chosen
    stored = ExhibitRecord.read(RECORDS / "mcmahan.table-1-2nn.json")
    assert stored.results == record.results


def test_a_record_of_runs_is_appended_and_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl.gz"
    assert finished_runs(path) == []
    runs = [{"seed": seed, "accuracy": [0.1, seed / 4], "method": "fedmr"} for seed in range(3)]
    for run in runs:
        append(path, run)
    assert finished_runs(path) == runs
    assert pd.read_json(path, lines=True).to_dict("records") == runs


@pytest.mark.parametrize("study", [blend, blend_rules, label_noise])
def test_a_study_with_a_complete_record_measures_nothing_again(
    study: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record has every run on data that is part of the package."""
    monkeypatch.setattr(study, "measure", lambda *cell: pytest.fail(f"measured again: {cell}"))
    monkeypatch.setattr(sys, "argv", [study.__name__])
    study.main()
    assert "fedmr" in capsys.readouterr().out.lower()


def test_the_record_of_the_map_has_finished_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["map.py", "--tables"])
    map_study.main()
    assert "dirichlet(0.1)" in capsys.readouterr().out


def test_the_tables_of_the_successors_are_those_of_the_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    successors.tables(successors.recorded(BENCHMARKS / "records" / "successors.jsonl.gz"))
    printed = capsys.readouterr().out.splitlines()
    page = (BENCHMARKS / "RESULTS.md").read_text()
    (section,) = re.findall(
        r"^## Do the successors help\?\n(.*?)\nOne round of the authors", page, re.M | re.S
    )
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    assert [row for row in rows if row not in printed] == []


def test_records_of_the_repository_are_explained_and_give_one_page() -> None:
    entries = ledger(RECORDS)
    unexplained = ("differs", "partial", "not run", "order")
    assert [
        entry.exhibit.id for entry in entries if entry.state in unexplained and not entry.reason
    ] == []
    assert {entry.exhibit.id for entry in entries if entry.records} >= {
        "fedmr.table-1",
        "fedumf.table-a2",
        "fedala.table-2",
    }
    page = to_markdown(entries)
    assert page == to_markdown(ledger(RECORDS))
    for row in entries:
        name, anchor = row.exhibit.id.partition(".")[2], row.exhibit.id.replace(".", "-")
        assert f"| [{name}](#{anchor}) |" in page if row.records else f"| {name} |" in page
        for record in row.records:
            assert record.command in page
            assert not re.search(r"[ =']/\w", record.command), (
                f"{record.command} names a folder of somebody's machine"
            )
