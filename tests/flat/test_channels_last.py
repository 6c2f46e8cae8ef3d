"""Channels-last training of small convolutions equals channels-first training within a tolerance
and is repeatable bit by bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedloom.flat.layout import Layout
from fedloom.flat.module import (
    Batch,
    FlatModule,
    Shortcuts,
    channels_last,
    data_loss,
    light_convolutions,
)


def convolutions(channels: int = 8) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, channels, 3),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, channels, 3),
            nn.Flatten(),
            nn.Linear(channels * 4, 10),
        )


def stepped(flat_module: FlatModule) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs, labels = (
        torch.randn(1, 6, 3, 10, 10, generator=draw),
        torch.randint(10, (1, 6), generator=draw),
    )
    rows = flat_module.initial.clone().unsqueeze(0)
    loss, gradient = flat_module.gradient(rows, Batch(inputs, labels), data_loss, {})
    return loss, gradient.clone(), rows


def test_channels_last_gives_the_numbers_of_channels_first_repeatably() -> None:
    module = convolutions()
    layouts: list[bool] = []
    module[0].register_forward_pre_hook(
        lambda _, inputs: layouts.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    shortcuts = Shortcuts(channels_last=True)
    gradients, repeated = (
        stepped(FlatModule(module, Layout(module), shortcuts)),
        stepped(FlatModule(module, Layout(module), shortcuts)),
    )
    assert layouts[-1]
    for gradient, reference in zip(gradients, repeated, strict=True):
        assert torch.equal(gradient, reference)
    expected = stepped(FlatModule(module, Layout(module)))
    assert not layouts[-1]
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_it_depends_on_the_sizes_of_filters_and_outputs() -> None:
    """The choice depends on the sizes of filters and outputs.

    8 filters of 3x3x3 and 8 of 8x3x3 output 8x8x8 and 8x2x2 numbers; 792 <= 8 * 544.
    """
    image = torch.zeros(1, 3, 10, 10)
    assert light_convolutions(convolutions().eval(), image)
    assert not light_convolutions(convolutions(600).eval(), image)
    assert not light_convolutions(nn.Flatten(), image)


@pytest.mark.parametrize("channels", [1, 3])
def test_later_layers_keep_the_channels_last_layout(channels: int) -> None:
    images = torch.randn(5, channels, 8, 8, generator=torch.Generator().manual_seed(0))
    laid = channels_last(images)
    torch.testing.assert_close(laid, images, rtol=0, atol=0)
    hidden = torch.nn.Conv2d(channels, 4, 3)(laid)
    assert hidden.is_contiguous(memory_format=torch.channels_last)
    assert not hidden.is_contiguous()
