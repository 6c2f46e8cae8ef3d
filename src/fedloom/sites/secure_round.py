"""Server's half of a round of secure recombination over Flower: carries the sites' parcels, and opens what they upload.

A site gives its trained model to nobody: it is asked to train, then to exchange, and in the end it uploads envelopes that hold
layers of any of the sites. Each step of an exchange is one message to each site and one back.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.algorithms.secure_recombination import Secure
from fedloom.errors import FedloomError, InvalidValue
from fedloom.round import Round
from fedloom.rounds.engine import ClientTask, Fault, Reply
from fedloom.secure import ExchangeAborted, ProtocolViolation, ServerKey, Terms, run_exchange
from fedloom.secure.layers import from_layers, layer_sizes, to_layers
from fedloom.secure.wire import Request, unpack
from fedloom.sites.known_sites import SiteMessenger
from fedloom.sites.messages import PARCEL, Words, parcel_of, words_of
from fedloom.task import Task

FEWEST = 2
"""Peers that the server asks of an exchange: a model that was exchanged with nobody is known to be its owner's. Sites ask for
more (`fewest-peers`)."""

_logger = logging.getLogger("flwr.fedloom")


def layer_exchange(algorithm: Algorithm, number: int) -> Secure | None:
    """Return the exchange of layers that clients of `algorithm` make in round `number`, if any."""
    return next((method for method in algorithm.active(number) if isinstance(method, Secure)), None)


def exchanges_layers(algorithm: Algorithm) -> bool:
    """Return True if clients of `algorithm` exchange layers in any round."""
    return any(isinstance(method, Secure) for method in algorithm.nested())


def require_supported(algorithm: Algorithm) -> None:
    """Raise `InvalidValue` for a method whose sites cannot know by themselves in which rounds to exchange their uploads."""
    if not algorithm.scheduled and exchanges_layers(algorithm):
        raise InvalidValue(f"{algorithm}: sites must know when secure(...) leads: give a last round in place of auto")


class Courier:
    """Carries the letters of one exchange as messages between the server and the sites (a `Transport`).

    Peers have their sites' numbers. A site that does not answer once, or not as agreed, is `lost`, for a reason: it is asked no
    more in this exchange. `reached` are the sites to which a message went out, `carried` the bytes that sites have handed in.
    """

    def __init__(
        self, messenger: SiteMessenger, round: Round, client_tasks: Sequence[ClientTask], terms: Terms
    ) -> None:
        self.messenger, self.round, self.terms = messenger, round, terms
        self.client_tasks = {messenger.numbers[client_task.client]: client_task for client_task in client_tasks}
        self.lost: dict[int, str] = {}
        self.reached: set[int] = set()
        self.carried = 0

    def carry(self, requests: Mapping[int, bytes]) -> dict[int, bytes]:
        answers = self._ask(requests, {})
        self.carried += sum(map(len, answers.values()))
        return answers

    def uploads(self, peers: Sequence[int]) -> dict[int, list[bytes]]:
        """Return the sealed layers of every peer that hands them over after the exchange."""
        layers = {}
        for peer, parcel in self._ask(dict.fromkeys(peers, b""), {"upload": True}).items():
            try:
                layers[peer] = unpack(parcel, peer, len(self.terms.sizes))
            except ProtocolViolation as fault:
                self.lost[peer] = str(fault)
        return layers

    def _ask(self, parcels: Mapping[int, bytes], words: Words) -> dict[int, bytes]:
        client_tasks, by_client = [], {}
        for peer, parcel in parcels.items():
            if peer not in self.lost:
                task = self.client_tasks[peer]
                inbox = {"model": task.inbox["model"]} if _brings_model(parcel) else {}
                client_tasks.append(replace(task, inbox=inbox))
                by_client[task.client] = parcel
        words = {"run": self.terms.run, "when": self.terms.when, **words}
        answers = {}
        for _, task, answer in self.messenger.answers("exchange", self.round, client_tasks, lambda _: words, by_client):
            peer = self.messenger.numbers[task.client]
            try:
                if not isinstance(answer, Fault) or answer.sent:
                    self.reached.add(peer)
                if isinstance(answer, Fault):
                    raise FedloomError(answer.reason)
                words_of(answer, PARCEL)
                answers[peer] = parcel_of(answer)
            except FedloomError as error:
                self.lost[peer] = str(error)
        return answers


def _brings_model(parcel: bytes) -> bool:
    """Return True for the request that begins an exchange before training."""
    terms = Request.decode(parcel).terms if parcel else None
    return terms is not None and (terms.when, terms.attempt) == ("before_train", 0)


@dataclass(frozen=True)
class SecureRound:
    """One round in which sites exchange layers, as `method` has them do. `train_at_sites` lets them train, where the models are
    exchanged before or withheld; `forget` is told of clients whose work of this round is not taken."""

    messenger: SiteMessenger
    task: Task
    method: Secure
    round: Round
    train_at_sites: Callable[[Sequence[ClientTask], bool, bool], Iterator[Reply | Fault]]
    forget: Callable[[int], None]

    def train(self, client_tasks: Sequence[ClientTask]) -> Iterator[Reply | Fault]:
        """Exchange, train, exchange again; yield what sites then upload. One that an exchange loses sits out the round."""
        uploading = [client_task for client_task in client_tasks if client_task.slot is not None]
        idle = [client_task for client_task in client_tasks if client_task.slot is None]
        sent = {task.client: task.inbox["model"][0] for task in uploading}
        several = len({task.inbox["model"].data_ptr() for task in uploading}) > 1  # else there is nothing to exchange
        exchanged = several and self.method.exchanges("before_train")
        if exchanged:
            _, _, terms, faults = self._exchange("before_train", uploading)
            yield from faults
            peers = () if terms is None else terms.peers
            uploading = [
                replace(task, inbox={name: rows for name, rows in task.inbox.items() if name != "model"})
                for task in uploading
                if self._number(task) in peers
            ]
        withheld = self.method.exchanges("before_upload")
        trained: list[Reply] = []
        for result in self.train_at_sites([*uploading, *idle], exchanged, withheld):
            if withheld and isinstance(result, Reply) and result.client_task.slot is not None:
                trained.append(result)
            else:
                yield result
        if trained:
            yield from self._uploads(sorted(trained, key=lambda reply: reply.client_task.slot or 0), sent)

    def _uploads(self, replies: Sequence[Reply], sent: Mapping[int, Tensor]) -> Iterator[Reply | Fault]:
        """Yield the replies with the models that the sites hold after the exchange.

        There is one exchange before upload, whatever becomes of it: from a second one among fewer sites the server would learn
        whose layers were missing. So the layers that a site holds are lost when it does not upload, as in a simulation those
        of a client that drops out after the exchange before training. A layer that cannot be used, whoever spoilt it, is
        replaced by that of the model that the server had sent.
        """
        courier, key, terms, faults = self._exchange("before_upload", [reply.client_task for reply in replies])
        yield from map(self._given_up, faults)
        if terms is None:
            return
        models, spoilt = key.open_models(courier.uploads(terms.peers), terms)
        for violation in spoilt:
            _logger.warning("round %d: %s", self.round.number, violation)
            courier.lost.setdefault(violation.peer, str(violation))
        for reply in replies:
            number = self._number(reply.client_task)
            if number in models:
                row = self._row(models[number], sent[reply.client_task.client])
                yield replace(reply, tensors={**reply.tensors, "model": row})
            elif number in terms.peers:
                yield self._given_up(Fault(reply.client_task, courier.lost[number]))

    def _row(self, layers: Sequence[bytes | None], sent: Tensor) -> Tensor:
        """Return the model of these layers; what is missing or not finite in it is as it was sent."""
        units, like = self.method.units(), sent.to(self.task.initial)
        fallbacks = to_layers(like, units)
        filled = [fallback if layer is None else layer for layer, fallback in zip(layers, fallbacks, strict=True)]
        row = from_layers(filled, units, like)
        return torch.where(row.isfinite(), row, like)

    def _exchange(
        self, when: str, client_tasks: Sequence[ClientTask]
    ) -> tuple[Courier, ServerKey, Terms | None, list[Fault]]:
        """Run one exchange, with a new name and a new key of the server, so that the peers' keys are new. Return the courier, the
        key, the terms of the attempt that came to its end, if any, and a fault for each site that took no part to the end."""
        key, rules = ServerKey(), self.method.rules()
        name = f"{self.messenger.federation}/{self.round.number}/{when}/{secrets.token_hex(8)}"
        sizes = tuple(layer_sizes(self.method.units(), self.task.initial))
        peers = tuple(map(self._number, client_tasks))
        opening = Terms(name, self.round.number, when, 0, peers, key.public, rules, sizes)
        courier = Courier(self.messenger, self.round, client_tasks, opening)
        terms, abort = None, ""
        try:
            outcome = run_exchange(courier, opening, fewest=FEWEST)
            terms, faults = outcome.terms, outcome.faults
        except ExchangeAborted as error:
            faults, abort = error.faults, str(error)
        self.method.carried(when, courier.carried)
        reasons: dict[int, str] = {}
        for fault in faults:
            _logger.warning("round %d: exchange %s: %s", self.round.number, when, fault)
            reason = courier.lost.get(fault.peer) if fault.kind == "left" else None
            reasons.setdefault(fault.peer, f"{fault}: {reason}" if reason else str(fault))
        lost = [
            Fault(task, reasons.get(number, abort), sent=when == "before_upload" or number in courier.reached)
            for task, number in zip(client_tasks, peers, strict=True)
            if terms is None or number not in terms.peers
        ]
        return courier, key, terms, lost

    def _given_up(self, fault: Fault) -> Fault:
        """Forget a client's work of this round, and return its fault."""
        self.forget(fault.client_task.client)
        return fault

    def _number(self, client_task: ClientTask) -> int:
        return self.messenger.numbers[client_task.client]
