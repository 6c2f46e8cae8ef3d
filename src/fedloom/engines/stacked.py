"""The stacked engine: clients advance together, many models in one batched step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, describe
from fedloom.config.fields import Count, checked
from fedloom.engines.base import ClientTask, Fault, Reply, engines, inspect_reply, keep_integers, load_integers
from fedloom.engines.rows import RowsEngine, full_batch, measured
from fedloom.errors import FedloomError, InvalidValue, RefusedReply
from fedloom.flat.module import Batch, FlatModule, cross_entropy, generator_state
from fedloom.flat.stacked_module import StackedModule
from fedloom.local.cohort import Cohort
from fedloom.round import Round
from fedloom.rounds.scoring import Tally
from fedloom.state.store import BUDGET, Memory
from fedloom.task import Task

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
    Clients with most samples share a chunk, so that few stand still. `unstackable` tells why models of this task cannot be
    stacked (None where they can), `alone` why methods were not, by their expressions: there clients train one after another.
    `compiled` is as in the rows engine, for steps that a whole chunk takes together.
    """

    def __init__(
        self, task: Task, *, memory_budget: int = BUDGET, chunk: Count | None = None, compiled: bool = False
    ) -> None:
        super().__init__(task, memory_budget=memory_budget, compiled=compiled)
        checked(StackedEngine, {"chunk": chunk, "compiled": compiled})
        self.stack = StackedModule(task.model, task.layout)
        self.alone: dict[str, str] = {}
        trial = _Trial(task, self.flat_module, self.stack)
        self.unstackable, self._draws = trial.unstackable, trial.draws
        self.chunk = chunk or default_chunk(task, self.flat_module)

    def begin(self, task: Task, directory: Path | None) -> None:
        super().begin(task, directory)
        self.stack.compile_for(full_batch(task) if self.compiled else None)

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
        cohort, inbox, sent = self._together(round, client_tasks)
        try:
            message = algorithm.train(cohort, inbox)
        except FedloomError:
            raise  # a mistake in the configuration is not the clients'
        except torch.OutOfMemoryError:
            self.chunk = max(1, len(client_tasks) // 2)
            for part in (client_tasks[: self.chunk], client_tasks[self.chunk :]):
                yield from self._train(algorithm, round, part, expected)
            return
        except Exception as error:
            # One client's failure is not that of the others: each trains by itself, with the same result.
            self.alone[describe(algorithm)] = f"{type(error).__name__}: {error}"
            yield from super().train_expecting(algorithm, round, client_tasks, expected)
            return
        keep_integers(cohort, message, sent)
        yield from _answers(client_tasks, message, cohort, expected)

    def evaluate(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Tally]:
        own = self.task.local_test
        if own is None:
            raise InvalidValue("the clients have no test data of their own: give the task local_test, such as 0.25")
        for chunk in self._chunks(algorithm, client_tasks):
            if len(chunk) == 1:
                yield from super().evaluate(algorithm, round, chunk)
                continue
            cohort, inbox, _ = self._together(round, chunk)
            rows = algorithm.personalise(cohort, {name: tensor.clone() for name, tensor in inbox.items()})
            integers = self.stack.integers()
            for place, client_task in enumerate(chunk):
                held = integers[place] if self.task.layout.integers else None
                yield self.evaluator.tally(rows[place], self.task.train, own, [client_task.client], held)

    def _chunks(self, algorithm: Algorithm, client_tasks: Sequence[ClientTask]) -> list[list[ClientTask]]:
        """The orders in chunks of about equal length, largest clients first; one by one where they cannot be stacked."""
        reason = apart(algorithm)
        if reason:
            self.alone[describe(algorithm)] = reason
        size = 1 if reason or self.unstackable else self.chunk
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
        streams = [round.stream("layers", client) for client in clients] if self._draws else []
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
) -> Iterator[Reply | Fault]:
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
    yield from answers


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """One row each, `[k, ...]`, of rows `[1, ...]`; what all were sent alike is not copied."""
    first = rows[0]
    if all(row.data_ptr() == first.data_ptr() and row.shape == first.shape for row in rows):
        return first.expand(len(rows), *first.shape[1:])
    return torch.cat(list(rows))


