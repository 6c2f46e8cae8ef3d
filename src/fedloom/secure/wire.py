"""Messages of an exchange as bytes; docs/secure-messages.md describes every field, for whoever writes the other side.

Reading never runs code. Bytes that cannot be read, or are not as agreed, raise `ProtocolViolation` naming their sender.
"""

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedloom.errors import one_line
from fedloom.secure.envelopes import OVERHEAD, SIGNATURE, can_seal, is_signed, padded_size
from fedloom.secure.exchange import Rules
from fedloom.secure.faults import SERVER, ProtocolViolation
from fedloom.state.digest import Digest

OCCASIONS = ("before_upload", "before_train")

ANNOUNCEMENT, SENT, RETURNED, CONFIRMATION = 1, 2, 3, 4
"""Kinds of notes: how many layers follow (stage 1), a layer sent (stage 1), one returned (stage 3), all is whole (the end)."""

INDEX = 4
"""Bytes of a layer's index in a parcel."""

_MOST_FIELDS = 1 << 17  # more than any message has: a letter is one field
_LONGEST_DETAIL = 200
_HEADER = struct.Struct(">4s32sIBIII")
_MAGIC = b"flsx"
_ENDS = struct.Struct(">II")

NOTE_OVERHEAD = _HEADER.size + SIGNATURE
"""Bytes that a note adds to its payload."""


def pack(*fields: bytes) -> bytes:
    """Join fields with their lengths before them, so that no two lists of fields give the same bytes."""
    return b"".join(struct.pack(">Q", len(field)) + field for field in fields)


def unpack(data: bytes, culprit: int, count: int | None = None) -> list[bytes]:
    """Return the fields that `pack` joined. Raises `ProtocolViolation` (damaged) for other bytes, or not `count` fields."""
    fields: list[bytes] = []
    offset = 0
    while offset < len(data):
        start = offset + 8
        offset = start + int.from_bytes(data[offset:start])
        if offset > len(data) or len(fields) == _MOST_FIELDS:
            raise ProtocolViolation("damaged", culprit)
        fields.append(data[start:offset])
    if count is not None and len(fields) != count:
        raise ProtocolViolation("damaged", culprit)
    return fields


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Return whole numbers as eight bytes each."""
    return b"".join(number.to_bytes(8) for number in numbers)


@dataclass(frozen=True)
class Terms:
    """Terms of one attempt (numbered from 0) at the exchange of a round, before training or upload (`when`).

    Keys stay the same in a `run`. `server_key` is the X25519 key for which layers are sealed before an upload. Every peer must
    have the same rules, and layers of the same `sizes` in bytes.
    """

    run: str
    round: int
    when: str
    attempt: int
    peers: tuple[int, ...]
    server_key: bytes
    rules: Rules
    sizes: tuple[int, ...]

    def encode(self) -> bytes:
        counts = (self.round, self.attempt, self.rules.repeats, self.rules.low, self.rules.high or 0)
        lists = map(pack_numbers, (counts, self.peers, self.sizes))
        return pack(b"fedloom terms", self.run.encode(), self.when.encode(), self.server_key, *lists)

    @classmethod
    def decode(cls, data: bytes) -> "Terms":
        _, run, when, key, *lists = unpack(data, SERVER, 7)
        try:
            numbers = [struct.unpack(f">{len(packed) // 8}Q", packed) for packed in lists]
            (round, attempt, repeats, low, high), peers, sizes = numbers
            rules = Rules(repeats, low, high or None)
            terms = cls(run.decode(), round, when.decode(), attempt, peers, key, rules, sizes)
        except (ValueError, struct.error):
            raise ProtocolViolation("damaged", SERVER, "the terms") from None
        if terms.encode() != data:
            raise ProtocolViolation("damaged", SERVER, "the terms")
        return terms

    def held_sizes(self) -> list[int]:
        """Return the bytes of each layer as peers hold it: before an upload, sealed for the server."""
        return [size + (OVERHEAD if self.when == "before_upload" else 0) for size in self.sizes]

    def parcel_content(self) -> int:
        """Return the bytes to which a layer and its index are padded, the same for every parcel."""
        return INDEX + max(self.held_sizes())

    def parcel_size(self) -> int:
        """Return the bytes of every letter that holds a layer."""
        return NOTE_OVERHEAD + padded_size(self.parcel_content())

    def layer_context(self, index: int) -> bytes:
        """Return the context of a layer's envelope for the server: these terms and the layer's index."""
        return pack(b"fedloom layer", Digest(self.encode()).digest(), pack_numbers([index]))

    def session(self, introductions: Mapping[int, bytes]) -> bytes:
        """Return the digest of all that the peers must agree on, which every note names."""
        ordered = (introductions[peer] for peer in sorted(introductions))
        return Digest(pack(b"fedloom session", self.encode(), *ordered)).digest()


class Introduction(NamedTuple):
    """Public keys of a peer in this run, for signatures (Ed25519) and for sealing (X25519), signed by its lasting identity."""

    verifying: bytes
    sealing: bytes
    signature: bytes

    @classmethod
    def decode(cls, body: bytes, peer: int) -> "Introduction":
        """Read an introduction. Raises `ProtocolViolation` for other bytes, or a key for which nothing can be sealed."""
        keys = cls(*unpack(body, peer, 3))
        if (len(keys.verifying), len(keys.sealing)) != (32, 32):
            raise ProtocolViolation("damaged", peer, "its introduction")
        if not can_seal(keys.sealing):
            raise ProtocolViolation("invalid", peer, "a key for which nothing can be sealed")
        return keys

    def encode(self) -> bytes:
        return pack(*self)

    def signed_content(self, run: str, peer: int) -> bytes:
        """Return the bytes that the lasting identity signs."""
        return pack(b"fedloom introduction", run.encode(), pack_numbers([peer]), self.verifying, self.sealing)


class Letter(NamedTuple):
    """Bytes from one peer to another: an introduction, or a note."""

    sender: int
    recipient: int
    body: bytes


class Note(NamedTuple):
    """Content of a letter after the introductions; `number` counts the parcels to the recipient, or says how many follow."""

    session: bytes
    repeat: int
    kind: int
    sender: int
    recipient: int
    number: int
    payload: bytes = b""

    @property
    def ends(self) -> tuple[int, int]:
        return self.sender, self.recipient

    def header(self) -> bytes:
        """Return everything but the payload, in a fixed length; parcels are sealed with it as their context."""
        return _HEADER.pack(_MAGIC, *self[:-1])

    def signed(self, key: Ed25519PrivateKey) -> bytes:
        """Return the note as a letter's body: header, payload, Ed25519 signature of both."""
        body = self.header() + self.payload
        return body + key.sign(body)


