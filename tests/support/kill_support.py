"""Kills between file operations."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fedloom.state.tensors
from fedloom.rounds.checkpoint import RoundLog


class Killed(BaseException):
    """Stands for the death of the process."""


class Disk:
    """Counts file operations; operation `deadly` stops half-way, and no operation follows it."""

    def __init__(self, deadly: float = float("inf")) -> None:
        self.deadly = deadly
        self.done = 0

    def operation(self, act: Callable[[], Any], half: Callable[[], Any]) -> Any:
        self.done += 1
        if self.done < self.deadly:
            return act()
        if self.done == self.deadly:
            half()
        raise Killed


@contextmanager
def disk(deadly: float = float("inf")) -> Iterator[Disk]:
    """Redirect every function that changes files of the run through a `Disk`."""
    watched = Disk(deadly)
    replacing, replace, unlink = fedloom.state.tensors.replacing, Path.replace, Path.unlink
    append, write_bytes, rmtree = RoundLog.append, Path.write_bytes, shutil.rmtree

    @contextmanager
    def written(path: Path, **options: Any) -> Iterator[Path]:
        with replacing(path, **options) as temporary:
            yield temporary
            watched.operation(
                nothing, lambda: os.truncate(temporary, temporary.stat().st_size // 2)
            )

    def appended(log: RoundLog, record: dict[str, Any]) -> None:
        def half() -> None:
            append(log, record)
            os.truncate(log.path, log.path.stat().st_size - 9)

        watched.operation(lambda: append(log, record), half)

    def nothing() -> None:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedloom.state.tensors, "replacing", written)
        patch.setattr(RoundLog, "append", appended)
        patch.setattr(
            Path, "replace", lambda a, b: watched.operation(lambda: replace(a, b), nothing)
        )
        patch.setattr(
            Path, "unlink", lambda a, **o: watched.operation(lambda: unlink(a, **o), nothing)
        )
        patch.setattr(
            Path,
            "write_bytes",
            lambda a, b: watched.operation(
                lambda: write_bytes(a, b), lambda: write_bytes(a, b[: len(b) // 2])
            ),
        )
        patch.setattr(
            shutil, "rmtree", lambda a, **o: watched.operation(lambda: rmtree(a, **o), nothing)
        )
        patch.setattr(os, "fsync", lambda descriptor: watched.operation(nothing, nothing))
        yield watched
