"""One peer of an exchange: bytes in, bytes out, in the steps that the server calls for."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.config.checks import require_at_least
from fedloom.errors import InvalidValue
from fedloom.secure.draws import Choices, Draws, secret_choices
from fedloom.secure.envelopes import (
    PrivateIdentity,
    PublicIdentity,
    is_signed,
    pad,
    padded_size,
    seal,
    sign,
    unpad,
    unseal,
)
from fedloom.secure.exchange import Repeat, Rules, Sent, purpose
from fedloom.secure.faults import SERVER, ProtocolViolation
from fedloom.secure.wire import (
    ANNOUNCEMENT,
    CONFIRMATION,
    RETURNED,
    SENT,
    Answer,
    Letter,
    Note,
    Request,
    Terms,
    is_from,
    pack,
    read_note,
    unpack,
)

OCCASIONS = ("before_upload", "before_train")
_INDEX = 4  # bytes of a layer's index in a parcel


class Peer:
    """Peer `number`, who owns `identity` and knows the lasting public `identities` of all peers.

    Before each exchange the model is handed over as layers (`offer`); then every request of the server goes to `handle`, and
    `layers` holds the outcome: the exchanged layers once `committed`, which before an upload are envelopes for the server
    alone, and else the layers that were offered. Nothing is given up before every peer has confirmed that its model is whole,
    and `abort` takes back even that until the next exchange.

    `rules` are the peer's own: a peer with other rules is noticed. `fewest` is how many peers an exchange must have. `choices`
    are secret unless a rehearsal with a run's streams is wanted. Keys for signing and sealing are new in every run.
    """

    def __init__(
        self,
        number: int,
        identity: PrivateIdentity,
        identities: Mapping[int, PublicIdentity],
        rules: Rules,
        *,
        fewest: int = 2,
        choices: Callable[[Terms], Choices] = lambda terms: secret_choices,
    ) -> None:
        require_at_least("fewest", fewest, 1)
        if number not in identities:
            raise InvalidValue(f"the identities name peers {sorted(identities)}, not peer {number} itself")
        self.number, self.identity, self.identities = number, identity, dict(identities)
        self.rules, self.fewest, self.choices = rules, fewest, choices
        self.offered: list[bytes] = []
        self.layers: list[bytes] = []
        self.held: list[bytes] = []
        self.committed = False
        self.run: str | None = None
        self.past: set[bytes] = set()  # digests of the terms and sessions of this run
        self.step: str | None = None

    def offer(self, layers: Sequence[bytes]) -> None:
        """Hand over the model with which to enter the next exchange, and forget the one before. Raises `InvalidValue` when the
        rules ask for more layers than it has."""
        if not layers or not all(layers):
            raise InvalidValue("a model needs at least one layer, and a layer at least one byte")
        self.rules.bounds(len(layers))
        self.offered = self.layers = list(layers)
        self.committed, self.step = False, None

    def abort(self) -> None:
        """The exchange did not happen: the layers are those that were offered."""
        self.layers, self.held, self.committed, self.step = self.offered, [], False, None

    def handle(self, request: bytes) -> bytes:
        """Answer one request. A fault that the peer notices is its answer, and the exchange is over for it."""
        try:
            asked = Request.decode(request)
            if asked.kind == "abort":
                self.abort()
                return Answer().encode()
            letters = self._begin(asked.terms) if asked.terms is not None else self._go_on(asked.letters)
            return Answer(tuple(letters)).encode()
        except ProtocolViolation as fault:
            self.abort()
            return Answer(fault=fault).encode()

    # --- the beginning: terms and introductions ---

    def _begin(self, terms: Terms) -> list[Letter]:
        self.abort()
        self._require_sense(terms)
        self._enter(terms)
        self.terms = terms
        self.others = [peer for peer in terms.peers if peer != self.number]
        sealed = terms.when == "before_upload"
        self.held = [
            seal(layer, terms.server_key, terms.layer_context(index)) if sealed else layer
            for index, layer in enumerate(self.offered)
        ]
        self.sizes = [len(item) for item in self.held]
        self.repeat, self.step = 0, "introductions"
        return [Letter(self.number, peer, self.introduction) for peer in self.others]

    def _require_sense(self, terms: Terms) -> None:
        if not self.offered:
            raise InvalidValue(f"peer {self.number} was asked to exchange before it offered a model")
        strangers = set(terms.peers) - self.identities.keys()
        detail = ""
        if strangers:
            detail = f"nobody knows the identity of peer {min(strangers)}"
        elif self.number not in terms.peers or len(set(terms.peers)) != len(terms.peers):
            detail = "the list of peers makes no sense"
        elif len(terms.peers) < self.fewest:
            detail = f"{len(terms.peers)} of at least {self.fewest} peers"
        elif terms.when not in OCCASIONS:
            detail = f"no occasion {terms.when!r}"
        elif len(terms.server_key) != 32:
            detail = "no server key"
        if detail:
            raise ProtocolViolation("invalid", SERVER, detail)

    def _enter(self, terms: Terms) -> None:
        """Make keys for a new run; in a run that goes on, refuse another server key and terms that were used already."""
        if terms.run != self.run:
            self.run, self.server_key, self.past = terms.run, terms.server_key, set()
            self.signing, self.opening = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
            keys = self.signing.public_key().public_bytes_raw(), self.opening.public_key().public_bytes_raw()
            self.introduction = pack(*keys, sign(introduced(terms.run, self.number, *keys), self.identity))
        if terms.server_key != self.server_key:
            raise ProtocolViolation("disagrees", SERVER, "another key than before in this run")
        used = pack(str(terms.round).encode(), terms.when.encode(), str(terms.attempt).encode())
        if used in self.past:
            raise ProtocolViolation("replayed", SERVER, "terms that were used already")
        self.past.add(used)

    def _meet(self, letters: Sequence[Letter]) -> None:
        """Take the others' keys for this run, each signed by its lasting identity, and derive what all must agree on."""
        found: dict[int, bytes] = {}
        for letter in letters:
            self._require_ends(letter)
            if letter.sender in found:
                raise ProtocolViolation("duplicated", letter.sender, "its introduction")
            found[letter.sender] = letter.body
        for peer in self.others:
            if peer not in found:
                raise ProtocolViolation("missing", peer, "its introduction")
        self.verifying: dict[int, Ed25519PublicKey] = {}
        self.sealing: dict[int, bytes] = {}
        for peer, body in found.items():
            parts = unpack(body, peer)
            if [len(part) for part in parts[:2]] != [32, 32] or len(parts) != 3:
                raise ProtocolViolation("damaged", peer, "its introduction")
            signing, sealing, signature = parts
            if not is_signed(introduced(self.terms.run, peer, signing, sealing), signature, self.identities[peer]):
                raise ProtocolViolation("impostor", peer)
            self.verifying[peer], self.sealing[peer] = Ed25519PublicKey.from_public_bytes(signing), sealing
        found[self.number] = self.introduction
        rules = repr((self.rules.repeats, self.rules.low, self.rules.high, self.sizes))
        together = pack(self.terms.encode(), rules.encode(), *(found[peer] for peer in sorted(found)))
        self.session = hashlib.sha256(together).digest()
        self.past.add(self.session)

    # --- the stages ---

    def _go_on(self, letters: Sequence[Letter]) -> list[Letter]:
        if self.step == "introductions":
            self._meet(letters)
            return self._send()
        if self.step == "sent":
            return self._return(letters)
        if self.step == "returned":
            return self._rebuild(letters)
        if self.step == "confirmation":
            return self._commit(letters)
        raise ProtocolViolation("invalid", SERVER, "letters without an exchange")

    def _send(self) -> list[Letter]:
        """Stage 1 of the next repeat: how many layers follow for each peer, then the layers."""
        self.repeat += 1
        low, high = self.rules.bounds(len(self.held))[self.repeat - 1]
        self.stage = Repeat(self.number, self.terms.peers, self.held)
        going = self.stage.send(low, high, self._draws("send"))
        counts = Counter(sent.peer for sent in going)
        announcements = [self._letter(peer, ANNOUNCEMENT, counts[peer]) for peer in self.others]
        self.step = "sent"
        return announcements + self._parcels(going, SENT)

    def _return(self, letters: Sequence[Letter]) -> list[Letter]:
        """Stages 2 and 3: once everything announced is here, return a layer for each."""
        notes = self._read(letters, (ANNOUNCEMENT, SENT))
        announced = {note.sender: note.number for note in notes if note.kind == ANNOUNCEMENT}
        for peer in self.others:
            if peer not in announced:
                raise ProtocolViolation("missing", peer, "its announcement")
        came = self._open([note for note in notes if note.kind == SENT], announced)
        self.step = "returned"
        return self._parcels(self.stage.exchange(came, self._draws("return")), RETURNED)

    def _rebuild(self, letters: Sequence[Letter]) -> list[Letter]:
        """Stage 4: a layer for each that was sent; then the next repeat, or the word to all that the model is whole."""
        owed = Counter(peer for peer, _ in self.stage.sent)
        came = self._open(self._read(letters, (RETURNED,)), owed)
        expected = Counter(self.stage.sent)
        for letter in came:
            if not expected[letter.peer, letter.layer]:
                raise ProtocolViolation("invalid", letter.peer, "a layer returned that was not sent to it")
        self.held = self.stage.rebuild(came)
        if self.repeat < self.rules.repeats:
            return self._send()
        self.step = "confirmation"
        return [self._letter(peer, CONFIRMATION, 0) for peer in self.others]

    def _commit(self, letters: Sequence[Letter]) -> list[Letter]:
        confirmed = {note.sender for note in self._read(letters, (CONFIRMATION,))}
        for peer in self.others:
            if peer not in confirmed:
                raise ProtocolViolation("missing", peer, "its confirmation")
        self.layers, self.committed, self.step = self.held, True, None
        return []

    def _draws(self, stage: str) -> Draws:
        return self.choices(self.terms)(self.number, purpose(self.terms.when, self.repeat, stage))

    # --- letters ---

    def _letter(self, peer: int, kind: int, number: int, content: bytes | None = None) -> Letter:
        note = Note(self.session, self.repeat, kind, self.number, peer, number)
        if content is not None:
            note = note._replace(payload=seal(content, self.sealing[peer], note.header()))
        return Letter(self.number, peer, note.signed(self.signing))

    def _parcels(self, going: Sequence[Sent[bytes]], kind: int) -> list[Letter]:
        """Each layer with its index in a parcel of one size, numbered by its recipient."""
        size = _INDEX + max(self.sizes)
        numbers: Counter[int] = Counter()
        letters = []
        for peer, index, item in going:
            content = pad(index.to_bytes(_INDEX) + item, size)
            letters.append(self._letter(peer, kind, numbers[peer], content))
            numbers[peer] += 1
        return letters

    def _require_ends(self, letter: Letter) -> None:
        if letter.recipient != self.number:
            raise ProtocolViolation("misdirected", letter.sender)
        if letter.sender not in self.others:
            raise ProtocolViolation("invalid", letter.sender, "it takes no part in this exchange")

    def _read(self, letters: Sequence[Letter], kinds: tuple[int, ...]) -> list[Note]:
        """The notes of this stage, each signed by its sender for this peer, and none of them twice."""
        seen: set[tuple[int, int, int]] = set()
        notes = []
        for letter in letters:
            self._require_ends(letter)
            sender = letter.sender
            note = read_note(letter.body, sender)
            if not is_from(letter.body, self.verifying[sender]):
                raise ProtocolViolation("altered", sender)
            if note.sender != sender or note.recipient != self.number:
                raise ProtocolViolation("misdirected", sender)
            if note.session != self.session:
                raise ProtocolViolation("replayed" if note.session in self.past else "disagrees", sender)
            if note.repeat != self.repeat or note.kind not in kinds:
                raise ProtocolViolation("replayed", sender)
            counted = 0 if note.kind == ANNOUNCEMENT else note.number
            if (sender, note.kind, counted) in seen:
                raise ProtocolViolation("duplicated", sender)
            seen.add((sender, note.kind, counted))
            notes.append(note)
        return notes

    def _open(self, notes: Sequence[Note], due: Mapping[int, int]) -> list[Sent[bytes]]:
        """The layers in these parcels, which must be as many from each peer as are due, and no index twice from one."""
        numbers: dict[int, set[int]] = {}
        for note in notes:
            numbers.setdefault(note.sender, set()).add(note.number)
        for peer in sorted({*numbers, *due}):
            found, count = numbers.get(peer, set()), due.get(peer, 0)
            if not found >= set(range(count)):
                raise ProtocolViolation("missing", peer, f"{len(found)} of {count} layers came")
            if len(found) > count:
                raise ProtocolViolation("unannounced", peer)
        came: dict[tuple[int, int], bytes] = {}
        for note in notes:
            index, item = self._layer(note)
            if (note.sender, index) in came:
                raise ProtocolViolation("duplicated", note.sender, "a layer")
            came[note.sender, index] = item
        return [Sent(peer, index, item) for (peer, index), item in came.items()]

    def _layer(self, note: Note) -> tuple[int, bytes]:
        size = _INDEX + max(self.sizes)
        if len(note.payload) != padded_size(size):
            raise ProtocolViolation("invalid", note.sender, "a parcel of another size")
        padded = unseal(note.payload, self.opening, note.header())
        content = None if padded is None else unpad(padded)
        if content is None:
            raise ProtocolViolation("invalid", note.sender, "a parcel that cannot be opened")
        index, item = int.from_bytes(content[:_INDEX]), content[_INDEX:]
        if index >= len(self.sizes) or len(item) != self.sizes[index]:
            raise ProtocolViolation("invalid", note.sender, "a layer of another size")
        return index, item


def introduced(run: str, peer: int, signing: bytes, sealing: bytes) -> bytes:
    """What a peer's lasting identity signs: the keys that are its own in this run."""
    return pack(b"fedloom introduction", run.encode(), str(peer).encode(), signing, sealing)
