"""Messages between the server and the sites, and how they travel: words and figures as JSON,
tensors as plain numbers.

Both sides check what they get before they decode it: which records there are, the size, type and
shape that an array says it has.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedloom.errors import FedloomError, RefusedReply, one_line

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.records import TensorSpec

PROTOCOL = 2
"""Number of the agreement between server and site; both must have the same."""

RECORD = "fedloom"
ARRAYS = "arrays"
PARCEL = "parcel"

NUMBERS = "fedloom.numbers"
"""Name of the way in which tensors travel, beside their type and shape."""

Words = dict[str, Any]
"""Plain values."""

_RECORDS = {RECORD: ConfigRecord, ARRAYS: ArrayRecord, PARCEL: ConfigRecord}

_LONGEST_WORDS = 1 << 22
_MOST_AXES = 32
_TYPES = {"float32", "float64", "int64", "int32", "uint8", "bool"}


_LONGEST_LOGGED = 2000


def _cleaned(record: logging.LogRecord) -> bool:
    """Clean and bound the texts of a line of the log, which may be another party's."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            one_line(str(value), _LONGEST_LOGGED)
            if isinstance(value, str | BaseException)
            else value
            for value in record.args
        )
    return True


logging.getLogger("flwr.fedloom").addFilter(_cleaned)


class Refusal(FedloomError):
    """The other side did not do what it was asked, and says why in `words`."""

    def __init__(self, words: Words) -> None:
        super().__init__(one_line(str(words.get("refused", ""))))
        self.words = words


def pack(
    words: Words, tensors: Mapping[str, Tensor | Array] | None = None, parcel: bytes = b""
) -> RecordDict:
    """Return the content of a message; `parcel` is what the carrier does not look into."""
    content = RecordDict({RECORD: ConfigRecord({"protocol": PROTOCOL, "words": json.dumps(words)})})
    if tensors is not None:
        content[ARRAYS] = ArrayRecord(
            {n: t if isinstance(t, Array) else encoded(t) for n, t in tensors.items()}
        )
    if parcel:
        content[PARCEL] = ConfigRecord({"bytes": parcel})
    return content


def words_of(message: Message, *records: str) -> Words:
    """Return the words of a message, which may have these `records` beside them, such as `ARRAYS`.

    Raises `Refusal` where the words are one, `RefusedReply` for other messages, `FedloomError` for
    a failure that Flower tells.
    """
    if message.has_error():
        raise FedloomError(
            one_line(f"the app failed: {message.error.reason or f'error {message.error.code}'}")
        )
    if RECORD not in message.content:
        raise RefusedReply("the message is not one of fedloom's")
    for name, record in message.content.items():
        if name not in (RECORD, *records):
            raise RefusedReply(f"the message holds a record {name!r:.80} that nobody asked for")
        if not isinstance(record, _RECORDS[name]):
            raise RefusedReply(f"the message's record {name!r} is of another kind")
    entries = message.content.config_records[RECORD]
    if (protocol := entries.get("protocol")) != PROTOCOL:
        raise RefusedReply(
            f"the message follows protocol {protocol!r:.40}, not {PROTOCOL}: versions differ"
        )
    if foreign := sorted(set(entries) - {"protocol", "words"}):
        raise RefusedReply(
            f"the message's record {RECORD!r} holds {foreign[0]!r:.80}, which nobody asked for"
        )
    text, words = entries.get("words"), None
    with suppress(ValueError, RecursionError):
        words = json.loads(text) if isinstance(text, str) and len(text) <= _LONGEST_WORDS else None
    if not isinstance(words, dict):
        raise RefusedReply("the message's words are not JSON, no table, or far too many")
    if "refused" in words:
        raise Refusal(words)
    return words


def encoded(tensor: Tensor) -> Array:
    """Return a tensor as it travels: its numbers, little-endian, one after another."""
    array = tensor.detach().cpu().contiguous().numpy()
    return Array(str(array.dtype), array.shape, NUMBERS, array.tobytes())


