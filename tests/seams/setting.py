"""A small federation, and a record of what its clients were sent and what they uploaded, taken at the client half alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.algorithm import Algorithm
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition, split_train_test
from fedloom.engines.proof import Proof
from fedloom.engines.rows import RowsEngine
from fedloom.exchange import Exchange, Message, Selection
from fedloom.local.cohort import Cohort
from fedloom.method import components
from fedloom.parts.building import build
from fedloom.round import Round
from fedloom.rounds.engine import Answer, Fault, Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.training import Training

FEATURES, HIDDEN, CLASSES = 4, 5, 3
SIZES = (3, 6, 8, 4, 7, 5, 2, 9, 6)


class Net(nn.Module):
    """Two layers, with batch norm between them where `norm` says so."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.lower = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN) if norm else nn.Identity()
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.norm(self.lower(inputs))))
        return logits


def small_task(
    model: str = "plain", sizes: Sequence[int] = SIZES, local_test: float | None = None, **training: Any
) -> Task:
    """Unequal clients with random data; `model` is plain, norm (batch norm), frozen (a bias that does not train) or float32."""
    generator = torch.Generator().manual_seed(11)
    dtype = torch.float32 if model == "float32" else torch.float64
    inputs = torch.randn(sum(sizes), FEATURES, dtype=dtype, generator=generator)
    samples = Samples(inputs, torch.randint(CLASSES, (len(inputs),), generator=generator))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = Net(norm=model == "norm").to(dtype)
    if model == "frozen":
        module.lower.bias.requires_grad_(False)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    partition = Partition.of([list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)])
    options = {"learning_rate": 0.1, "decay": 0.9, "batch_size": 7, "weight_decay": 1e-2} | training
    dataset = Dataset("random", samples, samples, CLASSES)
    partition, tested = (partition, None) if local_test is None else split_train_test(partition, 0, local_test)
    return Task(dataset, samples, samples, partition, module, Training(**options), tested)


@dataclass
class ClientRecord:
    """One client's work in a round, as one method of a nesting saw it: copies of its inbox and of its reply."""

    client: int
    uploads: bool
    inbox: dict[str, Tensor]
    reply: dict[str, Tensor]
    counters: Tensor  # integer buffers after training


@dataclass
class Recording:
    """By round, what the clients of each method of a nesting were given and returned, and what was selected; `sends` counts how
    often the method at each position has made its message in the round, and `impure` says what selecting changed."""

    methods: list[Algorithm]
    records: dict[int, list[dict[int, ClientRecord]]] = field(default_factory=dict)
    selections: dict[int, tuple[Round, Selection]] = field(default_factory=dict)
    sends: Counter[int] = field(default_factory=Counter)
    asked: dict[int, tuple[Message, tuple[int, ...]]] = field(default_factory=dict)
    """What, and whom, before the selection."""
    sent: dict[int, Message] = field(default_factory=dict)
    """What the selected clients were sent, one row for all or one each."""
    counting: bool = False
    impure: str = ""

    def of(self, number: int, depth: int = 0) -> dict[int, ClientRecord]:
        """The records of one round by client, of the method at this position of `Algorithm.nested`."""
        return self.records.get(number, [{} for _ in self.methods])[depth]


Change = Callable[[int, int, Message], Message]
"""What a client uploads in place of its reply, from the round, the client and the reply."""


def record(method: Algorithm, change: Change | None = None) -> Recording:
    """Record the client halves of `method` and of all it wraps; with `change`, replies are changed first on their way out."""
    recording = Recording(list(components(method)))
    for depth, nested in enumerate(recording.methods):
        _record(nested, recording, depth, change if depth == 0 else None)
    select = method.select

    def selecting(round: Round) -> Selection:
        before = method.full_state()
        selection = select(round)
        if select(round) != selection:
            recording.impure = f"round {round.number}: selecting twice selects others"
        after = method.full_state()
        if before.keys() != after.keys() or not all(torch.equal(before[name], after[name]) for name in before):
            recording.impure = f"round {round.number}: selecting changes the state"
        recording.selections[round.number] = (round, selection)
        recording.sends.clear()
        recording.counting = True
        return selection

    exchange, finish = method.exchange, method.finish

    def exchanging(round: Round, selection: Selection) -> Exchange:
        begun = exchange(round, selection)
        recording.sent[round.number] = {name: rows.clone() for name, rows in begun.sent.items()}
        return begun

    def finishing(round: Round, exchange: Exchange) -> None:
        recording.counting = False  # the next stage may be set up
        finish(round, exchange)

    method.select = selecting  # type: ignore[method-assign]
    method.exchange = exchanging  # type: ignore[method-assign]
    method.finish = finishing  # type: ignore[method-assign]
    return recording


