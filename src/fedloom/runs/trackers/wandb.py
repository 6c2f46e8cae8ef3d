"""Weights & Biases, where it is installed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedloom.runs.trackers.tracker import TrackedRun, require_installed, trackers


@trackers.register("wandb")
@dataclass
class WeightsAndBiases:
    """Figures of each round for Weights & Biases; `mode=offline`, the default, stores them on this
    machine for `wandb sync`.

    `project` is by default the experiment's name, `entity` your own. Online, a resumed run is
    the same run there; offline, each start makes a new folder with the run's figures from round 1
    on. Needs `pip install wandb`.
    """

    project: str | None = None
    entity: str | None = None
    mode: Literal["offline", "online"] = "offline"

    def __post_init__(self) -> None:
        require_installed("wandb", "pip install wandb")

    def begin(self, run: TrackedRun) -> int:
        """Make the run, or go on with it. The answer is the last round that is there already."""
        import wandb

        self._run: Any = wandb.init(
            id=run.token,
            resume="allow",
            mode=self.mode,
            project=self.project or run.experiment,
            entity=self.entity,
            group=run.algorithm,
            name=run.label,
            config=dict(run.configuration),
            dir=None if run.directory is None else str(run.directory),
        )
        # A step is written when the next one begins, so the next step is one more than the last
        # round.
        return int(self._run.step) - 1 if self._run.resumed and self._run.step else 0

    def record(self, round: int, figures: Mapping[str, float]) -> None:
        """One figure a name, the round as the step."""
        self._run.log(dict(figures), step=round)

    def end(self, result: Mapping[str, float] | None) -> None:
        """The figures at the end become the run's summary."""
        for name, value in (result or {}).items():
            self._run.summary[f"final_{name}"] = value
        self._run.finish(exit_code=0 if result is not None else 1)
