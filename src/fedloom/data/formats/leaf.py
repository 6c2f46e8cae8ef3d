"""The json files of LEAF: users, and for each user its inputs and labels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data.formats.labels import class_labels, same_length
from fedloom.errors import DataError

_SIDE = 28


@dataclass(frozen=True)
class Writer:
    """One user: uint8 images `[n, 1, 28, 28]` and labels `[n]`."""

    name: str
    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> Writer:
        """The writer with its first `count` samples only."""
        return Writer(self.name, self.images[:count], self.labels[:count])


def read_leaf_images(path: Path, classes: int) -> list[Writer]:
    """The writers of one LEAF json file, in the order of its `users`.

    Layout: `users` (names), `num_samples`, `user_data`: name -> `x` (lists of 784 pixels, byte / 255) and `y` (labels).
    Pixels become the bytes they were, round(255 x). Raises `DataError` for text that is not json, a missing key or
    user, pixels outside [0, 1], another number of pixels, or labels outside 0..classes-1.
    Source: Caldas et al., LEAF, 2018; github.com/TalwalkarLab/leaf.
    """

    def convert(found: dict[str, Any]) -> dict[str, Any]:
        # Called as each user's object closes: its numbers become arrays before the next user is parsed, so a file of
        # millions of Python floats never stands in memory at once.
        if isinstance(found.get("x"), list) and isinstance(found.get("y"), list):
            return {"x": _pixels(found["x"], path), "y": class_labels(found["y"] or np.empty(0, int), classes, path)}
        return found

    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=convert)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: damaged json ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict) or not {"users", "user_data"} <= content.keys():
        raise DataError(f"{path}: no LEAF file (wanted the keys users, num_samples, user_data)")
    return [_writer(name, content["user_data"], path) for name in content["users"]]


def _writer(name: str, data: Mapping[str, Any], path: Path) -> Writer:
    found = data.get(name)
    if not isinstance(found, dict) or not isinstance(found.get("x"), Tensor):
        raise DataError(f"{path}: user {name!r} has no x and y in user_data")
    same_length(len(found["x"]), len(found["y"]), f"{path}: user {name!r}")
    return Writer(name, found["x"], found["y"])


def _pixels(rows: object, path: Path) -> Tensor:
    try:
        values = np.asarray(rows, dtype=np.float32).reshape(-1, _SIDE * _SIDE) if rows else np.empty((0, _SIDE * _SIDE))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: x must be lists of {_SIDE * _SIDE} numbers") from error
    if not np.all((values >= 0) & (values <= 1)):
        raise DataError(f"{path}: pixels must lie in 0..1")
    return torch.from_numpy(np.rint(values * 255).astype(np.uint8)).view(-1, 1, _SIDE, _SIDE)
