"""Server of an exchange: calls for it, carries the letters stage by stage, and opens layers that
were sealed for it.

It cannot read parcels, but it sees everything else, and checks it before delivery. So it need not
believe a peer that accuses another of anything but the contents of a parcel.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.config.fields import require_at_least
from fedloom.secure.envelopes import unseal
from fedloom.secure.faults import SERVER, ExchangeAborted, ProtocolViolation
from fedloom.secure.peer import Peer
from fedloom.secure.wire import Introduction, Letter, PeerMessage, PeerSession, Terms


class Transport(Protocol):
    """Carries one request to each of some peers and their answers back, in bytes: one round of
    messages over Flower.
    """

    def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Return the answers of the peers that gave one in time. Peers work at the same time."""


class InMemoryTransport:
    """Peers in this process, for tests and measurements."""

    def __init__(self, peers: Mapping[int, Peer]) -> None:
        self.peers = dict(peers)

    def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return {peer: self.peers[peer].handle(request) for peer, request in requests.items()}


class ServerKey:
    """The server's key pair of one run."""

    def __init__(self, private: X25519PrivateKey | None = None) -> None:
        self.private = X25519PrivateKey.generate() if private is None else private
        self.public = self.private.public_key().public_bytes_raw()

    def open_models(
        self, uploads: Mapping[int, Sequence[bytes]], terms: Terms
    ) -> tuple[dict[int, list[bytes | None]], list[ProtocolViolation]]:
        """Open the sealed layers of every uploaded model, after the exchange of these terms. Return
        them by peer, and violations.

        None stands for a layer that was not sealed under these terms for its index, or that an
        earlier upload held too; its uploader may have received it so. An upload with more or fewer
        layers, or of other sizes, is left out.
        """
        models: dict[int, list[bytes | None]] = {}
        faults: list[ProtocolViolation] = []
        opened: set[bytes] = set()
        for peer, layers in uploads.items():
            if [len(layer) for layer in layers] != terms.held_sizes():
                faults.append(ProtocolViolation("invalid", peer, "an upload of other layers"))
                continue
            models[peer] = []
            for index, layer in enumerate(layers):
                content = (
                    None
                    if layer in opened
                    else unseal(layer, self.private, terms.layer_context(index))
                )
                if content is None:
                    reason = "was uploaded before" if layer in opened else "cannot be opened"
                    faults.append(
                        ProtocolViolation("spoilt", peer, f"layer {index} of its upload {reason}")
                    )
                opened.add(layer)
                models[peer].append(content)
        return models, faults


def run_exchange(
    transport: Transport, terms: Terms, *, fewest: int = 2
) -> tuple[Terms, list[ProtocolViolation]]:
    """Let the peers of `terms` exchange their layers; when one fails, the others begin anew without
    it, as the next attempt.

    Returns the last terms, whose peers have committed, and the faults that earlier attempts met.
    Raises `ExchangeAborted` when fewer than `fewest` are left; every peer then has the model that
    it had.
    """
    require_at_least("fewest", fewest, 1)
    believed: set[int] = set()
    met: list[ProtocolViolation] = []
    while len(terms.peers) >= fewest:  # every attempt but the last loses a peer
        faults = _Attempt(terms, believed).run(transport)
        if not faults:
            return terms, met
        gone = {fault.peer for fault in faults}
        remaining = tuple(peer for peer in terms.peers if peer not in gone)
        # the others learn it by the terms that follow
        over = terms.peers if len(remaining) < fewest else gone
        transport.carry({peer: PeerMessage("abort").encode() for peer in over})
        met += faults
        terms = replace(terms, attempt=terms.attempt + 1, peers=remaining)
    raise ExchangeAborted(met, len(terms.peers), fewest)


