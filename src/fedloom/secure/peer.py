"""Peer of an exchange: answers the server's requests step by step, bytes in, bytes out."""

import plistlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.common.digest import Digest
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import require_at_least
from fedloom.secure import wire
from fedloom.secure.envelopes import (
    PrivateIdentity,
    PublicIdentity,
    can_seal,
    is_signed,
    seal,
    sign,
    unseal,
)
from fedloom.secure.exchange import (
    Choices,
    Draw,
    LayerBuffers,
    Rules,
    Sent,
    purpose,
    secret_choices,
)
from fedloom.secure.faults import SERVER, ProtocolViolation
from fedloom.secure.wire import (
    INDEX,
    Introduction,
    Letter,
    Note,
    PeerMessage,
    PeerSession,
    Terms,
    pack,
)

_SAVED = ("run", "step", "committed", "server_key", "past", "uploaded", "offered")


class Peer:
    """A peer with its private `identity` and the long-term public `identities` of all peers.

    Before each exchange, `offer` takes the model as layers. Then every request of the server goes
    to `handle`. `layers` are the exchanged layers once the peer is `committed`, which means that
    every peer has confirmed that its model is complete. Before that, they are the offered ones;
    `abort` also restores them. `upload` returns the envelopes for the server. After an upload the
    model enters no other exchange: with other peers, the difference would reveal the owners of
    layers.

    Keys are new in every run.

    Args:
        number: Number of the peer.
        identity: Its private long-term key.
        identities: Public long-term keys of all peers by number.
        rules: Its rules; it refuses an exchange by other rules.
        fewest: Smallest number of peers in an exchange, including itself.
        choices: Sources of random integers for given terms; secret except in a rehearsal.
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
            raise InvalidValue(
                f"the identities name peers {sorted(identities)}, not peer {number} itself"
            )
        self.number = number
        self.identity = identity
        self.identities = dict(identities)
        self.rules = rules
        self.fewest = fewest
        self.choices = choices
        self.offered: list[bytes] = []
        self.committed = False
        self.uploaded: list[bytes] = []  # digests of models that entered an upload
        self.run: str | None = None
        self.past: list[bytes] = []  # digests of the terms and sessions of this run
        self.step = -1  # the last answered step of the current exchange

    @property
    def layers(self) -> list[bytes]:
        """Layers of the model: the exchanged ones if committed, else the offered ones."""
        return self.holding.items if self.committed else self.offered

    def offer(self, layers: Sequence[bytes]) -> None:
        """Take a model for the next exchange.

        Raises:
            InvalidValue: The model has no layers, or fewer than the rules require.
        """
        if not layers or not all(layers):
            raise InvalidValue("a model needs at least one layer, and a layer at least one byte")
        self.rules.bounds(len(layers))
        self.abort()
        self.offered = list(layers)

    def upload(self) -> list[bytes]:
        """Return the envelopes for the server, after an exchange before upload.

        Raises:
            InvalidValue: No such exchange has ended.
        """
        if not self.committed or self.terms.when != "before_upload":
            raise InvalidValue("the exchange before upload has not ended at this peer")
        self.uploaded.append(self._model_digest())
        return self.layers

    def abort(self) -> None:
        """Restore the offered layers."""
        self.committed = False
        self.step = -1

    def handle(self, request: bytes) -> bytes:
        """Answer one request.

        If the peer notices a fault, the fault is its answer, and the peer leaves the exchange.
        """
        try:
            decoded = PeerMessage.decode(request)
            if decoded.kind == "abort":
                self.abort()
                return PeerMessage("letters").encode()
            letters = (
                self._begin(decoded.terms)
                if decoded.terms is not None
                else self._continue(decoded.letters)
            )
            return PeerMessage("letters", letters=tuple(letters)).encode()
        except ProtocolViolation as fault:
            self.abort()
            return PeerMessage("fault", fault=fault).encode()

    # --- the beginning: terms and introductions ---

    def _begin(self, terms: Terms) -> list[Letter]:
        self.abort()
        self._require_acceptable(terms)
        self._enter(terms)
        items = self.offered
        if terms.when == "before_upload":
            items = [
                seal(item, terms.server_key, terms.layer_context(index))
                for index, item in enumerate(items)
            ]
        self._hold(terms, [[item] for item in items])
        self.step = 0
        return [Letter(self.number, peer, self.introduction.encode()) for peer in self.others]

    def _hold(self, terms: Terms, buffers: list[list[bytes]]) -> None:
        self.terms = terms
        self.session = PeerSession(terms, {})
        self.others = [peer for peer in terms.peers if peer != self.number]
        self.holding = LayerBuffers(self.others, buffers)

    def _require_acceptable(self, terms: Terms) -> None:
        """Raise `ProtocolViolation` if the peer refuses these terms."""
        strangers = set(terms.peers) - self.identities.keys()
        peers = terms.peers
        uploads = terms.when == "before_upload"
        for unacceptable, detail in (
            (not self.offered, "no model was offered"),
            (strangers, f"the identity of peer {min(strangers, default=0)} is unknown"),
            (
                self.number not in peers or len(set(peers)) != len(peers),
                "the list of peers is not valid",
            ),
            (len(peers) < self.fewest, f"{len(peers)} of at least {self.fewest} peers"),
            (terms.when not in wire.OCCASIONS, f"unknown occasion {terms.when!r}"),
            (terms.rules != self.rules, "other rules or layers than here"),
            (terms.sizes != tuple(map(len, self.offered)), "other rules or layers than here"),
            (not can_seal(terms.server_key), "no server key"),
            (uploads and self._model_digest() in self.uploaded, "this model was uploaded before"),
        ):
            if unacceptable:
                raise ProtocolViolation("invalid", SERVER, detail)

    def _enter(self, terms: Terms) -> None:
        """Make keys for a new run; in a known run, refuse another server key and repeated terms."""
        if terms.run != self.run:
            self.run = terms.run
            self.server_key = terms.server_key
            self.past = []
            self.signing = Ed25519PrivateKey.generate()
            self.opening = X25519PrivateKey.generate()
            keys = (
                self.signing.public_key().public_bytes_raw(),
                self.opening.public_key().public_bytes_raw(),
            )
            content = Introduction(*keys, b"").signed_content(terms.run, self.number)
            self.introduction = Introduction(*keys, sign(content, self.identity))
        if terms.server_key != self.server_key:
            raise ProtocolViolation("disagrees", SERVER, "another key than before in this run")
        used = pack(terms.when.encode(), wire.pack_numbers((terms.round, terms.attempt)))
        if used in self.past:
            raise ProtocolViolation("replayed", SERVER, "terms that were used already")
        self.past.append(used)

    def _meet(self, letters: Sequence[Letter]) -> None:
        """Store the other peers' keys for this run, each signed by its long-term identity."""
        bodies: dict[int, bytes] = {}
        for letter in letters:
            if letter.sender in bodies:
                raise ProtocolViolation("duplicated", letter.sender, "its introduction")
            bodies[letter.sender] = letter.body
        introductions = {self.number: self.introduction}
        for peer in self.others:
            if peer not in bodies:
                raise ProtocolViolation("missing", peer, "its introduction")
            introductions[peer] = keys = Introduction.decode(bodies[peer], peer)
            if not is_signed(
                keys.signed_content(self.terms.run, peer), keys.signature, self.identities[peer]
            ):
                raise ProtocolViolation("impostor", peer)
        self.session = PeerSession(self.terms, introductions)
        self.past.append(self.session.digest)

    # --- the stages ---

    def _continue(self, letters: Sequence[Letter]) -> list[Letter]:
        """Process the other peers' answers to the last step, and answer the next step."""
        answered = self.step
        final = 2 * self.rules.repeats + 1
        if answered < 0:
            raise ProtocolViolation("invalid", SERVER, "letters without an exchange")
        for letter in letters:
            if letter.recipient != self.number:
                raise ProtocolViolation("misdirected", letter.sender)
            if letter.sender not in self.others:
                raise ProtocolViolation("invalid", letter.sender, "it is not part of this exchange")
        came: list[Sent[bytes]] = []
        if answered == 0:
            self._meet(letters)
        else:
            owed = Counter((peer, self.number) for peer, _ in self.holding.sent)
            ends = [(peer, self.number) for peer in self.others]
            came = self._open(self.session.read(answered, letters, ends, owed, self.past))
        if answered == final:
            self.committed = True
            self.step = -1
            return []
        self.step += 1
        if self.step % 2 == 0:  # stages 2 and 3
            return self._parcels(self.holding.exchange(came, self._draw("return")), wire.RETURNED)
        if answered:  # stage 4
            if wrong := [
                sent.peer for sent in came if (sent.peer, sent.layer) not in self.holding.sent
            ]:
                raise ProtocolViolation(
                    "spoilt", wrong[0], "a layer returned that was not sent to it"
                )
            self.holding.rebuild(came)
        if self.step < final:
            return self._send()
        return [self._letter(peer, wire.CONFIRMATION, 0) for peer in self.others]

    def _send(self) -> list[Letter]:
        """Begin the next repeat (stage 1): announce the numbers of layers, then send the layers."""
        low, high = self.rules.bounds(len(self.offered))[self.terms.repeat(self.step) - 1]
        going = self.holding.send(low, high, self._draw("send"))
        counts = Counter(sent.peer for sent in going)
        announcements = [
            self._letter(peer, wire.ANNOUNCEMENT, counts[peer]) for peer in self.others
        ]
        return announcements + self._parcels(going, wire.SENT)

    def _draw(self, stage: str) -> Draw:
        return self.choices(self.terms)(
            self.number, purpose(self.terms.when, self.terms.repeat(self.step), stage)
        )

    def _model_digest(self) -> bytes:
        return Digest(pack(*self.offered)).digest()

    # --- between two requests ---

    def snapshot(self) -> bytes:
        """Return the state of the peer's run, empty before its first run.

        It contains keys and a model.
        """
        if self.run is None:
            return b""
        state = {name: getattr(self, name) for name in _SAVED} | {
            "keys": [
                self.signing.private_bytes_raw(),
                self.opening.private_bytes_raw(),
                self.introduction.encode(),
            ],
            "terms": self.terms.encode(),
            "introductions": [
                keys.encode() for _, keys in sorted(self.session.introductions.items())
            ],
            "buffers": self.holding.buffers,
            "sent": self.holding.sent,
        }
        return plistlib.dumps(state, fmt=plistlib.FMT_BINARY)

    def restore(self, data: bytes) -> None:
        """Restore a snapshot in a new peer with the same number and identities.

        The rules of the snapshot apply.
        """
        if not data:
            return
        state = plistlib.loads(data, fmt=plistlib.FMT_BINARY)
        for name in _SAVED:
            setattr(self, name, state[name])
        signing, opening, introduction = state["keys"]
        self.signing = Ed25519PrivateKey.from_private_bytes(signing)
        self.opening = X25519PrivateKey.from_private_bytes(opening)
        self.introduction = Introduction.decode(introduction, self.number)
        self._hold(Terms.decode(state["terms"]), state["buffers"])
        self.rules = self.terms.rules
        self.holding.sent = [(recipient, index) for recipient, index in state["sent"]]
        # empty before the introductions
        bodies = zip(sorted(self.terms.peers), state["introductions"], strict=False)
        self.session = PeerSession(
            self.terms, {peer: Introduction.decode(body, peer) for peer, body in bodies}
        )

    def _letter(self, peer: int, kind: int, number: int, content: bytes | None = None) -> Letter:
        note = Note(
            self.session.digest, self.terms.repeat(self.step), kind, self.number, peer, number
        )
        if content is not None:
            note = note._replace(
                payload=seal(content, self.session.introductions[peer].sealing, note.header())
            )
        return Letter(self.number, peer, note.signed(self.signing))

    def _parcels(self, going: Iterable[Sent[bytes]], kind: int) -> list[Letter]:
        """Pack each layer with its index in a parcel of fixed size, numbered by recipient."""
        numbers = Counter[int]()
        letters = []
        for peer, index, item in going:
            content = pack(index.to_bytes(INDEX) + item).ljust(self.terms.content_size(), b"\0")
            letters.append(self._letter(peer, kind, numbers[peer], content))
            numbers[peer] += 1
        return letters

    def _open(self, parcels: Sequence[Note]) -> list[Sent[bytes]]:
        """Return the layers in these parcels; a peer may send each index only once."""
        came: dict[tuple[int, int], bytes] = {}
        sizes = self.terms.held_sizes()
        for note in parcels:
            padded = unseal(note.payload, self.opening, note.header())
            if padded is None:
                raise ProtocolViolation("spoilt", note.sender, "a parcel that cannot be opened")
            content = padded[8 : 8 + int.from_bytes(padded[:8])]
            index = int.from_bytes(content[:INDEX])
            item = content[INDEX:]
            if index >= len(sizes) or len(item) != sizes[index]:
                raise ProtocolViolation("spoilt", note.sender, "a layer of another size")
            if (note.sender, index) in came:
                raise ProtocolViolation("spoilt", note.sender, "a layer arrived twice")
            came[note.sender, index] = item
        return [Sent(peer, index, item) for (peer, index), item in came.items()]
