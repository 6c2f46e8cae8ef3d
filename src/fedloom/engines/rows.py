"""The rows engine: this process trains the clients one after another on one module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.engines.base import INTEGERS, Choice, Fault, Order, Remembering, Reply, expectations, inspect_reply
from fedloom.errors import FedloomError, InvalidValue, RefusedReply
from fedloom.flat.allocator import keep_pages
from fedloom.flat.module import Replica
from fedloom.local.cohort import Cohort
from fedloom.randomness import stream_seed
from fedloom.round import Round
from fedloom.rounds.scoring import Evaluator, Tally
from fedloom.state.store import BUDGET, ClientStore, Memory
from fedloom.task import Task


class RowsEngine(Remembering):
    """Trains each client's row in place through a module whose parameters are views of it.

    `memory_budget`: bytes of client memory kept here; the clients not used for longest spill to files beyond it. `compiled`:
    steps on full batches without an objective of the method's own run as one function of torch.compile, which takes the better
    part of a minute once for a machine.
    """

    chosen: Choice | None = None  # how it came to be this engine, where `make_engine` made it

    def __init__(self, task: Task, memory_budget: int = BUDGET, compiled: bool = False) -> None:
        self.task, self.compiled = task, compiled
        self.store = ClientStore(budget=memory_budget)
        self.replica = Replica(task.model, task.layout)
        self.evaluator = Evaluator(task.model, task.layout, task.dataset)

    def begin(self, task: Task, directory: Path | None) -> None:
        self.task = task
        self.replica.compile_for(full_batch(task) if self.compiled else None)
        self.store.begin(directory)
        keep_pages()

    def train(self, algorithm: Algorithm, round: Round, orders: Sequence[Order]) -> Iterator[Reply | Fault]:
        return self.train_expecting(algorithm, round, orders, expectations(algorithm, round, self.task.layout))

    def train_expecting(
        self, algorithm: Algorithm, round: Round, orders: Sequence[Order], expected: Mapping[str, tuple[int, ...]]
    ) -> Iterator[Reply | Fault]:
        """`train` without the server's half of the method; `expected` is what `expectations` gives for this round."""
        for order in orders:
            yield self.train_one(algorithm, round, order, expected)

    def train_one(
        self, algorithm: Algorithm, round: Round, order: Order, expected: Mapping[str, tuple[int, ...]]
    ) -> Reply | Fault:
        """Let one client train."""
        try:
            return self._train_one(algorithm, round, order, expected)
        except RefusedReply as error:
            return Fault(order, str(error), error, diverged="not finite" in str(error))
        except FedloomError:
            raise  # a mistake in the configuration is not the client's
        except Exception as error:
            return Fault(order, f"{type(error).__name__}: {error}", error)

    def _train_one(
        self, algorithm: Algorithm, round: Round, order: Order, expected: Mapping[str, tuple[int, ...]]
    ) -> Reply:
        cohort = self.cohort(round, order)
        inbox = dict(order.inbox)
        integers = inbox.pop(INTEGERS, None)
        if integers is not None:
            self.replica.load_integers(integers)
        with self._layers_draw(round, order.client):
            message = algorithm.train(cohort, inbox)
        if integers is not None:
            message[INTEGERS] = self.replica.integers()
        tensors = {name: rows[0] for name, rows in message.items()}
        if order.slot is not None:
            inspect_reply(tensors, expected)
        cohort.memory.commit()
        return Reply(order, tensors, measured(cohort)[0])

    def evaluate(self, algorithm: Algorithm, round: Round, orders: Sequence[Order]) -> Iterator[Tally]:
        own = self.task.local_test
        if own is None:
            raise InvalidValue("the clients have no test data of their own: give the task local_test, such as 0.25")
        for order in orders:
            row, integers = self.personalise(algorithm, round, order)
            yield self.evaluator.tally(row, self.task.train, own, [order.client], integers)

    def personalise(self, algorithm: Algorithm, round: Round, order: Order) -> tuple[Tensor, Tensor | None]:
        """The model `[P]` that one client would use in `round`, and its integer buffers if it has any. Nothing of it lasts:
        the method works on a copy of the inbox, and what it writes to the client's memory is dropped."""
        inbox = {name: rows.clone() for name, rows in order.inbox.items()}
        integers = inbox.pop(INTEGERS, None)
        if integers is not None:
            self.replica.load_integers(integers)
        with self._layers_draw(round, order.client):
            row = algorithm.personalise(self.cohort(round, order), inbox)[0]
        return row, None if integers is None else self.replica.integers()[0]

    @contextmanager
    def _layers_draw(self, round: Round, client: int) -> Iterator[None]:
        """Dropout and other layers that draw in `forward` know only torch's global generator: it is borrowed, seeded by the
        client's own stream, and given back as it was."""
        devices = _cuda_devices(self.task.initial)
        seed = stream_seed(round.seed, "layers", round=round.number, client=client)
        with torch.random.fork_rng(devices=devices):
            # torch.manual_seed would also take down a stack trace for devices not in use: a third of a small client's time.
            torch.default_generator.manual_seed(seed)
            for device in devices:
                torch.cuda.default_generators[device].manual_seed(seed)
            yield

    def cohort(self, round: Round, order: Order) -> Cohort:
        """The cohort of one client."""
        return Cohort(
            [order.client],
            [self.task.samples(order.client)],
            self.task.dataset,
            self.replica,
            self.task.training,
            round,
            Memory(self.store, [order.client]),
            [order.slot is not None],
        )

    def close(self) -> None:
        self.store.close()


def full_batch(task: Task) -> int:
    """Samples of a batch that is not short, of the client that has most."""
    largest, size = int(task.partition.sizes.max()), task.training.batch_size
    return largest if size is None else min(size, largest)


def measured(cohort: Cohort) -> list[dict[str, float]]:
    """What was measured of each client's work; NaN says that there was nothing to measure."""
    figures = {name: values.tolist() for name, values in cohort.metrics.items()}
    places = range(len(cohort.clients))
    return [{n: values[k] for n, values in figures.items() if not math.isnan(values[k])} for k in places]


def _cuda_devices(tensor: Tensor) -> list[int]:
    return [tensor.device.index or 0] if tensor.is_cuda else []
