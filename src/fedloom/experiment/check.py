"""What is wrong with a method: a few tiny rounds, listened to, and made in several ways that must come to the same."""

from __future__ import annotations

import copy
import difflib
import inspect
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.algorithm import Algorithm, Message, build, describe
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition
from fedloom.engines.pickling import dump, load
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import Diverged, FedloomError, InvalidValue, code_place, error_place, error_text
from fedloom.experiment.findings import Finding, kinds, source_place
from fedloom.experiment.listening import Listener, ListeningCohort, ListeningMemory, draws
from fedloom.local.cohort import Cohort
from fedloom.local.proof import Proof, prove
from fedloom.randomness import global_stream, stream
from fedloom.round import Round
from fedloom.rounds.engine import ClientTask, Fault, Reply
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.training import Training

T = TypeVar("T")

ROUNDS = 3
CLIENTS = 4
"""Clients in a round, at most."""

BATCH, BATCHES, TEST = 8, 3, 64
"""Of a task of the user's: samples in a batch, batches of a client, and samples of the test set, at most."""

TOLERANCE = 1e-2
"""Of how far the models have moved, by so much may those of clients that advance together be off."""


@dataclass(frozen=True)
class Checked:
    """What was found out about a method: what is wrong, and bytes by what takes them."""

    method: str
    findings: list[Finding]
    sizes: Mapping[str, float]


def check(algorithm: Algorithm | str, task: Task | None = None) -> list[Finding]:
    """What is wrong with a method, such as `HalfStep()` or `"umf(my_methods:HalfStep)"`; nothing where all is well.

    It trains three tiny rounds: one client after another and watched line by line, together, as worker processes have it, and
    killed and resumed. Results must agree, and the watched run must change nothing in place, draw from no global generator and
    keep nothing where no checkpoint finds it. By default on a task of its own; of a `task`, on a small part.
    Raises `InvalidValue` or `UnknownName` where the method cannot even be made.
    """
    return examine(algorithm, task).findings


def examine(algorithm: Algorithm | str, task: Task | None = None, *, compare: bool = True) -> Checked:
    """As `check`, with what the method takes: bytes of a model, of messages down and up, and of a client's memory. Without
    `compare`, rounds are made in one way alone, and listened to."""
    try:
        method = build(algorithm)
    except FedloomError as error:
        found = _failure(error, "")
        if not found.place:
            raise
        return Checked(str(algorithm), [found], {})
    trial = _Trial(method, own_task() if task is None else part_of(task))
    findings = [*_misread(method)]
    listened = _Listened(trial)
    findings += listened.findings
    if compare and not listened.stopped:
        findings += _together(trial, listened.federation, bool(findings))
        findings += _as_processes(trial, listened.federation, bool(findings))
        findings += _resumed(trial, listened.federation, bool(findings))
        findings += _lengthened(trial, listened.federation, bool(findings))
    return Checked(describe(method), list(dict.fromkeys(findings)), listened.sizes)


# --- tasks ---


@cache
def own_task() -> Task:
    """Six clients of 3 to 12 samples with test samples of their own, and a model of 51 weights and statistics."""
    sizes, tests, rest = (9, 5, 12, 7, 3, 8), (2, 1, 3, 0, 1, 2), 20
    generator = stream(0, "check")
    count = sum(sizes) + sum(tests)
    inputs = torch.randn(count + rest, 6, generator=generator)
    labels = (inputs[:, :3] + 0.3 * torch.randn(count + rest, 3, generator=generator)).argmax(1)
    everything = Samples(inputs, labels)
    with global_stream(0, "check"):
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    dataset = Dataset("check", everything[:count], everything[count:], 3)
    return Task(
        dataset,
        dataset.train,
        dataset.test,
        Partition.from_sizes(np.arange(sum(sizes)), sizes),
        model,
        Training(learning_rate=0.05, batch_size=4),
        Partition.from_sizes(np.arange(sum(sizes), count), tests),
    )


