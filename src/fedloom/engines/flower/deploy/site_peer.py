"""One site in secure exchanges: what it keeps from one message to the next, in files that only it can read.

site-<number>.peer     the peer in the middle of an exchange: the keys that it made for it, the model it offered, the layers it
                       holds. It is gone when the site has trained on what it was given, or has uploaded
site-<number>.trained  the layers of the site's own trained model, to be exchanged; the next round writes over it
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedloom.engines.flower.deploy.answer import Answer, federation_folder, memory_folder
from fedloom.engines.flower.deploy.node_config import Identity
from fedloom.errors import CheckpointError, RefusedReply
from fedloom.secure import Peer, ProtocolViolation, Rules, Terms, restore, secret_choices, snapshot, stream_choices
from fedloom.secure.draws import Choices
from fedloom.secure.wire import Request, pack, unpack
from fedloom.state.files import remove_unfinished, write_bytes


@dataclass(frozen=True)
class Entry:
    """The exchange that a site has entered: its name `run`, `when` it is, in which round of a run with which seed, its rules."""

    run: str
    when: str
    round: int
    seed: int
    rules: Rules


class SitePeer:
    """Site `number` as a peer; its files lie in `folder`."""

    def __init__(self, folder: Path, number: int, identity: Identity) -> None:
        self.folder, self.number, self.identity = folder, number, identity

    def begin(self, request: bytes, entry: Entry, layers: Sequence[bytes]) -> bytes:
        """Enter an exchange with these layers, and answer its first request. Raises `RefusedReply` when that is of another."""
        terms = _terms(request)
        if terms is None or not _is_of(terms, entry):
            raise RefusedReply("the terms are not those of this exchange")
        peer = self._peer(entry)
        peer.offer(layers)
        return self._handled(peer, entry, request)

    def go_on(self, request: bytes, run: str) -> bytes:
        """Answer the next request of the exchange that the site is in. Raises `RefusedReply` when it is in none, or another."""
        peer, entry = self._kept()
        terms = _terms(request)
        if run != entry.run or (terms is not None and not _is_of(terms, entry)):
            raise RefusedReply("this site is in no such exchange")
        return self._handled(peer, entry, request)

    def outcome(self, when: str, round: int | None = None, run: str | None = None) -> list[bytes]:
        """The layers that the site holds after an exchange. Raises `RefusedReply` unless that came to its end."""
        peer, entry = self._kept()
        if round not in (None, entry.round) or run not in (None, entry.run):
            raise RefusedReply("this site is in no such exchange")
        if not peer.committed or entry.when != when:
            raise RefusedReply(f"the exchange {when} did not come to its end here")
        return list(peer.layers)

    def leave(self) -> None:
        """The exchange is over: forget its keys and layers."""
        self._path("peer").unlink(missing_ok=True)

    def keep(self, layers: Sequence[bytes], round: int) -> None:
        """The site has trained this model; nobody else may see it before it is exchanged."""
        _write(self._path("trained"), pack(json.dumps({"round": round}).encode(), *layers))

    def trained(self, round: int) -> list[bytes]:
        """The model that the site trained in this round. Raises `RefusedReply` when it trained none."""
        head, layers = self._read("trained")
        if head.get("round") != round:
            raise RefusedReply("this site has trained no model in this round")
        return layers

    def _handled(self, peer: Peer, entry: Entry, request: bytes) -> bytes:
        answer = peer.handle(request)
        _write(self._path("peer"), pack(json.dumps(asdict(entry)).encode(), snapshot(peer)))
        return answer

    def _kept(self) -> tuple[Peer, Entry]:
        head, data = self._read("peer")
        if not head:
            raise RefusedReply("this site is in no such exchange")
        entry = Entry(**{**head, "rules": Rules(**head["rules"])})
        peer = self._peer(entry)
        restore(peer, data[0])
        return peer, entry

    def _peer(self, entry: Entry) -> Peer:
        def choices(terms: Terms) -> Choices:
            if not self.identity.rehearsed:
                return secret_choices
            from fedloom.randomness import stream

            return stream_choices(lambda purpose, peer: stream(entry.seed, purpose, round=entry.round, client=peer))

        return Peer(self.number, self.identity.private, self.identity.known, entry.rules, choices=choices)

    def _read(self, kind: str) -> tuple[dict[str, Any], list[bytes]]:
        """What a file of this site holds; nothing when there is none, or what is there cannot be read."""
        try:
            first, *parts = unpack(self._path(kind).read_bytes(), self.number)
            return dict(json.loads(first)), parts
        except (OSError, ValueError, ProtocolViolation):
            return {}, []

    def _path(self, kind: str) -> Path:
        return self.folder / f"site-{self.number:06d}.{kind}"


def go_on(node_config: Mapping[str, Any], words: Mapping[str, Any], parcel: bytes) -> Answer | None:
    """The next step of the exchange that this site is in, or what it hands over at its end; None where it is to enter one.

    Nothing of a model, a method or data is needed here, and so none of it is loaded: there are 2 r + 2 such messages in an
    exchange, and each is a new process. Raises `RefusedReply` when the site is in no such exchange.
    """
    number, uploads = node_config.get("partition-id"), words.get("upload") is True
    if type(number) is not int or words.get("site") != number or (not uploads and _begins(parcel)):
        return None
    identity = Identity.of(node_config, number)
    if identity is None:
        return None
    folder = federation_folder(memory_folder(node_config), str(words.get("federation")))
    peer = SitePeer(folder, number, identity)
    run, told = str(words.get("run")), {"site": number}
    if not uploads:
        return Answer(told, parcel=peer.go_on(parcel, run))
    layers = peer.outcome("before_upload", run=run)
    peer.leave()
    return Answer(told, parcel=pack(*layers))


def _begins(request: bytes) -> bool:
    """Whether a request begins an exchange, and not another attempt at one."""
    terms = _terms(request)
    return terms is not None and terms.attempt == 0


def _is_of(terms: Terms, entry: Entry) -> bool:
    return (terms.run, terms.when, terms.round) == (entry.run, entry.when, entry.round)


def _terms(request: bytes) -> Terms | None:
    """The terms in a request, where it has any. Raises `RefusedReply` when it cannot be read."""
    try:
        return Request.decode(request).terms
    except ProtocolViolation as fault:
        raise RefusedReply(str(fault)) from None


def _write(path: Path, content: bytes) -> None:
    """A file for its owner's eyes alone, complete or not there. Raises `CheckpointError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror or error})") from None
    remove_unfinished(path.parent)
    write_bytes(path, content, mode=0o600, durable=False)
