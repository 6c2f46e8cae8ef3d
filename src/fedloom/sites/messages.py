"""Messages between the server and the sites: words as JSON, tensors as plain arrays, figures.

Both sides check what they get before they decode it: which records there are, the size, type and shape that an array says it
has, then its bytes, which are read as numbers and never as objects.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedloom.errors import FedloomError, RefusedReply, one_line

if TYPE_CHECKING:
    from torch import Tensor

PROTOCOL = 1
"""Number of the agreement between server and site; both must have the same."""

RECORD = "fedloom"
ARRAYS = "arrays"
FIGURES = "figures"
PARCEL = "parcel"

Words = dict[str, Any]
"""Plain values."""

_LONGEST_WORDS = 1 << 22
_LONGEST_HEADER = 4096  # of an array in NumPy's format; the headers of plain arrays take 128 bytes
_TYPES = {"float32", "float64", "int64", "int32", "uint8", "bool"}


class Expected(NamedTuple):
    """Shape of a tensor and the name of its type as NumPy and PyTorch have it, such as `float32`."""

    shape: tuple[int, ...]
    dtype: str


class Refusal(FedloomError):
    """The other side did not do what it was asked, and says why in `words`."""

    def __init__(self, words: Words) -> None:
        super().__init__(one_line(str(words.get("refused", ""))))
        self.words = words


def pack(
    words: Words,
    tensors: Mapping[str, Tensor | Array] | None = None,
    figures: Mapping[str, float] | None = None,
    parcel: bytes = b"",
) -> RecordDict:
    """Return the content of a message; `parcel` is what the carrier does not look into."""
    content = RecordDict({RECORD: ConfigRecord({"protocol": PROTOCOL, "words": json.dumps(words)})})
    if tensors is not None:
        content[ARRAYS] = ArrayRecord({n: t if isinstance(t, Array) else encoded(t) for n, t in tensors.items()})
    if figures is not None:
        content[FIGURES] = MetricRecord({name: float(value) for name, value in figures.items()})
    if parcel:
        content[PARCEL] = ConfigRecord({"bytes": parcel})
    return content


def words_of(message: Message, *records: str) -> Words:
    """Return the words of a message.

    Args:
        message: A message or a reply.
        *records: Records that it may have beside its words, such as `ARRAYS`.

    Raises:
        Refusal: The words say why there is nothing else.
        RefusedReply: It is no message of this kind, or holds something that nobody asked for.
        FedloomError: It is Flower's own report of a failure.
    """
    if message.has_error():
        raise FedloomError(one_line(f"the app failed: {message.error.reason or f'error {message.error.code}'}"))
    record = message.content.get(RECORD)
    if not isinstance(record, ConfigRecord):
        raise RefusedReply("the message is not one of fedloom's")
    for name in message.content:
        if name not in (RECORD, *records):
            raise RefusedReply(f"the message holds a record {name!r:.80} that nobody asked for")
    if record.get("protocol") != PROTOCOL:
        raise RefusedReply(
            f"the message follows protocol {record.get('protocol')!r:.40}, not {PROTOCOL}: versions differ"
        )
    _require_entries(RECORD, record, ("protocol", "words"))
    text = record.get("words")
    if not isinstance(text, str) or len(text) > _LONGEST_WORDS:
        raise RefusedReply("the message has no words, or far too many")
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        raise RefusedReply("the message's words are not JSON") from None
    if not isinstance(words, dict):
        raise RefusedReply("the message's words are no table")
    if "refused" in words:
        raise Refusal(words)
    return words


def _require_entries(name: str, record: ConfigRecord, entries: Collection[str]) -> None:
    for entry in record:
        if entry not in entries:
            raise RefusedReply(f"the message's record {name!r} holds {entry!r:.80}, which nobody asked for")


def encoded(tensor: Tensor) -> Array:
    """Return a tensor as it travels: its numbers in NumPy's format."""
    return Array.from_numpy_ndarray(tensor.detach().cpu().contiguous().numpy())


def expected_tensors(message: Message, expected: Mapping[str, Expected]) -> dict[str, Tensor]:
    """Return the tensors of a message. Raises `RefusedReply` unless they have exactly these names, shapes and types."""
    arrays = _arrays(message)
    if arrays.keys() != expected.keys():
        names = one_line(str(sorted(arrays)[:8]), 200)
        raise RefusedReply(f"tensors {names} where {sorted(expected)} are expected")
    return {name: decoded(name, array, expected[name]) for name, array in arrays.items()}


