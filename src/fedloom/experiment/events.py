"""What a run says while it goes on: to the terminal, or through a queue from a worker process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fedloom.objectives import ACCURACY, Metric


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
    metric: Metric = ACCURACY  # by which the record judges

    @property
    def score(self) -> str:
        """What the record says of the metric, for the global model and for the clients' own; empty where it says nothing."""
        models = ((self.metric.name, ""), (f"personal_{self.metric.name}", " (clients' own)"))
        known = [(value, of) for name, of in models if (value := self.record.get(name)) is not None]
        return ", ".join(f"{self.metric.text(value, 1)}{self.metric.unit}{of}" for value, of in known)


Watch = Callable[[Event], None]
