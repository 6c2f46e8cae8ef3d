"""The plane in which a set of points varies most."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FLAT = 1e-6  # a second component whose singular value is below this share of the first is rounding, not a direction


class Plane(NamedTuple):
    """A plane in float64: `centre [D]`, orthonormal `axes [2, D]`, coordinates `points [n, 2]`, variance explained `[2]`."""

    centre: Tensor
    axes: Tensor
    points: Tensor
    explained: Tensor

    def at(self, x: float, y: float) -> Tensor:
        """Return the point `[D]` with these coordinates."""
        return self.centre + x * self.axes[0] + y * self.axes[1]


def principal_plane(rows: Tensor) -> Plane | None:
    """Return the first two principal components of `rows [n, D]`; None where the rows span no plane.

    X = rows - mean = U S V^T; axes = the first two rows of V^T, points = U S. Computed from the eigenvectors of X X^T, which is
    small. Each axis points where its largest entry by magnitude is positive, so that the signs are settled.
    """
    if len(rows) < 3:
        return None
    exact = rows.double()
    centre = exact.mean(0)
    centred = exact - centre
    squares, vectors = torch.linalg.eigh(centred @ centred.T)
    values = squares.clamp_min(0).flip(0)
    singular = values[:2].sqrt()
    if not float(singular[1]) > FLAT * float(singular[0]):
        return None
    axes = (vectors.flip(1)[:, :2].T @ centred) / singular.unsqueeze(1)
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    axes = axes * largest.sign()
    return Plane(centre, axes, centred @ axes.T, values[:2] / values.sum())
