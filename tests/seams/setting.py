"""A small federation, and recordings of downloads and uploads at the clients' hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.algorithm import Algorithm
from fedloom.algorithm.method import Method, components
from fedloom.algorithm.records import Exchange, Message, Selection
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition, split_train_test
from fedloom.engines.proof import Proof
from fedloom.engines.rows import RowsEngine
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.parts.course import Course
from fedloom.parts.hooks import Inner, Part, Poll
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Answer, Fault, Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task

FEATURES, HIDDEN, CLASSES = 4, 5, 3
SIZES = (3, 6, 8, 4, 7, 5, 2, 9, 6)


class Net(nn.Module):
    """Two layers, with batch norm between them if `norm` is True."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.lower = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN) if norm else nn.Identity()
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.norm(self.lower(inputs))))
        return logits


def small_task(
    model: str = "plain",
    sizes: Sequence[int] = SIZES,
    local_test: float | None = None,
    **training: Any,
) -> Task:
    """Return a task with random data and clients of unequal size.

    `model` is plain, norm (batch norm), frozen (a bias without training) or float32.
    """
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
    partition = Partition.of(
        [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    )
    options = {"learning_rate": 0.1, "decay": 0.9, "batch_size": 7, "weight_decay": 1e-2} | training
    dataset = Dataset("random", samples, samples, CLASSES)
    partition, tested = (
        (partition, None) if local_test is None else split_train_test(partition, 0, local_test)
    )
    return Task(dataset, samples, samples, partition, module, Training(**options), tested)


@dataclass
class ClientRecord:
    """Work of one client in a round for one component: copies of its inbox and its reply."""

    client: int
    uploads: bool
    inbox: dict[str, Tensor]
    reply: dict[str, Tensor]
    counters: Tensor  # integer buffers after training


Records = dict[int, ClientRecord]
"""Records of a round by client."""

WIRE = -1
"""Position of the records of transmitted messages, before and after all parts."""


@dataclass
class Recording:
    """Inputs and outputs of the hooks of the parts and the algorithm, by round.

    Attributes:
        methods: The parts and algorithms of the expression, in the order of its text.
        records: By round and position in `methods` (or `WIRE`), the records of the clients.
        selections: The round and the selection, by round.
        calls: Number of calls that made or changed the current message, by hook and position.
        asked: The message and the clients of a poll before the selection, by round.
        sent: The message of the algorithm, by round.
        counting: True from the selection to the end of the round.
        impure: Description of an impure selection, or "".
    """

    methods: list[Method]
    records: dict[int, dict[int, Records]] = field(default_factory=dict)
    selections: dict[int, tuple[Round, Selection]] = field(default_factory=dict)
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)
    asked: dict[int, tuple[Message, tuple[int, ...]]] = field(default_factory=dict)
    sent: dict[int, Message] = field(default_factory=dict)
    counting: bool = False
    impure: str = ""
    inboxes: dict[int, Message] = field(default_factory=dict)
    """Inputs of the parts that decode downloads, by position, until the client replies."""

    def of(self, number: int, method: Method | None = None) -> Records:
        """Return the transmitted messages of a round, or the records of a method at the clients.

        Returns {} without records.
        """
        position = WIRE if method is None else self.position(method)
        return self.records.get(number, {}).get(position, {})

    def position(self, method: Method) -> int:
        """Return the position of a part or an algorithm in the expression."""
        return next(k for k, other in enumerate(self.methods) if other is method)

    def add(self, position: int, cohort: Cohort, inbox: Message, reply: Message) -> None:
        """Record the work of a cohort. The inbox must be a copy from before the work."""
        counters = torch.zeros(1, 0, dtype=torch.int64)
        if cohort.layout.integers:
            counters = cohort.flat_module.integers()
        records = self.records.setdefault(cohort.round.number, {}).setdefault(position, {})
        for k, client in enumerate(cohort.clients):
            records[client] = ClientRecord(
                client,
                bool(cohort.uploads[k]),
                {name: rows[k if len(rows) > 1 else 0].clone() for name, rows in inbox.items()},
                {name: rows[k].clone() for name, rows in reply.items()},
                counters[k if len(counters) > 1 else 0].clone(),
            )


Change = Callable[[int, int, Message], Message]
"""Function of the round, the client and the reply that returns another upload."""

MAKING = ("send", "message", "move", "encode_down")
"""Hooks that make or change the message of a round. The pipeline calls each of them once."""


def record(run: Federation, change: Change | None = None) -> Recording:
    """Record the hooks of all components of a run. `change` alters replies before transfer."""
    recording = Recording(list(components(run.algorithm)))
    for position, method in enumerate(recording.methods):
        for hook in MAKING:
            if hasattr(method, hook):
                _count(method, hook, position, recording)
        if isinstance(method, Algorithm):
            _record_algorithm(method, position, recording)
        elif isinstance(method, Part):
            _record_part(method, position, recording, run.course)
    at = run.course.at

    def recorded_at(number: int) -> Pipeline:
        pipeline = at(number)
        if "work" not in vars(pipeline):  # a course caches its pipelines
            _record_pipeline(pipeline, recording, run.course, change)
        return pipeline

    run.course.at = recorded_at  # type: ignore[method-assign]
    return recording


def copies(message: Message) -> Message:
    return {name: rows.clone() for name, rows in message.items()}


def _count(method: Method, hook: str, position: int, recording: Recording) -> None:
    """Count the calls of a hook during a round."""
    make = getattr(method, hook)

    def counted(*given: Any) -> Message:
        recording.calls[position, hook] += recording.counting
        message: Message = make(*given)
        return message

    setattr(method, hook, counted)


