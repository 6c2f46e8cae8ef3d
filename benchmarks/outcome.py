"""Print the outcome of benchmarks as a table and one JSON line, and record finished runs."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def append(record: Path, run: Mapping[str, Any]) -> None:
    """Append a run to a record, one JSON line each."""
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(run) + "\n")


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
