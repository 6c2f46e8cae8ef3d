"""Site in secure exchanges, whose state lies in files between messages that only the site can read
(docs/secure.md).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedloom.errors import RefusedReply
from fedloom.round import Round
from fedloom.secure import Peer, ProtocolViolation, Rules, secret_choices, stream_choices
from fedloom.secure.wire import PeerMessage, pack, pack_numbers, unpack
from fedloom.sites.node_config import Identity, NodeConfig, read_content
from fedloom.state.files import make_folder, remove, remove_unfinished, write_bytes


class SitePeer:
    """Peer of the site that `config` describes, known by `identity`, in a round; its files lie in
    `folder`.
    """

    def __init__(self, folder: Path, config: NodeConfig, identity: Identity, round: Round) -> None:
        self.folder, self.config, self.identity, self.round = folder, config, identity, round

    def answer(
        self,
        request: bytes,
        run: str,
        when: str,
        rules: Rules,
        layers: Callable[[], Sequence[bytes]],
    ) -> bytes:
        """Answer a request of the exchange `run`, which its first begins with these layers. Raises
        `RefusedReply` for others.
        """
        try:
            terms = PeerMessage.decode(request).terms
        except ProtocolViolation as fault:
            raise RefusedReply(str(fault)) from None
        if terms is not None and (terms.run, terms.when, terms.round) != (
            run,
            when,
            self.round.number,
        ):
            raise RefusedReply("the terms are not those of this exchange")
        if terms is not None and terms.attempt == 0:
            peer = self._peer(rules)
            peer.offer(layers())
        else:
            peer = self._kept(when, run)
        answer = peer.handle(request)
        self._write("peer", peer.snapshot())
        return answer

    def exchanged(self) -> tuple[list[bytes], list[bytes]]:
        """Return the layers after the exchange before training, and those sent. Raises
        `RefusedReply` unless it has ended.
        """
        peer = self._kept("before_train")
        if not peer.committed:
            raise RefusedReply("the exchange before_train did not come to its end here")
        return peer.layers, peer.offered

    def upload(self, run: str) -> bytes:
        """Return the envelopes for the server after the exchange `run` before upload, once for each
        trained model.
        """
        peer = self._kept("before_upload", run)
        layers = peer.upload()
        self._write("uploaded", pack(*peer.uploaded))
        self.leave()
        return pack(*layers)

    def leave(self) -> None:
        """Forget the keys and layers of an exchange that is over."""
        remove(self._path("peer"))

    def keep(self, layers: Sequence[bytes]) -> None:
        """Keep a model that the site has trained, which nobody else may see before it is exchanged."""
        self._write("trained", pack(pack_numbers([self.round.number]), *layers))

    def trained(self) -> list[bytes]:
        """Return the model that the site trained in this round. Raises `RefusedReply` when it
        trained none.
        """
        trained, *layers = self._read("trained") or [b""]
        if trained != pack_numbers([self.round.number]):
            raise RefusedReply("this site has trained no model in this round")
        return layers

    def _kept(self, when: str, run: str | None = None) -> Peer:
        """Return the peer in the exchange of this round that the site is in, which must be `run`
        unless that is None.
        """
        peer = self._peer(Rules())
        try:
            peer.restore(self._path("peer").read_bytes())
            if (peer.terms.when, peer.terms.round) == (when, self.round.number) and run in (
                None,
                peer.terms.run,
            ):
                return peer
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ProtocolViolation):
            pass
        raise RefusedReply("this site is in no such exchange")

    def _peer(self, rules: Rules) -> Peer:
        choices = stream_choices(self.round.stream) if self.config.rehearsed else secret_choices
        number, (private, public_keys), fewest = (
            self.config.number,
            self.identity,
            self.config.fewest_peers,
        )
        peer = Peer(
            number, private, public_keys, rules, fewest=fewest, choices=lambda terms: choices
        )
        peer.uploaded = self._read("uploaded")
        return peer

    def _read(self, kind: str) -> list[bytes]:
        """Return the fields of a file of this site, none where there is no file. Raises
        `FedloomError` for a damaged one.
        """
        path = self._path(kind)
        return unpack(read_content(path), self.config.number) if path.exists() else []

    def _write(self, kind: str, content: bytes) -> None:
        make_folder(self.folder, mode=0o700)
        remove_unfinished(self.folder)
        write_bytes(self._path(kind), content, mode=0o600, durable=kind == "uploaded")

    def _path(self, kind: str) -> Path:
        return self.folder / f"site-{self.config.number:06d}.{kind}"
