"""Messages between the server and the sites: words and figures as JSON, tensors as plain numbers.

Both sides check a message before they decode it: its records, and the size, type and shape that
each array declares.
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

from fedloom.common.errors import FedloomError, RefusedReply, one_line

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.algorithm.records import TensorSpec

PROTOCOL = 2
"""Version of the protocol between server and site; both must have the same."""

RECORD = "fedloom"
ARRAYS = "arrays"
PARCEL = "parcel"

NUMBERS = "fedloom.numbers"
"""Name of the encoding of tensors, beside their type and shape."""

Words = dict[str, Any]
"""Plain values."""

_RECORDS = {RECORD: ConfigRecord, ARRAYS: ArrayRecord, PARCEL: ConfigRecord}

_LONGEST_WORDS = 1 << 22
_MOST_AXES = 32
_TYPES = {"float32", "float64", "int64", "int32", "uint8", "bool"}


_LONGEST_LOGGED = 2000


def _cleaned(record: logging.LogRecord) -> bool:
    """Clean and shorten the texts of a log line, which may be from another party."""
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
    """The other side did not execute a request. `words` contain the reason."""

    def __init__(self, words: Words) -> None:
        super().__init__(one_line(str(words.get("refused", ""))))
        self.words = words


def pack(
    words: Words, tensors: Mapping[str, Tensor | Array] | None = None, parcel: bytes = b""
) -> RecordDict:
    """Return the content of a message.

    Args:
        words: Plain values, sent as JSON.
        tensors: Tensors, possibly encoded already.
        parcel: Bytes that the carrier forwards without reading them.

    Returns:
        Flower's records: the words, and `ARRAYS` and `PARCEL` where they are given.
    """
    content = RecordDict({RECORD: ConfigRecord({"protocol": PROTOCOL, "words": json.dumps(words)})})
    if tensors is not None:
        content[ARRAYS] = ArrayRecord(
            {n: t if isinstance(t, Array) else encoded(t) for n, t in tensors.items()}
        )
    if parcel:
        content[PARCEL] = ConfigRecord({"bytes": parcel})
    return content


def words_of(message: Message, *records: str) -> Words:
    """Return the words of a message.

    Args:
        message: The message.
        *records: Names of the records, such as `ARRAYS`, that may accompany the words.

    Returns:
        The JSON object of the message as plain values. They are not checked further.

    Raises:
        Refusal: The words contain a refusal.
        RefusedReply: The message is not valid.
        FedloomError: Flower reports a failure.
    """
    if message.has_error():
        raise FedloomError(
            one_line(f"the app failed: {message.error.reason or f'error {message.error.code}'}")
        )
    if RECORD not in message.content:
        raise RefusedReply("the message is not one of fedloom's")
    for name, record in message.content.items():
        if name not in (RECORD, *records):
            raise RefusedReply(f"unexpected record {name!r:.80} in the message")
        if not isinstance(record, _RECORDS[name]):
            raise RefusedReply(f"the message's record {name!r} has the wrong type")
    entries = message.content.config_records[RECORD]
    if (protocol := entries.get("protocol")) != PROTOCOL:
        raise RefusedReply(
            f"the message follows protocol {protocol!r:.40}, not {PROTOCOL}: versions differ"
        )
    if foreign := sorted(set(entries) - {"protocol", "words"}):
        raise RefusedReply(
            f"unexpected entry {foreign[0]!r:.80} in the message's record {RECORD!r}"
        )
    text = entries.get("words")
    words = None
    with suppress(ValueError, RecursionError):
        words = json.loads(text) if isinstance(text, str) and len(text) <= _LONGEST_WORDS else None
    if not isinstance(words, dict):
        raise RefusedReply("the message's words are not a JSON object, or are too long")
    if "refused" in words:
        raise Refusal(words)
    return words


def encoded(tensor: Tensor) -> Array:
    """Return a tensor in the form in which it travels: its numbers in order, little-endian."""
    array = tensor.detach().cpu().contiguous().numpy()
    return Array(str(array.dtype), array.shape, NUMBERS, array.tobytes())


def tensors_of(
    message: Message, expected: Mapping[str, TensorSpec] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a message.

    Args:
        message: The message.
        expected: Names, shapes and types; None accepts any.

    Returns:
        Copies of the tensors by name, on the CPU; empty without a record of tensors.

    Raises:
        RefusedReply: A tensor is broken, or differs from `expected`.
    """
    arrays = message.content.array_records.get(ARRAYS, ArrayRecord())
    if expected is not None and arrays.keys() != expected.keys():
        names = one_line(str(sorted(arrays)[:8]), 200)
        raise RefusedReply(f"tensors {names}, expected {sorted(expected)}")
    return {
        name: decoded(name, array, (expected or {}).get(name)) for name, array in arrays.items()
    }


