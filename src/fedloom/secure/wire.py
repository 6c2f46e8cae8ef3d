"""Messages of an exchange as bytes. docs/secure.md describes every field.

Reading never runs code. Bytes that cannot be read or do not follow the protocol raise
`ProtocolViolation` with the number of their sender.
"""

import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedloom.common.digest import Digest
from fedloom.common.errors import one_line
from fedloom.secure.envelopes import OVERHEAD, SIGNATURE, can_seal, is_signed
from fedloom.secure.exchange import Rules
from fedloom.secure.faults import KINDS, SERVER, ProtocolViolation

OCCASIONS = ("before_upload", "before_train")

ANNOUNCEMENT = 1
SENT = 2
RETURNED = 3
CONFIRMATION = 4
"""Kinds of notes.

Number of layers that follow (stage 1), a sent layer (stage 1), a returned layer (stage 3), and
confirmation that the model is complete (the end).
"""

INDEX = 4
"""Bytes of a layer's index in a parcel."""

_MOST_FIELDS = 1 << 17  # more than in any message: a letter is one field
_LONGEST_DETAIL = 200
_HEADER = struct.Struct(">4s32sIBIII")
_MAGIC = b"flsx"
_ENDS = struct.Struct(">II")

NOTE_OVERHEAD = _HEADER.size + SIGNATURE
"""Bytes that a note adds to its payload."""


def pack(*fields: bytes) -> bytes:
    """Join fields with their lengths, so that different lists of fields give different bytes."""
    return b"".join(struct.pack(">Q", len(field)) + field for field in fields)


def unpack(data: bytes, culprit: int, count: int | None = None) -> list[bytes]:
    """Return the fields that `pack` joined.

    Args:
        data: The bytes.
        culprit: Number of the sender, for the fault.
        count: Number of fields; None accepts any.

    Returns:
        The fields in their order, at most 131,072.

    Raises:
        ProtocolViolation: The bytes are damaged, or have another number of fields.
    """
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
    """Return integers as eight bytes each."""
    return b"".join(number.to_bytes(8) for number in numbers)


@dataclass(frozen=True)
class Terms:
    """Terms of one attempt at an exchange. Every peer must have the same rules and sizes.

    Attributes:
        run: Name of the exchange; keys stay the same in a run.
        round: Number of the round.
        when: `before_train` or `before_upload`.
        attempt: Number of the attempt, from 0.
        peers: Numbers of the peers.
        server_key: X25519 public key that seals layers before an upload.
        rules: Rules of the exchange.
        sizes: Bytes of each layer.
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
        counts = (
            self.round,
            self.attempt,
            self.rules.repeats,
            self.rules.low,
            self.rules.high or 0,
        )
        lists = map(pack_numbers, (counts, self.peers, self.sizes))
        return pack(
            b"fedloom terms", self.run.encode(), self.when.encode(), self.server_key, *lists
        )

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

    def repeat(self, step: int) -> int:
        """Return the repeat, from 1, that the answers of a step belong to. Step 0 has no repeat."""
        return min((step + 1) // 2, self.rules.repeats)

    def held_sizes(self) -> list[int]:
        """Return the bytes of each layer at a peer; before an upload, layers are sealed."""
        return [size + (OVERHEAD if self.when == "before_upload" else 0) for size in self.sizes]

    def content_size(self) -> int:
        """Return the bytes to which a layer and its index are padded, equal for all parcels."""
        return 8 + INDEX + max(self.held_sizes())

    def parcel_size(self) -> int:
        """Return the bytes of a letter with a layer."""
        return NOTE_OVERHEAD + self.content_size() + OVERHEAD

    def layer_context(self, index: int) -> bytes:
        """Return the context of a layer's envelope for the server: these terms and its index."""
        return pack(b"fedloom layer", Digest(self.encode()).digest(), pack_numbers([index]))


