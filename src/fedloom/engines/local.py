"""The rows engine: this process trains the clients one after another on one module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.cohort import Cohort
from fedloom.engines.base import Fault, Order, Reply, inspect_reply
from fedloom.errors import FedloomError, RefusedReply
from fedloom.randomness import stream_seed
from fedloom.replica import Replica
from fedloom.round import Round
from fedloom.store import ClientStore, Memory
from fedloom.task import Task

INTEGERS = "integers"
"""Name under which a model's integer buffers travel beside the method's own tensors, when the model has any."""


class RowsEngine:
    """Trains each client's row in place through a module whose parameters are views of it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.store = ClientStore()
        self.replica = Replica(task.model, task.layout)

    def train(self, algorithm: Algorithm, round: Round, orders: Sequence[Order]) -> Iterator[Reply | Fault]:
        expected = dict(algorithm.expects(round))
        if self.task.layout.integers:
            expected[INTEGERS] = (self.task.layout.integers,)
        for order in orders:
            try:
                yield self._train_one(algorithm, round, order, expected)
            except RefusedReply as error:
                yield Fault(order, str(error), error, diverged="not finite" in str(error))
            except FedloomError:
                raise  # a mistake in the configuration is not the client's
            except Exception as error:
                yield Fault(order, f"{type(error).__name__}: {error}", error)

    def _train_one(
        self, algorithm: Algorithm, round: Round, order: Order, expected: dict[str, tuple[int, ...]]
    ) -> Reply:
        cohort = self.cohort(round, order)
        inbox = dict(order.inbox)
        integers = inbox.pop(INTEGERS, None)
        if integers is not None:
            self.replica.load_integers(integers)
        # Dropout and other layers that draw in `forward` know only torch's global generator: it is borrowed, seeded by the
        # client's own stream, and given back as it was.
        with torch.random.fork_rng(devices=_cuda_devices(self.task.initial)):
            torch.manual_seed(stream_seed(round.seed, "layers", round=round.number, client=order.client))
            message = algorithm.train(cohort, inbox)
        if integers is not None:
            message[INTEGERS] = self.replica.integers()
        tensors = {name: rows[0] for name, rows in message.items()}
        if order.slot is not None:
            inspect_reply(tensors, expected)
        cohort.memory.commit()
        return Reply(order, tensors, {name: float(value[0]) for name, value in cohort.metrics.items()})

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

    def memory(self) -> dict[str, Tensor]:
        return self.store.state()

    def restore_memory(self, memory: dict[str, Tensor]) -> None:
        self.store.restore(memory)

    def close(self) -> None:
        """Nothing to give back."""


def _cuda_devices(tensor: Tensor) -> list[int]:
    return [tensor.device.index or 0] if tensor.is_cuda else []
