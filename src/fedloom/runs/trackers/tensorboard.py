"""TensorBoard: event files that `tensorboard --logdir` shows."""

import json
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.common.errors import installing
from fedloom.common.fields import NonNegativeInt
from fedloom.runs.trackers.tracker import TrackedRun, require_installed, trackers

_LAST = "last_round"


@trackers.register("tensorboard")
@dataclass
class TensorBoard:
    """Figures of each round as scalars for TensorBoard, in the run's directory or below
    `directory`.

    `tensorboard --logdir runs/NAME` then shows all runs of an experiment; below your own
    `directory` they are in `EXPERIMENT/METHOD/seed-N`. Writing waits at most `flush_seconds`. Needs
    the extra `tensorboard`; tensorflow is not needed.
    """

    directory: str | None = None
    flush_seconds: NonNegativeInt = 10

    def __post_init__(self) -> None:
        require_installed("tensorboard", installing("tensorboard"))

    def begin(self, run: TrackedRun) -> int:
        """Open the event files and remove files of earlier runs; return the last round in the files
        of this run.
        """
        from torch.utils.tensorboard import SummaryWriter

        folder = run.directory
        if folder is None or self.directory is not None:
            folder = Path(self.directory or "tensorboard") / run.experiment / run.label
        folder.mkdir(parents=True, exist_ok=True)
        suffix = f".fedloom-{run.token[:12]}"
        recorded = 0
        for path in folder.glob("events.out.tfevents.*.fedloom-*"):
            if path.name.endswith(suffix):
                recorded = max(recorded, _last_round(path))
            else:
                path.unlink()
        self._writer: Any = SummaryWriter(
            folder, flush_secs=self.flush_seconds, filename_suffix=suffix
        )
        if not recorded:
            settings = json.dumps(dict(run.configuration), indent=2, ensure_ascii=False)
            self._writer.add_text("configuration", textwrap.indent(settings, "\t"), 0)
        return recorded

    def record(self, round: int, figures: Mapping[str, float]) -> None:
        """Write a scalar for each figure. The round's number comes last and marks them complete."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, round)
        self._writer.add_scalar(_LAST, round, round)

    def end(self, result: Mapping[str, float] | None) -> None:
        """Close the files."""
        self._writer.close()


def _last_round(path: Path) -> int:
    """Return the last complete round of an event file, which may be cut short."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    number = 0
    with warnings.catch_warnings(action="ignore"):  # the loader's
        for event in LegacyEventFileLoader(str(path)).Load():
            if any(value.tag == _LAST for value in event.summary.value):
                number = max(number, event.step)
    return number