def tensors_of(
    message: Message, expected: Mapping[str, TensorSpec] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a message. Raises `RefusedReply` for broken ones, or other names,
    shapes and types than expected.
    """
    arrays = message.content.array_records.get(ARRAYS, ArrayRecord())
    if expected is not None and arrays.keys() != expected.keys():
        names = one_line(str(sorted(arrays)[:8]), 200)
        raise RefusedReply(f"tensors {names} where {sorted(expected)} are expected")
    return {
        name: decoded(name, array, (expected or {}).get(name)) for name, array in arrays.items()
    }


def decoded(name: str, array: Array, expected: TensorSpec | None = None) -> Tensor:
    """Return the tensor of one array. Raises `RefusedReply`, before anything is allocated, for a
    type or shape that is not `expected` (None for any), and bytes that are not what type and shape
    say.
    """
    if array.stype != NUMBERS or array.dtype not in _TYPES:
        raise RefusedReply(
            f"{name!r:.80} is of type {array.dtype!r:.40}, not one of {', '.join(sorted(_TYPES))}"
        )
    declared = tuple(array.shape)
    if expected is not None and f"torch.{array.dtype}" != str(expected.dtype):
        raise RefusedReply(
            f"{name!r:.80} is {array.dtype}, not {str(expected.dtype).removeprefix('torch.')}"
        )
    if expected is not None and declared != expected.shape:
        raise RefusedReply(
            f"{name!r:.80} has shape {list(declared)!s:.80}, not {list(expected.shape)}"
        )
    if len(declared) > _MOST_AXES or any(type(size) is not int or size < 0 for size in declared):
        raise RefusedReply(f"{name!r:.80} has an impossible shape")
    size = math.prod(declared) * np.dtype(array.dtype).itemsize
    if len(array.data) != size:
        raise RefusedReply(
            f"{name!r:.80} holds {len(array.data)} bytes where its shape needs {size}"
        )
    import torch

    # Into memory of torch's own: sums may round differently where memory begins off the boundaries
    # that it keeps.
    tensor = torch.empty(declared, dtype=getattr(torch, array.dtype))
    tensor.numpy()[...] = np.ndarray(declared, array.dtype, array.data)
    return tensor


def figures_of(words: Words, declared: Collection[str]) -> dict[str, float]:
    """Return the figures among the words. Raises `RefusedReply` for names that are not declared and
    for infinity.
    """
    figures = words.get("figures", {})
    if not isinstance(figures, dict):
        raise RefusedReply("the message's figures are no table")
    for name, value in figures.items():
        if name not in declared:
            raise RefusedReply(
                f"{name!r:.80} is no figure of a client: {', '.join(sorted(declared)) or 'none'} is"
            )
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise RefusedReply(f"the figure {name} is not a finite number")
    return {name: float(value) for name, value in figures.items()}


def parcel_of(message: Message) -> bytes:
    """Return the parcel that a message carries for somebody else, perhaps empty. Raises
    `RefusedReply` for a broken one.
    """
    record = message.content.config_records.get(PARCEL, ConfigRecord({"bytes": b""}))
    content = record.get("bytes")
    if not isinstance(content, bytes) or len(record) > 1:
        raise RefusedReply("the message's parcel is none")
    return content


def whole_number(words: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return a whole number among the words. Raises `RefusedReply` unless it is there and between
    `low` and `high`.
    """
    value = words.get(name)
    if type(value) is not int or not low <= value <= high:
        raise RefusedReply(
            f"{name} must be a whole number between {low} and {high}, not {value!r:.60}"
        )
    return value


class Mailbox:
    """Sends single messages and looks for their replies every `pause` seconds."""

    def __init__(self, grid: Grid, pause: float) -> None:
        self.grid, self.pause = grid, pause
        # replies that nobody has taken yet, by the message's id
        self._arrived: dict[str, Message] = {}

    def send(
        self, node: int, kind: str, content: RecordDict, group: str = "", seconds: float = math.inf
    ) -> str | None:
        """Send a message that is void after `seconds`. Returns its id, None where Flower could not
        take it.
        """
        ttl = None if seconds == math.inf else seconds
        message = Message(content, node, kind, group_id=group, ttl=ttl)
        # One at a time: the contents of many messages are not in memory at once, and each id is
        # that of its own message.
        return next(iter(self.grid.push_messages([message])), None)

    def collect(
        self, ids: Iterable[str], seconds: float = math.inf
    ) -> Iterator[tuple[str, Message]]:
        """Yield the reply to each of these messages as they come, until all are there or `seconds`
        have passed.

        Those that come together are yielded in the order of the ids; those that are not taken stay
        for the next time.
        """
        waiting, end = dict.fromkeys(ids), time.monotonic() + seconds
        while waiting:
            due = waiting.keys() - self._arrived.keys()
            for reply in self.grid.pull_messages(list(due)) if due else ():
                if reply.metadata.reply_to_message_id in due:  # else it was asked by nobody
                    self._arrived[reply.metadata.reply_to_message_id] = reply
            for message_id in [name for name in waiting if name in self._arrived]:
                del waiting[message_id]
                yield message_id, self._arrived.pop(message_id)
            if not waiting or (remaining := end - time.monotonic()) <= 0:
                return
            time.sleep(min(self.pause, remaining))
