"""Malicious sites that change their answers. To add one, write a class with a `tamper` method and
add it to `SITES`.
"""

from __future__ import annotations

import json
import random

import numpy as np
from flwr.app import Array, ConfigRecord, Message

from damage import mutated
from fedloom.algorithm.records import INTEGERS
from fedloom.sites.messages import ARRAYS, PROTOCOL, RECORD, tensors_of
from flower_support import with_array, with_words, words_of


class Site:
    """A site that changes its answers.

    `refused`: whether the server must refuse them in training, rather than only bound them.
    """

    refused = True
    only_training = True
    count = 1  # number of sites that do this together

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def tamper(self, reply: Message) -> Message:
        """Return the changed answer."""
        raise NotImplementedError

    def floats(self, reply: Message) -> tuple[str, np.ndarray]:
        """Return a floating-point array of a reply: the model, or an array of a coded model."""
        arrays = {name: tensor.numpy() for name, tensor in tensors_of(reply).items()}
        name = self.draw.choice(
            sorted(name for name, array in arrays.items() if array.dtype.kind == "f")
        )
        return name, arrays[name]


class WrongShape(Site):
    def tamper(self, reply: Message) -> Message:
        name, values = self.floats(reply)
        return with_array(name, np.zeros((*values.shape, self.draw.randrange(2, 9)), np.float32))(
            reply
        )


class WrongType(Site):
    def tamper(self, reply: Message) -> Message:
        name, values = self.floats(reply)
        return with_array(
            name, values.astype(self.draw.choice((np.int64, np.float16, np.complex64)))
        )(reply)


class NotFinite(Site):
    def tamper(self, reply: Message) -> Message:
        name, values = self.floats(reply)
        values = values.copy()
        values.reshape(-1)[self.draw.randrange(values.size)] = self.draw.choice(
            (np.nan, np.inf, -np.inf)
        )
        return with_array(name, values)(reply)


class MoreTensors(Site):
    def tamper(self, reply: Message) -> Message:
        return with_array(f"other {self.draw.random()}", np.zeros(3, np.float32))(reply)


class OwnFigures(Site):
    """Reports a false figure for the model of the server."""

    def tamper(self, reply: Message) -> Message:
        name = self.draw.choice(("accuracy", "loss", "round", "bytes_up", "personal_accuracy"))
        words = words_of(reply)
        return with_words(json.dumps({**words, "figures": {**words["figures"], name: 1.0}}))(reply)


class NoWords(Site):
    def tamper(self, reply: Message) -> Message:
        return with_words(
            self.draw.choice(("", "[", "[" * 10**5, "9" * 10**4, "null", '{"a": 1e999}'))
        )(reply)


class Garbage(Site):
    def tamper(self, reply: Message) -> Message:
        reply.content[RECORD] = ConfigRecord(
            {"protocol": self.draw.randbytes(20), "words": self.draw.randbytes(300)}
        )
        return reply


class Claims(Site):
    """Claims more samples than any other site."""

    refused = False

    def tamper(self, reply: Message) -> Message:
        return with_words(json.dumps({**words_of(reply), "samples": 10**9}))(reply)


class Colluders(Claims):
    """Two sites that claim too many samples."""

    count = 2


class Counters(Site):
    """Reports an impossible number of trained batches, such as a negative one."""

    refused = False

    def tamper(self, reply: Message) -> Message:
        counters = tensors_of(reply)[INTEGERS].numpy()
        return with_array(
            INTEGERS, np.full_like(counters, self.draw.choice((2**63 - 1, 10**9, 0, -1, -(2**63))))
        )(reply)


class Mutated(Site):
    """Answers every message with a few changed bytes in its fields, or in the type, shape or length
    of an array.

    The numbers of an array stay, because a changed number looks like an honest one.
    """

    refused = False
    only_training = False

    def tamper(self, reply: Message) -> Message:
        if not reply.has_content():
            return reply
        arrays = reply.content.array_records.get(ARRAYS)
        if not arrays or self.draw.random() < 0.5:
            words = mutated(json.dumps(words_of(reply)).encode(), self.draw).decode(
                errors="replace"
            )
            return with_words(words, self.draw.choice((PROTOCOL, PROTOCOL, PROTOCOL + 1)))(reply)
        name = self.draw.choice(sorted(arrays))
        array, kind = arrays[name], self.draw.randrange(3)
        dtype = (
            mutated(array.dtype.encode(), self.draw).decode(errors="replace")
            if kind == 0
            else array.dtype
        )
        shape = (
            (*array.shape, self.draw.choice((0, -1, (1 << 31) - 1))) if kind == 1 else array.shape
        )
        data = array.data[: self.draw.randrange(len(array.data))] if kind == 2 else array.data
        arrays[name] = Array(dtype, shape, array.stype, data)
        return reply


SITES: tuple[type[Site], ...] = (
    WrongShape, WrongType, NotFinite, MoreTensors, OwnFigures, NoWords, Garbage, Claims, Colluders, Counters,
    Mutated,
)  # fmt: skip
