"""One site in secure exchanges: what it keeps from one message to the next, in files that only it can read.

site-<number>.peer     the peer in the middle of an exchange: the keys that it made for it, the model it offered, the layers it
                       holds. It is gone when the site has trained on what it was given, or has uploaded
site-<number>.trained  the layers of the site's own trained model, to be exchanged; the next round writes over it
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fedloom.deploy.identity import Identity
from fedloom.errors import CheckpointError, RefusedReply
from fedloom.randomness import stream
from fedloom.secure import Misbehaviour, Peer, Rules, Terms, restore, secret_choices, snapshot, stream_choices
from fedloom.secure.draws import Choices
from fedloom.secure.messages import Request, pack, unpack


class SitePeer:
    """Site `number` as a peer, in exchanges of round `round` under `rules`; its files lie in `folder`. `seed` is the run's."""

    def __init__(self, folder: Path, number: int, identity: Identity, rules: Rules, round: int, seed: int) -> None:
        self.folder, self.number, self.identity, self.rules = folder, number, identity, rules
        self.round, self.seed = round, seed

    def begin(self, request: bytes, run: str, when: str, layers: Sequence[bytes]) -> bytes:
        """Enter exchange `run` with these layers, and answer its first request. Raises `RefusedReply` when that is of another."""
        terms = _decoded(request).terms
        if terms is None or (terms.run, terms.when, terms.round) != (run, when, self.round):
            raise RefusedReply("the terms are not those of this exchange")
        peer = self._peer()
        peer.offer(layers)
        return self._handled(peer, request, run, when)

    def go_on(self, request: bytes, run: str) -> bytes:
        """Answer the next request of the exchange that the site is in. Raises `RefusedReply` when it is in none, or another."""
        peer, when = self._kept(run)
        terms = _decoded(request).terms
        if terms is not None and (terms.run, terms.when, terms.round) != (run, when, self.round):
            raise RefusedReply("the terms are not those of this exchange")
        return self._handled(peer, request, run, when)

    def outcome(self, when: str, run: str | None = None) -> list[bytes]:
        """The layers that the site holds after the exchange. Raises `RefusedReply` unless that came to its end."""
        peer, kept = self._kept(run)
        if not peer.committed or kept != when:
            raise RefusedReply(f"the exchange {when} did not come to its end here")
        return list(peer.layers)

    def leave(self) -> None:
        """The exchange is over: forget its keys and layers."""
        self._path("peer").unlink(missing_ok=True)

    def keep(self, layers: Sequence[bytes]) -> None:
        """The site has trained this model; nobody else may see it before it is exchanged."""
        _write(self._path("trained"), pack(json.dumps({"round": self.round}).encode(), *layers))

    def trained(self) -> list[bytes]:
        """The model that the site trained in this round. Raises `RefusedReply` when it trained none."""
        head, layers = self._read("trained")
        if head.get("round") != self.round:
            raise RefusedReply("this site has trained no model in this round")
        return layers

    def _handled(self, peer: Peer, request: bytes, run: str, when: str) -> bytes:
        answer = peer.handle(request)
        head = {"round": self.round, "run": run, "when": when}
        _write(self._path("peer"), pack(json.dumps(head).encode(), snapshot(peer)))
        return answer

    def _kept(self, run: str | None) -> tuple[Peer, str]:
        head, data = self._read("peer")
        if head.get("round") != self.round or run not in (None, head.get("run")):
            raise RefusedReply("this site is in no such exchange")
        peer = self._peer()
        restore(peer, data[0])
        return peer, str(head["when"])

    def _peer(self) -> Peer:
        return Peer(self.number, self.identity.private, self.identity.known, self.rules, choices=self._choices)

    def _choices(self, terms: Terms) -> Choices:
        if not self.identity.rehearsed:
            return secret_choices
        return stream_choices(lambda purpose, peer: stream(self.seed, purpose, round=self.round, client=peer))

    def _read(self, kind: str) -> tuple[dict[str, object], list[bytes]]:
        """What a file of this site holds; nothing when there is none, or what is there cannot be read."""
        try:
            first, *parts = unpack(self._path(kind).read_bytes(), self.number)
            return dict(json.loads(first)), parts
        except (OSError, ValueError, Misbehaviour):
            return {}, []

    def _path(self, kind: str) -> Path:
        return self.folder / f"site-{self.number:06d}.{kind}"


def begins(request: bytes) -> bool:
    """Whether a request begins an exchange, and not another attempt at one. Raises `RefusedReply` when it is none."""
    terms = _decoded(request).terms
    return terms is not None and terms.attempt == 0


def _decoded(request: bytes) -> Request:
    try:
        return Request.decode(request)
    except Misbehaviour as fault:
        raise RefusedReply(str(fault)) from None


def _write(path: Path, content: bytes) -> None:
    """A file for its owner's eyes alone from its first byte on, complete or not there. Raises `CheckpointError`."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror or error})") from None
