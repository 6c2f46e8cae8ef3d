"""Files of one JSON object a line, as tests read what a run has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, a line each."""
    return [json.loads(line) for line in path.read_text().splitlines()]