class _Trial:
    """Two small clients take a gradient alone and together: whether that comes to the same, and whether layers draw.

    `unstackable` is the reason where models of this architecture cannot be stacked: it branches on its data, draws by itself
    in a way that cannot be given to each client, keeps statistics that a stack would lose, or has several number types.
    """

    def __init__(self, task: Task, one: FlatModule, many: StackedModule) -> None:
        self.draws = False
        self.unstackable: str | None = None
        index = torch.arange(4, device=task.train.labels.device) % len(task.train)
        samples = task.train[index]
        inputs = task.dataset.prepare(samples.inputs)
        self.batch = Batch(inputs.unflatten(0, (2, 2)), samples.labels.unflatten(0, (2, 2)))
        self.rows = torch.stack([task.initial, 0.9 * task.initial])
        self.integers = task.initial_integers.repeat(2, 1)
        try:
            apart = self._apart(one)
            together = self._together(many)
        except Exception as error:
            self.unstackable = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return
        scale = max(1.0, *(float(expected.abs().max()) for expected in apart[:3]))
        tolerance = scale * (1e-9 if task.layout.dtype == torch.float64 else 1e-3)
        alike = all(
            torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance, equal_nan=True)
            for a, b in zip(apart, together, strict=True)
        )
        if not alike and not (self.draws and self.rows.is_cuda):
            self.unstackable = "a stack of two models does not compute what each of them does"

    def _apart(self, one: FlatModule) -> tuple[Tensor, ...]:
        found: list[tuple[Tensor, ...]] = []
        for client in range(2):
            rows = self.rows[client : client + 1].clone()
            one.load_integers(self.integers[client : client + 1])
            with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
                torch.manual_seed(client)
                before = generator_state(rows)
                batch = Batch(self.batch.inputs[client : client + 1], self.batch.labels[client : client + 1])
                loss, gradient = one.gradient(rows, batch, cross_entropy, {})
                self.draws |= not torch.equal(before, generator_state(rows))
            found.append((loss, gradient.clone(), rows, one.integers()))
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def _together(self, many: StackedModule) -> tuple[Tensor, ...]:
        rows = self.rows.clone()
        many.begin(2, [torch.Generator().manual_seed(client) for client in range(2)] if self.draws else [])
        many.load_integers(self.integers)
        loss, gradient = many.gradient(rows, self.batch, cross_entropy, {})
        return loss, gradient.clone(), rows, many.integers()


def default_chunk(task: Task, flat_module: FlatModule) -> int:
    """How many models to stack: what fits the processor's caches, or an accelerator's free memory."""
    if task.initial.is_cuda:
        free, _ = torch.cuda.mem_get_info(task.initial.device)
        return max(1, int(SHARE_OF_MEMORY * free / bytes_of_training(task, flat_module)))
    return max(4, min(64, STACK_VALUES // task.layout.size))


def bytes_of_training(task: Task, flat_module: FlatModule) -> int:
    """Bytes that one model needs while it trains: its rows, and what a step's forward pass keeps for its backward pass (measured
    on one sample, or two for batch norm)."""
    count = 2 if flat_module.needs_pairs else 1
    samples = task.train[:count]
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    row = task.initial.clone().unsqueeze(0)
    batch = Batch(task.dataset.prepare(samples.inputs).unsqueeze(0), samples.labels.unsqueeze(0))
    with (
        torch.random.fork_rng(devices=[row.device] if row.is_cuda else []),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        flat_module.gradient(row, batch, cross_entropy, {})
    weights = task.layout.size * row.element_size()
    activations = max(0, sum(kept.values()) - weights) // count + batch.inputs[0, 0].numel() * row.element_size()
    return ROWS_HELD * weights + 2 * full_batch(task) * activations
