"""Write records for the page on faithfulness from runs of `fedloom run`, finished or not.

    python benchmarks/record_runs.py fedmr.table-1 benchmarks/records/fedmr_table_1/runs.zip
        --command "fedloom run ..."

The runs are below a folder, or below the folder `runs` of a zip file. Every run is assigned to the
cell of the table or figure with the least different settings. Runs that differ in other settings
are other experiments: each has a separate record.
`fedloom paper reproduce` writes its own record.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedloom.common.expression import Call, parse
from fedloom.report.summary import RunSummary, dotted
from fedloom.reviews.papers.exhibit_record import ExhibitRecord, today
from fedloom.reviews.papers.library import exhibit
from fedloom.reviews.papers.measure import measured
from fedloom.reviews.papers.plan import PLACES
from fedloom.reviews.papers.protocols import Exhibit, PaperCell
from fedloom.reviews.papers.result_table import CellResult
from fedloom.runs.config_file import configuration
from fedloom.state.files import slug, write_text

RECORDS = Path(__file__).parent / "records" / "papers"

APART = {*PLACES, "name", "directory", "targets", "command", "seed", "record", "rounds", "device"}
"""Settings without effect on the experiment, and the number of rounds, which is compared
separately.
"""

DECIDING = ("algorithm", "model", "data.name", "data.partition", "participation", "data.clients")
"""Settings in which a run must equal its cell."""


def summary(folder: Path) -> RunSummary:
    """Return the summary of a run's files, also from earlier versions."""

    def lines(name: str) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()
        ]

    resolved, environment = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("configuration", "environment")
    )
    records = lines("metrics.jsonl")
    timings = lines("timings.jsonl")[: len(records)]
    return RunSummary(
        resolved["algorithm"],
        resolved["seed"],
        records,
        timings,
        configuration=resolved,
        environment=environment,
    )


def summaries(place: Path) -> list[RunSummary]:
    """Return the summaries of all runs below a folder, or below `runs` in a zip file."""
    if place.is_dir():
        return [summary(path.parent) for path in sorted(place.rglob("configuration.json"))]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(place) as archive:
        archive.extractall(folder)
        return summaries(Path(folder) / "runs")


def settings(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key.

    Expressions have one spelling, and data sets have no folders.
    """
    options = dotted(resolved)
    data = parse(options["data.name"])
    named = {key: value for key, value in data.named.items() if key != "folder"}
    return {
        **options,
        "data.name": str(Call(data.name, data.positional, named)),
        "algorithm": str(parse(options["algorithm"])),
    }


def settings_of(cell: PaperCell, rounds: int) -> dict[str, Any]:
    """Return the settings of a cell in a run of so many rounds."""
    table = {**cell.setting.table(rounds), "algorithm": cell.algorithm}
    return settings(configuration(table).resolved(cell.algorithm, 0))


def differences(expected: Mapping[str, Any], used: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that differ from those of a cell."""
    return {
        key: used[key]
        for key in used
        if key in expected and key not in APART and used[key] != expected[key]
    }


def records(
    paper_exhibit: Exhibit, runs: list[RunSummary], command: str
) -> Iterator[tuple[str, ExhibitRecord]]:
    """Return one named record for each set of changed settings."""
    groups: dict[str, dict[int, list[RunSummary]]] = {}
    changes: dict[str, tuple[str, ...]] = {}
    cells: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        rounds, used = run.configuration["rounds"], settings(run.configuration)
        if rounds not in cells:
            cells[rounds] = [settings_of(cell, rounds) for cell in paper_exhibit.cells]
        near = min(
            ((differences(expected, used), k) for k, expected in enumerate(cells[rounds])),
            key=lambda pair: len(pair[0]),
        )
        if any(key in near[0] for key in DECIDING):
            raise SystemExit(f"{paper_exhibit.id} has no cell of {run.algorithm} with {near[0]}")
        texts = tuple(f"{key}={value}" for key, value in near[0].items())
        name = slug(" ".join([paper_exhibit.id, *texts]))
        changes[name] = texts
        groups.setdefault(name, {}).setdefault(near[1], []).append(run)
    for name, runs_by_cell in groups.items():
        results = []
        for k, begun in runs_by_cell.items():
            cell = paper_exhibit.cells[k]
            rounds, seeds = max(len(run.records) for run in begun), len(cell.setting.seeds)
            # A mean over runs of different lengths belongs to no round: seeds with fewer rounds
            # wait.
            finished = [run for run in begun if len(run.records) == rounds]
            left_out = (
                [f"{rounds} of {cell.setting.rounds:,} rounds"]
                if rounds < cell.setting.rounds
                else []
            )
            left_out += [f"{len(finished)} of {seeds} seeds"] if len(finished) < seeds else []
            results.append(CellResult(cell, measured(cell, finished), (*left_out, *changes[name])))
        environment = next(iter(runs_by_cell.values()))[0].environment
        yield name, ExhibitRecord(paper_exhibit.id, command, today(), environment, tuple(results))


def main() -> None:
    """Read the runs and write the records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("exhibit")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--command", required=True)
    arguments = parser.parse_args()
    runs = summaries(arguments.runs)
    for name, record in records(exhibit(arguments.exhibit), runs, arguments.command):
        write_text(RECORDS / f"{name}.json", record.to_json())
        print(RECORDS / f"{name}.json")


if __name__ == "__main__":
    main()
