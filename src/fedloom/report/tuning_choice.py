"""The choice of a search for one method, as tables and pages show it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedloom.common.fields import Count, require_fields
from fedloom.report.summary import Spread

TUNING = "tuning.json"
"""File in the folder of a setting with the choice of each method that was tuned."""


@dataclass(frozen=True)
class TuningChoice:
    """The chosen values of a method.

    Attributes:
        values: The value of each searched key.
        validation: The measure on validation data over the seeds.
        measure: The measure in words.
        trials: The number of trials.
        seeds: The seeds of each trial.
        combinations: The number of combinations of the values tried.
        edges: The keys with the smallest or the largest of their values.
    """

    values: dict[str, Any]
    validation: Spread
    measure: str
    trials: Count
    seeds: Count
    combinations: Count
    edges: list[str]

    def __post_init__(self) -> None:
        require_fields(self)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "TuningChoice":
        """Return the choice of plain values. Raise an error for values that `to_plain` does not
        give.
        """
        return cls(**{**table, "validation": Spread(**table["validation"])})
