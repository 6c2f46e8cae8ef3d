"""What a model asks of the data and of its options, refused in one line where it does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from fedloom.data import DataSpec
from fedloom.errors import InvalidValue, suggestion


class Window(NamedTuple):
    """A convolution or pooling as the image's height and width see it: `size -> (size + 2·padding - kernel) // stride + 1`."""

    kernel: int
    stride: int = 1
    padding: int = 0


def image_shape(model: str, spec: DataSpec, windows: Sequence[Window] = ()) -> tuple[int, int, int]:
    """`(channels, height, width)` of the images of `spec`, height and width as `windows` leave them.

    Raises `InvalidValue` where the data are no images, or images that a window does not fit in.
    """
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
    """Numbers in one sample of features or pixels; raises `InvalidValue` for tokens, which are names and not quantities."""
    if spec.vocabulary is not None or not spec.shape:
        raise InvalidValue(f"{model} needs features or images, not {described(spec)}")
    return prod(spec.shape)


def vocabulary(model: str, spec: DataSpec) -> int:
    """Distinct tokens of the data; raises `InvalidValue` where the data are no sequences of tokens."""
    if spec.vocabulary is None or len(spec.shape) != 1:
        raise InvalidValue(f"{model} needs tokens (length,) with a vocabulary, not {described(spec)}")
    return spec.vocabulary


def described(spec: DataSpec) -> str:
    """The data in words: `images of shape (1, 8, 8)`, `features of shape (30,)`, `tokens of shape (200,)`."""
    kind = "tokens" if spec.vocabulary is not None else {1: "features", 3: "images"}.get(len(spec.shape), "samples")
    return f"{kind} of shape {spec.shape}"


def positive(model: str, option: str, value: object) -> int:
    """`value` if it is a whole number of at least 1; raises `InvalidValue` if not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidValue(f"{model}: {option} must be a whole number of at least 1, not {value!r}")
    return value


def widths(model: str, option: str, values: object) -> tuple[int, ...]:
    """`values` as a tuple of layer widths; raises `InvalidValue` if they are no list of whole numbers of at least 1."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidValue(f"{model}: {option} must be a list of layer widths such as [200, 100], not {values!r}")
    return tuple(positive(model, f"each width in {option}", value) for value in values)


def probability(model: str, option: str, value: object) -> float:
    """`value` if it lies in [0, 1); raises `InvalidValue` if not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InvalidValue(f"{model}: {option} must lie in [0, 1), not {value!r}")
    return float(value)


def flag(model: str, option: str, value: object) -> bool:
    """`value` if it is true or false; raises `InvalidValue` if not."""
    if not isinstance(value, bool):
        raise InvalidValue(f"{model}: {option} must be true or false, not {value!r}")
    return value


def one_of(model: str, option: str, value: object, allowed: Iterable[str]) -> str:
    """`value` if it is among the `allowed` names; raises `InvalidValue` with the nearest one if not."""
    names = list(allowed)
    if not isinstance(value, str) or value not in names:
        near = suggestion(str(value), names)
        raise InvalidValue(f"{model}: {option} must be one of {', '.join(names)}, not {value!r}{near and ':' + near}")
    return value
