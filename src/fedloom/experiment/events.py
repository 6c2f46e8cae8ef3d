"""What a run says while it goes on: to the terminal, or through a queue from a worker process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


class RunName(NamedTuple):
    """One run of a comparison: a method, as the user wrote it, a seed, and the label of a setting where there are several."""

    algorithm: str
    seed: int
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.algorithm}, seed {self.seed}" + (f", {self.setting}" if self.setting else "")


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    `started` (also when it goes on; `finished` rounds are done, and `text` is an engine that nobody named), `round` (with its
    figures in `record` and its times in `timing`), `ended`, `skipped` (it was finished before), `failed` and `notice` (with a
    line of `text`).
    """

    kind: Literal["started", "round", "ended", "skipped", "failed", "notice"]
    run: RunName
    finished: int = 0
    record: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    text: str = ""
    timing: dict[str, Any] = field(default_factory=dict)


Watch = Callable[[Event], None]
