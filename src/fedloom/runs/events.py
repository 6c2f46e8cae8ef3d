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
    """An event of a run.

    Attributes:
        kind: `started` (also a resumed run), `round`, `ended`, `skipped` (it was finished already),
            `failed` or `notice`.
        run: Name of the run.
        finished: Rounds so far.
        record: Figures of a round or of the end.
        seconds: Time of the round, or of the run.
        text: The engine that a rule chose, the reason of the failure, or the notice.
        timing: Times of a round.
        metric: The metric of the record.
    """

    kind: Literal["started", "round", "ended", "skipped", "failed", "notice"]
    run: RunName
    finished: int = 0
    record: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    text: str = ""
    timing: dict[str, Any] = field(default_factory=dict)
    metric: Metric = ACCURACY

    @property
    def score(self) -> str:
        """The measured metrics of the global model and of the clients' own models."""
        models = ((self.metric.name, ""), (f"personal_{self.metric.name}", " (clients' own)"))
        scores = [
            (value, owner) for name, owner in models if (value := self.record.get(name)) is not None
        ]
        return ", ".join(
            f"{self.metric.text(value, 1)}{self.metric.unit}{owner}" for value, owner in scores
        )


Watch = Callable[[Event], None]