def any_tensors(message: Message) -> dict[str, Tensor]:
    """Return the tensors of a message, whatever their names, shapes and types. Raises `RefusedReply` for broken ones."""
    return {name: decoded(name, array) for name, array in _arrays(message).items()}


def _arrays(message: Message) -> ArrayRecord:
    record = message.content.get(ARRAYS, ArrayRecord())
    if not isinstance(record, ArrayRecord):
        raise RefusedReply("the message's arrays are not arrays")
    return record


def decoded(name: str, array: Array, expected: Expected | None = None) -> Tensor:
    """Return the tensor of one array. Nothing is allocated for one that is refused.

    Args:
        name: Name of the tensor, for errors.
        array: The array as it came.
        expected: Shape and type that it must have, None for any.

    Raises:
        RefusedReply: Its type is none that tensors travel in, type or shape are not as expected, or its bytes are not what
            type and shape say.
    """
    if array.stype != "numpy.ndarray" or array.dtype not in _TYPES:
        raise RefusedReply(f"{name!r:.80} is of type {array.dtype!r:.40}, not one of {', '.join(sorted(_TYPES))}")
    declared = tuple(array.shape)
    if expected is not None and array.dtype != expected.dtype:
        raise RefusedReply(f"{name!r:.80} is {array.dtype}, not {expected.dtype}")
    if expected is not None and declared != expected.shape:
        raise RefusedReply(f"{name!r:.80} has shape {list(declared)!s:.80}, not {list(expected.shape)}")
    if any(type(size) is not int or size < 0 for size in declared):
        raise RefusedReply(f"{name!r:.80} has an impossible shape")
    dtype = np.dtype(array.dtype)
    size = math.prod(declared) * dtype.itemsize
    if not size < len(array.data) <= size + _LONGEST_HEADER:
        raise RefusedReply(f"{name!r:.80} holds {len(array.data)} bytes where its shape needs {size}")
    stream = io.BytesIO(array.data[:_LONGEST_HEADER])
    try:
        header = _read_header(stream)
    except Exception:  # whatever foreign bytes do to the reader of headers
        raise RefusedReply(f"{name!r:.80} is not an array in NumPy's format") from None
    if header != (declared, False, dtype) or len(array.data) - stream.tell() != size:
        raise RefusedReply(f"{name!r:.80} holds other numbers than its type and shape say")
    import torch

    # Into memory of torch's own: sums may round differently where memory begins off the boundaries that it keeps.
    tensor = torch.empty(declared, dtype=getattr(torch, array.dtype))
    tensor.numpy()[...] = np.frombuffer(array.data, dtype, math.prod(declared), stream.tell()).reshape(declared)
    return tensor


def _read_header(stream: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    # A single axis, or one with a single entry, has no order of axes; `numpy.save` may then say either.
    return tuple(shape), bool(fortran) and sum(size > 1 for size in shape) > 1, dtype


def figures_of(message: Message, declared: Collection[str]) -> dict[str, float]:
    """Return the figures of a message. Raises `RefusedReply` for names that are not declared and numbers that are not finite."""
    record = message.content.get(FIGURES, MetricRecord())
    if not isinstance(record, MetricRecord):
        raise RefusedReply("the message's figures are no figures")
    for name, value in record.items():
        if name not in declared:
            raise RefusedReply(f"{name!r:.80} is no figure of a client: {', '.join(sorted(declared)) or 'none'} is")
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RefusedReply(f"the figure {name} is not a finite number")
    return {name: float(value) for name, value in record.items() if isinstance(value, (int, float))}


def parcel_of(message: Message) -> bytes:
    """Return the parcel that a message carries for somebody else, empty where it has none. Raises `RefusedReply` for a broken
    one."""
    record = message.content.get(PARCEL)
    if record is None:
        return b""
    content = record.get("bytes") if isinstance(record, ConfigRecord) else None
    if not isinstance(content, bytes) or not isinstance(record, ConfigRecord):
        raise RefusedReply("the message's parcel is none")
    _require_entries(PARCEL, record, ("bytes",))
    return content


def whole_number(words: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return a whole number among the words. Raises `RefusedReply` unless it is there and between `low` and `high`."""
    value = words.get(name)
    if type(value) is not int or not low <= value <= high:
        raise RefusedReply(f"{name} must be a whole number between {low} and {high}, not {value!r:.60}")
    return value
