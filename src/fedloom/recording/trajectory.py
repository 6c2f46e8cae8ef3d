"""The trajectory of one client's models over the surface of its local loss (FedALA, figure 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count, NonNegativeInt, require_at_least
from fedloom.recording.recorder import (
    ClientExchange,
    Measurement,
    Recorder,
    RunContext,
    Series,
    Tensors,
    recorders,
)

MARGIN = 0.2  # width of the surface beyond the path on each side, as a share of the path's extent
# a second singular value below this share of the first is due to rounding, not a direction
FLAT = 1e-6


@recorders.register("trajectory")
@dataclass(frozen=True)
class Trajectory(Recorder):
    """The trained models of `client` in rounds `first` to `last`, and the loss in their plane.

    `last` is by default the last round. After the run, the models' trainable parameters are
    projected to the plane of their two principal components (`principal_plane`). The client's mean
    training loss in evaluation mode is computed on `grid` x `grid` points of that plane, which
    reach 20 % beyond the path on each side. On the grid, floating-point buffers are the mean over
    the recorded models.

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
                raise InvalidValue(
                    f"{key} must be at most {context.rounds}, the number of rounds, not {number}"
                )

    def measure(
        self, number: int, exchanges: Sequence[ClientExchange], context: RunContext
    ) -> Measurement | None:
        if number < self.first or (self.last is not None and number > self.last):
            return None
        client = context.client(self.client)
        exchange = next((exchange for exchange in exchanges if exchange.client == client), None)
        if exchange is None:
            return None
        loss, samples = context.training_loss(exchange.uploaded, client, exchange.uploaded_integers)
        tensors = {"model": exchange.uploaded, "integers": exchange.uploaded_integers}
        copies = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
        return Measurement(loss / samples, copies)

    def result(self, series: Series, tensors: Tensors, context: RunContext) -> dict[str, Any]:
        numbers, values = map(list, zip(*series, strict=True))
        losses = {"client": self.client, "rounds": numbers, "losses": values}
        rows = torch.stack([tensors[number]["model"] for number in numbers])
        plane = principal_plane(rows[:, : context.task.layout.trainable].cpu())
        if plane is None:
            return losses
        buffers = rows.double().mean(0).to(rows)
        integers = tensors[numbers[-1]].get("integers")
        surface = surroundings(plane, self.grid, buffers, integers, self.client, context)
        return {**losses, "points": plane.points.tolist(), **surface}


def surroundings(
    plane: "Plane",
    grid: int,
    model: Tensor,
    integers: Tensor | None,
    client: int,
    context: RunContext,
) -> dict[str, Any]:
    """Return the loss on a grid around the points of a plane.

    Args:
        plane: The plane.
        grid: Number of grid points in each direction.
        model: A model `[P]` with the buffers for the grid.
        integers: Integer buffers of the model.
        client: The user's number of the client.
        context: The run.

    Returns:
        The variance that the plane explains (`explained`), the grid (`x`, `y`), and the loss on it
            (`surface`), a line for each y.
    """
    index = context.client(client)
    trainable = context.task.layout.trainable
    low = plane.points.amin(0)
    high = plane.points.amax(0)
    margin = MARGIN * (high - low)
    low = low - margin
    high = high + margin
    x, y = (
        torch.linspace(float(low[k]), float(high[k]), grid, dtype=torch.float64).tolist()
        for k in (0, 1)
    )
    row = model.clone()

    def loss_at(a: float, b: float) -> float:
        row[:trainable] = plane.centre + a * plane.axes[0] + b * plane.axes[1]
        loss, samples = context.training_loss(row, index, integers)
        return loss / samples

    surface = [[loss_at(a, b) for a in x] for b in y]
    return {"explained": plane.explained.tolist(), "x": x, "y": y, "surface": surface}


class Plane(NamedTuple):
    """A plane in float64.

    Attributes:
        centre: Mean of the points, `[D]`.
        axes: Orthonormal axes, `[2, D]`.
        points: Coordinates of the points, `[n, 2]`.
        explained: Share of the variance that each axis explains, `[2]`.
    """

    centre: Tensor
    axes: Tensor
    points: Tensor
    explained: Tensor


def principal_plane(rows: Tensor) -> Plane | None:
    """Return the first two principal components of `rows [n, D]`; None if rows span no plane.

    X = rows - mean = U S V^T; axes = the first two rows of V^T, points = X V. Each axis has the
    sign that makes its entry of largest magnitude positive, so that signs are unique.
    """
    if len(rows) < 3:
        return None
    centre = rows.double().mean(0)
    centred = rows.double() - centre
    _, singular, axes = torch.linalg.svd(centred, full_matrices=False)
    if not float(singular[1]) > FLAT * float(singular[0]):
        return None
    axes = axes[:2]
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    squares = singular.square()
    return Plane(centre, axes, centred @ axes.T, squares[:2] / squares.sum())
