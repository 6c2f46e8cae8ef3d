"""Clipping of updates, and noise that is reproducible in a simulation and cryptographic over real
sites.
"""

import secrets
from typing import Any

import numpy as np
import torch
from torch import Tensor


def clipped(updates: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Clip updates: each row u becomes u min(1, `clip` / |u|).

    A row with a NaN or infinity counts as zero, since a refusal would reveal something about the
    client's data.

    Args:
        updates: Updates, `[k, m]`.
        clip: Largest length.

    Returns:
        The clipped updates, `[k, m]`, and the lengths |u| before, `[k]`.
    """
    shares, lengths = clip_factors(updates, clip)
    scaled = updates.double() * shares.unsqueeze(1)
    finite = lengths.isfinite().unsqueeze(1)
    return torch.where(finite, scaled, 0).to(updates), lengths


def clip_factors(updates: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return the factors by which updates u are clipped.

    Args:
        updates: Updates, `[k, m]`.
        clip: Largest length.

    Returns:
        min(1, `clip` / |u|) and |u| of each row, `[k]` float64 each.
    """
    lengths = torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64)
    positive = lengths.clamp_min(torch.finfo(torch.float64).tiny)
    return (clip / positive).clamp_max(1), lengths


def normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard normal numbers in float64, in the shape of `like`.

    Args:
        like: A tensor with the shape and device of the result.
        generator: Source of the numbers; None for the system's cryptographic generator (Box and
            Muller).

    Returns:
        Independent numbers with mean 0 and deviation 1.
    """
    if generator is not None:
        drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        return drawn.to(like.device)
    count = like.numel()
    radius, angle = 1 - secret_uniforms(2 * count).reshape(2, count)  # in (0, 1]
    numbers = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
    return torch.from_numpy(numbers).reshape(like.shape).to(like.device)


def secret_uniforms(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return `count` numbers in [0, 1) from the system's cryptographic generator."""
    integers = np.frombuffer(secrets.token_bytes(8 * count), np.uint64)
    return (integers >> np.uint64(11)) / 2.0**53
