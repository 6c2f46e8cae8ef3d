"""Reads files with one JSON object per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, one per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]