def _record_algorithm(algorithm: Algorithm, position: int, recording: Recording) -> None:
    train = algorithm.train

    def training(cohort: Cohort, inbox: Message) -> Message:
        taken = copies(inbox)
        reply = train(cohort, inbox)
        recording.add(position, cohort, taken, reply)
        return reply

    algorithm.train = training  # type: ignore[method-assign]


def _record_part(part: Part, position: int, recording: Recording, course: Course) -> None:
    """Record the client hooks of a part.

    The record of an encoding part starts with the inbox before decoding of the download.
    """
    train, poll, encode, corrupt = part.train, part.poll, part.encode, part.corrupt
    decode_down = part.decode_down

    def training(cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        taken = copies(inbox)
        reply = train(cohort, inbox, inner)
        recording.add(position, cohort, taken, reply)
        return reply

    def corrupting(cohort: Cohort, inbox: Message, reply: Message, *inner: Any) -> Message:
        changed = corrupt(cohort, inbox, reply, *inner)
        recording.add(position, cohort, copies(inbox), changed)
        return changed

    def decoding(round: Round, inbox: Message, inner: Inner) -> Message:
        recording.inboxes[position] = copies(inbox)
        return decode_down(round, inbox, inner)

    def encoding(cohort: Cohort, inbox: Message, reply: Message, inner: Inner) -> Message:
        coded = encode(cohort, inbox, reply, inner)
        taken = recording.inboxes.pop(position, None) or copies(inbox)
        recording.add(position, cohort, taken, coded)
        return coded

    def asking(round: Round) -> Poll | None:
        asked = poll(round)
        if asked is not None:
            message = course.at(round.number).deploy(round, asked.clients)
            recording.asked[round.number] = copies(message), asked.clients
        return asked

    replaced = {
        "poll": asking,
        "train": training,
        "corrupt": corrupting,
        "decode_down": decoding,
        "encode": encoding,
    }
    for hook in replaced.keys() & part.hooks():
        setattr(part, hook, replaced[hook])


def _record_pipeline(
    pipeline: Pipeline, recording: Recording, course: Course, change: Change | None
) -> None:
    """Record the selections, downloads and uploads of a pipeline."""
    select, begin, finish, work = pipeline.select, pipeline.open, pipeline.finish, pipeline.work

    def selecting(round: Round) -> Selection:
        before = course.state()
        selection = select(round)
        if select(round) != selection:
            recording.impure = f"round {round.number}: selecting twice selects others"
        after = course.state()
        unchanged = before.keys() == after.keys()
        if not unchanged or not all(torch.equal(before[name], after[name]) for name in before):
            recording.impure = f"round {round.number}: selecting changes the state"
        recording.selections[round.number] = (round, selection)
        recording.calls.clear()
        recording.counting = True
        return selection

    def opening(round: Round, selection: Selection) -> Exchange:
        exchange = begin(round, selection)
        recording.sent[round.number] = copies(exchange.wire)
        return exchange

    def finishing(exchange: Exchange) -> None:
        recording.counting = False  # the next stage may be set up
        finish(exchange)

    def working(cohort: Cohort, inbox: Message) -> Message:
        taken = copies(inbox)
        reply = work(cohort, inbox)
        if change is not None:
            reply = change(cohort.round.number, cohort.clients[0], dict(reply))
        recording.add(WIRE, cohort, taken, reply)
        return reply

    pipeline.select = selecting  # type: ignore[method-assign]
    pipeline.open = opening  # type: ignore[method-assign]
    pipeline.finish = finishing  # type: ignore[method-assign]
    pipeline.work = working  # type: ignore[method-assign]


class LossyEngine(RowsEngine):
    """A simulation that loses the answers of some clients and changes others in transit."""

    lost: Callable[[int, int], bool] = staticmethod(lambda number, client: False)
    tamper: Callable[[int, int, dict[str, Tensor]], dict[str, Tensor]] | None = None

    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> Iterator[Answer | Fault]:
        present = [job for job in jobs if not self.lost(round.number, job.client)]
        for job in jobs:
            if self.lost(round.number, job.client):
                yield Fault(job, "lost")
        for answer in super().train(pipeline, round, present):
            if self.tamper is not None and isinstance(answer, Answer):
                changed = self.tamper(round.number, answer.job.client, dict(answer.tensors))
                answer = replace(answer, tensors=changed)
            yield answer


def federation(
    expression: str | Method,
    task: Task | None = None,
    *,
    directory: Path | None = None,
    change: Change | None = None,
    engine: LossyEngine | None = None,
    rounds: int = 4,
    awaited: int = 5,
    **schedule: Any,
) -> tuple[Federation, Recording]:
    """Return a federation of `awaited` clients per round and its recording."""
    task = small_task() if task is None else task
    method = build(expression)
    options = {"seed": 3, "evaluate_every": 1000, "checkpoint_every": 1000} | schedule
    plan = Schedule(rounds=rounds, participation=min(1.0, awaited / task.clients + 1e-9), **options)
    run = Federation(method, task, engine or LossyEngine(task, proof_of(task)), plan, directory)
    return run, record(run, change)


PROOFS: dict[tuple[object, ...], Proof] = {}


def proof_of(task: Task) -> Proof:
    """Return the valid shortcuts of a task.

    The result is cached for similar tasks, because the search takes as long as some rounds.
    """
    kind = (str(task.model), task.layout.dtype, task.layout.frozen, repr(task.training))
    if kind not in PROOFS:
        PROOFS[kind] = RowsEngine(task).proof
    return PROOFS[kind]


def answered(run: Federation, recording: Recording, number: int) -> list[int]:
    """Return the clients of a round with accepted answers, in slot order."""
    record = run.history[number - 1]
    faulty = {fault["client"] for fault in record["faults"]}
    return [client for client in record["clients"] if client not in faulty]
