"""The rows engine: this process trains the clients one after another on one module."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.engines.base import LocalEngine, engines, inspect_reply, keep_integers, load_integers, trained
from fedloom.errors import FedloomError, RefusedReply
from fedloom.flat.allocator import keep_pages
from fedloom.flat.module import FlatModule
from fedloom.local.cohort import Cohort
from fedloom.local.proof import Proof, prove
from fedloom.randomness import global_stream
from fedloom.round import Round
from fedloom.rounds.engine import ClientTask, Fault, Reply, expectations, slot_blocks, slots_together
from fedloom.rounds.scoring import Evaluator, Tally
from fedloom.state.store import BUDGET, Memory
from fedloom.task import Task


@engines.register("rows")
class RowsEngine(LocalEngine):
    """Trains each client's row in place through a module whose parameters are views of it.

    `proof`: which shortcuts the task allows, where that is known already. `memory_budget`: bytes of client memory kept here; the
    clients not used for longest spill to files beyond it. `compiled`: steps on full batches without a loss of the method's
    own run as one function of torch.compile, which takes the better part of a minute once for a machine.
    """

    in_process: bool | None = True
    stacks: ClassVar[bool] = False
    chunk: int = 1  # how many clients advance together

    def __init__(
        self, task: Task, proof: Proof | None = None, *, memory_budget: int = BUDGET, compiled: bool = False
    ) -> None:
        super().__init__(memory_budget)
        self.task, self.compiled = task, compiled
        self.proof = proof or prove(task.model, task.dataset, task.train, task.training, stack=self.stacks)
        self.notices += self.proof.notices
        self.flat_module = FlatModule(
            task.model, task.layout, self.proof.shortcuts, task.training.autocast_dtype, task.objective
        )
        self.evaluator = Evaluator(task.model, task.layout, task.dataset)

    def begin(self, task: Task, directory: Path | None) -> None:
        self.task = task
        self.renew_notices()
        self.flat_module.autocast = task.training.autocast_dtype
        self.flat_module.compile_for(full_batch(task) if self.compiled else None, self.notice)
        self.store.begin(directory)
        keep_pages()

    def train(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Reply | Fault]:
        expected = expectations(algorithm, round, self.task.layout)
        slots = slots_together(algorithm, self.task.layout)
        whole = slots * math.ceil(self.chunk / slots)  # no block cuts a chunk
        for block in slot_blocks(client_tasks, round, whole).values():
            yield from self.train_expecting(algorithm, round, block, expected)

    def train_expecting(
        self,
        algorithm: Algorithm,
        round: Round,
        client_tasks: Sequence[ClientTask],
        expected: Mapping[str, tuple[int, ...]],
    ) -> Iterator[Reply | Fault]:
        """`train` without the server's half of the method; `expected` is what `expectations` gives for this round."""
        for client_task in client_tasks:
            yield self.train_one(algorithm, round, client_task, expected)

    def train_one(
        self, algorithm: Algorithm, round: Round, client_task: ClientTask, expected: Mapping[str, tuple[int, ...]]
    ) -> Reply | Fault:
        """Let one client train."""
        try:
            return self._train_one(algorithm, round, client_task, expected)
        except RefusedReply as error:
            return Fault(client_task, str(error), error)
        except FedloomError:
            raise  # a mistake in the configuration is not the client's
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # which hold what the failed step has computed
            return Fault(client_task, f"{type(error).__name__}: {error}", error)

    def _train_one(
        self, algorithm: Algorithm, round: Round, client_task: ClientTask, expected: Mapping[str, tuple[int, ...]]
    ) -> Reply:
        cohort = self.cohort(round, client_task)
        inbox = dict(client_task.inbox)
        sent = load_integers(cohort, inbox, self.task.initial_integers)
        with self._drawing_layers(round, client_task.client):
            message = trained(algorithm, cohort, inbox)
        keep_integers(cohort, message, sent)
        tensors = {name: rows[0] for name, rows in message.items()}
        if client_task.slot is not None:
            inspect_reply(tensors, expected)
        cohort.memory.commit()
        return Reply(client_task, tensors, measured(cohort)[0])

    def evaluate(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Tally]:
        own = self.local_test()
        models = ((one.client, *self.personalise(algorithm, round, one)) for one in client_tasks)
        yield from self.evaluator.tallies(models, self.task.train, own)

    def personalise(self, algorithm: Algorithm, round: Round, client_task: ClientTask) -> tuple[Tensor, Tensor | None]:
        """The model `[P]` that one client would use in `round`, and its integer buffers if it has any. Nothing of it lasts:
        the method works on a copy of the inbox, and what it writes to the client's memory is dropped."""
        inbox = {name: rows.clone() for name, rows in client_task.inbox.items()}
        cohort = self.cohort(round, client_task)
        load_integers(cohort, inbox, self.task.initial_integers)
        with self._drawing_layers(round, client_task.client):
            row = algorithm.personalise(cohort, inbox)[0]
        return row, self.flat_module.integers()[0] if self.task.layout.integers else None

    def _drawing_layers(self, round: Round, client: int) -> AbstractContextManager[None]:
        """Dropout and other layers that draw in `forward` know only torch's global generator: inside, the client's stream."""
        return global_stream(round.seed, "layers", round=round.number, client=client, device=self.task.initial.device)

    def cohort(self, round: Round, client_task: ClientTask) -> Cohort:
        """The cohort of one client."""
        return Cohort(
            [client_task.client],
            [self.task.samples(client_task.client)],
            self.task.dataset,
            self.flat_module,
            self.task.training,
            round,
            Memory(self.store, [client_task.client]),
            [client_task.slot is not None],
        )


def full_batch(task: Task) -> int:
    """Samples of a batch that is not short, of the client that has most."""
    largest, size = int(task.partition.sizes.max()), task.training.batch_size
    return largest if size is None else min(size, largest)


def measured(cohort: Cohort) -> list[dict[str, float]]:
    """What was measured of each client's work; NaN says that there was nothing to measure."""
    figures = {name: values.tolist() for name, values in cohort.metrics.items()}
    places = range(len(cohort.clients))
    return [{n: values[k] for n, values in figures.items() if not math.isnan(values[k])} for k in places]
