"""The server's part in a round of secure recombination over Flower: it carries the sites' parcels, and opens what they upload.

A site gives its trained model to nobody: it is asked to train, then to exchange, and what it uploads in the end are envelopes
that hold layers of any of the sites. What is carried is one message to each site and one back for each step of an exchange.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import flwr.app

from fedloom.algorithm import Algorithm, Message
from fedloom.algorithms.secure import Secure
from fedloom.engines.base import ClientTask, Fault, Reply, inspect_reply
from fedloom.engines.flower.mailbox import Kind
from fedloom.engines.flower.messages import Words, parcel_of, words_of
from fedloom.errors import FedloomError
from fedloom.round import Round
from fedloom.secure import (
    SERVER,
    ExchangeAborted,
    ProtocolViolation,
    ServerKey,
    Terms,
    from_layers,
    layer_sizes,
    run_exchange,
)
from fedloom.secure.envelopes import OVERHEAD
from fedloom.secure.wire import Request, unpack
from fedloom.task import Task

FEWEST = 2
"""Peers that an exchange must have: a model that was exchanged with nobody has its owner's name on it."""

_logger = logging.getLogger("flwr.fedloom")


class Correspondent(Protocol):
    """What an exchange asks of the engine that sends its messages."""

    task: Task
    federation: str
    numbers: Sequence[int]

    def answers(
        self,
        kind: Kind,
        round: Round,
        client_tasks: Sequence[ClientTask],
        words: Callable[[ClientTask], Words],
        parcels: Mapping[int, bytes] | None = None,
    ) -> Iterator[tuple[ClientTask, flwr.app.Message | str]]:
        """Every site's message as it comes, or why there is none."""

    def trained(
        self,
        algorithm: Algorithm,
        round: Round,
        client_tasks: Sequence[ClientTask],
        exchanged: bool = False,
        withheld: bool = False,
    ) -> Iterator[Reply | Fault]:
        """What the sites that train answer."""

    def forget(self, client: int) -> None:
        """What this client did in this round is not taken."""


class Courier:
    """Carries what peers send each other in one exchange, as messages between the server and the sites (a `Transport`).

    Peers have their sites' numbers. A site that does not answer once, or not as agreed, is asked no more in this exchange:
    `lost` says why. `carried` counts the bytes that sites gave it.
    """

    def __init__(self, engine: Correspondent, round: Round, client_tasks: Sequence[ClientTask], terms: Terms) -> None:
        self.engine, self.round, self.terms = engine, round, terms
        self.client_tasks = {engine.numbers[client_task.client]: client_task for client_task in client_tasks}
        self.lost: dict[int, str] = {}
        self.carried = 0

    def carry(self, requests: Mapping[int, bytes]) -> dict[int, bytes]:
        answers = self._ask(requests, {})
        self.carried += sum(map(len, answers.values()))
        return answers

    def uploads(self, peers: Sequence[int]) -> dict[int, list[bytes]]:
        """The sealed layers of every peer that hands them over after the exchange."""
        found = {}
        for peer, parcel in self._ask(dict.fromkeys(peers, b""), {"upload": True}).items():
            try:
                found[peer] = unpack(parcel, peer)
            except ProtocolViolation as fault:
                self.lost[peer] = str(fault)
        return found

    def _ask(self, parcels: Mapping[int, bytes], words: Words) -> dict[int, bytes]:
        asked = {peer: parcel for peer, parcel in parcels.items() if peer not in self.lost}
        client_tasks = [
            replace(self.client_tasks[peer], inbox=self._inbox(peer, parcel)) for peer, parcel in asked.items()
        ]
        told = {"run": self.terms.run, "when": self.terms.when, **words}
        by_client = {self.client_tasks[peer].client: parcel for peer, parcel in asked.items()}
        answers = {}
        for client_task, answer in self.engine.answers("exchange", self.round, client_tasks, lambda _: told, by_client):
            peer = self.engine.numbers[client_task.client]
            try:
                if isinstance(answer, str):
                    raise FedloomError(answer)
                words_of(answer)
                answers[peer] = parcel_of(answer)
            except FedloomError as error:
                self.lost[peer] = str(error)
        return answers

    def _inbox(self, peer: int, parcel: bytes) -> Message:
        """The model that a site takes into an exchange before training goes with the first request."""
        terms = Request.decode(parcel).terms if parcel else None
        first = terms is not None and (terms.when, terms.attempt) == ("before_train", 0)
        return {"model": self.client_tasks[peer].inbox["model"]} if first else {}


