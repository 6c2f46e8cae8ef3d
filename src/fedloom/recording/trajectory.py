"""The way of one client's models over the surface of its local loss (FedALA, figure 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.config.checks import require_at_least
from fedloom.errors import InvalidValue
from fedloom.recording.plane import Plane, principal_plane
from fedloom.recording.recorder import Exchange, Note, Recorder, RunContext, Series, recorders

MARGIN = 0.2
"""How far the surface goes beyond the path on each side, as a share of the path's extent."""


@recorders.register("trajectory")
@dataclass(frozen=True)
class Trajectory(Recorder):
    """One client's trained models in the rounds `first` to `last`, and its local loss in the plane of their main directions.

    After the run: the models' trainable parameters in the plane of their two principal components (`principal_plane`), and the
    client's mean training loss in evaluation mode on `grid` x `grid` points of that plane, which reach 20 % beyond the path on
    each side. Floating-point buffers are, on the grid, the mean of the recorded models'. `last`: by default the last round.
    Source: Zhang et al. 2023 (FedALA), figure 4.
    """

    client: int = 0
    first: int = 1
    last: int | None = None
    grid: int = 21

    def __post_init__(self) -> None:
        require_at_least("client", self.client, 0)
        require_at_least("first", self.first, 1)
        if self.last is not None:
            require_at_least("last", self.last, self.first)
        require_at_least("grid", self.grid, 2)

    @property
    def name(self) -> str:
        return f"trajectory of client {self.client}"

    def require(self, scene: RunContext) -> None:
        scene.place(self.client)
        for key, number in (("first", self.first), ("last", self.last)):
            if number is not None and number > scene.rounds:
                raise InvalidValue(f"{key} must be at most {scene.rounds}, the number of rounds, not {number}")

    def note(self, number: int, exchanges: Sequence[Exchange], scene: RunContext) -> Note | None:
        if number < self.first or (self.last is not None and number > self.last):
            return None
        client = scene.place(self.client)
        for one in exchanges:
            if one.client == client:
                loss, samples = scene.training_loss(one.uploaded, client, one.uploaded_integers)
                tensors = {"model": one.uploaded.clone()}
                if one.uploaded_integers is not None:
                    tensors["integers"] = one.uploaded_integers.clone()
                return Note(loss / samples, tensors)
        return None

    def result(self, series: Series, tensors: Mapping[int, Mapping[str, Tensor]], scene: RunContext) -> dict[str, Any]:
        numbers = [number for number, _ in series]
        found: dict[str, Any] = {
            "kind": "trajectory",
            "client": self.client,
            "rounds": numbers,
            "losses": [value for _, value in series],
        }
        if len(numbers) < 3:
            return found
        rows = torch.stack([tensors[number]["model"] for number in numbers])
        trainable = scene.task.layout.trainable
        plane = principal_plane(rows[:, :trainable].cpu())
        if plane is None:
            return found
        integers = tensors[numbers[-1]].get("integers")
        return found | {
            "points": plane.points.tolist(),
            **surroundings(plane, self.grid, rows.double().mean(0).to(rows), integers, self.client, scene),
        }


def surroundings(
    plane: Plane, grid: int, model: Tensor, integers: Tensor | None, client: int, scene: RunContext
) -> dict[str, Any]:
    """What the plane explains, the coordinates `x` and `y` of a grid around its points, and the client's loss on it.

    The loss stands line by line from the lowest y up; `model [P]` lends its buffers.
    """
    place, trainable = scene.place(client), scene.task.layout.trainable
    x, y = (_ticks(plane.points[:, axis], grid) for axis in (0, 1))
    row = model.clone()
    lines: list[list[float]] = []
    for up in y:
        line: list[float] = []
        for along in x:
            row[:trainable] = plane.at(along, up)
            loss, samples = scene.training_loss(row, place, integers)
            line.append(loss / samples)
        lines.append(line)
    return {"explained": plane.explained.tolist(), "x": x, "y": y, "surface": lines}


def _ticks(values: Tensor, count: int) -> list[float]:
    """`count` evenly spaced coordinates that reach beyond the values on both sides."""
    low, high = float(values.min()), float(values.max())
    beyond = MARGIN * (high - low)
    return torch.linspace(low - beyond, high + beyond, count, dtype=torch.float64).tolist()
