"""The trajectory of one client's models over the surface of its local loss (FedALA, figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.config.checks import require_at_least
from fedloom.config.fields import Count, NonNegativeInt
from fedloom.errors import InvalidValue
from fedloom.recording.plane import Plane, principal_plane
from fedloom.recording.recorder import Exchange, Kept, Measurement, Recorder, RunContext, Series, recorders, rounds_of

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

    client: NonNegativeInt = 0
    first: Count = 1
    last: Count | None = None
    grid: int = 21

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last is not None:
            require_at_least("last", self.last, self.first)
        require_at_least("grid", self.grid, 2)

    @property
    def name(self) -> str:
        return f"trajectory of client {self.client}"

    def require(self, context: RunContext) -> None:
        context.client(self.client)
        for key, number in (("first", self.first), ("last", self.last)):
            if number is not None and number > context.rounds:
                raise InvalidValue(f"{key} must be at most {context.rounds}, the number of rounds, not {number}")

    def measure(self, number: int, exchanges: Sequence[Exchange], context: RunContext) -> Measurement | None:
        if number < self.first or (self.last is not None and number > self.last):
            return None
        client = context.client(self.client)
        one = next((one for one in exchanges if one.client == client), None)
        if one is None:
            return None
        loss, samples = context.training_loss(one.uploaded, client, one.uploaded_integers)
        tensors = {"model": one.uploaded, "integers": one.uploaded_integers}
        return Measurement(
            loss / samples, {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
        )

    def result(self, series: Series, kept: Kept, context: RunContext) -> dict[str, Any]:
        numbers = rounds_of(series)
        found: dict[str, Any] = {"client": self.client, "rounds": numbers, "losses": [value for _, value in series]}
        rows = torch.stack([kept[number]["model"] for number in numbers])
        plane = principal_plane(rows[:, : context.task.layout.trainable].cpu())
        if plane is None:
            return found
        buffers, integers = rows.double().mean(0).to(rows), kept[numbers[-1]].get("integers")
        return found | {
            "points": plane.points.tolist(),
            **surroundings(plane, self.grid, buffers, integers, self.client, context),
        }


def surroundings(
    plane: Plane, grid: int, model: Tensor, integers: Tensor | None, client: int, context: RunContext
) -> dict[str, Any]:
    """The variance that the plane explains, the coordinates `x` and `y` of a grid around its points, and the client's loss on it.

    `surface` has a line for each y, from the lowest up; the buffers are those of `model [P]`.
    """
    index, trainable = context.client(client), context.task.layout.trainable
    x, y = (_ticks(plane.points[:, axis], grid) for axis in (0, 1))
    row = model.clone()

    def loss_at(along: float, up: float) -> float:
        row[:trainable] = plane.at(along, up)
        loss, samples = context.training_loss(row, index, integers)
        return loss / samples

    surface = [[loss_at(along, up) for along in x] for up in y]
    return {"explained": plane.explained.tolist(), "x": x, "y": y, "surface": surface}


def _ticks(values: Tensor, count: int) -> list[float]:
    """`count` evenly spaced coordinates that reach beyond the values on both sides."""
    low, high = float(values.min()), float(values.max())
    beyond = MARGIN * (high - low)
    return torch.linspace(low - beyond, high + beyond, count, dtype=torch.float64).tolist()