def part_of(task: Task) -> Task:
    """The same task with clients that hold one to three small batches each, and a small test set."""
    size = min(BATCH, task.training.batch_size or BATCH)
    held = [task.partition[k][: size * (1 + k % BATCHES) - k % 2] for k in range(task.clients)]
    held = [own if len(own) else task.partition[k][:1] for k, own in enumerate(held)]
    local = task.local_test
    return replace(
        task,
        test=task.test[:TEST],
        partition=Partition.from_sizes(np.concatenate(held), [len(own) for own in held]),
        local_test=local and Partition.from_sizes(
            np.concatenate([local[k][:size] for k in range(task.clients)]),
            [len(local[k][:size]) for k in range(task.clients)],
        ),
        training=replace(task.training, batch_size=size, epochs=1, steps=None),
    )  # fmt: skip


def _proof(task: Task) -> Proof:
    return prove(task.model, task.dataset, task.train, task.training, stack=True)


@cache
def _own_proof() -> Proof:
    return _proof(own_task())


@dataclass(frozen=True)
class _Trial:
    """A method and the task that it is tried on."""

    method: Algorithm
    task: Task

    @cached_property
    def proof(self) -> Proof:
        return _own_proof() if self.task is own_task() else _proof(self.task)

    @cached_property
    def participation(self) -> float:
        """A few clients, or all where the method's setup refuses that."""
        some = min(1.0, CLIENTS / self.task.clients)
        try:
            self._federation(RowsEngine(self.task, self.proof), some)
        except InvalidValue:
            return 1.0
        return some

    def federation(self, engine: RowsEngine, directory: Path | None = None, rounds: int = ROUNDS) -> Federation:
        return self._federation(engine, self.participation, directory, rounds)

    def _federation(
        self, engine: RowsEngine, participation: float, directory: Path | None = None, rounds: int = ROUNDS
    ) -> Federation:
        personal = 1 if self.task.local_test is not None else None
        schedule = Schedule(
            rounds,
            participation,
            evaluate_every=1,
            checkpoint_every=1,
            personal_every=personal,
            personal_clients=CLIENTS,
        )
        return Federation(copy.deepcopy(self.method), self.task, engine, schedule, directory)

    def outcome(self, engine: RowsEngine, rounds: int = ROUNDS) -> Federation:
        """A federation after `ROUNDS` of its rounds."""
        with closing(engine):
            federation = self.federation(engine, rounds=rounds)
            for _ in range(ROUNDS):
                federation.step()
        return federation

    @property
    def server_place(self) -> str:
        """Where the server half takes replies, or else the class."""
        kind = type(self.method)
        return code_place(kind.update) or code_place(kind.receive) or self.place

    @property
    def place(self) -> str:
        """Where the client half stands, or else the class."""
        return code_place(type(self.method).train) or code_place(type(self.method))


# --- what its code shows ---


def _misread(method: Algorithm) -> Iterator[Finding]:
    """Names in the classes of a method that fedloom does not read as they are meant."""
    hooks = {name for name in vars(Algorithm) if not name.startswith("_")}
    for kind in kinds(method):
        bases = {name for base in kind.__mro__[1:] for name in [*vars(base), *vars(base).get("__annotations__", {})]}
        written = vars(kind).get("__annotations__", {})
        for name, value in vars(kind).items():
            if name.startswith("_") or name in bases or name in written:
                continue
            near = difflib.get_close_matches(name, hooks, 1, 0.8)
            if inspect.isfunction(value) and near and not source_place(method, rf"\.{name}\b"):
                yield Finding(
                    f"{kind.__name__}.{name} is called by nobody", code_place(value), f"did you mean {near[0]}?"
                )
            elif isinstance(value, bool | int | float | str) and name.islower():
                place = source_place(method, rf"^\s+{name}\s*=") or code_place(kind)
                kind_of = type(value).__name__
                yield Finding(
                    f"{name} = {value!r} has no type, so it is no parameter of {kind.__name__}",
                    place,
                    f"write {name}: {kind_of} = {value!r}, or ClassVar where it is none",
                )


# --- one client after another, listened to ---


