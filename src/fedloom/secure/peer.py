"""Peer of an exchange: bytes in, bytes out, in the steps that the server calls for."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.config.fields import require_at_least
from fedloom.errors import InvalidValue
from fedloom.secure.envelopes import (
    PrivateIdentity,
    PublicIdentity,
    can_seal,
    is_signed,
    pad,
    seal,
    sign,
    unpad,
    unseal,
)
from fedloom.secure.exchange import Choices, Draw, LayerBuffers, Rules, Sent, purpose, secret_choices
from fedloom.secure.faults import SERVER, ProtocolViolation
from fedloom.secure.wire import (
    ANNOUNCEMENT,
    CONFIRMATION,
    INDEX,
    OCCASIONS,
    RETURNED,
    SENT,
    Answer,
    Introduction,
    Letter,
    Note,
    Request,
    Terms,
    announced,
    pack,
    pack_numbers,
    read_notes,
    require_parcels,
    unpack,
)
from fedloom.state.digest import Digest

_SAVED = ("run", "step", "repeat", "committed")


class Peer:
    """Peer `number`, who owns `identity` and knows the lasting public `identities` of all peers.

    Before each exchange the model is handed over as layers (`offer`); then every request of the server goes to `handle`, and
    `layers` holds the outcome: the exchanged layers once `committed`, which before an upload are envelopes for the server
    alone, and else the layers that were offered. Nothing is given up before every peer has confirmed that its model is whole,
    and `abort` takes back even that. `upload` gives the envelopes to the server; the model that was offered then enters no
    other exchange before an upload: between two of them, in other company, the difference would show whose layers are whose.

    `rules` are the peer's own, and `fewest` is how many peers it must have for company, itself included: of an exchange among
    fewer, or by other rules, it takes no part. `choices` are secret unless a rehearsal with a run's streams is wanted. Keys for
    signing and sealing are new in every run.
    """

    def __init__(
        self,
        number: int,
        identity: PrivateIdentity,
        identities: Mapping[int, PublicIdentity],
        rules: Rules,
        *,
        fewest: int = 3,
        choices: Callable[[Terms], Choices] = lambda terms: secret_choices,
    ) -> None:
        require_at_least("fewest", fewest, 1)
        if number not in identities:
            raise InvalidValue(f"the identities name peers {sorted(identities)}, not peer {number} itself")
        self.number, self.identity, self.identities = number, identity, dict(identities)
        self.rules, self.fewest, self.choices = rules, fewest, choices
        self.offered: list[bytes] = []
        self.committed = False
        self.uploaded: set[bytes] = set()  # digests of models that entered an upload
        self.run: str | None = None
        self.past: set[bytes] = set()  # digests of the terms and sessions of this run
        self.step: str | None = None

    @property
    def layers(self) -> list[bytes]:
        """Layers of the model: exchanged, or as they were offered."""
        return self.holding.items if self.committed else self.offered

    def offer(self, layers: Sequence[bytes]) -> None:
        """Hand over a model for the next exchange. Raises `InvalidValue` when the rules ask for more layers than it has."""
        if not layers or not all(layers):
            raise InvalidValue("a model needs at least one layer, and a layer at least one byte")
        self.rules.bounds(len(layers))
        self.offered, self.committed, self.step = list(layers), False, None

    def upload(self) -> list[bytes]:
        """Return the envelopes for the server, after an exchange before upload. Raises `InvalidValue` where there was none."""
        if not self.committed or self.terms.when != "before_upload":
            raise InvalidValue("the exchange before upload did not come to its end here")
        self.uploaded.add(self._model_digest())
        return self.layers

    def abort(self) -> None:
        """Take back the model: the layers are those that were offered."""
        self.committed, self.step = False, None

    def handle(self, request: bytes) -> bytes:
        """Answer one request. A fault that the peer notices is its answer, and the exchange is over for it."""
        try:
            decoded = Request.decode(request)
            if decoded.kind == "abort":
                self.abort()
                return Answer().encode()
            letters = self._begin(decoded.terms) if decoded.terms is not None else self._go_on(decoded.letters)
            return Answer(tuple(letters)).encode()
        except ProtocolViolation as fault:
            self.abort()
            return Answer(fault=fault).encode()

    # --- the beginning: terms and introductions ---

    def _begin(self, terms: Terms) -> list[Letter]:
        self.abort()
        detail = self._refusal(terms)
        if detail:
            raise ProtocolViolation("invalid", SERVER, detail)
        self._enter(terms)
        self.terms = terms
        self.others = [peer for peer in terms.peers if peer != self.number]
        items = self.offered
        if terms.when == "before_upload":
            items = [seal(item, terms.server_key, terms.layer_context(index)) for index, item in enumerate(items)]
        self.holding = LayerBuffers(self.number, terms.peers, items)
        self.repeat, self.step = 0, "introductions"
        return [Letter(self.number, peer, self.introduction) for peer in self.others]

    def _refusal(self, terms: Terms) -> str:
        """Return the reason why the peer takes no part on these terms, or nothing."""
        strangers = set(terms.peers) - self.identities.keys()
        if not self.offered:
            return "no model was offered"
        if strangers:
            return f"nobody knows the identity of peer {min(strangers)}"
        if self.number not in terms.peers or len(set(terms.peers)) != len(terms.peers):
            return "the list of peers makes no sense"
        if len(terms.peers) < self.fewest:
            return f"{len(terms.peers)} of at least {self.fewest} peers"
        if terms.when not in OCCASIONS:
            return f"no occasion {terms.when!r}"
        if terms.rules != self.rules or terms.sizes != tuple(map(len, self.offered)):
            return "other rules or layers than here"
        if len(terms.server_key) != 32 or not can_seal(terms.server_key):
            return "no server key"
        if terms.when == "before_upload" and self._model_digest() in self.uploaded:
            return "this model was uploaded before"
        return ""

    def _enter(self, terms: Terms) -> None:
        """Make keys for a new run; in a run that goes on, refuse another server key and terms that were used already."""
        if terms.run != self.run:
            self.run, self.server_key, self.past = terms.run, terms.server_key, set()
            self.signing, self.opening = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
            keys = self.signing.public_key().public_bytes_raw(), self.opening.public_key().public_bytes_raw()
            content = Introduction(*keys, b"").signed_content(terms.run, self.number)
            self.introduction = Introduction(*keys, sign(content, self.identity)).encode()
        if terms.server_key != self.server_key:
            raise ProtocolViolation("disagrees", SERVER, "another key than before in this run")
        used = pack(terms.when.encode(), pack_numbers((terms.round, terms.attempt)))
        if used in self.past:
            raise ProtocolViolation("replayed", SERVER, "terms that were used already")
        self.past.add(used)

    def _meet(self, letters: Sequence[Letter]) -> None:
        """Take the others' keys for this run, each signed by its lasting identity, and derive what all must agree on."""
        introductions: dict[int, bytes] = {}
        for letter in letters:
            self._require_ends(letter)
            if letter.sender in introductions:
                raise ProtocolViolation("duplicated", letter.sender, "its introduction")
            introductions[letter.sender] = letter.body
        self.verifying: dict[int, Ed25519PublicKey] = {}
        self.sealing: dict[int, bytes] = {}
        for peer in self.others:
            if peer not in introductions:
                raise ProtocolViolation("missing", peer, "its introduction")
            keys = Introduction.decode(introductions[peer], peer)
            if not is_signed(keys.signed_content(self.terms.run, peer), keys.signature, self.identities[peer]):
                raise ProtocolViolation("impostor", peer)
            self.verifying[peer], self.sealing[peer] = Ed25519PublicKey.from_public_bytes(keys.verifying), keys.sealing
        self.session = self.terms.session(introductions | {self.number: self.introduction})
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
        """Begin the next repeat (stage 1): announce how many layers follow for each peer, then send them."""
        self.repeat, self.step = self.repeat + 1, "sent"
        low, high = self.rules.bounds(len(self.offered))[self.repeat - 1]
        going = self.holding.send(low, high, self._draw("send"))
        counts = Counter(sent.peer for sent in going)
        return [self._letter(peer, ANNOUNCEMENT, counts[peer]) for peer in self.others] + self._parcels(going, SENT)

    def _return(self, letters: Sequence[Letter]) -> list[Letter]:
        """Return a layer for each that came, once everything announced is there (stages 2 and 3)."""
        notes = self._read(letters, (ANNOUNCEMENT, SENT))
        due = announced(notes, [(peer, self.number) for peer in self.others], self.terms)
        came = self._open([note for note in notes if note.kind == SENT], due)
        self.step = "returned"
        return self._parcels(self.holding.exchange(came, self._draw("return")), RETURNED)

    def _rebuild(self, letters: Sequence[Letter]) -> list[Letter]:
        """Take a layer for each that was sent (stage 4); then begin the next repeat, or confirm that the model is whole."""
        owed = Counter((peer, self.number) for peer, _ in self.holding.sent)
        came = self._open(self._read(letters, (RETURNED,)), owed)
        for sent in came:
            if (sent.peer, sent.layer) not in self.holding.sent:
                raise ProtocolViolation("spoilt", sent.peer, "a layer returned that was not sent to it")
        self.holding.rebuild(came)
        if self.repeat < self.rules.repeats:
            return self._send()
        self.step = "confirmation"
        return [self._letter(peer, CONFIRMATION, 0) for peer in self.others]

    def _commit(self, letters: Sequence[Letter]) -> list[Letter]:
        confirmed = {note.sender for note in self._read(letters, (CONFIRMATION,))}
        for peer in self.others:
            if peer not in confirmed:
                raise ProtocolViolation("missing", peer, "its confirmation")
        self.committed, self.step = True, None
        return []

    def _draw(self, stage: str) -> Draw:
        return self.choices(self.terms)(self.number, purpose(self.terms.when, self.repeat, stage))

    def _model_digest(self) -> bytes:
        return Digest(pack(*self.offered)).digest()

    # --- between two requests ---

    def snapshot(self) -> bytes:
        """Return all that the peer must remember to go on, empty before its first exchange. It holds keys and a model."""
        if self.run is None:
            return b""
        met = sorted(self.verifying) if self.step not in (None, "introductions") else []
        head = {
            **{name: getattr(self, name) for name in _SAVED},
            "met": met,
            "buffers": [len(buffer) for buffer in self.holding.buffers],
            "sent": self.holding.sent,
        }
        secret = self.signing.private_bytes_raw(), self.opening.private_bytes_raw(), self.introduction, self.server_key
        return pack(
            json.dumps(head).encode(),
            pack(*secret),
            pack(*sorted(self.past)),
            pack(*sorted(self.uploaded)),
            pack(self.terms.encode(), self.session if met else b""),
            pack(*(key for peer in met for key in (self.verifying[peer].public_bytes_raw(), self.sealing[peer]))),
            pack(*self.offered),
            pack(*(item for buffer in self.holding.buffers for item in buffer)),
        )

    def restore(self, data: bytes) -> None:
        """Let a new peer of the same number and identities go on where `snapshot` was taken, by the rules that it had then."""
        if not data:
            return
        text, *blobs = unpack(data, self.number)
        head = json.loads(text)
        secret, past, uploaded, agreed, keys, offered, items = (unpack(blob, self.number) for blob in blobs)
        for name in _SAVED:
            setattr(self, name, head[name])
        self.signing = Ed25519PrivateKey.from_private_bytes(secret[0])
        self.opening = X25519PrivateKey.from_private_bytes(secret[1])
        self.introduction, self.server_key, self.past, self.offered = secret[2], secret[3], set(past), offered
        self.uploaded |= set(uploaded)
        self.terms, self.session = Terms.decode(agreed[0]), agreed[1]
        self.rules = self.terms.rules
        self.others = [peer for peer in self.terms.peers if peer != self.number]
        verifying = map(Ed25519PublicKey.from_public_bytes, keys[::2])
        self.verifying = dict(zip(head["met"], verifying, strict=True))
        self.sealing = dict(zip(head["met"], keys[1::2], strict=True))
        remaining = iter(items)
        self.holding = LayerBuffers(self.number, self.terms.peers, [])
        self.holding.buffers = [[next(remaining) for _ in range(length)] for length in head["buffers"]]
        self.holding.sent = [(recipient, index) for recipient, index in head["sent"]]

    # --- letters ---

    def _letter(self, peer: int, kind: int, number: int, content: bytes | None = None) -> Letter:
        note = Note(self.session, self.repeat, kind, self.number, peer, number)
        if content is not None:
            note = note._replace(payload=seal(content, self.sealing[peer], note.header()))
        return Letter(self.number, peer, note.signed(self.signing))

    def _parcels(self, going: Iterable[Sent[bytes]], kind: int) -> list[Letter]:
        """Pack each layer with its index in a parcel of one size, numbered by its recipient."""
        size, numbers, letters = self.terms.parcel_content(), Counter[int](), []
        for peer, index, item in going:
            letters.append(self._letter(peer, kind, numbers[peer], pad(index.to_bytes(INDEX) + item, size)))
            numbers[peer] += 1
        return letters

    def _require_ends(self, letter: Letter) -> None:
        if letter.recipient != self.number:
            raise ProtocolViolation("misdirected", letter.sender)
        if letter.sender not in self.others:
            raise ProtocolViolation("invalid", letter.sender, "it takes no part in this exchange")

    def _read(self, letters: Sequence[Letter], kinds: tuple[int, ...]) -> list[Note]:
        for letter in letters:
            self._require_ends(letter)
        return read_notes(letters, self.verifying, self.terms, self.session, self.repeat, kinds, self.past)

    def _open(self, notes: Sequence[Note], due: Mapping[tuple[int, int], int]) -> list[Sent[bytes]]:
        """Return the layers in these parcels, which must be as many from each peer as are due, and no index twice from one."""
        require_parcels(notes, due)
        came: dict[tuple[int, int], bytes] = {}
        sizes = self.terms.held_sizes()
        for note in notes:
            padded = unseal(note.payload, self.opening, note.header())
            content = None if padded is None else unpad(padded)
            if content is None:
                raise ProtocolViolation("spoilt", note.sender, "a parcel that cannot be opened")
            index, item = int.from_bytes(content[:INDEX]), content[INDEX:]
            if index >= len(sizes) or len(item) != sizes[index]:
                raise ProtocolViolation("spoilt", note.sender, "a layer of another size")
            if (note.sender, index) in came:
                raise ProtocolViolation("spoilt", note.sender, "a layer came twice")
            came[note.sender, index] = item
        return [Sent(peer, index, item) for (peer, index), item in came.items()]