class Introduction(NamedTuple):
    """Public keys of a peer in this run, signed by its long-term identity.

    Attributes:
        verifying: Ed25519 key for signatures.
        sealing: X25519 key for envelopes.
        signature: Signature of both keys.
    """

    verifying: bytes
    sealing: bytes
    signature: bytes

    @classmethod
    def decode(cls, body: bytes, peer: int) -> "Introduction":
        """Read an introduction.

        Args:
            body: The bytes of `encode`.
            peer: Number of the sender, for the fault.

        Returns:
            The introduction with valid keys. Its signature is not checked.

        Raises:
            ProtocolViolation: The bytes are damaged, or the sealing key is not valid.
        """
        introduction = cls(*unpack(body, peer, 3))
        if (len(introduction.verifying), len(introduction.sealing)) != (32, 32):
            raise ProtocolViolation("damaged", peer, "its introduction")
        if not can_seal(introduction.sealing):
            raise ProtocolViolation("invalid", peer, "a sealing key that is not valid")
        return introduction

    def encode(self) -> bytes:
        return pack(*self)

    def signed_content(self, run: str, peer: int) -> bytes:
        """Return the bytes that the long-term identity signs.

        Args:
            run: Name of the exchange, in which the keys are used.
            peer: Number of the peer, so that no other peer can present the keys.

        Returns:
            The name, the number and both public keys, joined by `pack`.
        """
        return pack(
            b"fedloom introduction",
            run.encode(),
            pack_numbers([peer]),
            self.verifying,
            self.sealing,
        )


class Letter(NamedTuple):
    """Bytes from one peer to another: an introduction, or a note."""

    sender: int
    recipient: int
    body: bytes

    def encode(self) -> bytes:
        return _ENDS.pack(self.sender, self.recipient) + self.body

    @classmethod
    def decode(cls, data: bytes, culprit: int) -> "Letter":
        if len(data) < _ENDS.size:
            raise ProtocolViolation("damaged", culprit, "a letter")
        return cls._make((*_ENDS.unpack_from(data), data[_ENDS.size :]))


class Note(NamedTuple):
    """Content of a letter after the introductions.

    Attributes:
        session: Digest of the session.
        repeat: Number of the repeat.
        kind: Kind of the note.
        sender: Number of the sender.
        recipient: Number of the recipient.
        number: Number of the parcel to this recipient, or of the parcels that follow.
        payload: Sealed content of a parcel.
    """

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

    @property
    def is_parcel(self) -> bool:
        return self.kind in (SENT, RETURNED)

    def header(self) -> bytes:
        """Return all fields except the payload, in a fixed length.

        It is the context with which a parcel is sealed.
        """
        return _HEADER.pack(_MAGIC, *self[:-1])

    def signed(self, key: Ed25519PrivateKey) -> bytes:
        """Return the note as a letter's body: header, payload, Ed25519 signature of both."""
        body = self.header() + self.payload
        return body + key.sign(body)


def read_note(body: bytes, sender: int) -> Note:
    """Return the note in a letter's body, without checking its signature.

    Args:
        body: Header, payload and signature.
        sender: Number of the carrier's sender, for the fault. The header may name another one.

    Returns:
        The note, with its signature left out.

    Raises:
        ProtocolViolation: The body is damaged.
    """
    if len(body) < NOTE_OVERHEAD or body[:4] != _MAGIC:
        raise ProtocolViolation("damaged", sender)
    _, session, repeat, kind, source, recipient, number = _HEADER.unpack_from(body)
    return Note(session, repeat, kind, source, recipient, number, body[_HEADER.size : -SIGNATURE])


class PeerSession:
    """Terms and public keys on which the peers of an attempt have agreed.

    Each note contains the `digest` of its session.
    """

    def __init__(self, terms: Terms, introductions: Mapping[int, Introduction]) -> None:
        self.terms = terms
        self.introductions = introductions
        ordered = (introductions[peer].encode() for peer in sorted(introductions))
        self.digest = Digest(pack(b"fedloom session", terms.encode(), *ordered)).digest()

    def read(
        self,
        step: int,
        letters: Sequence[Letter],
        ends: Sequence[tuple[int, int]],
        owed: Mapping[tuple[int, int], int],
        past: Collection[bytes] = (),
    ) -> list[Note]:
        """Return the parcels among the answers to a step.

        Args:
            step: The step.
            letters: The answers.
            ends: Allowed pairs (sender, recipient).
            owed: Number of returned parcels for each pair.
            past: Digests of earlier sessions.

        Returns:
            The verified parcels of this step, in the order of the letters.

        Raises:
            ProtocolViolation: A note is not signed by its sender for its recipient, arrives twice
                or belongs to a past session. An announcement or confirmation is missing. The number
                of parcels differs from the announced or owed one, or parcels are not numbered from
                0.
        """
        kinds: tuple[int, ...] = (ANNOUNCEMENT, SENT) if step % 2 else (RETURNED,)
        if step > 2 * self.terms.rules.repeats:
            kinds = (CONFIRMATION,) if step % 2 else ()
        notes: dict[tuple[int, int, int, int], Note] = {}
        for letter in letters:
            note = self._checked_note(step, letter, kinds, past)
            mark = (*note.ends, note.kind, note.number if note.is_parcel else 0)
            if mark in notes:
                raise ProtocolViolation("duplicated", letter.sender)
            notes[mark] = note
        due = owed
        if RETURNED not in kinds:
            due = {note.ends: note.number for note in notes.values() if not note.is_parcel}
            if absent := [
                sender for sender, recipient in ends if kinds and (sender, recipient) not in due
            ]:
                raise ProtocolViolation("missing", absent[0], "its announcement or confirmation")
        parcels = [note for note in notes.values() if note.is_parcel]
        _require_numbered(parcels, ends, due)
        return parcels

    def _checked_note(
        self, step: int, letter: Letter, kinds: Collection[int], past: Collection[bytes]
    ) -> Note:
        """Return the note of a letter. Raise `ProtocolViolation` unless it is signed by its sender,
        for its recipient, and belongs to this step.
        """
        sender = letter.sender
        note = read_note(letter.body, letter.sender)
        key = Ed25519PublicKey.from_public_bytes(self.introductions[sender].verifying)
        if not is_signed(letter.body[:-SIGNATURE], letter.body[-SIGNATURE:], key):
            raise ProtocolViolation("altered", sender)
        if note.ends != (sender, letter.recipient):
            raise ProtocolViolation("misdirected", sender)
        if note.session != self.digest:
            raise ProtocolViolation("replayed" if note.session in past else "disagrees", sender)
        if note.repeat != self.terms.repeat(step) or note.kind not in kinds:
            raise ProtocolViolation("replayed", sender)
        if len(letter.body) != (self.terms.parcel_size() if note.is_parcel else NOTE_OVERHEAD):
            raise ProtocolViolation("invalid", sender, "a parcel of another size")
        return note


