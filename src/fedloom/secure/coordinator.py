"""The server's part: it calls for an exchange, carries the letters stage by stage, and opens layers that were sealed for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.config.checks import require_at_least
from fedloom.secure.envelopes import unseal
from fedloom.secure.exchange import Rules
from fedloom.secure.faults import SERVER, ExchangeAborted, ProtocolViolation
from fedloom.secure.transport import Transport
from fedloom.secure.wire import Answer, Letter, Request, Terms


class ServerKey:
    """The server's key pair of one run."""

    def __init__(self, private: X25519PrivateKey | None = None) -> None:
        self.private = X25519PrivateKey.generate() if private is None else private
        self.public = self.private.public_key().public_bytes_raw()

    def open_models(self, uploads: Mapping[int, Sequence[bytes]], terms: Terms) -> dict[int, list[bytes]]:
        """The layers of every uploaded model. Raises `ProtocolViolation` naming a peer whose upload lacks a layer, holds one that
        was not sealed under these terms for its place, or one that another model holds too: such a round must be given up."""
        units = max((len(layers) for layers in uploads.values()), default=0)
        holders: dict[bytes, int] = {}
        models: dict[int, list[bytes]] = {}
        for peer, layers in uploads.items():
            if len(layers) != units:
                raise ProtocolViolation("missing", peer, f"{len(layers)} of {units} layers uploaded")
            models[peer] = []
            for index, layer in enumerate(layers):
                if layer in holders:
                    raise ProtocolViolation(
                        "duplicated", peer, f"layer {index}, which peer {holders[layer]} uploaded too"
                    )
                holders[layer] = peer
                content = unseal(layer, self.private, terms.layer_context(index))
                if content is None:
                    raise ProtocolViolation("invalid", peer, f"layer {index} of its upload cannot be opened")
                models[peer].append(content)
        return models


@dataclass
class Exchanged:
    """An exchange that happened: its last terms (whose peers have committed), the faults that earlier attempts met, and the
    bytes of all letters carried."""

    terms: Terms
    faults: list[ProtocolViolation] = field(default_factory=list)
    letter_bytes: int = 0


def run_exchange(transport: Transport, terms: Terms, rules: Rules, *, fewest: int = 2) -> Exchanged:
    """Let the peers of `terms` exchange their layers. When a peer fails, all others take back their models and begin anew without
    the peer that was named, as attempt `terms.attempt` + 1 and so on.

    Raises `ExchangeAborted` when fewer than `fewest` are left, and at once when a peer refuses the server's own doing; every
    peer then has the model that it had.
    """
    require_at_least("fewest", fewest, 1)
    outcome = Exchanged(terms)
    while True:
        peers = outcome.terms.peers
        if len(peers) < fewest:
            raise ExchangeAborted(outcome.faults, len(peers), fewest)
        faults = _attempt(transport, outcome, rules)
        if not faults:
            return outcome
        transport.carry({peer: Request("abort").encode() for peer in peers})
        outcome.faults += faults
        accused = {fault.peer for fault in faults}
        if SERVER in accused:
            raise ExchangeAborted(faults, len(peers), fewest)
        rest = tuple(peer for peer in peers if peer not in accused)
        last = outcome.terms
        outcome.terms = Terms(last.run, last.round, last.when, last.attempt + 1, rest, last.server_key)


def _attempt(transport: Transport, outcome: Exchanged, rules: Rules) -> list[ProtocolViolation]:
    """One attempt: each step ends for all before the next begins. The faults that ended it, or none."""
    terms = outcome.terms
    requests = {peer: Request("begin", terms) for peer in terms.peers}
    for _ in range(2 * rules.repeats + 3):
        answers = transport.carry({peer: request.encode() for peer, request in requests.items()})
        inboxes: dict[int, list[Letter]] = {peer: [] for peer in terms.peers}
        faults = []
        for peer in terms.peers:
            fault = _sort(peer, answers.get(peer), inboxes)
            if fault is not None:
                faults.append(fault)
        if faults:
            return faults
        outcome.letter_bytes += sum(len(letter.body) for inbox in inboxes.values() for letter in inbox)
        requests = {peer: Request("letters", letters=tuple(inbox)) for peer, inbox in inboxes.items()}
    return []


def _sort(peer: int, answer: bytes | None, inboxes: dict[int, list[Letter]]) -> ProtocolViolation | None:
    """Put the letters of one answer into the inboxes, or say what is wrong with it."""
    if answer is None:
        return ProtocolViolation("left", peer)
    try:
        read = Answer.decode(answer, peer)
    except ProtocolViolation as fault:
        return fault
    if read.fault is not None:
        return read.fault
    for letter in read.letters:
        if letter.sender != peer or letter.recipient == peer or letter.recipient not in inboxes:
            return ProtocolViolation("invalid", peer, "a letter in another's name or to nobody in this exchange")
        inboxes[letter.recipient].append(letter)
    return None
