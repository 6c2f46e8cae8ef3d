"""Checks that the data have a shape that a model accepts."""

from math import prod

from fedloom.common.errors import InvalidValue
from fedloom.data import DataSpec


def image_shape(model: str, spec: DataSpec, least: int = 1) -> tuple[int, int, int]:
    """Return `(channels, height, width)`.

    Args:
        model: Name of the model, with which errors begin.
        spec: Shape of the data.
        least: Smallest height and width in pixels.

    Returns:
        Channels, height and width.

    Raises:
        InvalidValue: The data are not images with at least `least` pixels on each side.
    """
    if spec.vocabulary is not None or len(spec.shape) != 3:
        raise InvalidValue(f"{model} needs images (channels, height, width), not {described(spec)}")
    channels, height, width = spec.shape
    if min(height, width) < least:
        raise InvalidValue(
            f"{model} needs images of at least {least}x{least} pixels, not {described(spec)}"
        )
    return channels, height, width


def flat_features(model: str, spec: DataSpec) -> int:
    """Return the number of features or pixels of a sample.

    Args:
        model: Name of the model, with which errors begin.
        spec: Shape of the data.

    Returns:
        Product of the dimensions of a sample.

    Raises:
        InvalidValue: The data are tokens.
    """
    if spec.vocabulary is not None or not spec.shape:
        raise InvalidValue(f"{model} needs features or images, not {described(spec)}")
    return prod(spec.shape)


def vocabulary(model: str, spec: DataSpec) -> int:
    """Return the number of tokens of the data.

    Args:
        model: Name of the model, with which errors begin.
        spec: Shape of the data.

    Returns:
        Number of different tokens. Their ids are smaller than it.

    Raises:
        InvalidValue: The data are not sequences of tokens.
    """
    if spec.vocabulary is None or len(spec.shape) != 1:
        raise InvalidValue(
            f"{model} needs tokens (length,) with a vocabulary, not {described(spec)}"
        )
    return spec.vocabulary


def described(spec: DataSpec) -> str:
    """Describe the data, such as `images of shape (1, 8, 8)` or `tokens of shape (200,)`."""
    kind = (
        "tokens"
        if spec.vocabulary is not None
        else {1: "features", 3: "images"}.get(len(spec.shape), "samples")
    )
    return f"{kind} of shape {spec.shape}"