class SecureRound:
    """One round in which sites exchange layers, as `method`, some part of `algorithm`, has them do."""

    def __init__(self, engine: Correspondent, method: Secure, algorithm: Algorithm, round: Round) -> None:
        self.engine, self.method, self.algorithm, self.round = engine, method, algorithm, round

    def train(self, client_tasks: Sequence[ClientTask]) -> Iterator[Reply | Fault]:
        """Exchange, train, exchange again; what the sites then upload. Whoever is lost in an exchange sits out the round."""
        uploading = [client_task for client_task in client_tasks if client_task.slot is not None]
        rest = [client_task for client_task in client_tasks if client_task.slot is None]
        exchanged = self.method.exchanges("before_train") and _several_models(uploading)
        if exchanged:
            uploading, faults = self._exchange_models(uploading)
            yield from faults
            uploading = [
                replace(client_task, inbox={name: rows for name, rows in client_task.inbox.items() if name != "model"})
                for client_task in uploading
            ]
        withheld = self.method.exchanges("before_upload")
        trained: list[Reply] = []
        for result in self.engine.trained(self.algorithm, self.round, [*uploading, *rest], exchanged, withheld):
            if withheld and isinstance(result, Reply) and result.client_task.slot is not None:
                trained.append(result)
            else:
                yield result
        if withheld:
            yield from self._exchange_uploads(sorted(trained, key=lambda reply: reply.client_task.slot or 0))

    def _exchange_models(self, client_tasks: Sequence[ClientTask]) -> tuple[list[ClientTask], list[Fault]]:
        """The orders of the sites that have exchanged the models they were sent, and why the others have not."""
        courier, _ = self._courier("before_train", client_tasks)
        done, faults = self._conducted(courier, client_tasks)
        peers = () if done is None else done.peers
        return [client_task for client_task in client_tasks if self._number(client_task) in peers], faults

    def _exchange_uploads(self, replies: Sequence[Reply]) -> Iterator[Reply | Fault]:
        """The replies with the models that the sites hold after the exchange.

        Where one is missing at the end, layers of the others are in it: all of them take back their own and begin anew without
        it. Nothing of a round is used in which a layer cannot be opened or was uploaded twice.
        """
        left = {self._number(reply.client_task): reply for reply in replies}
        while left:
            client_tasks = [reply.client_task for reply in left.values()]
            courier, key = self._courier("before_upload", client_tasks)
            terms, faults = self._conducted(courier, client_tasks)
            yield from self._given_up(faults)
            if terms is None:
                return
            left = {peer: left[peer] for peer in terms.peers}
            uploads = courier.uploads(terms.peers)
            missing = [
                Fault(left.pop(peer).client_task, courier.lost[peer]) for peer in terms.peers if peer not in uploads
            ]
            if missing:
                yield from self._given_up(missing)
                continue
            yield from self._opened(left, uploads, key, terms)
            return

    def _opened(
        self, replies: Mapping[int, Reply], uploads: Mapping[int, list[bytes]], key: ServerKey, terms: Terms
    ) -> Iterator[Reply | Fault]:
        units, like = self.method.units(), self.engine.task.initial
        sizes = [size + OVERHEAD for size in layer_sizes(units, like)]
        try:
            for peer, layers in uploads.items():
                if [len(layer) for layer in layers] != sizes:
                    raise ProtocolViolation("invalid", peer, "an upload of other sizes")
            models = key.open_models(uploads, terms)
        except ProtocolViolation as fault:
            yield from self._given_up([Fault(reply.client_task, str(fault)) for reply in replies.values()])
            return
        for peer, reply in replies.items():
            row = from_layers(models[peer], units, like)
            try:
                inspect_reply({"model": row}, {"model": tuple(like.shape)})
            except FedloomError as error:
                found = Fault(reply.client_task, f"{error}; whose layer that was, the exchange hides", error)
                yield from self._given_up([found])
                continue
            yield replace(reply, tensors={**reply.tensors, "model": row})

    def _courier(self, when: str, client_tasks: Sequence[ClientTask]) -> tuple[Courier, ServerKey]:
        """What an exchange needs: its name, new in each, so that the peers' keys are; the server's key, likewise."""
        key = ServerKey()
        name = f"{self.engine.federation}/{self.round.number}/{when}/{secrets.token_hex(8)}"
        terms = Terms(name, self.round.number, when, 0, tuple(map(self._number, client_tasks)), key.public)
        return Courier(self.engine, self.round, client_tasks, terms), key

    def _conducted(self, courier: Courier, client_tasks: Sequence[ClientTask]) -> tuple[Terms | None, list[Fault]]:
        """The last terms of an exchange, None where there was none; and why some of the sites took no part to the end."""
        try:
            outcome = run_exchange(courier, courier.terms, self.method.rules(), fewest=FEWEST)
            terms, faults, abort = outcome.terms, outcome.faults, ""
        except ExchangeAborted as error:
            terms, faults, abort = None, error.faults, str(error)
        self.method.carried(courier.terms.when, courier.carried)
        named: dict[int, str] = {}
        for fault in faults:
            _logger.warning("round %d: exchange %s: %s", self.round.number, courier.terms.when, fault)
            if fault.peer != SERVER:
                reason = courier.lost.get(fault.peer) if fault.kind == "left" else None
                named.setdefault(fault.peer, f"{fault}: {reason}" if reason else str(fault))
        staying = () if terms is None else terms.peers
        given = [(client_task, self._number(client_task)) for client_task in client_tasks]
        return terms, [Fault(client_task, named.get(n, abort)) for client_task, n in given if n not in staying]

    def _given_up(self, faults: Sequence[Fault]) -> Sequence[Fault]:
        """Clients whose work of this round is not taken."""
        for fault in faults:
            self.engine.forget(fault.client_task.client)
        return faults

    def _number(self, client_task: ClientTask) -> int:
        return self.engine.numbers[client_task.client]


def _several_models(client_tasks: Sequence[ClientTask]) -> bool:
    """Whether clients are sent models of their own, and not all the same one."""
    return len({client_task.inbox["model"].data_ptr() for client_task in client_tasks}) > 1