def read_note(body: bytes, sender: int) -> Note:
    """Return the note in a letter's body, without checking its signature. Raises `ProtocolViolation` (damaged)."""
    if len(body) < NOTE_OVERHEAD or body[:4] != _MAGIC:
        raise ProtocolViolation("damaged", sender)
    _, session, repeat, kind, source, recipient, number = _HEADER.unpack_from(body)
    return Note(session, repeat, kind, source, recipient, number, body[_HEADER.size : -SIGNATURE])


def read_notes(
    letters: Sequence[Letter],
    keys: Mapping[int, Ed25519PublicKey],
    terms: Terms,
    session: bytes,
    repeat: int,
    kinds: tuple[int, ...],
    past: Collection[bytes] = (),
) -> list[Note]:
    """Return the notes of one stage, each signed by its sender for its recipient, none twice. `past` sessions are over."""
    marks: set[tuple[int, int, int, int]] = set()
    notes = []
    for letter in letters:
        sender, note = letter.sender, read_note(letter.body, letter.sender)
        if not is_signed(letter.body[:-SIGNATURE], letter.body[-SIGNATURE:], keys[sender]):
            raise ProtocolViolation("altered", sender)
        if note.ends != (sender, letter.recipient):
            raise ProtocolViolation("misdirected", sender)
        if note.session != session:
            raise ProtocolViolation("replayed" if note.session in past else "disagrees", sender)
        if note.repeat != repeat or note.kind not in kinds:
            raise ProtocolViolation("replayed", sender)
        parcel = note.kind in (SENT, RETURNED)
        if len(letter.body) != (terms.parcel_size() if parcel else NOTE_OVERHEAD):
            raise ProtocolViolation("invalid", sender, "a parcel of another size")
        mark = (*note.ends, note.kind, note.number if parcel else 0)
        if mark in marks:
            raise ProtocolViolation("duplicated", sender)
        marks.add(mark)
        notes.append(note)
    return notes


