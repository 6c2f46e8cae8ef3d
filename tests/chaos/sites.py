"""Malicious sites. To try another one, write a class with a `tamper` here and add it to `SITES`."""

from __future__ import annotations

import json
import random

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord

from fedloom.engines.flower.messages import ARRAYS, RECORD
from flower_support import with_array, with_words, words_of


class Site:
    """A site that changes its answers to training; `refused`: whether the server must refuse them, and not just bound them."""

    refused = True

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def tamper(self, reply: Message) -> Message:
        """The answer that it sends in place of this one."""
        raise NotImplementedError


class WrongShape(Site):
    def tamper(self, reply: Message) -> Message:
        return with_array("model", np.zeros(self.draw.randrange(1, 9), np.float32))(reply)


class WrongType(Site):
    def tamper(self, reply: Message) -> Message:
        model = reply.content.array_records[ARRAYS]["model"].numpy()
        return with_array("model", model.astype(self.draw.choice((np.int64, np.float16, np.complex64))))(reply)


class NotFinite(Site):
    def tamper(self, reply: Message) -> Message:
        model = reply.content.array_records[ARRAYS]["model"].numpy().copy()
        model[self.draw.randrange(len(model))] = self.draw.choice((np.nan, np.inf, -np.inf))
        return with_array("model", model)(reply)


class MoreTensors(Site):
    def tamper(self, reply: Message) -> Message:
        return with_array(f"other {self.draw.random()}", np.zeros(3, np.float32))(reply)


class OwnFigures(Site):
    """Says how good the server's model is."""

    def tamper(self, reply: Message) -> Message:
        name = self.draw.choice(("accuracy", "loss", "round", "bytes_up", "personal_accuracy"))
        measured = reply.content.metric_records.get("figures", MetricRecord())
        reply.content["figures"] = MetricRecord({**dict(measured), name: 1.0})
        return reply


class NoWords(Site):
    def tamper(self, reply: Message) -> Message:
        return with_words(self.draw.choice(("", "[", "[" * 10**5, "9" * 10**4, "null", '{"a": 1e999}')))(reply)


class Garbage(Site):
    def tamper(self, reply: Message) -> Message:
        reply.content[RECORD] = ConfigRecord({"protocol": self.draw.randbytes(20), "words": self.draw.randbytes(300)})
        return reply


class Claims(Site):
    """Claims more samples than anybody has."""

    refused = False

    def tamper(self, reply: Message) -> Message:
        return with_words(json.dumps({**words_of(reply), "samples": 10**9}))(reply)


SITES: tuple[type[Site], ...] = (
    WrongShape, WrongType, NotFinite, MoreTensors, OwnFigures, NoWords, Garbage, Claims,
)  # fmt: skip