def _require_numbered(
    parcels: Iterable[Note], ends: Sequence[tuple[int, int]], due: Mapping[tuple[int, int], int]
) -> None:
    """Raise `ProtocolViolation` unless each pair has its number of parcels, numbered from 0."""
    numbers: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for note in parcels:
        numbers[note.ends].append(note.number)
    for pair in ends:
        arrived = numbers[pair]
        count = due.get(pair, 0)
        if len(arrived) > count:
            raise ProtocolViolation("unannounced", pair[0])
        if len(arrived) < count or max(arrived, default=-1) >= count:
            text = f"{len(arrived)} of {count} layers arrived"
            raise ProtocolViolation("missing", pair[0], text)


@dataclass(frozen=True)
class PeerMessage:
    """The server's request to a peer, or its answer.

    The server requests a peer to `begin` on `terms`, to continue with `letters`, or to `abort` and
    restore the offered model. A peer answers with `letters`, or with the `fault` because of which
    it has restored its model.
    """

    kind: str
    terms: Terms | None = None
    letters: tuple[Letter, ...] = ()
    fault: ProtocolViolation | None = None

    def encode(self) -> bytes:
        fields = [letter.encode() for letter in self.letters]
        if self.terms is not None:
            fields = [self.terms.encode()]
        if self.fault is not None:
            detail = one_line(self.fault.detail, _LONGEST_DETAIL).encode()
            fields = [self.fault.kind.encode(), self.fault.peer.to_bytes(8, signed=True), detail]
        return pack(self.kind.encode(), *fields)

    @classmethod
    def decode(cls, data: bytes, sender: int = SERVER) -> "PeerMessage":
        """Read a message of the server or of peer `sender`.

        Args:
            data: The bytes of a message.
            sender: Number of the peer that sent it; by default the server.

        Returns:
            The message. Only the server can begin or abort, and only a peer can report a fault.

        Raises:
            ProtocolViolation: The message cannot be read; the violation names the sender.
        """
        kind, *fields = unpack(data, sender) or [b""]
        if kind == b"letters":
            return cls("letters", letters=tuple(Letter.decode(field, sender) for field in fields))
        if sender == SERVER and kind == b"begin" and len(fields) == 1:
            return cls("begin", Terms.decode(fields[0]))
        if sender == SERVER and kind == b"abort" and not fields:
            return cls("abort")
        faulty = sender != SERVER and kind == b"fault" and len(fields) == 3 and len(fields[1]) == 8
        if faulty and fields[0] in map(str.encode, KINDS):
            accused = int.from_bytes(fields[1], signed=True)
            text = fields[2]
            detail = one_line(text[: 4 * _LONGEST_DETAIL].decode(errors="replace"), _LONGEST_DETAIL)
            return cls(
                "fault",
                fault=ProtocolViolation(fields[0].decode(), accused, detail, witness=sender),
            )
        raise ProtocolViolation("damaged", sender, "a request" if sender == SERVER else "an answer")
