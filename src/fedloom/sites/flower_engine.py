"""Flower engine: clients train at sites of their own, with one message to each site and one back, through Flower's Grid.

Every site is sent its own tensors, and every tensor that comes back is checked against what the method expects, before its
bytes are decoded. A site that is absent, late, or answers anything else loses its turn, never the round. What sites say
decides neither what the run reports nor whether it goes on; only when all of them fail, one after another, does it end.

Clients' memory stays at their sites, as versions named by the round that wrote them. The server keeps only which version each
client goes on from: that of the last reply that it took. So a reply that came too late, or that was refused, leaves no
trace, and a server that goes on from a checkpoint finds every site as it was then.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.engines.base import inspect_reply
from fedloom.errors import DamagedCheckpoint, FedloomError, InvalidValue, RefusedReply
from fedloom.objectives.metrics import counted_shapes
from fedloom.round import Round
from fedloom.rounds.engine import ClientTask, Fault, RemoteClients, Reply, TensorSpec, expectations
from fedloom.rounds.scoring import Tally
from fedloom.sites.known_sites import MOST_SAMPLES, KnownSites, Orders
from fedloom.sites.messages import ARRAYS, Refusal, Words, figures_of, tensors_of, whole_number, words_of
from fedloom.sites.secure_round import SecureRound, layer_exchange
from fedloom.task import Task

_logger = logging.getLogger("flwr.fedloom")


class FlowerEngine(RemoteClients):
    """Lets sites train. None counts for more than `largest_share` of a round's mean."""

    in_process: bool | None = None

    def __init__(self, sites: KnownSites, largest_share: float = 1.0) -> None:
        self.sites, self.numbers = sites, sites.numbers
        self.largest_share = largest_share
        self.notices: list[str] = []

    def begin(self, task: Task, directory: Path | None) -> None:
        self.task = task
        self._versions = torch.zeros(task.clients, dtype=torch.int64)  # of each client's memory; 0 is none
        self._written: dict[int, int] = {}  # the versions of this round
        self._orders: Orders = {}  # those under way of an asynchronous method
        self._saved = [self._versions, self._versions]  # those of the two newest checkpoints
        self._saving = self._versions
        self._failing: dict[int, str] = {}  # clients that failed since the last reply that was taken, and why

    # --- the work of a round ---

    def train(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Reply | Fault]:
        method = layer_exchange(algorithm, round.number)
        if method is not None:
            train = partial(self.train_at_sites, algorithm, round)
            yield from SecureRound(self.sites, self.task, method, round, train, self.forget).train(client_tasks)
        else:
            yield from self.train_at_sites(algorithm, round, client_tasks)

    def train_at_sites(
        self,
        algorithm: Algorithm,
        round: Round,
        client_tasks: Sequence[ClientTask],
        exchanged: bool = False,
        withheld: bool = False,
    ) -> Iterator[Reply | Fault]:
        """Let sites train and yield what they reply. Raises `FedloomError` when every site has failed since a reply was taken.

        Where models are `exchanged`, sites begin from those that they exchanged before. Models that are `withheld` are no part of
        the replies: sites exchange them afterwards.
        """
        specs = expectations(algorithm, round, self.task.layout)
        shapes = {name: list(spec.shape) for name, spec in specs.items()}
        expected = {name: spec for name, spec in specs.items() if not (withheld and name == "model")}
        figures = {name for method in algorithm.nested() for name in method.client_figures}

        def words(client_task: ClientTask) -> Words:
            client, uploads = client_task.client, client_task.slot is not None
            memory = {
                "memory": self._version(client),
                "keep": sorted({int(saved[client]) for saved in self._saved} - {0}),
            }
            return memory | {"expected": shapes if uploads else None, "exchanged": exchanged and uploads}

        needed = algorithm.step_replies
        starting = [task for task in client_tasks if task.client not in self.under_way]
        orders = None if needed is None else self._orders
        for began, client_task, answer in self.sites.answers("train", round, starting, words, orders=orders):
            if isinstance(answer, Fault):
                yield answer
                continue
            try:
                due = {} if client_task.slot is None else expected
                reply = self._reply(algorithm, began, client_task, answer, due, figures)
            except FedloomError as error:
                if not (isinstance(error, Refusal) and "lost" in error.words):
                    self._failing[client_task.client] = str(error)
                yield Fault(client_task, str(error))
            else:
                self._failing.clear()
                yield reply
                needed = None if needed is None else needed - 1
                if needed == 0:
                    break
        self._require_anybody(round)

    @property
    def under_way(self) -> frozenset[int]:
        """Return the clients that train already, for an asynchronous method."""
        return frozenset(client_task.client for _, client_task in self._orders.values())

    def _require_anybody(self, round: Round) -> None:
        """Raise `FedloomError` when every known site has failed since a reply was taken."""
        introduced = {client for client in range(round.clients) if self.numbers[client] in self.sites.known}
        if introduced and introduced <= self._failing.keys():
            client, reason = next(reversed(self._failing.items()))
            raise FedloomError(
                f"round {round.number}: every site has failed, one after another; site {self.numbers[client]}: {reason}"
            )

    def _reply(
        self,
        algorithm: Algorithm,
        round: Round,
        client_task: ClientTask,
        message: Message,
        expected: Mapping[str, TensorSpec],
        figures: set[str],
    ) -> Reply:
        """Return one site's reply. Raises `FedloomError` when it says why it did not train, or when it is refused."""
        client, number = client_task.client, self.numbers[client_task.client]
        try:
            words = words_of(message, ARRAYS)
        except Refusal as refusal:
            if refusal.words.get("lost"):
                self._written[client] = 0  # from the next time on it is a client that remembers nothing
            raise
        order = whole_number(words, "round", 0, round.number), whole_number(words, "site", 0, MOST_SAMPLES)
        if order != (round.number, number):
            raise RefusedReply("the reply is to another order")
        version = whole_number(words, "memory", 0, round.number)
        if version not in (self._version(client), round.number):
            raise RefusedReply(f"memory {version} was neither sent nor written in this round")
        # Names, shapes and types are as the method has them, whatever any site sends.
        tensors = tensors_of(message, expected)
        if expected:
            inspect_reply(algorithm, round, tensors, expected)
        measured = figures_of(words, figures)
        self._written[client] = version
        return Reply(
            client_task, tensors, measured, samples=self.sites.samples(number) if self.task.elsewhere else None
        )

    def evaluate(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Tally]:
        as_sent = type(algorithm) is Algorithm  # every client judges what it is sent

        def words(client_task: ClientTask) -> Words:
            return {"memory": self._version(client_task.client), "given": as_sent}

        for _, client_task, answer in self.sites.answers("evaluate", round, client_tasks, words):
            try:
                if isinstance(answer, Fault):
                    raise FedloomError(answer.reason)
                yield self._tally(client_task.client, words_of(answer))
            except FedloomError as error:
                _logger.warning("site %d is not evaluated: %s", self.numbers[client_task.client], error)

    def _tally(self, client: int, words: Mapping[str, Any]) -> Tally:
        """Return what one site counted; it weighs no more than the test samples that it had at the start. Raises
        `RefusedReply` for counts that cannot be."""
        local_test = self.task.local_test
        registered = 0 if local_test is None else int(local_test.sizes[client])
        samples = whole_number(words, "samples", 1, MOST_SAMPLES)
        objective, outputs = self.task.objective, self.task.dataset.spec.outputs
        try:
            counted = words["totals"]
            shapes = objective.shapes(outputs) | counted_shapes(self.task.dataset.metrics)
            totals = {name: _total(counted[name], shape) for name, shape in shapes.items()}
            objective.require_totals({**totals, "samples": torch.tensor([float(samples)])})
        except (KeyError, TypeError, ValueError, OverflowError, InvalidValue) as error:
            raise RefusedReply(f"the reply does not say what was counted: {error}") from None
        share = min(1.0, registered / samples)
        totals = {name: total if share == 1 else total * share for name, total in totals.items()}
        return Tally(torch.tensor([client]), torch.tensor([min(samples, registered)]), totals)

    # --- clients' memory ---

    def _version(self, client: int) -> int:
        """Return the version of a client's memory, after what it wrote in this round."""
        return self._written.get(client, int(self._versions[client]))

    def commit(self) -> None:
        self._versions = self._versions.clone()
        for client, version in self._written.items():
            self._versions[client] = version
        self._written = {}

    def forget(self, client: int) -> None:
        """Let a client whose work of this round is not taken go on from the memory that it had."""
        self._written.pop(client, None)

    def rollback(self) -> bool:
        self._written = {}
        return True

    def memory(self) -> dict[str, Tensor]:
        """Return the version of each client's memory, now and at the checkpoint before."""
        self._saving = self._versions
        return {"versions": self._versions, "before": self._saved[-1]}

    def release_memory(self) -> None:
        self._saved = [self._saved[-1], self._saving]

    def restore_memory(self, memory: dict[str, Tensor]) -> None:
        shape = self._versions.shape
        if any(name not in memory or memory[name].shape != shape for name in ("versions", "before")):
            raise DamagedCheckpoint("the checkpoint does not say which memory the sites go on from")
        self._versions, self._written = memory["versions"], {}
        self._saved = [memory["before"], memory["versions"]]

    def close(self) -> None:
        """Hold nothing: sites end by themselves what they keep ready."""


def _total(value: Any, shape: tuple[int, ...]) -> Tensor:
    """Return what a site counted, `[1, ...]` float64. Raises `TypeError` or `ValueError` unless it is numbers in that shape."""
    total = torch.tensor(value, dtype=torch.float64)
    if total.shape != shape:
        raise ValueError(f"shape {list(total.shape)} where {list(shape)} is expected")
    return total.unsqueeze(0)