def _record(method: Algorithm, recording: Recording, depth: int, change: Change | None) -> None:
    train, send, question = method.train, method.send, method.question

    def sending(round: Round) -> Message:
        recording.sends[depth] += recording.counting
        return send(round)

    def recorded(cohort: Cohort, inbox: Message) -> Message:
        taken = {name: rows.clone() for name, rows in inbox.items()}
        reply = train(cohort, inbox)
        if change is not None:
            reply = change(cohort.round.number, cohort.clients[0], dict(reply))
        counters = cohort.flat_module.integers() if cohort.layout.integers else torch.zeros(1, 0, dtype=torch.int64)
        rounds = recording.records.setdefault(cohort.round.number, [{} for _ in recording.methods])
        for k, client in enumerate(cohort.clients):
            rounds[depth][client] = ClientRecord(
                client,
                bool(cohort.uploads[k]),
                {name: rows[k if len(rows) > 1 else 0].clone() for name, rows in taken.items()},
                {name: rows[k].clone() for name, rows in reply.items()},
                counters[k if len(counters) > 1 else 0].clone(),
            )
        return reply

    def asking(round: Round) -> tuple[Algorithm, tuple[int, ...]] | None:
        asked = question(round)
        if asked is not None:
            message = asked[0].deploy(round, asked[1])
            recording.asked[round.number] = {name: rows.clone() for name, rows in message.items()}, asked[1]
        return asked

    method.question = asking  # type: ignore[method-assign]
    method.train = recorded  # type: ignore[method-assign]
    method.send = sending  # type: ignore[method-assign]


class LossyEngine(RowsEngine):
    """A simulation in which the answers of some clients are lost, and others are changed on their way."""

    lost: Callable[[int, int], bool] = staticmethod(lambda number, client: False)
    tamper: Callable[[int, int, dict[str, Tensor]], dict[str, Tensor]] | None = None

    def train(self, algorithm: Algorithm, round: Round, jobs: Sequence[Job]) -> Iterator[Answer | Fault]:
        present = [task for task in jobs if not self.lost(round.number, task.client)]
        for task in jobs:
            if self.lost(round.number, task.client):
                yield Fault(task, "lost")
        for answer in super().train(algorithm, round, present):
            if self.tamper is not None and isinstance(answer, Answer):
                changed = self.tamper(round.number, answer.job.client, dict(answer.tensors))
                answer = replace(answer, tensors=changed)
            yield answer


def federation(
    expression: str | Algorithm,
    task: Task | None = None,
    *,
    directory: Path | None = None,
    change: Change | None = None,
    engine: LossyEngine | None = None,
    rounds: int = 4,
    awaited: int = 5,
    **schedule: Any,
) -> tuple[Federation, Recording]:
    """A federation of `awaited` clients a round, and the recording of what goes on in it."""
    task = small_task() if task is None else task
    method = build(expression)
    recording = record(method, change)
    options = {"seed": 3, "evaluate_every": 1000, "checkpoint_every": 1000} | schedule
    plan = Schedule(rounds=rounds, participation=min(1.0, awaited / task.clients + 1e-9), **options)
    return Federation(method, task, engine or LossyEngine(task, proof_of(task)), plan, directory), recording


PROOFS: dict[tuple[object, ...], Proof] = {}


def proof_of(task: Task) -> Proof:
    """Return which shortcuts the task allows, found once for tasks of one kind: that takes as long as some rounds."""
    kind = (str(task.model), task.layout.dtype, task.layout.frozen, repr(task.training))
    if kind not in PROOFS:
        PROOFS[kind] = RowsEngine(task).proof
    return PROOFS[kind]


def answered(run: Federation, recording: Recording, number: int) -> list[int]:
    """The clients of a round whose answers counted, in the order of their slots."""
    record = run.history[number - 1]
    faulty = {fault["client"] for fault in record["faults"]}
    return [client for client in record["clients"] if client not in faulty]
