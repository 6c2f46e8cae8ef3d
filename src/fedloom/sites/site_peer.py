"""Site in secure exchanges, whose state lies in files between messages that only the site can read.

site-<number>.peer      the peer in the middle of an exchange: the keys that it made for it, the model it offered, the layers it
                        holds. It is gone when the site has trained on the exchanged model, or has uploaded
site-<number>.trained   the layers of the site's own trained model, to be exchanged; the next round writes over it
site-<number>.uploaded  digests of the trained models that it has uploaded, each of which it uploads once
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedloom.errors import RefusedReply
from fedloom.secure import Choices, Peer, ProtocolViolation, Rules, Terms, secret_choices, stream_choices
from fedloom.secure.wire import Request, pack, pack_numbers, unpack
from fedloom.sites.messages import pack as pack_message
from fedloom.sites.node_config import Identity, NodeConfig, read_content
from fedloom.state.files import make_folder, remove, remove_unfinished, write_bytes

_DIGEST = 32


class SitePeer:
    """Peer of the site that `config` describes, known by `identity`; its files lie in `folder`."""

    def __init__(self, folder: Path, config: NodeConfig, identity: Identity) -> None:
        self.folder, self.config, self.number, self.identity = folder, config, config.number, identity

    def begin(
        self, request: bytes, run: str, when: str, round: int, seed: int, rules: Rules, layers: Sequence[bytes]
    ) -> bytes:
        """Enter the exchange `run` with these layers. Raises `RefusedReply` unless the request is its first."""
        terms = _terms(request)
        if terms is None or (terms.run, terms.when, terms.round) != (run, when, round):
            raise RefusedReply("the terms are not those of this exchange")
        peer = self._peer(seed, rules)
        peer.offer(layers)
        return self._handled(peer, seed, request)

    def go_on(self, request: bytes, run: str) -> bytes:
        """Answer the next request of the exchange that the site is in. Raises `RefusedReply` when it is in none, or another."""
        peer, seed = self._kept(run)
        terms, agreed = _terms(request), peer.terms
        if terms is not None and (terms.run, terms.when, terms.round) != (agreed.run, agreed.when, agreed.round):
            raise RefusedReply("this site is in no such exchange")
        return self._handled(peer, seed, request)

    def exchanged(self, round: int) -> tuple[list[bytes], list[bytes]]:
        """Return the layers after the exchange before training, and those sent. Raises `RefusedReply` unless it has ended."""
        peer, _ = self._kept()
        if not peer.committed or (peer.terms.when, peer.terms.round) != ("before_train", round):
            raise RefusedReply("the exchange before_train did not come to its end here")
        return peer.layers, peer.offered

    def upload(self, run: str) -> list[bytes]:
        """Return the envelopes for the server after the exchange `run` before upload, once for each trained model."""
        peer, _ = self._kept(run)
        layers = peer.upload()
        self._write("uploaded", b"".join(sorted(peer.uploaded)))
        self.leave()
        return layers

    def leave(self) -> None:
        """Forget the keys and layers of an exchange that is over."""
        remove(self._path("peer"))

    def keep(self, layers: Sequence[bytes], round: int) -> None:
        """Keep a model that the site has trained, which nobody else may see before it is exchanged."""
        self._write("trained", pack(pack_numbers([round]), *layers))

    def trained(self, round: int) -> list[bytes]:
        """Return the model that the site trained in this round. Raises `RefusedReply` when it trained none."""
        trained, *layers = self._read("trained") or [b""]
        if trained != pack_numbers([round]):
            raise RefusedReply("this site has trained no model in this round")
        return layers

    def _handled(self, peer: Peer, seed: int, request: bytes) -> bytes:
        answer = peer.handle(request)
        self._write("peer", pack(pack_numbers([seed]), peer.snapshot()))
        return answer

    def _kept(self, run: str | None = None) -> tuple[Peer, int]:
        """Return the peer in the exchange that the site is in, which must be `run` unless that is None, and the run's seed."""
        fields = self._read("peer")
        if len(fields) != 2 or not fields[1]:
            raise RefusedReply("this site is in no such exchange")
        seed = int.from_bytes(fields[0])
        peer = self._peer(seed, Rules())
        try:
            peer.restore(fields[1])
        except (ValueError, LookupError, TypeError, ProtocolViolation):
            raise RefusedReply("this site's file of the exchange is damaged") from None
        if run not in (None, peer.terms.run):
            raise RefusedReply("this site is in no such exchange")
        return peer, seed

    def _peer(self, seed: int, rules: Rules) -> Peer:
        def choices(terms: Terms) -> Choices:
            if not self.config.rehearsed:
                return secret_choices
            from fedloom.randomness import stream

            return stream_choices(lambda purpose, peer: stream(seed, purpose, round=terms.round, client=peer))

        identity, fewest = self.identity, self.config.fewest_peers
        peer = Peer(self.number, identity.private, identity.public_keys, rules, fewest=fewest, choices=choices)
        path = self._path("uploaded")
        digests = read_content(path) if path.exists() else b""
        peer.uploaded = {digests[start : start + _DIGEST] for start in range(0, len(digests), _DIGEST)}
        return peer

    def _read(self, kind: str) -> list[bytes]:
        """Return the fields of a file of this site; nothing when it is missing or cannot be read."""
        try:
            return unpack(self._path(kind).read_bytes(), self.number)
        except (OSError, ProtocolViolation):
            return []

    def _write(self, kind: str, content: bytes) -> None:
        make_folder(self.folder, mode=0o700)
        remove_unfinished(self.folder)
        write_bytes(self._path(kind), content, mode=0o600, durable=kind == "uploaded")

    def _path(self, kind: str) -> Path:
        return self.folder / f"site-{self.number:06d}.{kind}"


def go_on(node_config: Mapping[str, Any], words: Mapping[str, Any], parcel: bytes) -> RecordDict | None:
    """Answer the next step of the exchange that this site is in, or hand over its upload; None where it is to enter one.

    No model, method or data are needed here, and so none are loaded: there are 2 r + 2 such messages in an exchange, and each is
    a new process. Raises `RefusedReply` when the site is in no such exchange.
    """
    config, uploads = NodeConfig.read(node_config), words.get("upload") is True
    if config.identity is None or words.get("site") != config.number:
        return None
    terms = None if uploads else _terms(parcel)
    if terms is not None and terms.attempt == 0:  # it begins an exchange, and is not another attempt at one
        return None
    peer, run = SitePeer(config.folder(words.get("federation")), config, config.identity), str(words.get("run"))
    answer = pack(*peer.upload(run)) if uploads else peer.go_on(parcel, run)
    return pack_message({"site": config.number}, parcel=answer)


def _terms(request: bytes) -> Terms | None:
    """Return the terms in a request, None where it has none. Raises `RefusedReply` when it cannot be read."""
    try:
        return Request.decode(request).terms
    except ProtocolViolation as fault:
        raise RefusedReply(str(fault)) from None
