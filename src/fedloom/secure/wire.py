"""What travels: terms, letters between peers, and the requests and answers in which the server carries them.

Everything is bytes that any transport can take; reading them never runs code, and what cannot be read raises `ProtocolViolation`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedloom.secure.envelopes import SIGNATURE
from fedloom.secure.faults import SERVER, ProtocolViolation

_COUNT = struct.Struct(">I")
_HEADER = struct.Struct(">4s32sIBIII")
_MAGIC = b"flsx"

ANNOUNCEMENT, SENT, RETURNED, CONFIRMATION = 1, 2, 3, 4
"""Kinds of notes: how many layers follow (stage 1), a layer sent (stage 1), one returned (stage 3), all is whole (the end)."""


class Letter(NamedTuple):
    """Bytes from one peer to another; the carrier reads just the two numbers."""

    sender: int
    recipient: int
    body: bytes


class Note(NamedTuple):
    """What a letter says after the introductions. `number` counts the parcels to this recipient from 0, or is how many there
    are (announcement); `payload` is a sealed parcel, or empty."""

    session: bytes
    repeat: int
    kind: int
    sender: int
    recipient: int
    number: int
    payload: bytes = b""

    def header(self) -> bytes:
        """All but the payload, of one length whatever it says."""
        return _HEADER.pack(_MAGIC, *self[:-1])

    def signed(self, key: Ed25519PrivateKey) -> bytes:
        """The note as a letter's body: header, payload, Ed25519 signature of both."""
        body = self.header() + self.payload
        return body + key.sign(body)


PARCEL_OVERHEAD = _HEADER.size + SIGNATURE
"""Bytes that a letter adds to its payload."""


def read_note(body: bytes, sender: int) -> Note:
    """The note in a letter's body, its signature not yet looked at. Raises `ProtocolViolation` (damaged)."""
    if len(body) < PARCEL_OVERHEAD or body[:4] != _MAGIC:
        raise ProtocolViolation("damaged", sender)
    _, session, repeat, kind, one, other, number = _HEADER.unpack_from(body)
    return Note(session, repeat, kind, one, other, number, body[_HEADER.size : -SIGNATURE])


def is_from(body: bytes, key: Ed25519PublicKey) -> bool:
    """Whether the body's signature is this key's."""
    try:
        key.verify(body[-SIGNATURE:], body[:-SIGNATURE])
    except InvalidSignature:
        return False
    return True


@dataclass(frozen=True)
class Terms:
    """One attempt at one exchange, as the server calls for it: `when` is "before_upload" or "before_train", `peers` takes part,
    `server_key` is the X25519 key of the run for which layers are sealed before an upload."""

    run: str
    round: int
    when: str
    attempt: int
    peers: tuple[int, ...]
    server_key: bytes

    def encode(self) -> bytes:
        return _pack(
            {
                "run": self.run,
                "round": self.round,
                "when": self.when,
                "attempt": self.attempt,
                "peers": list(self.peers),
            },
            [self.server_key],
        )

    @classmethod
    def decode(cls, data: bytes) -> Terms:
        head, (key,) = _unpack(data, SERVER, 1)
        try:
            peers = tuple(_number(peer) for peer in head["peers"])
            when, numbers = str(head["when"]), (_number(head["round"]), _number(head["attempt"]))
            return cls(str(head["run"]), numbers[0], when, numbers[1], peers, key)
        except (KeyError, TypeError, ValueError):
            raise ProtocolViolation("damaged", SERVER, "the terms") from None

    def layer_context(self, index: int) -> bytes:
        """What a layer's envelope for the server is bound to: these terms and the layer's index."""
        return b"fedloom layer" + hashlib.sha256(self.encode()).digest() + _COUNT.pack(index)


@dataclass(frozen=True)
class Request:
    """What the server hands to one peer: terms to begin with (`begin`), letters to go on with (`letters`), or nothing but the
    word that it is over (`abort`: take back the model before)."""

    kind: str
    terms: Terms | None = None
    letters: tuple[Letter, ...] = ()

    def encode(self) -> bytes:
        terms = [] if self.terms is None else [self.terms.encode()]
        return _pack({"kind": self.kind, "ends": _ends(self.letters)}, [*terms, *(e.body for e in self.letters)])

    @classmethod
    def decode(cls, data: bytes) -> Request:
        head, blobs = _unpack(data, SERVER)
        terms = Terms.decode(blobs.pop(0)) if head.get("kind") == "begin" and blobs else None
        if head.get("kind") not in ("begin", "letters", "abort") or (head["kind"] == "begin" and terms is None):
            raise ProtocolViolation("damaged", SERVER, "a request")
        return cls(head["kind"], terms, _letters(head, blobs, SERVER))


@dataclass(frozen=True)
class Answer:
    """What a peer gives back: its letters, or the fault because of which it has taken back its model."""

    letters: tuple[Letter, ...] = ()
    fault: ProtocolViolation | None = None

    def encode(self) -> bytes:
        fault = None if self.fault is None else [self.fault.kind, self.fault.peer, self.fault.detail]
        return _pack({"ends": _ends(self.letters), "fault": fault}, [letter.body for letter in self.letters])

    @classmethod
    def decode(cls, data: bytes, sender: int) -> Answer:
        """The answer of peer `sender`. Raises `ProtocolViolation` naming it when that cannot be read."""
        head, blobs = _unpack(data, sender)
        try:
            told = head["fault"]
            fault = None
            if told is not None:
                kind, accused, detail = told
                fault = ProtocolViolation(str(kind), _accused(accused), str(detail), witness=sender)
        except (KeyError, TypeError, ValueError):
            raise ProtocolViolation("damaged", sender, "an answer") from None
        return cls(_letters(head, blobs, sender), fault)


def _ends(letters: Sequence[Letter]) -> list[tuple[int, int]]:
    return [(letter.sender, letter.recipient) for letter in letters]


def _letters(head: dict[str, Any], blobs: list[bytes], culprit: int) -> tuple[Letter, ...]:
    try:
        ends = [(_number(one), _number(two)) for one, two in head["ends"]]
        return tuple(Letter(*end, body) for end, body in zip(ends, blobs, strict=True))
    except (KeyError, TypeError, ValueError):
        raise ProtocolViolation("damaged", culprit, "a list of letters") from None


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 32:
        raise ValueError(value)
    return value


def _accused(value: object) -> int:
    return SERVER if value == SERVER else _number(value)


def pack(*parts: bytes) -> bytes:
    """Parts with their lengths before them, so that no two lists of parts give the same bytes."""
    return b"".join(struct.pack(">Q", len(part)) + part for part in parts)


def unpack(data: bytes, culprit: int) -> list[bytes]:
    """What `pack` joined. Raises `ProtocolViolation` (damaged)."""
    parts, place = [], 0
    while place < len(data):
        end = place + 8
        length = int.from_bytes(data[place:end])
        if end > len(data) or end + length > len(data):
            raise ProtocolViolation("damaged", culprit)
        parts.append(data[end : end + length])
        place = end + length
    return parts


def _pack(head: dict[str, Any], blobs: Sequence[bytes]) -> bytes:
    return pack(json.dumps(head).encode(), *blobs)


def _unpack(data: bytes, culprit: int, count: int | None = None) -> tuple[dict[str, Any], list[bytes]]:
    parts = unpack(data, culprit)
    try:
        head = json.loads(parts[0])
    except (IndexError, ValueError):
        raise ProtocolViolation("damaged", culprit) from None
    if not isinstance(head, dict) or (count is not None and len(parts) != count + 1):
        raise ProtocolViolation("damaged", culprit)
    return head, parts[1:]
