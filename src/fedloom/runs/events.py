"""Events of a run: for the terminal, or through a queue from a worker process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fedloom.objectives import ACCURACY, Metric


class RunName(NamedTuple):
    """One run of a comparison: a method, as the user wrote it, a seed, and the label of a setting
    where there are several.
    """

    algorithm: str
    seed: int
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.algorithm}, seed {self.seed}" + (f", {self.setting}" if self.setting else "")


@dataclass(frozen=True)
class Event:
    """An event of a run: `started`, also when it goes on, with `finished` rounds and in `text` an
    engine that a rule chose.

    A `round` has its figures in `record`, `skipped` was finished already, `failed` and `notice`
    have a line of `text`.
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
        """The metric of the global model and of the clients' own, as far as they were measured."""
        models = ((self.metric.name, ""), (f"personal_{self.metric.name}", " (clients' own)"))
        scores = [
            (value, owner) for name, owner in models if (value := self.record.get(name)) is not None
        ]
        return ", ".join(
            f"{self.metric.text(value, 1)}{self.metric.unit}{owner}" for value, owner in scores
        )


Watch = Callable[[Event], None]
