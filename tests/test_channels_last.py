"""Images lie channels last in training where filters are few, with the same numbers to tolerance and bit by bit repeatable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedloom.flat.layout import Layout
from fedloom.flat.module import Batch, FlatModule, Shortcuts, channels_last, data_loss, light_convolutions


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
    inputs, labels = torch.randn(1, 6, 3, 10, 10, generator=draw), torch.randint(10, (1, 6), generator=draw)
    rows = flat_module.initial.clone().unsqueeze(0)
    loss, gradient = flat_module.gradient(rows, Batch(inputs, labels), data_loss, {})
    return loss, gradient.clone(), rows


def test_the_numbers_are_those_of_channels_first_and_repeat() -> None:
    module = convolutions()
    seen: list[bool] = []
    module[0].register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    last = Shortcuts(channels_last=True)
    found, again = stepped(FlatModule(module, Layout(module), last)), stepped(FlatModule(module, Layout(module), last))
    assert seen[-1]
    for one, two in zip(found, again, strict=True):
        assert torch.equal(one, two)
    expected = stepped(FlatModule(module, Layout(module)))
    assert not seen[-1]
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_it_depends_on_the_filters_beside_what_they_put_out() -> None:
    """8 filters of 3x3x3 and 8 of 8x3x3 put out 8x8x8 and 8x2x2 numbers; 792 <= 8 * 544."""
    image = torch.zeros(1, 3, 10, 10)
    assert light_convolutions(convolutions().eval(), image)
    assert not light_convolutions(convolutions(600).eval(), image)
    assert not light_convolutions(nn.Flatten(), image)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_layer_after_images_that_are_laid_out_is_laid_out_too(channels: int) -> None:
    images = torch.randn(5, channels, 8, 8, generator=torch.Generator().manual_seed(0))
    laid = channels_last(images)
    torch.testing.assert_close(laid, images, rtol=0, atol=0)
    hidden = torch.nn.Conv2d(channels, 4, 3)(laid)
    assert hidden.is_contiguous(memory_format=torch.channels_last)
    assert not hidden.is_contiguous()
