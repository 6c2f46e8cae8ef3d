"""Checks of the data's shape, with a refusal in one line if a model needs another."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from fedloom.data import DataSpec
from fedloom.errors import InvalidValue


class Window(NamedTuple):
    """A convolution or pooling as the image's height and width see it: `size -> (size + 2·padding - kernel) // stride + 1`."""

    kernel: int
    stride: int = 1
    padding: int = 0


def image_shape(model: str, spec: DataSpec, windows: Sequence[Window] = ()) -> tuple[int, int, int]:
    """Return `(channels, height, width)` after `windows` have passed over the images."""
    if spec.vocabulary is not None or len(spec.shape) != 3:
        raise InvalidValue(f"{model} needs images (channels, height, width), not {described(spec)}")
    channels, height, width = spec.shape
    least = 1
    for window in reversed(windows):
        least = max(1, (least - 1) * window.stride + window.kernel - 2 * window.padding)
    if min(height, width) < least:
        raise InvalidValue(f"{model} needs images of at least {least}x{least} pixels, not {described(spec)}")
    for window in windows:
        height, width = ((size + 2 * window.padding - window.kernel) // window.stride + 1 for size in (height, width))
    return channels, height, width


def flat_features(model: str, spec: DataSpec) -> int:
    """Return the numbers in a sample of features or pixels; raises `InvalidValue` for tokens."""
    if spec.vocabulary is not None or not spec.shape:
        raise InvalidValue(f"{model} needs features or images, not {described(spec)}")
    return prod(spec.shape)


def vocabulary(model: str, spec: DataSpec) -> int:
    """Return the number of tokens of the data; raises `InvalidValue` unless these are sequences of tokens."""
    if spec.vocabulary is None or len(spec.shape) != 1:
        raise InvalidValue(f"{model} needs tokens (length,) with a vocabulary, not {described(spec)}")
    return spec.vocabulary


def described(spec: DataSpec) -> str:
    """Describe the data: `images of shape (1, 8, 8)`, `features of shape (30,)`, `tokens of shape (200,)`."""
    kind = "tokens" if spec.vocabulary is not None else {1: "features", 3: "images"}.get(len(spec.shape), "samples")
    return f"{kind} of shape {spec.shape}"
