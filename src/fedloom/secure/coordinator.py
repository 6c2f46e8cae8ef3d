"""Server of an exchange: starts it, carries the letters, and opens layers sealed for the server.

It cannot read parcels, but it sees everything else and checks it before delivery. Therefore it can
verify every accusation of a peer, except about the contents of a parcel.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.common.fields import require_at_least
from fedloom.secure.envelopes import unseal
from fedloom.secure.faults import SERVER, ExchangeAborted, ProtocolViolation
from fedloom.secure.peer import Peer
from fedloom.secure.wire import Introduction, Letter, PeerMessage, PeerSession, Terms


class Transport(Protocol):
    """Carries one request to each of some peers and returns their answers, as bytes.

    Over Flower this is one round of messages.
    """

    def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Return the answers of the peers that answered in time. Peers work at the same time."""


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
        """Open the sealed layers of every uploaded model, after an exchange.

        An upload with another number or other sizes of layers is left out.

        Args:
            uploads: Sealed layers by peer.
            terms: Terms of the exchange.

        Returns:
            The layers by peer, and violations. A layer is None if it was not sealed under these
                terms for its index, or if an earlier upload contained it too. Its uploader may have
                received it in this state.
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
    """Let the peers of `terms` exchange their layers.

    If a peer fails, the others start again without it, as the next attempt.

    Args:
        transport: Carries the messages.
        terms: Terms of the first attempt.
        fewest: Smallest number of peers.

    Returns:
        The last terms, with the peers that have committed, and the faults of earlier attempts.

    Raises:
        ExchangeAborted: Fewer than `fewest` peers are left; every peer then has its previous model.
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
        # the next terms inform the other peers
        over = terms.peers if len(remaining) < fewest else gone
        transport.carry({peer: PeerMessage("abort").encode() for peer in over})
        met += faults
        terms = replace(terms, attempt=terms.attempt + 1, peers=remaining)
    raise ExchangeAborted(met, len(terms.peers), fewest)


class _Attempt:
    """One attempt: each step ends for all peers before the next begins.

    `believed` are the peers that have accused another peer once.
    """

    def __init__(self, terms: Terms, believed: set[int]) -> None:
        self.terms = terms
        self.believed = believed
        self._introductions: dict[int, Introduction] = {}
        # numbers of layers sent in this repeat, by (sender, recipient)
        self._counts: dict[tuple[int, int], int] = {}

    def run(self, transport: Transport) -> list[ProtocolViolation]:
        """Return the faults that ended the attempt; an empty list means success.

        Each fault names a peer to exclude.
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
        """Return a peer's letters in answer to a step.

        Raises:
            ProtocolViolation: The letters are wrong, or accuse a peer.
        """
        if answer is None:
            raise ProtocolViolation("left", peer)
        read = PeerMessage.decode(answer, peer)
        if read.fault is not None:
            raise read.fault
        ends = [(peer, recipient) for recipient in self.terms.peers if recipient != peer]
        if any((letter.sender, letter.recipient) not in ends for letter in read.letters):
            raise ProtocolViolation("invalid", peer, "a letter in another's name or to a stranger")
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
        """Return violations that name the peers to exclude for these accusations.

        A peer that accuses the server, or accuses another peer although the server has seen the
        opposite, is excluded. All peers get the same introduction, so most of the other peers must
        find it forged. Only the recipient can check the content of a parcel: a peer is believed
        once in an exchange. After its second accusation it is excluded together with the accused
        peer.
        """
        votes = Counter(fault.peer for fault in accusations if fault.kind == "impostor")
        violations = []
        for fault in accusations:
            assert fault.witness is not None  # `_letters` sets it
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
