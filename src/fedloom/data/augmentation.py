"""Training-time changes to images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def flip_crop(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Each image of `[b, channels, height, width]` is flipped left to right with p = 0.5 and, with p = 0.5, cropped at random
    after zero padding (FedUmf, appendix). Draws from `generator` on the CPU, whatever the device."""
    count, _, height, width = images.shape
    flipped = torch.rand(count, generator=generator) < 0.5
    cropped = torch.rand(count, generator=generator) < 0.5
    shift = torch.randint(0, 2 * padding + 1, (2, count), generator=generator)
    shift = torch.where(cropped, shift, padding).to(images.device)
    columns = torch.arange(width).expand(count, width)
    columns = torch.where(flipped[:, None], columns.flip(1), columns).to(images.device) + shift[1][:, None]
    rows = torch.arange(height, device=images.device) + shift[0][:, None]
    padded = F.pad(images, (padding, padding, padding, padding))
    index = torch.arange(count, device=images.device)[:, None, None]
    return padded[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