class _Listened:
    """The run that the others are compared with: `findings`, what the method takes (`sizes`), and whether it had to stop."""

    def __init__(self, trial: _Trial) -> None:
        self.trial = trial
        self.listener = Listener()
        self.findings: list[Finding] = []
        self.sizes: dict[str, float] = {}
        self.stopped = False
        generators = _generators()
        engine = _ListeningEngine(trial.task, trial.proof, self.listener)
        try:
            with self.listener, closing(engine):
                self.federation = trial.federation(engine)
                self._rounds(engine)
        except Exception as error:
            self.stopped = True
            found = _failure(error, trial.place)
            changed = next(iter(self.listener.changed.values()), "")
            self.findings.append(replace(found, place=changed or found.place))
            self.listener.changed.clear()
            self.listener.faults.clear()  # the first of which is why no round came about
        self.findings += self.listener.findings()
        if not self.stopped:
            self._after(generators)

    def _rounds(self, engine: _ListeningEngine) -> None:
        method = self.federation.algorithm
        made, kept = set(method.full_state()), _attributes(method)
        for _ in range(ROUNDS):
            before = {_in_state(name): tensor for name, tensor in method.full_state().items()}
            copies = {name: tensor.clone() for name, tensor in before.items()}
            self.listener.watch(before)
            self.federation.step()
            self.listener.unwatch(list(before))
            for name, tensor in before.items():
                if not torch.equal(tensor.nan_to_num(), copies[name].nan_to_num()):
                    self.listener.changed.setdefault(name, self.trial.place)
        self.findings += _unmade(method, made)
        self.findings += _unkept(method, kept, set(self.listener.written))
        participants = len(self.federation.history[0]["clients"])
        memories = [_bytes(engine.store.read(client)) for client in engine.store]
        self.sizes = {
            "a model": _bytes({"model": self.trial.task.initial}),
            "sent to a client": self.federation.history[-1]["bytes_down"] / participants,
            "sent by a client": self.federation.history[-1]["bytes_up"] / participants,
            "remembered by a client": sum(memories) / max(1, len(memories)),
        }

    def _after(self, generators: Sequence[object]) -> None:
        method, initial = self.federation.algorithm, self.trial.task.initial
        if torch.equal(method.model(), initial) and not method.personal and not self.findings:
            self.findings.append(
                Finding(
                    f"the global model has not moved in {ROUNDS} rounds",
                    self.trial.server_place,
                    "update (or receive) must put a new model into self.state['model'], and train reply with trained weights",
                )
            )
        names = ("torch", "numpy.random", "random")
        patterns = (r"torch\.manual_seed", r"\b(np|numpy)\.random\.", r"(?<![.\w])random\.")
        for name, pattern, before, now in zip(names, patterns, generators, _generators(), strict=True):
            if before != now and not self.listener.drawn:
                self.findings.append(
                    draws(f"the global generator of {name}", source_place(method, pattern) or self.trial.place)
                )


class _ListeningEngine(RowsEngine):
    """The rows engine whose clients are listened to."""

    def __init__(self, task: Task, proof: Proof, listener: Listener) -> None:
        super().__init__(task, proof)
        self.listener = listener
        self.memories: list[ListeningMemory] = []

    def train_one(
        self, algorithm: Algorithm, round: Round, client_task: ClientTask, expected: Mapping[str, tuple[int, ...]]
    ) -> Reply | Fault:
        inbox = {f"inbox[{name!r}]": rows for name, rows in client_task.inbox.items()}
        self.listener.watch(inbox)
        with self._client_half(algorithm):
            result = super().train_one(algorithm, round, client_task, expected)
        self.listener.unwatch(list(inbox))
        for name, place in self.memories[-1].lost().items():
            self.listener.lost.setdefault(name, place)
        if isinstance(result, Fault) and not result.diverged:
            error = result.error
            place = (error_place(error) if error else "") or code_place(type(algorithm).train)
            self.listener.faults.append(Finding(f"a client fails: {result.reason}", place))
        return result

    def personalise(self, algorithm: Algorithm, round: Round, client_task: ClientTask) -> tuple[Tensor, Tensor | None]:
        with self._client_half(algorithm):
            return super().personalise(algorithm, round, client_task)

    def cohort(self, round: Round, client_task: ClientTask) -> Cohort:
        plain = super().cohort(round, client_task)
        self.memories.append(ListeningMemory(self.store, plain.clients))
        plain.memory = self.memories[-1]
        return plain

    @contextmanager
    def _client_half(self, algorithm: Algorithm) -> Iterator[None]:
        """Inside, the method is at a client: what it reads of the server's state and writes to itself is noted."""
        kept, states = _attributes(algorithm), [method.state for method in algorithm.nested()]
        for method, state in zip(algorithm.nested(), states, strict=True):
            method.state = self.listener.guarded(state)
        try:
            yield
        finally:
            for method, state in zip(algorithm.nested(), states, strict=True):
                method.state = state
        for name, place in _written(algorithm, kept):
            self.listener.written.setdefault(name, place)


