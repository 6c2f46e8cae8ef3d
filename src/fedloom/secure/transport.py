"""How requests reach the peers: the one thing that a place where peers live has to offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from fedloom.secure.faults import ProtocolViolation
from fedloom.secure.peer import Peer
from fedloom.secure.wire import Answer, Letter, Request


class Transport(Protocol):
    """Carries one request to each of some peers and their answers back, in bytes: one round of messages over Flower."""

    def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """The answer of every peer that gave one in time. Peers work at the same time; the call ends when all have answered or
        the transport has waited long enough."""


Tamper = Callable[[int, int, tuple[Letter, ...]], tuple[Letter, ...]]
"""(step, recipient, letters) -> the letters that are delivered in their place."""


class InMemoryTransport:
    """Peers in this process, for tests and measurements. It keeps every byte that passes through.

    `gone` says from which step on (0 is the terms) a peer answers no more; `tamper` may change what is delivered. Steps are
    counted from the last terms, over all attempts that `attempts` names (by default the first).
    """

    def __init__(
        self,
        peers: Mapping[int, Peer],
        *,
        tamper: Tamper | None = None,
        gone: Mapping[int, int] | None = None,
        attempts: tuple[int, ...] = (0,),
    ) -> None:
        self.peers, self.tamper, self.gone, self.attempts = dict(peers), tamper, dict(gone or {}), attempts
        self.captured: list[bytes] = []
        self.letters: list[Letter] = []
        self._step, self._attempt = 0, -1
        self._left: set[int] = set()

    def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        answers = {}
        self._count(requests)
        for peer, request in requests.items():
            self.captured.append(request)
            asked = Request.decode(request)
            if self._attempt in self.attempts and asked.kind != "abort":
                if self._step >= self.gone.get(peer, self._step + 1):
                    self._left.add(peer)
                if self.tamper is not None:
                    request = replace(asked, letters=self.tamper(self._step, peer, asked.letters)).encode()
            if peer not in self._left:
                answers[peer] = self.peers[peer].handle(request)
                self.captured.append(answers[peer])
                with suppress(ProtocolViolation):  # what cannot be read is for the server to find
                    self.letters += Answer.decode(answers[peer], peer).letters
        return answers

    def _count(self, requests: Mapping[int, bytes]) -> None:
        terms = [Request.decode(request).terms for request in requests.values()]
        first = next((found for found in terms if found is not None), None)
        if first is None:
            self._step += 1
        else:
            self._step, self._attempt = 0, first.attempt