def decoded(name: str, array: Array, expected: TensorSpec | None = None) -> Tensor:
    """Return the tensor of one array.

    Everything is checked before memory is allocated.

    Args:
        name: Name of the tensor, for errors.
        array: The array.
        expected: Shape and type; None accepts any.

    Returns:
        A copy of the array, on the CPU.

    Raises:
        RefusedReply: Type or shape differ from `expected`, or do not match the bytes.
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
        raise RefusedReply(f"{name!r:.80} has {len(array.data)} bytes, but its shape needs {size}")
    import torch

    # Copy into memory that torch allocates: with another alignment, sums may round differently.
    tensor = torch.empty(declared, dtype=getattr(torch, array.dtype))
    tensor.numpy()[...] = np.ndarray(declared, array.dtype, array.data)
    return tensor


def figures_of(words: Words, declared: Collection[str]) -> dict[str, float]:
    """Return the figures among the words.

    Args:
        words: Words of a reply. The entry `figures` may be missing.
        declared: Names of the figures that the method declares.

    Returns:
        Finite numbers by name; some declared names may be missing.

    Raises:
        RefusedReply: A name is not declared, or a figure is not finite.
    """
    figures = words.get("figures", {})
    if not isinstance(figures, dict):
        raise RefusedReply("the message's figures are not a table")
    for name, value in figures.items():
        if name not in declared:
            raise RefusedReply(
                f"unknown figure {name!r:.80} of a client (allowed: "
                f"{', '.join(sorted(declared)) or 'none'})"
            )
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise RefusedReply(f"the figure {name} is not a finite number")
    return {name: float(value) for name, value in figures.items()}


def parcel_of(message: Message) -> bytes:
    """Return the parcel in a message, which may be empty.

    Raises:
        RefusedReply: The parcel is broken.
    """
    record = message.content.config_records.get(PARCEL, ConfigRecord({"bytes": b""}))
    content = record.get("bytes")
    if not isinstance(content, bytes) or len(record) > 1:
        raise RefusedReply("the message's parcel must be one entry of bytes")
    return content


def whole_number(words: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return an integer among the words.

    Args:
        words: Words of a message.
        name: The entry to read.
        low: Smallest allowed value.
        high: Largest allowed value.

    Returns:
        The integer, in [low, high]. True and 1.0 are no integers.

    Raises:
        RefusedReply: The integer is missing or not between `low` and `high`.
    """
    value = words.get(name)
    if type(value) is not int or not low <= value <= high:
        raise RefusedReply(
            f"{name} must be a whole number between {low} and {high}, not {value!r:.60}"
        )
    return value


class Mailbox:
    """Sends single messages and checks for their replies every `pause` seconds."""

    def __init__(self, grid: Grid, pause: float) -> None:
        self.grid = grid
        self.pause = pause
        # replies that are not collected yet, by message id
        self._arrived: dict[str, Message] = {}

    def send(
        self, node: int, kind: str, content: RecordDict, group: str = "", seconds: float = math.inf
    ) -> str | None:
        """Send a message, which expires after `seconds`.

        Args:
            node: Id of the SuperNode in Flower.
            kind: Type of the message, which selects the handler at the site.
            content: Records of `pack`.
            group: Name of the group of messages in Flower; by default none.
            seconds: Time until the message expires; by default Flower's limit.

        Returns:
            The id of the message, or None if Flower could not take it.
        """
        ttl = None if seconds == math.inf else seconds
        message = Message(content, node, kind, group_id=group, ttl=ttl)
        # One at a time: only one content is in memory, and the id belongs to this message.
        return next(iter(self.grid.push_messages([message])), None)

    def collect(
        self, ids: Iterable[str], seconds: float = math.inf
    ) -> Iterator[tuple[str, Message]]:
        """Yield the replies to these messages as they arrive.

        It ends when all have arrived or `seconds` have passed. Replies that arrive together are
        yielded in the order of the ids. Replies that the caller does not take remain for the next
        call.

        Args:
            ids: Ids of messages.
            seconds: Longest time to wait.

        Yields:
            Ids of messages, with their replies.
        """
        waiting = dict.fromkeys(ids)
        end = time.monotonic() + seconds
        while waiting:
            due = waiting.keys() - self._arrived.keys()
            for reply in self.grid.pull_messages(list(due)) if due else ():
                if reply.metadata.reply_to_message_id in due:  # ignore others
                    self._arrived[reply.metadata.reply_to_message_id] = reply
            for message_id in [name for name in waiting if name in self._arrived]:
                del waiting[message_id]
                yield message_id, self._arrived.pop(message_id)
            if not waiting or (remaining := end - time.monotonic()) <= 0:
                return
            time.sleep(min(self.pause, remaining))
