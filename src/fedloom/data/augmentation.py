"""Augmentation of images (FedUmf, appendix): with p = 0.5 a left-right flip, with p = 0.5 a random
crop after zero padding.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

PADDING = 4


def draw_flip_crop(count: int, generator: torch.Generator) -> Tensor:
    """Draw flips and crops of images.

    Args:
        count: Number of images.
        generator: Source of the draws.

    Returns:
        For each image 1 if it is flipped, and the crop's shift in rows and in columns, `[count, 3]`
        int64.
    """
    flipped = torch.rand(count, generator=generator) < 0.5
    cropped = torch.rand(count, generator=generator) < 0.5
    shift = torch.randint(0, 2 * PADDING + 1, (2, count), generator=generator)
    shift = torch.where(cropped, shift, PADDING)
    return torch.stack([flipped.long(), shift[0], shift[1]], 1)


def apply_flip_crop(images: Tensor, drawn: Tensor) -> Tensor:
    """Flip and crop images.

    Args:
        images: Images `[b, channels, height, width]`.
        drawn: Flips and shifts `[b, 3]` of `draw_flip_crop`.

    Returns:
        The images, of the same shape.
    """
    count, _, height, width = images.shape
    flipped, row_shift, column_shift = drawn.to(images.device).unsqueeze(2).unbind(1)
    columns = torch.arange(width, device=images.device).expand(count, width)
    columns = torch.where(flipped.bool(), columns.flip(1), columns) + column_shift
    rows = torch.arange(height, device=images.device) + row_shift
    padded = F.pad(images, (PADDING, PADDING, PADDING, PADDING))
    index = torch.arange(count, device=images.device)[:, None, None]
    moved = padded[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    # `contiguous` would not change the strides of a single channel, and convolutions and dropout
    # would then use other kernels.
    return moved.clone(memory_format=torch.contiguous_format)