class _Attempt:
    """One attempt: each step ends for all before the next begins. `believed` are the peers that
    have accused another once.
    """

    def __init__(self, terms: Terms, believed: set[int]) -> None:
        self.terms, self.believed = terms, believed
        self._introductions: dict[int, Introduction] = {}
        # layers sent in this repeat, from whom to whom
        self._counts: dict[tuple[int, int], int] = {}

    def run(self, transport: Transport) -> list[ProtocolViolation]:
        """Return the faults that ended the attempt, each naming a peer that must go; none for
        success.
        """
        peers = self.terms.peers
        requests = {peer: PeerMessage("begin", self.terms) for peer in peers}
        for step in range(2 * self.terms.rules.repeats + 3):
            answers = transport.carry(
                {peer: request.encode() for peer, request in requests.items()}
            )
            inboxes: dict[int, list[Letter]] = {peer: [] for peer in peers}
            faults: list[ProtocolViolation] = []
            accusations: list[ProtocolViolation] = []
            for peer in peers:
                try:
                    for letter in self._letters(step, peer, answers.get(peer)):
                        inboxes[letter.recipient].append(letter)
                except ProtocolViolation as fault:
                    (faults if fault.witness is None else accusations).append(fault)
            faults += self._judged(accusations, requests)
            if faults:
                return faults
            if step == 0:
                self._session = PeerSession(self.terms, self._introductions)
            requests = {
                peer: PeerMessage("letters", letters=tuple(inbox))
                for peer, inbox in inboxes.items()
            }
        return []

    def _letters(self, step: int, peer: int, answer: bytes | None) -> tuple[Letter, ...]:
        """Return a peer's letters in answer to a step. Raises `ProtocolViolation` when they are
        wrong, or accuse a peer.
        """
        if answer is None:
            raise ProtocolViolation("left", peer)
        read = PeerMessage.decode(answer, peer)
        if read.fault is not None:
            raise read.fault
        ends = [(peer, recipient) for recipient in self.terms.peers if recipient != peer]
        if any((letter.sender, letter.recipient) not in ends for letter in read.letters):
            raise ProtocolViolation(
                "invalid", peer, "a letter in another's name or to nobody in this exchange"
            )
        if step == 0:
            bodies = {letter.body for letter in read.letters}
            if (
                sorted(letter.recipient for letter in read.letters) != sorted(to for _, to in ends)
                or len(bodies) > 1
            ):
                raise ProtocolViolation("invalid", peer, "not one introduction, the same to all")
            for body in bodies:
                self._introductions[peer] = Introduction.decode(body, peer)
            return read.letters
        owed = {(peer, to): self._counts.get((to, peer), 0) for _, to in ends}
        parcels = self._session.read(step, read.letters, ends, owed)
        rules = self.terms.rules
        if step % 2 and step <= 2 * rules.repeats:
            low, high = rules.bounds(len(self.terms.sizes))[step // 2]
            if ends and not low <= len(parcels) <= high:
                raise ProtocolViolation(
                    "disagrees", peer, f"{len(parcels)} layers sent, not {low} to {high}"
                )
            self._counts |= {pair: sum(note.ends == pair for note in parcels) for pair in ends}
        return read.letters

    def _judged(
        self, accusations: Sequence[ProtocolViolation], requests: Mapping[int, PeerMessage]
    ) -> list[ProtocolViolation]:
        """Return the peers who must go for these accusations, as violations.

        An accusation of the server, or of what the server has seen not to be so, costs the witness
        its own place. Everybody is sent the same introduction, so most of the others must find it
        forged. What a parcel holds nobody but its recipient can tell: once in an exchange a peer is
        believed, and leaves with the one that it accuses again.
        """
        votes = Counter(fault.peer for fault in accusations if fault.kind == "impostor")
        violations = []
        for fault in accusations:
            assert fault.witness is not None  # the reader of its answer has named it
            parcels = [
                e
                for e in requests[fault.witness].letters
                if len(e.body) == self.terms.parcel_size()
            ]
            opened = fault.kind == "spoilt" and fault.peer in {letter.sender for letter in parcels}
            if opened or (
                fault.kind == "impostor" and 2 * votes[fault.peer] > len(self.terms.peers) - 1
            ):
                violations.append(fault)
            else:
                kind = "withdrew" if fault.peer == SERVER else "unproved"
                violations.append(ProtocolViolation(kind, fault.witness, str(fault)))
            if opened and fault.witness in self.believed:
                violations.append(
                    ProtocolViolation("unproved", fault.witness, "for the second time")
                )
            if opened:
                self.believed.add(fault.witness)
        return violations
