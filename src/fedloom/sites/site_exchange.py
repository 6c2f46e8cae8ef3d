"""A site's part in exchanges of layers with the other sites (docs/secure.md)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.common.errors import InvalidValue, RefusedReply
from fedloom.common.round import Round
from fedloom.parts.building import build
from fedloom.parts.course import client_pipeline
from fedloom.parts.pipeline import Pipeline
from fedloom.parts.secure_recombination import Secure
from fedloom.secure import from_layers, to_layers
from fedloom.secure.wire import OCCASIONS
from fedloom.sites.messages import Words
from fedloom.sites.node_config import Identity
from fedloom.sites.secure_round import exchanges_layers, layer_exchange
from fedloom.sites.site_peer import SitePeer
from fedloom.sites.site_request import require_sound
from fedloom.sites.site_state import SiteState
from fedloom.task import Task


@dataclass(frozen=True)
class RoundExchange:
    """The exchange of layers in a round in which a site trains.

    Attributes:
        method: The part that exchanges layers.
        peer: The site among its peers.
    """

    method: Secure
    peer: SitePeer

    def received(self, task: Task, inbox: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inbox with the model after the exchange before training. Another site may have
        sent a layer with numbers that are not finite. The server's weights replace these
        numbers.

        Args:
            task: The site's task, with the layout of the model.
            inbox: Tensors that the server sent, one row each.

        Returns:
            A copy of the inbox, in which `model` is `[1, P]` and finite.
        """
        exchanged, as_sent = (
            from_layers(layers, self.method.units(), task.initial)
            for layers in self.peer.exchanged()
        )
        model = torch.where(exchanged.isfinite(), exchanged, as_sent).unsqueeze(0)
        received = {**inbox, "model": model}
        require_sound(task, received)
        return received

    def finish(self, tensors: dict[str, Tensor]) -> None:
        """End the exchange before training. Keep the trained model back if it is exchanged too."""
        self.peer.leave()
        if self.method.exchanges("before_upload"):
            self.peer.keep(to_layers(tensors.pop("model"), self.method.units()))


class SiteExchange:
    """Answers the steps of exchanges at one site."""

    def __init__(self, state: SiteState) -> None:
        self.state = state

    def require_identity(self) -> None:
        """Raise `InvalidValue` if the method exchanges layers and this site has no key."""
        if exchanges_layers(build(self.state.settings.algorithm)):
            self._identity()

    def of_round(self, pipeline: Pipeline, words: Words, round: Round) -> RoundExchange | None:
        """Return the exchange of a round in which the site trains, or None.

        The site's configuration decides about the exchange, so the server cannot request an
        unmixed model.

        Args:
            pipeline: The site's pipeline of the round.
            words: Words of the server's train message, with the terms of the exchange.
            round: The round.

        Returns:
            None if no part of the pipeline exchanges layers.
        """
        method = layer_exchange(pipeline)
        return None if method is None else RoundExchange(method, self._peer(words, round))

    def answer(
        self, words: Words, round: Round, client: int, inbox: Mapping[str, Tensor], parcel: bytes
    ) -> bytes:
        """Answer a step of an exchange, or return the envelopes for the server after it.

        Args:
            words: The step of the exchange.
            round: The round.
            client: Number of the client in it.
            inbox: Tensors that the server sent, one row each.
            parcel: The letters of the step.

        Returns:
            The bytes of the peer's message, for the parcel of the reply.

        Raises:
            RefusedReply: The message is not valid in this exchange.
        """
        run = str(words.get("run"))
        when = str(words.get("when"))
        peer = self._peer(words, round)
        if words.get("upload") is True:
            return peer.upload(run)
        pipeline = client_pipeline(build(self.state.settings.algorithm), round.number, {})
        method = layer_exchange(pipeline)
        if method is None or when not in OCCASIONS or not method.exchanges(when):
            raise RefusedReply(f"no exchange takes place {when:.40} in round {round.number}")

        def layers() -> list[bytes]:
            if when == "before_upload":
                return peer.trained()
            return self._sent(self.state.task(words, client), round, inbox)

        return peer.answer(parcel, run, when, method.rules(), layers)

    def _sent(self, task: Task, round: Round, inbox: Mapping[str, Tensor]) -> list[bytes]:
        """Return the layers of the server's model, for an exchange before training."""
        require_sound(task, inbox)
        method = layer_exchange(self.state.pipeline(task, round, inbox))
        model = inbox.get("model")
        if method is None or model is None or model.shape != (1, task.layout.size):
            raise RefusedReply("the server sent no whole model to exchange")
        return to_layers(model[0], method.units())

    def _identity(self) -> Identity:
        """Return the keys by which this site proves its identity to the others."""
        settings = self.state.settings
        config = self.state.config
        if config.identity is None:
            example = "identity='keys/site-0/site.key' peers='keys/site-0/peers.pub'"
            raise InvalidValue(
                f"site {config.number}: {settings.algorithm} needs the keys of the sites: set its "
                f"key and the public keys of all sites in the node configuration ({example})"
            )
        return config.identity

    def _peer(self, words: Words, round: Round) -> SitePeer:
        config = self.state.config
        folder = config.folder(words.get("federation"))
        return SitePeer(folder, config, self._identity(), round)
