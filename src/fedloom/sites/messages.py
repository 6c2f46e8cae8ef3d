"""Messages between the server and the sites, and how they travel: words as JSON, tensors as plain arrays, figures.

Both sides check what they get before they decode it: which records there are, the size, type and shape that an array says it
has, then its bytes, which are read as numbers and never as objects.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedloom.errors import FedloomError, RefusedReply, one_line

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.rounds.engine import TensorSpec

PROTOCOL = 1
"""Number of the agreement between server and site; both must have the same."""

RECORD = "fedloom"
ARRAYS = "arrays"
FIGURES = "figures"
PARCEL = "parcel"

Kind = Literal["hello", "statistics", "exchange", "train", "evaluate", "end"]

_KINDS = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE, "hello": MessageType.QUERY}

Words = dict[str, Any]
"""Plain values."""

_LONGEST_WORDS = 1 << 22
_MOST_AXES = 32
_TYPES = {"float32", "float64", "int64", "int32", "uint8", "bool"}


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
    """Return the words of a message, which may have these `records` beside them, such as `ARRAYS`.

    Raises `Refusal` where the words say why there is nothing else, `RefusedReply` for a message of another kind, or with a record
    that nobody asked for, and `FedloomError` for Flower's own report of a failure.
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
    foreign = sorted(set(record) - {"protocol", "words"})
    if foreign:
        raise RefusedReply(f"the message's record {RECORD!r} holds {foreign[0]!r:.80}, which nobody asked for")
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


def encoded(tensor: Tensor) -> Array:
    """Return a tensor as it travels: its numbers in NumPy's format."""
    return Array.from_numpy_ndarray(tensor.detach().cpu().contiguous().numpy())


def tensors_of(message: Message, expected: Mapping[str, TensorSpec] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a message. Raises `RefusedReply` for broken ones, or other names, shapes and types than expected."""
    arrays = message.content.get(ARRAYS, ArrayRecord())
    if not isinstance(arrays, ArrayRecord):
        raise RefusedReply("the message's arrays are not arrays")
    if expected is not None and arrays.keys() != expected.keys():
        names = one_line(str(sorted(arrays)[:8]), 200)
        raise RefusedReply(f"tensors {names} where {sorted(expected)} are expected")
    return {name: decoded(name, array, (expected or {}).get(name)) for name, array in arrays.items()}


def decoded(name: str, array: Array, expected: TensorSpec | None = None) -> Tensor:
    """Return the tensor of one array, whose name is for errors. Nothing is allocated for one that is refused.

    Raises `RefusedReply` for a type in which no tensor travels, a type or shape that is not `expected` (None for any), and bytes
    that are not what type and shape say.
    """
    if array.stype != "numpy.ndarray" or array.dtype not in _TYPES:
        raise RefusedReply(f"{name!r:.80} is of type {array.dtype!r:.40}, not one of {', '.join(sorted(_TYPES))}")
    declared = tuple(array.shape)
    if expected is not None and f"torch.{array.dtype}" != str(expected.dtype):
        raise RefusedReply(f"{name!r:.80} is {array.dtype}, not {str(expected.dtype).removeprefix('torch.')}")
    if expected is not None and declared != expected.shape:
        raise RefusedReply(f"{name!r:.80} has shape {list(declared)!s:.80}, not {list(expected.shape)}")
    if len(declared) > _MOST_AXES or any(type(size) is not int or size < 0 for size in declared):
        raise RefusedReply(f"{name!r:.80} has an impossible shape")
    dtype, stream = np.dtype(array.dtype), io.BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": declared}
    np.lib.format.write_array_header_1_0(stream, header)
    start, size = stream.tell(), math.prod(declared) * dtype.itemsize
    if len(array.data) != start + size:
        raise RefusedReply(f"{name!r:.80} holds {len(array.data)} bytes where its shape needs {start + size}")
    if not array.data.startswith(stream.getvalue()):
        raise RefusedReply(f"{name!r:.80} is not an array of its type and shape in NumPy's format")
    import torch

    # Into memory of torch's own: sums may round differently where memory begins off the boundaries that it keeps.
    tensor = torch.empty(declared, dtype=getattr(torch, array.dtype))
    tensor.numpy()[...] = np.frombuffer(array.data, dtype, offset=start).reshape(declared)
    return tensor


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
    """Return the parcel that a message carries for somebody else, perhaps empty. Raises `RefusedReply` for a broken one."""
    record = message.content.get(PARCEL, ConfigRecord({"bytes": b""}))
    content = record.get("bytes") if isinstance(record, ConfigRecord) and set(record) == {"bytes"} else None
    if not isinstance(content, bytes):
        raise RefusedReply("the message's parcel is none")
    return content


def whole_number(words: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return a whole number among the words. Raises `RefusedReply` unless it is there and between `low` and `high`."""
    value = words.get(name)
    if type(value) is not int or not low <= value <= high:
        raise RefusedReply(f"{name} must be a whole number between {low} and {high}, not {value!r:.60}")
    return value


class Mailbox:
    """Sends single messages and looks for their replies every `pause` seconds."""

    def __init__(self, grid: Grid, pause: float) -> None:
        self.grid, self.pause = grid, pause

    def nodes(self) -> set[int]:
        """Return the nodes that are connected, as far as Flower knows."""
        return set(self.grid.get_node_ids())

    def send(
        self, node: int, kind: Kind, content: RecordDict, group: str = "", seconds: float = math.inf
    ) -> str | None:
        """Send a message that is void after `seconds`. Returns its id, None where Flower could not take it."""
        ttl = None if seconds == math.inf else seconds
        message = Message(content, node, _KINDS.get(kind, f"{MessageType.QUERY}.{kind}"), group_id=group, ttl=ttl)
        # One at a time: the contents of many messages are not in memory at once, and each id is that of its own message.
        ids = list(self.grid.push_messages([message]))
        return ids[0] if ids else None

    def pull(self, ids: Collection[str]) -> list[Message]:
        """Return the replies to these messages that have come since the last look."""
        return list(self.grid.pull_messages(list(ids))) if ids else []

    def collect(self, ids: Collection[str], seconds: float = math.inf) -> Iterator[Message]:
        """Yield one reply to each of these messages as they come, until all are there or `seconds` have passed."""
        waiting, end = set(ids), time.monotonic() + seconds
        while waiting:
            for reply in self.pull(waiting):
                if reply.metadata.reply_to_message_id in waiting:  # else it came twice, or was asked by nobody
                    waiting.discard(reply.metadata.reply_to_message_id)
                    yield reply
            remaining = end - time.monotonic()
            if waiting and remaining <= 0:
                return
            if waiting:
                time.sleep(min(self.pause, remaining))
