"""LEAF's json files: users and their samples.

Source: Caldas et al., LEAF, 2018; github.com/TalwalkarLab/leaf.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.data.formats.limits import read_text, reading
from fedloom.errors import DataError, quoted


def json_files(folder: Path, pattern: str = "*.json") -> list[Path]:
    """Return the json files in `folder`, `all_data_10` after `all_data_9`."""

    def order(path: Path) -> list[tuple[int, str]]:
        return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", path.name)]

    return sorted(folder.glob(pattern), key=order)


def read_leaf(path: Path, convert: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """Read each user's `x` and `y`; `convert` is called as each object closes, before the next is parsed."""
    with reading(path, "damaged json"):
        content = json.loads(read_text(path, "json"), object_hook=convert)
    if not isinstance(content, dict) or not {"users", "user_data"} <= content.keys():
        raise DataError(f"{path}: no LEAF file (wanted the keys users, num_samples, user_data)")
    users, data = content["users"], content["user_data"]
    if not isinstance(users, list) or not all(isinstance(name, str) for name in users) or len(set(users)) < len(users):
        raise DataError(f"{path}: users must be a list of names, each of them once, not {quoted(users)}")
    if not isinstance(data, dict):
        raise DataError(f"{path}: user_data must hold x and y of each user, not {quoted(data)}")
    for name in users:
        if not isinstance(data.get(name), dict) or not {"x", "y"} <= data[name].keys():
            raise DataError(f"{path}: user {quoted(name)} has no x and y in user_data")
    return {name: data[name] for name in users}
