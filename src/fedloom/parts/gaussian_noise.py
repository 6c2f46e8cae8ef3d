"""Clipping of updates, and noise: reproducible in a simulation, cryptographic over real sites."""

import secrets
from typing import Any

import numpy as np
import torch
from torch import Tensor


def clipped(updates: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return each row u of `updates [k, m]` as u min(1, `clip` / |u|), and the lengths |u| `[k]`.

    A row that is not finite counts as zero: refusing it would reveal something of the client's
    data.
    """
    shares, lengths = clip_factors(updates, clip)
    scaled = updates.double() * shares.unsqueeze(1)
    return torch.where(lengths.isfinite().unsqueeze(1), scaled, 0).to(updates), lengths


def clip_factors(updates: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return min(1, `clip` / |u|) and |u| of each row u of `updates [k, m]`, `[k]` float64."""
    lengths = torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64)
    return (clip / lengths.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1), lengths


def normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return standard normal float64 like `like`: by `generator`, or else the system's
    cryptographic one (Box and Muller).
    """
    if generator is not None:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)
    count = like.numel()
    radius, angle = 1 - secret_uniforms(2 * count).reshape(2, count)  # in (0, 1]
    numbers = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
    return torch.from_numpy(numbers).reshape(like.shape).to(like.device)


def secret_uniforms(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return `count` numbers in [0, 1) from the system's cryptographic generator."""
    return (np.frombuffer(secrets.token_bytes(8 * count), np.uint64) >> np.uint64(11)) / 2.0**53