def announced(notes: Iterable[Note], ends: Iterable[tuple[int, int]], terms: Terms) -> dict[tuple[int, int], int]:
    """Return how many layers follow from whom to whom. Raises `ProtocolViolation` unless each of these senders has said so."""
    counts = {note.ends: note.number for note in notes if note.kind == ANNOUNCEMENT}
    for sender, recipient in ends:
        count = counts.get((sender, recipient))
        if count is None:
            raise ProtocolViolation("missing", sender, "its announcement")
        if count > len(terms.sizes):
            raise ProtocolViolation("unannounced", sender, f"{count} layers of a model that has {len(terms.sizes)}")
    return counts


def require_parcels(notes: Iterable[Note], due: Mapping[tuple[int, int], int]) -> None:
    """Raise `ProtocolViolation` unless as many parcels came from whom to whom as are due, numbered from 0."""
    received: dict[tuple[int, int], set[int]] = {}
    for note in notes:
        received.setdefault(note.ends, set()).add(note.number)
    for ends in sorted({*received, *due}):
        numbers, count = received.get(ends, set()), due.get(ends, 0)
        if not numbers >= set(range(count)):
            raise ProtocolViolation("missing", ends[0], f"{len(numbers)} of {count} layers came")
        if len(numbers) > count:
            raise ProtocolViolation("unannounced", ends[0])


@dataclass(frozen=True)
class Request:
    """Request to a peer: `begin` on these terms, go on with these `letters`, or `abort` and take back the offered model."""

    kind: str
    terms: Terms | None = None
    letters: tuple[Letter, ...] = ()

    def encode(self) -> bytes:
        terms = () if self.terms is None else (self.terms.encode(),)
        return pack(self.kind.encode(), *terms, *_encoded(self.letters))

    @classmethod
    def decode(cls, data: bytes) -> "Request":
        kind, *fields = unpack(data, SERVER) or [b""]
        if kind == b"begin" and len(fields) == 1:
            return cls("begin", Terms.decode(fields[0]))
        if kind == b"letters":
            return cls("letters", letters=_letters(fields, SERVER))
        if kind == b"abort" and not fields:
            return cls("abort")
        raise ProtocolViolation("damaged", SERVER, "a request")


@dataclass(frozen=True)
class Answer:
    """Answer of a peer: its letters, or the fault because of which it has taken back its model."""

    letters: tuple[Letter, ...] = ()
    fault: ProtocolViolation | None = None

    def encode(self) -> bytes:
        if self.fault is None:
            return pack(b"letters", *_encoded(self.letters))
        kind, detail = self.fault.kind.encode(), one_line(self.fault.detail, _LONGEST_DETAIL).encode()
        return pack(b"fault", kind, self.fault.peer.to_bytes(8, signed=True), detail)

    @classmethod
    def decode(cls, data: bytes, sender: int) -> "Answer":
        """Read the answer of peer `sender`. Raises `ProtocolViolation` naming it when that cannot be read."""
        head, *fields = unpack(data, sender) or [b""]
        if head == b"letters":
            return cls(_letters(fields, sender))
        if head == b"fault" and len(fields) == 3 and len(fields[1]) == 8:
            accused = int.from_bytes(fields[1], signed=True)
            detail = one_line(fields[2][: 4 * _LONGEST_DETAIL].decode(errors="replace"), _LONGEST_DETAIL)
            try:
                return cls(fault=ProtocolViolation(fields[0].decode(), accused, detail, witness=sender))
            except ValueError:  # no such kind
                pass
        raise ProtocolViolation("damaged", sender, "an answer")


def _encoded(letters: Iterable[Letter]) -> list[bytes]:
    return [_ENDS.pack(letter.sender, letter.recipient) + letter.body for letter in letters]


def _letters(fields: Sequence[bytes], culprit: int) -> tuple[Letter, ...]:
    if any(len(field) < _ENDS.size for field in fields):
        raise ProtocolViolation("damaged", culprit, "a list of letters")
    return tuple(Letter._make((*_ENDS.unpack_from(field), field[_ENDS.size :])) for field in fields)
