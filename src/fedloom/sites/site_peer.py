"""A site in secure exchanges (docs/secure.md).

Between messages, its state is in files that only the site can read.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from fedloom.common.errors import RefusedReply
from fedloom.common.round import Round
from fedloom.secure import Peer, ProtocolViolation, Rules, secret_choices, stream_choices
from fedloom.secure.wire import PeerMessage, pack, pack_numbers, unpack
from fedloom.sites.node_config import Identity, NodeConfig, read_content
from fedloom.state.files import make_folder, remove, remove_unfinished, write_bytes


class SitePeer:
    """Peer of a site in a round.

    Attributes:
        folder: Folder of its files.
        config: Configuration of the site.
        identity: Keys by which the peers recognise each other.
        round: The round.
    """

    def __init__(self, folder: Path, config: NodeConfig, identity: Identity, round: Round) -> None:
        self.folder = folder
        self.config = config
        self.identity = identity
        self.round = round

    def answer(
        self,
        request: bytes,
        run: str,
        when: str,
        rules: Rules,
        layers: Callable[[], Sequence[bytes]],
    ) -> bytes:
        """Answer a request of the exchange `run`.

        Args:
            request: The request.
            run: Name of the exchange.
            when: `before_train` or `before_upload`.
            rules: Rules of the exchange.
            layers: Returns the layers to exchange; called at the first request.

        Returns:
            The answer.

        Raises:
            RefusedReply: The request is not valid, or belongs to another exchange.
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
            raise RefusedReply("the terms belong to another exchange")
        if terms is not None and terms.attempt == 0:
            peer = self._peer(rules)
            peer.offer(layers())
        else:
            peer = self._current_peer(when, run)
        answer = peer.handle(request)
        self._write("peer", peer.snapshot())
        return answer

    def exchanged(self) -> tuple[list[bytes], list[bytes]]:
        """Return the layers after the exchange before training, and the layers that were sent.

        Returns:
            The bytes of each layer, `[U]`, after the exchange and as this site sent them.

        Raises:
            RefusedReply: The exchange has not ended.
        """
        peer = self._current_peer("before_train")
        if not peer.committed:
            raise RefusedReply("the exchange before_train has not ended at this site")
        return peer.layers, peer.offered

    def upload(self, run: str) -> bytes:
        """Return the envelopes for the server after the exchange `run` before upload.

        Each trained model is uploaded only once.
        """
        peer = self._current_peer("before_upload", run)
        layers = peer.upload()
        self._write("uploaded", pack(*peer.uploaded))
        self.leave()
        return pack(*layers)

    def leave(self) -> None:
        """Forget the keys and layers of an exchange that is over."""
        remove(self._path("peer"))

    def keep(self, layers: Sequence[bytes]) -> None:
        """Store the site's trained model, which no other party may see before it is exchanged."""
        self._write("trained", pack(pack_numbers([self.round.number]), *layers))

    def trained(self) -> list[bytes]:
        """Return the model that the site trained in this round.

        Raises:
            RefusedReply: It has not trained a model.
        """
        trained, *layers = self._read("trained") or [b""]
        if trained != pack_numbers([self.round.number]):
            raise RefusedReply("this site has not trained a model in this round")
        return layers

    def _current_peer(self, when: str, run: str | None = None) -> Peer:
        """Return the peer in the site's current exchange of this round.

        The exchange must be `run`, unless that is None.
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
        raise RefusedReply("this site does not take part in this exchange")

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
        """Return the fields of a file of this site; empty if the file does not exist.

        Raises:
            FedloomError: The file is damaged.
        """
        path = self._path(kind)
        return unpack(read_content(path), self.config.number) if path.exists() else []

    def _write(self, kind: str, content: bytes) -> None:
        make_folder(self.folder, mode=0o700)
        remove_unfinished(self.folder)
        write_bytes(self._path(kind), content, mode=0o600, durable=kind == "uploaded")

    def _path(self, kind: str) -> Path:
        return self.folder / f"site-{self.config.number:06d}.{kind}"