def _attributes(method: Algorithm) -> dict[tuple[int, str], object]:
    """What the methods hold beside their state, so that a change can be told."""
    return {
        (k, name): _trace(value)
        for k, one in enumerate(method.nested())
        for name, value in vars(one).items()
        if name not in ("state", "plan", *one.wraps)
    }


def _trace(value: object) -> object:
    if isinstance(value, Tensor):
        return id(value), value._version
    return (
        (id(value), repr(value)) if isinstance(value, list | dict | set) else value if _is_plain(value) else id(value)
    )


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple)


def _written(method: Algorithm, kept: Mapping[tuple[int, str], object]) -> Iterator[tuple[str, str]]:
    """The attributes that are new or changed since, and where that is written."""
    for (k, name), value in _attributes(method).items():
        if (k, name) not in kept or kept[k, name] != value:
            yield name, source_place(method, rf"self\.{name}\b(?!\()")


def _unkept(method: Algorithm, kept: Mapping[tuple[int, str], object], by_clients: set[str]) -> Iterator[Finding]:
    """What the server half writes to the method itself."""
    for name, place in _written(method, kept):
        if name not in by_clients:
            yield Finding(
                f"self.{name} changes from round to round, and no checkpoint holds it",
                place,
                f"keep it as a tensor in self.state[{name!r}]",
            )


def _unmade(method: Algorithm, made: set[str]) -> Iterator[Finding]:
    """Names in the state that `setup` has not made."""
    for full in method.full_state():
        name = full.rpartition(".")[2]
        if full not in made and not re.search(r"\d", name):  # figures in a name: one for each client, as they come
            near = difflib.get_close_matches(name, [one.rpartition(".")[2] for one in made], 1)
            yield Finding(
                f"self.state[{name!r}] is not there after setup, but after a round",
                source_place(method, rf"state\[.{re.escape(name)}.\]"),
                f"did you mean {near[0]!r}?" if near else "make it in setup, with the value that it begins with",
            )


# --- the other ways, which must come to the same ---


class _LockStepEngine(StackedEngine):
    """The stacked engine, with what went wrong where clients advanced together."""

    def __init__(self, task: Task, proof: Proof) -> None:
        super().__init__(task, proof)
        self.failure: Finding | None = None
        self.listener = Listener()

    def _together(self, round: Round, client_tasks: Sequence[ClientTask]) -> tuple[Cohort, Message, bool]:
        cohort, inbox, sent = super()._together(round, client_tasks)
        return ListeningCohort.of(cohort, self.listener), inbox, sent

    def _attempt(
        self, algorithm: Algorithm, client_tasks: Sequence[ClientTask], work: Callable[[], list[T]]
    ) -> tuple[list[T], list[Sequence[ClientTask]]]:
        def noted() -> list[T]:
            try:
                return work()
            except FedloomError:
                raise
            except Exception as error:
                place = error_place(error) or code_place(type(algorithm).train)
                self.failure = self.failure or Finding(
                    f"clients cannot advance together: {error_text(error)}",
                    place,
                    "every tensor has a leading client axis; what belongs to clients and enters steps goes into context",
                )
                raise

        return super()._attempt(algorithm, client_tasks, noted)


class _ElsewhereEngine(RowsEngine):
    """The rows engine with a method that is sent to each client anew, without its state, as to a worker process."""

    def train_one(
        self, algorithm: Algorithm, round: Round, client_task: ClientTask, expected: Mapping[str, tuple[int, ...]]
    ) -> Reply | Fault:
        return super().train_one(self._sent(algorithm), round, client_task, expected)

    def personalise(self, algorithm: Algorithm, round: Round, client_task: ClientTask) -> tuple[Tensor, Tensor | None]:
        return super().personalise(self._sent(algorithm), round, client_task)

    def _sent(self, algorithm: Algorithm) -> Algorithm:
        sent: Algorithm = load(*dump(algorithm), task=self.task)
        return sent


