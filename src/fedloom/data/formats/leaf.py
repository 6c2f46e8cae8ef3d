"""LEAF's json files: users and their samples.

Source: Caldas et al., LEAF, 2018; github.com/TalwalkarLab/leaf.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.data.formats.limits import read_text, reading


def json_files(folder: Path, pattern: str = "*.json") -> list[Path]:
    """Return files in the order of the numbers in their names: `all_data_10` after `all_data_9`.

    Args:
        folder: Folder of the files.
        pattern: Pattern of their names.

    Returns:
        Paths of the files; empty if none has such a name.
    """

    def order(path: Path) -> list[tuple[int, str]]:
        return [
            (int(word), "") if word.isdecimal() else (-1, word)
            for word in re.split(r"(\d+)", path.name)
        ]

    return sorted(folder.glob(pattern), key=order)


def read_leaf(
    path: Path, convert: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, tuple[Any, Any]]:
    """Read a file of users and their samples.

    Args:
        path: The file.
        convert: Called with each object as it closes, before the next one is parsed.

    Returns:
        `x` and `y` of each user.
    """
    with reading(path, "damaged json"):
        content = json.loads(read_text(path, "json"), object_hook=convert)
    with reading(
        path, "no LEAF file (wanted users, a list of names, and user_data with x and y of each)"
    ):
        samples = {name: content["user_data"][name] for name in content["users"]}
        return {name: (user["x"], user["y"]) for name, user in samples.items()}
