"""Transport of requests to the peers: the interface that a place where peers live must offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fedloom.secure.peer import Peer


class Transport(Protocol):
    """Carries one request to each of some peers and their answers back, in bytes: one round of messages over Flower."""

    def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Return the answer of every peer that gave one in time. Peers work at the same time; the call ends when all have
        answered or the transport has waited long enough."""


class InMemoryTransport:
    """Peers in this process, for tests and measurements."""

    def __init__(self, peers: Mapping[int, Peer]) -> None:
        self.peers = dict(peers)

    def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return {peer: self.peers[peer].handle(request) for peer, request in requests.items()}