def _together(trial: _Trial, expected: Federation, explained: bool) -> Iterator[Finding]:
    engine = _LockStepEngine(trial.task, trial.proof)
    try:
        found = trial.outcome(engine)
    except Exception as error:
        yield _failure(error, trial.place)
        return
    enclosed = list(engine.listener.findings())
    yield from enclosed
    if engine.failure and not enclosed:
        yield engine.failure
    elif not enclosed and not explained and (off := _off(found, expected, trial.task.initial, TOLERANCE)):
        yield Finding(
            f"clients that advance together come to other models than one by one ({off})",
            trial.place,
            "treat every row by itself: no index 0, no mean over all clients, random numbers from cohort.stream",
        )


def _as_processes(trial: _Trial, expected: Federation, explained: bool) -> Iterator[Finding]:
    try:
        found = trial.outcome(_ElsewhereEngine(trial.task, trial.proof))
    except Exception as error:
        if not explained:
            yield _failure(error, trial.place, "in worker processes: ")
        return
    if not explained and (off := _off(found, expected, trial.task.initial)):
        yield Finding(
            f"clients in worker processes come to other models than here ({off})",
            trial.place,
            "train may depend on its inbox, its samples, its memory and the method's fields alone",
        )


def _resumed(trial: _Trial, expected: Federation, explained: bool) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="fedloom-check-") as folder:
        try:
            with closing(RowsEngine(trial.task, trial.proof)) as engine:
                killed = trial.federation(engine, Path(folder))
                killed.step()
                killed.save()
            with closing(RowsEngine(trial.task, trial.proof)) as engine:
                found = trial.federation(engine, Path(folder))
                found.run()
        except Exception as error:
            if not explained:
                yield _failure(error, trial.place, "killed after a round and resumed: ")
            return
    if not explained and (off := _off(found, expected, trial.task.initial)):
        yield Finding(
            f"a run that is killed and resumed comes to another model ({off})",
            trial.server_place,
            "what the server must remember goes into self.state, and every draw comes from round.stream",
        )


def _lengthened(trial: _Trial, expected: Federation, explained: bool) -> Iterator[Finding]:
    if explained or trial.method.needs_total_rounds:
        return
    found = trial.outcome(RowsEngine(trial.task, trial.proof), rounds=2 * ROUNDS)
    if off := _off(found, expected, trial.task.initial):
        yield Finding(
            f"the first rounds depend on how many there will be ({off})",
            source_place(trial.method, r"\.rounds\b") or trial.place,
            "a property needs_total_rounds that returns True says so",
        )


def _off(found: Federation, expected: Federation, initial: Tensor, tolerance: float = 0.0) -> str:
    """How far a federation's states are from those expected, where that is more than a share of how far these have moved."""
    ours, theirs = found.algorithm.full_state(), expected.algorithm.full_state()
    models = {"model": found.algorithm.model()}, {"model": expected.algorithm.model()}
    for name, wanted in {**theirs, **models[1]}.items():
        got = {**ours, **models[0]}.get(name)
        if got is None or got.shape != wanted.shape:
            return f"{name} is {'missing' if got is None else list(got.shape)}"
        if torch.equal(got, wanted) or not got.is_floating_point():
            continue
        moved = float((models[1]["model"] - initial).abs().max())
        off = float((got - wanted).abs().nan_to_num().max())
        if off > tolerance * max(moved, float(wanted.abs().max()) if name != "model" else moved):
            return f"{name} is off by {off:.2g}"
    return ""


# --- words ---


def _failure(error: Exception, place: str, when: str = "") -> Finding:
    """The finding that an error is; what it says of its place is taken out of its text."""
    text = str(error) if isinstance(error, FedloomError) else error_text(error)
    said = re.fullmatch(r"(.*) \(at ([^()]*)\)", text, re.S)
    what, told = (said[1], said[2]) if said else (text, "")
    if isinstance(error, Diverged):
        return Finding(f"{when}{what}", place)
    return Finding(f"{when}{what}", error_place(error) or told or place)


def _in_state(full: str) -> str:
    """How a method's code names what a checkpoint holds under its path: `inner0.model` is self.state['model'] (inner0)."""
    path, _, name = full.rpartition(".")
    return f"self.state[{name!r}]{path and f' ({path})'}"


def _generators() -> tuple[object, ...]:
    """The states of the global random generators."""
    return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
