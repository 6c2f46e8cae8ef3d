"""Server half of a round of secure recombination over Flower.

It carries the sites' parcels, and opens the envelopes that they upload. A site sends its trained
model to no other party. The server requests it to train, then to exchange layers, and then to
upload envelopes with layers of any site.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.algorithm.method import Method, components
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.common.round import Round
from fedloom.parts.pipeline import Pipeline
from fedloom.parts.secure_recombination import Secure
from fedloom.parts.stages import stages_in
from fedloom.rounds.engine import Answer, Fault, Job
from fedloom.secure import ExchangeAborted, ProtocolViolation, ServerKey, Terms, run_exchange
from fedloom.secure.layers import from_layers, layer_sizes
from fedloom.secure.wire import unpack
from fedloom.sites.known_sites import KnownSites
from fedloom.sites.messages import PARCEL, Words, parcel_of, words_of
from fedloom.task import Task

FEWEST = 2
"""Smallest number of peers in an exchange for the server.

If only one peer remained, the server would know the owner of its model. Sites have their own
minimum, `fewest-peers`.
"""

_logger = logging.getLogger("flwr.fedloom")


def layer_exchange(pipeline: Pipeline) -> Secure | None:
    """Return the exchange of layers in the round of a pipeline, or None."""
    return next((part for part in pipeline.parts if isinstance(part, Secure)), None)


def exchanges_layers(method: Method) -> bool:
    """Return True if clients exchange layers in any round."""
    return any(isinstance(component, Secure) for component in components(method))


def require_supported(method: Method) -> None:
    """Raise `InvalidValue` if the sites cannot know in which rounds to exchange their uploads."""
    if exchanges_layers(method) and any(stages.automatic for stages in stages_in(method)):
        remedy = "give a last round instead of auto"
        raise InvalidValue(f"{method}: sites must know the rounds of secure(...): {remedy}")


class Courier:
    """Carries the letters of one exchange between the server and the sites (a `Transport`).

    Peers have their sites' numbers. A site that does not answer as agreed is lost and gets no
    further request.

    Attributes:
        lost: Reasons by lost site.
        reached: Sites to which a message was sent.
        carried: Bytes that sites have sent.
    """

    def __init__(self, sites: KnownSites, round: Round, jobs: Sequence[Job], terms: Terms) -> None:
        self.sites = sites
        self.round = round
        self.terms = terms
        self.jobs = {sites.numbers[job.client]: job for job in jobs}
        self.lost: dict[int, str] = {}
        self.reached: set[int] = set()
        self.carried = 0

    def carry(self, requests: Mapping[int, bytes]) -> dict[int, bytes]:
        answers = self._ask(requests, {})
        self.carried += sum(map(len, answers.values()))
        return answers

    def uploads(self) -> dict[int, list[bytes]]:
        """Return the sealed layers of every peer that uploads them after the exchange."""
        layers = {}
        for peer, parcel in self._ask(
            dict.fromkeys(self.terms.peers, b""), {"upload": True}
        ).items():
            try:
                layers[peer] = unpack(parcel, peer, len(self.terms.sizes))
            except ProtocolViolation as fault:
                self.lost[peer] = str(fault)
        return layers

    def _ask(self, parcels: Mapping[int, bytes], words: Words) -> dict[int, bytes]:
        # The first request of an exchange before training contains the model to exchange.
        tensors = {"model"} if self.terms.when == "before_train" and not self.reached else set()
        tasks = [self.jobs[peer] for peer in parcels if peer not in self.lost]
        tasks = [
            replace(task, inbox={n: rows for n, rows in task.inbox.items() if n in tensors})
            for task in tasks
        ]
        by_client = {task.client: parcels[self.sites.numbers[task.client]] for task in tasks}
        words = {"run": self.terms.run, "when": self.terms.when, **words}
        answers = {}
        for _, task, answer in self.sites.answers(
            "query.exchange", self.round, tasks, lambda _: words, by_client
        ):
            peer = self.sites.numbers[task.client]
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


@dataclass(frozen=True)
class SecureRound:
    """One round in which sites exchange layers.

    Attributes:
        sites: The sites.
        task: The task.
        method: The exchange of layers.
        round: The round.
        train_at_sites: Lets sites train. Takes jobs, whether models were exchanged before, and
            whether models are withheld.
        forget: Called for clients if their work of this round is not used.
    """

    sites: KnownSites
    task: Task
    method: Secure
    round: Round
    train_at_sites: Callable[[Sequence[Job], bool, bool], Iterator[Answer | Fault]]
    forget: Callable[[int], None]

    def train(self, jobs: Sequence[Job]) -> Iterator[Answer | Fault]:
        """Exchange, train, exchange again, and yield the uploads.

        A site that an exchange loses is left out of the round.
        """
        uploading = [job for job in jobs if job.slot is not None]
        idle = [job for job in jobs if job.slot is None]
        sent = {task.client: task.inbox["model"][0] for task in uploading}
        # equal models need no exchange
        several = len({task.inbox["model"].data_ptr() for task in uploading}) > 1
        exchanged = several and self.method.exchanges("before_train")
        if exchanged:
            courier, faults = self._exchange("before_train", uploading, ServerKey())
            yield from faults
            uploading = [
                replace(
                    task, inbox={name: rows for name, rows in task.inbox.items() if name != "model"}
                )
                for task in uploading
                if self.sites.numbers[task.client] in courier.terms.peers
            ]
        withheld = self.method.exchanges("before_upload")
        trained: list[Answer] = []
        for result in self.train_at_sites([*uploading, *idle], exchanged, withheld):
            if withheld and isinstance(result, Answer) and result.job.slot is not None:
                trained.append(result)
            else:
                yield result
        if trained:
            for result in self._uploads(
                sorted(trained, key=lambda reply: reply.job.slot or 0), sent
            ):
                if isinstance(result, Fault):
                    self.forget(result.job.client)
                yield result

    def _uploads(
        self, replies: Sequence[Answer], sent: Mapping[int, Tensor]
    ) -> Iterator[Answer | Fault]:
        """Yield the replies with the sites' models after the exchange.

        Only one exchange runs before upload, whatever its result: from a second one among fewer
        sites the server would learn the owners of the missing layers. Therefore the layers at a
        site are lost if it does not upload. In a simulation, layers are lost in the same way if a
        client drops out after the exchange before training. A layer that cannot be used is replaced
        by the layer of the model that the server had sent, regardless of which site spoilt it.
        Weights that are not finite are replaced in the same way.
        """
        key = ServerKey()
        courier, faults = self._exchange("before_upload", [reply.job for reply in replies], key)
        yield from faults
        models, spoilt = key.open_models(courier.uploads(), courier.terms)
        for violation in spoilt:
            _logger.warning("round %d: %s", self.round.number, violation)
            courier.lost.setdefault(violation.peer, str(violation))
        for reply in replies:
            client = reply.job.client
            number = self.sites.numbers[client]
            like = sent[client].to(self.task.initial)
            if number in models:
                row = from_layers(models[number], self.method.units(), like)
                row = torch.where(row.isfinite(), row, like)
                yield replace(reply, tensors={**reply.tensors, "model": row})
            elif number in courier.terms.peers:
                yield Fault(reply.job, courier.lost[number])

    def _exchange(
        self, when: str, jobs: Sequence[Job], key: ServerKey
    ) -> tuple[Courier, list[Fault]]:
        """Run one exchange with a new name and a new key of the server, so the peers' keys are new.

        Returns:
            The courier, with the peers that completed the exchange in its terms, and a fault for
                each other site.
        """
        name = f"{self.sites.federation}/{self.round.number}/{when}/{secrets.token_hex(8)}"
        sizes = tuple(layer_sizes(self.method.units(), self.task.initial))
        peers = tuple(self.sites.numbers[job.client] for job in jobs)
        opening = Terms(
            name, self.round.number, when, 0, peers, key.public, self.method.rules(), sizes
        )
        courier = Courier(self.sites, self.round, jobs, opening)
        abort = ""
        try:
            courier.terms, violations = run_exchange(courier, opening, fewest=FEWEST)
        except ExchangeAborted as error:
            courier.terms = replace(opening, peers=())
            violations = error.faults
            abort = str(error)
        self.method.carried(courier.carried)
        reasons: dict[int, str] = {}
        for violation in violations:
            _logger.warning("round %d: exchange %s: %s", self.round.number, when, violation)
            reason = courier.lost.get(violation.peer) if violation.kind == "left" else None
            reasons.setdefault(
                violation.peer, f"{violation}: {reason}" if reason else str(violation)
            )
        return courier, [
            Fault(
                task,
                reasons.get(number, abort),
                sent=when == "before_upload" or number in courier.reached,
            )
            for task, number in zip(jobs, peers, strict=True)
            if number not in courier.terms.peers
        ]
