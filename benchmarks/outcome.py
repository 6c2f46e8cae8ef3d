"""Print the outcome of benchmarks as a table and one JSON line, and record finished runs."""

from __future__ import annotations

import gzip
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def finished_runs(record: Path) -> list[dict[str, Any]]:
    """Return the runs of a record in the order of `append`; none if the file does not exist.

    A record is a table with one JSON line per run, compressed by gzip:
    `pandas.read_json(record, lines=True)` also reads it.
    """
    if not record.exists():
        return []
    with gzip.open(record, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def append(record: Path, run: Mapping[str, Any]) -> None:
    """Append a run to a record; the file and its folder are made if needed."""
    record.parent.mkdir(parents=True, exist_ok=True)
    line = f"{json.dumps(run)}\n".encode()
    with record.open("ab") as file:
        file.write(gzip.compress(line, mtime=0))  # gzip files may be concatenated


def tell(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print `rows` as a table, then everything with versions and machine as one JSON line.

    All rows have the same keys.
    """
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(
            name.replace("_", " "),
            justify="right" if isinstance(rows[0][name], (int, float)) else "left",
        )
    for row in rows:
        table.add_row(
            *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
        )
    console = Console()
    # a file or pipe counts as 80 columns, too narrow for these tables
    console.width = max(console.width, 160)
    console.print(table)
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine(),
    }
    print(json.dumps({"benchmark": title, "machine": machine, "rows": list(rows)}))
