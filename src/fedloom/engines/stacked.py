"""The stacked engine: clients advance together, many models in one batched step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, describe
from fedloom.config.fields import Count, checked
from fedloom.data.partition import Partition
from fedloom.engines.base import engines, inspect_reply, keep_integers, load_integers, trained
from fedloom.engines.rows import RowsEngine, full_batch, measured
from fedloom.errors import FedloomError, RefusedReply, error_text
from fedloom.flat.module import Batch, FlatModule, data_loss
from fedloom.flat.stacked_module import StackedModule
from fedloom.local.cohort import Cohort
from fedloom.local.proof import Proof
from fedloom.round import Round
from fedloom.rounds.engine import ClientTask, Fault, Reply
from fedloom.rounds.scoring import Tally
from fedloom.state.store import BUDGET, Memory
from fedloom.task import Task

T = TypeVar("T")

STACK_VALUES = 1 << 21
"""Numbers in the weights of one stack on a CPU: ten models of 200,000. Larger stacks leave its caches and get slower."""

SHARE_OF_MEMORY = 0.6
"""Of the free memory of an accelerator, what stacks may take."""

ROWS_HELD = 8
"""Rows of P numbers that one model in training may need at a time: download, weights, velocity, gradient and a method's own."""


@engines.register("stacked")
class StackedEngine(RowsEngine):
    """Trains clients in lock step, `chunk` of them at a time, with the numbers of the rows engine to float tolerance.

    `chunk` is by default what suits the processor: as many models as its caches or, on an accelerator, its free memory hold.
    Clients with most samples share a chunk, so that few stand still. Where models of the task or a method's clients cannot be
    stacked, clients train one after another, and a notice says why. `compiled` is as in the rows engine, for steps that a whole
    chunk takes together.
    """

    stacks = True

    def __init__(
        self,
        task: Task,
        proof: Proof | None = None,
        *,
        memory_budget: int = BUDGET,
        chunk: Count | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__(task, proof, memory_budget=memory_budget, compiled=compiled)
        checked(StackedEngine, {"chunk": chunk, "compiled": compiled})
        self.stack = StackedModule(
            task.model, task.layout, self.proof.shortcuts, task.training.autocast_dtype, task.objective
        )
        self.chunk = chunk or default_chunk(task, self.flat_module)
        if self.proof.unstackable:
            self.notice(
                f"clients train one by one, since models of this kind cannot be stacked: {self.proof.unstackable}"
            )

    def begin(self, task: Task, directory: Path | None) -> None:
        super().begin(task, directory)
        self.stack.autocast = task.training.autocast_dtype
        self.stack.compile_for(full_batch(task) if self.compiled else None, self.notice)

    def train_expecting(
        self,
        algorithm: Algorithm,
        round: Round,
        client_tasks: Sequence[ClientTask],
        expected: Mapping[str, tuple[int, ...]],
    ) -> Iterator[Reply | Fault]:
        for chunk in self._chunks(algorithm, client_tasks):
            yield from self._train(algorithm, round, chunk, expected)

    def _train(
        self,
        algorithm: Algorithm,
        round: Round,
        client_tasks: Sequence[ClientTask],
        expected: Mapping[str, tuple[int, ...]],
    ) -> Iterator[Reply | Fault]:
        if len(client_tasks) == 1:
            yield self.train_one(algorithm, round, client_tasks[0], expected)
            return

        def train() -> list[Reply | Fault]:
            cohort, inbox, sent = self._together(round, client_tasks)
            message = trained(algorithm, cohort, inbox)
            keep_integers(cohort, message, sent)
            return _answers(client_tasks, message, cohort, expected)

        answers, again = self._attempt(algorithm, client_tasks, train)
        yield from answers
        for part in again:
            yield from self._train(algorithm, round, part, expected)

    def evaluate(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Tally]:
        own = self.local_test()
        for chunk in self._chunks(algorithm, client_tasks):
            yield from self._evaluate(algorithm, round, chunk, own)

    def _evaluate(
        self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask], own: Partition
    ) -> Iterator[Tally]:
        if len(client_tasks) == 1:
            yield from super().evaluate(algorithm, round, client_tasks)
            return

        def personalise() -> list[Tally]:
            cohort, inbox, _ = self._together(round, client_tasks)
            rows = algorithm.personalise(cohort, {name: tensor.clone() for name, tensor in inbox.items()})
            integers = self.stack.integers() if self.task.layout.integers else [None] * len(rows)
            models = zip([one.client for one in client_tasks], rows, integers, strict=True)
            return list(self.evaluator.tallies(models, self.task.train, own))

        tallies, again = self._attempt(algorithm, client_tasks, personalise)
        yield from tallies
        for part in again:
            yield from self._evaluate(algorithm, round, part, own)

    def _attempt(
        self, algorithm: Algorithm, client_tasks: Sequence[ClientTask], work: Callable[[], list[T]]
    ) -> tuple[list[T], list[Sequence[ClientTask]]]:
        """What `work` makes of several clients together, and, where it failed, in which parts they are to try again.

        They try after this has returned: while an exception is handled, the frames that it came through hold all that the failed
        step has computed.
        """
        try:
            return work(), []
        except FedloomError:
            raise  # a mistake in the configuration is not the clients'
        except torch.OutOfMemoryError:
            size = self.chunk = max(1, len(client_tasks) // 2)
            self.notice(
                f"a stack of {len(client_tasks)} models does not fit in memory: {size} train together from now on"
            )
        except Exception as error:
            # One client's failure is not that of the others: each works by itself, with the same result.
            size = 1
            self.notice(
                f"{describe(algorithm)}: clients train one by one where they fail in lock step: {error_text(error)}"
            )
        return [], [client_tasks[first : first + size] for first in range(0, len(client_tasks), size)]

    def _chunks(self, algorithm: Algorithm, client_tasks: Sequence[ClientTask]) -> list[list[ClientTask]]:
        """The clients in chunks of about equal length, largest first; one by one where they cannot be stacked."""
        reason = apart(algorithm)
        if reason:
            self.notice(f"{describe(algorithm)}: {reason}")
        size = 1 if reason or self.proof.unstackable else self.chunk
        clients = torch.tensor([client_task.client for client_task in client_tasks], dtype=torch.int64)
        falling = self.task.sizes(clients).argsort(descending=True, stable=True).tolist()
        count = math.ceil(len(client_tasks) / size)
        edges = [place * len(client_tasks) // max(1, count) for place in range(count + 1)]
        return [[client_tasks[k] for k in falling[a:b]] for a, b in pairwise(edges)]

    def _together(self, round: Round, client_tasks: Sequence[ClientTask]) -> tuple[Cohort, Message, bool]:
        """The cohort of several clients, their inboxes with one row each, and whether integer buffers were sent."""
        clients = [client_task.client for client_task in client_tasks]
        inbox = {
            name: _joined([client_task.inbox[name] for client_task in client_tasks]) for name in client_tasks[0].inbox
        }
        streams = [round.stream("layers", client) for client in clients] if self.proof.draws else []
        self.stack.begin(len(clients), streams)
        cohort = Cohort(
            clients,
            [self.task.samples(client) for client in clients],
            self.task.dataset,
            self.stack,
            self.task.training,
            round,
            Memory(self.store, clients),
            [client_task.slot is not None for client_task in client_tasks],
        )
        sent = load_integers(cohort, inbox, self.task.initial_integers)
        return cohort, inbox, sent


def apart(algorithm: Algorithm) -> str | None:
    """Why clients of this method train one at a time, or None where they may advance together."""
    found = next((type(method).__name__ for method in algorithm.nested() if not method.stackable), None)
    return None if found is None else f"{found} trains one client at a time"


def _answers(
    client_tasks: Sequence[ClientTask], message: Message, cohort: Cohort, expected: Mapping[str, tuple[int, ...]]
) -> list[Reply | Fault]:
    """One answer a client; whoever's is refused remembers nothing of the round."""
    answers: list[Reply | Fault] = []
    kept = []
    figures = measured(cohort)
    for place, client_task in enumerate(client_tasks):
        tensors = {name: rows[place] for name, rows in message.items()}
        try:
            if client_task.slot is not None:
                inspect_reply(tensors, expected)
        except RefusedReply as error:
            answers.append(Fault(client_task, str(error), error))
            continue
        kept.append(place)
        answers.append(Reply(client_task, tensors, figures[place]))
    cohort.memory.commit(kept)
    return answers


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """One row each, `[k, ...]`, of rows `[1, ...]`; what all were sent alike is not copied."""
    first = rows[0]
    if all(row.data_ptr() == first.data_ptr() and row.shape == first.shape for row in rows):
        return first.expand(len(rows), *first.shape[1:])
    return torch.cat(list(rows))


def default_chunk(task: Task, flat_module: FlatModule) -> int:
    """How many models to stack: what fits the processor's caches, or an accelerator's free memory."""
    if task.initial.is_cuda:
        free, _ = torch.cuda.mem_get_info(task.initial.device)
        return max(1, int(SHARE_OF_MEMORY * free / bytes_of_training(task, flat_module)))
    frozen = sum(tensor.numel() for tensor in task.layout.frozen_tensors(task.model).values())
    return max(4, min(64, STACK_VALUES // (task.layout.size + frozen)))


def bytes_of_training(task: Task, flat_module: FlatModule) -> int:
    """Bytes that one model needs while it trains: its rows, and what a step's forward pass keeps for its backward pass (measured
    on one sample, or two for batch norm)."""
    count = 2 if flat_module.needs_pairs else 1
    samples = task.train[:count]
    kept: dict[int, int] = {}

    frozen = {tensor.data_ptr() for tensor in task.layout.frozen_tensors(task.model).values()}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in frozen:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    row = task.initial.clone().unsqueeze(0)
    batch = Batch(task.dataset.prepare(samples.inputs).unsqueeze(0), samples.labels.unsqueeze(0))
    with (
        torch.random.fork_rng(devices=[row.device] if row.is_cuda else []),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        flat_module.gradient(row, batch, data_loss, {})
    weights = task.layout.size * row.element_size()
    activations = max(0, sum(kept.values()) - weights) // count + batch.inputs[0, 0].numel() * row.element_size()
    return ROWS_HELD * weights + 2 * full_batch(task) * activations
