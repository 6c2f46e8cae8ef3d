"""Peers with random layers, a server, and the simulator's outcome of their exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.common.randomness import stream
from fedloom.secure import (
    InMemoryTransport,
    Peer,
    ProtocolViolation,
    Rules,
    ServerKey,
    Terms,
    rehearse,
    run_exchange,
    stream_choices,
)
from fedloom.secure.envelopes import PrivateIdentity
from fedloom.secure.exchange import Choices
from fedloom.secure.wire import RETURNED, SENT, Letter, PeerMessage, read_note

SIZES = (40, 24, 96)
KEY = ServerKey()

Tamper = Callable[[int, int, tuple[Letter, ...]], tuple[Letter, ...]]
"""(step, recipient, letters) -> the letters to deliver instead."""


def choices_of(seed: int) -> Callable[[Terms], Choices]:
    return lambda terms: stream_choices(
        lambda purpose, peer: stream(seed, purpose, round=terms.round, client=peer)
    )


class WatchedTransport(InMemoryTransport):
    """A transport that records every byte, with faults in the first attempt.

    `gone` gives the first step without an answer of a peer (0 is the terms). `tamper` may change
    delivered messages. Steps are counted from the last terms.
    """

    def __init__(
        self,
        peers: Mapping[int, Peer],
        *,
        tamper: Tamper | None = None,
        gone: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(peers)
        self.tamper, self.gone = tamper, dict(gone or {})
        self.captured: list[bytes] = []
        self.letters: list[Letter] = []
        self._step, self._attempt = 0, -1
        self._left: set[int] = set()

    def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        answers = {}
        self._count(requests)
        for peer, request in requests.items():
            self.captured.append(request)
            decoded = PeerMessage.decode(request)
            if self._attempt == 0 and decoded.kind != "abort":
                if self._step >= self.gone.get(peer, self._step + 1):
                    self._left.add(peer)
                if self.tamper is not None:
                    request = replace(
                        decoded, letters=self.tamper(self._step, peer, decoded.letters)
                    ).encode()
            if peer not in self._left:
                answers |= super().carry({peer: request})
                self.captured.append(answers[peer])
                with suppress(ProtocolViolation):  # the server must refuse unreadable answers
                    self.letters += PeerMessage.decode(answers[peer], peer).letters
        return answers

    def _count(self, requests: Mapping[int, bytes]) -> None:
        terms = [PeerMessage.decode(request).terms for request in requests.values()]
        new_terms = next((entry for entry in terms if entry is not None), None)
        if new_terms is None:
            self._step += 1
        else:
            self._step, self._attempt = 0, new_terms.attempt


class World:
    """Peers 10, 11, ... with random layers, and a server."""

    def __init__(
        self,
        count: int = 4,
        sizes: Sequence[int] = SIZES,
        rules: Rules | None = None,
        seed: int = 1,
        fewest: int = 2,
        kinds: Mapping[int, type[Peer]] | None = None,
    ) -> None:
        self.rules = Rules(2, 1, len(sizes)) if rules is None else rules
        self.seed, self.fewest = seed, fewest
        self.numbers = tuple(10 + k for k in range(count))
        self.identities: dict[int, PrivateIdentity] = {
            k: Ed25519PrivateKey.generate() for k in self.numbers
        }
        public_keys = {k: identity.public_key() for k, identity in self.identities.items()}
        self.peers = {
            k: (kinds or {}).get(k, Peer)(
                k, self.identities[k], public_keys, self.rules, fewest=1, choices=choices_of(seed)
            )
            for k in self.numbers
        }
        generator = torch.Generator().manual_seed(seed)
        self.models = {
            k: [
                torch.randint(256, (n,), generator=generator).to(torch.uint8).numpy().tobytes()
                for n in sizes
            ]
            for k in self.numbers
        }

    def offer(self) -> None:
        for number, peer in self.peers.items():
            peer.offer(self.models[number])

    def terms(self, when: str = "before_upload", round: int = 1, **changes: Any) -> Terms:
        sizes = tuple(map(len, self.models[10]))
        return replace(
            Terms("run", round, when, 0, self.numbers, KEY.public, self.rules, sizes), **changes
        )

    def exchange(
        self, transport: InMemoryTransport, when: str = "before_upload", round: int = 1
    ) -> tuple[Terms, list[ProtocolViolation]]:
        self.offer()
        return run_exchange(transport, self.terms(when, round), fewest=self.fewest)

    def outcome(self, terms: Terms) -> dict[int, list[bytes]]:
        """Return the models after the exchange; the server opens them if they are sealed for it."""
        layers = {k: self.peers[k].layers for k in terms.peers}
        assert all(self.peers[k].committed for k in terms.peers)
        if terms.when == "before_train":
            return layers
        models, faults = KEY.open_models(layers, terms)
        assert not faults
        return {k: [layer for layer in model if layer is not None] for k, model in models.items()}

    def expected(self, terms: Terms) -> dict[int, list[bytes]]:
        """Return the simulator's models after the exchange."""
        choices = choices_of(self.seed)(terms)
        sources = rehearse(terms.peers, len(SIZES), self.rules, choices, terms.when).sources
        return {
            k: [
                self.models[terms.peers[source[index]]][unit] for unit, source in enumerate(sources)
            ]
            for index, k in enumerate(terms.peers)
        }


def is_parcel(letter: Letter) -> bool:
    return letter.body[:4] == b"flsx" and read_note(letter.body, letter.sender).kind in (
        SENT,
        RETURNED,
    )


def flipped(body: bytes, position: int) -> bytes:
    changed = bytearray(body)
    changed[position] ^= 1
    return bytes(changed)
