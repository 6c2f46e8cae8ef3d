"""Check a method by running tiny instrumented rounds in several ways, which must come to the same
models.
"""

import copy
import difflib
import inspect
import re
import sys
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

from fedloom.algorithm import Algorithm
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition
from fedloom.engines.base import LocalEngine
from fedloom.engines.pickling import dump, load
from fedloom.engines.proof import Proof, prove
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.errors import (
    Diverged,
    FedloomError,
    InvalidValue,
    NotFinite,
    code_location,
    error_location,
    error_text,
    is_user_code,
)
from fedloom.local.cohort import Cohort
from fedloom.method import Method, components, needs_total_rounds
from fedloom.parts.building import build
from fedloom.parts.hooks import Part
from fedloom.parts.pipeline import Pipeline
from fedloom.parts.stages import stages_in
from fedloom.randomness import global_stream, stream
from fedloom.records import Specs
from fedloom.reviews.checker.findings import Finding, kinds, source_match
from fedloom.reviews.checker.listening import GuardedState, Listener, ListeningMemory
from fedloom.round import Round
from fedloom.rounds.engine import Answer, Fault, Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.training import Training

T = TypeVar("T")

ROUNDS = 3
CLIENTS = 4
"""Clients in a round, at most."""

BATCH, BATCHES, TEST = 8, 3, 64
"""At most so many samples in a batch, batches of a client and test samples of a user's task are
used.
"""

TOLERANCE = 1e-2
"""Allowed error of clients that advance together, as a share of how far the models have moved."""


@dataclass(frozen=True)
class CheckResult:
    """The findings about a method, and the bytes that it takes by name."""

    method: str
    findings: list[Finding]
    sizes: Mapping[str, float]


def check(algorithm: Algorithm | str, task: Task | None = None) -> list[Finding]:
    """Check a method by running tiny instrumented rounds in several ways.

    It trains three rounds: one client after another and watched line by line, clients together, as
    in worker processes, killed and resumed, and as the beginning of a longer run. Results must
    agree, and the watched run must change nothing in place, draw from no global generator and keep
    nothing where no checkpoint finds it.

    Args:
        algorithm: The method, such as `HalfStep()` or `"umf(my_methods:HalfStep)"`.
        task: A task, of which a small sample is used (default: six clients and a model of 51
            weights).

    Returns:
        The findings; none where the method is sound.

    Raises:
        InvalidValue: The method cannot be made.
        UnknownName: Nothing has that name.
    """
    return examine(algorithm, task).findings


def examine(
    algorithm: Algorithm | str, task: Task | None = None, *, compare: bool = True
) -> CheckResult:
    """Check a method as `check` does, without `compare` in one way alone, and count bytes of
    models, messages and memory.
    """
    try:
        method = build(algorithm)
    except FedloomError as error:
        finding = _failure(error, "")
        if not finding.location:
            raise
        return CheckResult(str(algorithm), [finding], {})
    trial = _Trial(method, own_task() if task is None else sample_of(task))
    reference = _Reference(trial)
    findings = [*_misread(method), *reference.findings]
    if compare and not findings:
        findings = _in_other_ways(trial, reference)
    return CheckResult(str(method), list(dict.fromkeys(findings)), reference.sizes)


# --- tasks ---


@cache
def own_task() -> Task:
    """Return a task of six clients with 3 to 12 samples and test samples of their own, and a model
    of 51 weights.
    """
    sizes, tests, extra = (9, 5, 12, 7, 3, 8), (2, 1, 3, 0, 1, 2), 20
    generator = stream(0, "check")
    count = sum(sizes) + sum(tests)
    inputs = torch.randn(count + extra, 6, generator=generator)
    labels = (inputs[:, :3] + 0.3 * torch.randn(count + extra, 3, generator=generator)).argmax(1)
    samples = Samples(inputs, labels)
    with global_stream(0, "check"):
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    dataset = Dataset("check", samples[:count], samples[count:], 3)
    return Task(
        dataset,
        dataset.train,
        dataset.test,
        Partition.from_sizes(np.arange(sum(sizes)), sizes),
        model,
        Training(learning_rate=0.05, batch_size=4),
        Partition.from_sizes(np.arange(sum(sizes), count), tests),
    )


def sample_of(task: Task) -> Task:
    """Return the task with one to three small batches for each client, and a small test set."""
    size = min(BATCH, task.training.batch_size or BATCH)
    indices = [
        task.partition[k][: max(1, size * (1 + k % BATCHES) - k % 2)] for k in range(task.clients)
    ]
    local = task.local_test
    return replace(
        task,
        test=task.test[:TEST],
        partition=Partition.of(indices),
        local_test=local and Partition.of([local[k][:size] for k in range(task.clients)]),
        training=replace(task.training, batch_size=size, epochs=1, steps=None),
    )  # fmt: skip


@dataclass(frozen=True)
class _Trial:
    """A method and the task that it is checked on."""

    method: Method
    task: Task

    @cached_property
    def proof(self) -> Proof:
        return prove(
            self.task.model, self.task.dataset, self.task.train, self.task.training, stack=True
        )

    @cached_property
    def participation(self) -> float:
        share = min(1.0, CLIENTS / self.task.clients)
        try:
            self.federation(RowsEngine(self.task, self.proof), participation=share)
        except InvalidValue:
            return 1.0  # its setup refuses a part of the clients
        return share

    def federation(
        self,
        engine: LocalEngine,
        folder: Path | None = None,
        rounds: int = ROUNDS,
        participation: float | None = None,
    ) -> Federation:
        personal = 1 if self.task.local_test is not None else None
        options = {
            "evaluate_every": 1,
            "checkpoint_every": 1,
            "personal_every": personal,
            "personal_clients": CLIENTS,
        }
        schedule = Schedule(rounds, participation or self.participation, **options)  # type: ignore[arg-type]
        return Federation(copy.deepcopy(self.method), self.task, engine, schedule, folder)

    def outcome(self, engine: LocalEngine, rounds: int = ROUNDS) -> Federation:
        """Return a federation after `ROUNDS` of its rounds."""
        with closing(engine):
            federation = self.federation(engine, rounds=rounds)
            for _ in range(ROUNDS):
                federation.step()
        return federation

    def resumed(self) -> Federation:
        """Return a federation that was killed after its first round and has gone on to its last."""
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(RowsEngine(self.task, self.proof)) as rows_engine,
            closing(RowsEngine(self.task, self.proof)) as second,
        ):
            killed = self.federation(rows_engine, Path(folder))
            killed.step()
            killed.save()
            federation = self.federation(second, Path(folder))
            federation.run()
        return federation

    @property
    def server_location(self) -> str:
        kind = self._kind
        return code_location(kind.update) or code_location(kind.receive) or self.location

    @property
    def location(self) -> str:
        return code_location(self._kind.train) or code_location(type(self.method))

    @property
    def _kind(self) -> type[Algorithm]:
        found = (method for method in components(self.method) if isinstance(method, Algorithm))
        return type(next(found))


# --- mistakes in its code ---


def _misread(method: Method) -> Iterator[Finding]:
    """Find names in the classes of a method that fedloom does not read as they are meant."""
    hooks = {name for base in (Algorithm, Part) for name in vars(base) if not name.startswith("_")}
    for kind in (kind for kind in kinds(method) if not kind.__module__.startswith("fedloom.")):
        bases = {
            name
            for base in kind.__mro__[1:]
            for name in [*vars(base), *vars(base).get("__annotations__", {})]
        }
        written = vars(kind).get("__annotations__", {})
        for name, value in vars(kind).items():
            if name.startswith("_") or name in bases or name in written:
                continue
            near = difflib.get_close_matches(name, hooks, 1, 0.8)
            if inspect.isfunction(value) and near and not source_match(method, rf"\.{name}\b")[0]:
                problem = f"{kind.__name__}.{name} is called by nobody"
                yield Finding(problem, code_location(value), f"did you mean {near[0]}?")
            elif isinstance(value, bool | int | float | str) and name.islower():
                location = source_match(method, rf"^\s+{name}\s*=")[0] or code_location(kind)
                problem = (
                    f"{name} = {value!r} has no type, so it is no parameter of {kind.__name__}"
                )
                remedy = f"write {name}: {type(value).__name__} = {value!r}, or ClassVar where it is none"
                yield Finding(problem, location, remedy)


# --- one client after another, instrumented ---


class _Reference:
    """The instrumented run that all others are compared with."""

    def __init__(self, trial: _Trial) -> None:
        self.trial = trial
        self.listener = Listener()
        self.findings: list[Finding] = []
        self.sizes: dict[str, float] = {}
        variables = _globals(trial.method)
        engine = _ListeningEngine(trial.task, trial.proof, self.listener)
        try:
            with self.listener, closing(engine):
                self.federation = trial.federation(engine)
                self._rounds(engine)
        except Exception as error:
            finding = _failure(error, trial.location)
            changed = next(iter(self.listener.notes["changed"].values()), "")
            arose = self.listener.nan_location if isinstance(error, Diverged | NotFinite) else ""
            self.findings.append(replace(finding, location=changed or arose or finding.location))
            self.listener.notes["changed"].clear()
            self.listener.faults.clear()  # the first of which is why no round came about
        self.findings += self.listener.findings()
        for (module, name), value in _globals(trial.method).items():
            if value != variables.get((module, name)):
                problem = f"{name} of {module} changes while rounds go on, and each process has one of its own"
                location = source_match(trial.method, rf"\b{name}\b")[0] or trial.location
                remedy = "send it with the message; a client remembers in cohort.memory"
                self.findings.append(Finding(problem, location, remedy))
        moved = self.findings or not torch.equal(self.federation.model(), trial.task.initial)
        if not moved and not self.federation.pipeline.personal:
            problem = f"the global model has not moved in {ROUNDS} rounds"
            remedy = "update (or receive) must put a new model into self.state['model'], and train reply with trained weights"
            self.findings.append(Finding(problem, trial.server_location, remedy))

    def _rounds(self, engine: "_ListeningEngine") -> None:
        method = self.federation.algorithm
        initial, attributes = set(self.federation.server_state()), _attributes(method)
        for _ in range(ROUNDS):
            state = {
                _in_state(name): tensor for name, tensor in self.federation.server_state().items()
            }
            self.listener.watch(state)
            self.federation.step()
            self.listener.unwatch(list(state))
        self.findings += _missing_in_setup(self.federation, initial)
        for name, location in _written(method, attributes):
            if name not in self.listener.notes["written"]:
                problem = f"self.{name} changes from round to round, and no checkpoint holds it"
                self.findings.append(
                    Finding(problem, location, f"keep it as a tensor in self.state[{name!r}]")
                )
        participants = len(self.federation.history[0]["clients"])
        memories = [_bytes(engine.store.read(client)) for client in engine.store]
        self.sizes = {
            "a model": _bytes({"model": self.trial.task.initial}),
            "sent to a client": self.federation.history[-1]["bytes_down"] / participants,
            "sent by a client": self.federation.history[-1]["bytes_up"] / participants,
            "remembered by a client": sum(memories) / max(1, len(memories)),
        }


class _ListeningEngine(RowsEngine):
    """The rows engine with a listener at each client."""

    def __init__(self, task: Task, proof: Proof, listener: Listener) -> None:
        super().__init__(task, proof)
        self.listener = listener

    def train_chunk(
        self, pipeline: Pipeline, round: Round, expected: Specs, jobs: Sequence[Job]
    ) -> list[Answer | Fault]:
        (job,) = jobs
        inbox = {f"inbox[{name!r}]": rows for name, rows in job.inbox.items()}
        self.listener.watch(inbox)
        with self._client_half(pipeline):
            (result,) = super().train_chunk(pipeline, round, expected, jobs)
        self.listener.unwatch(list(inbox))
        for name, location in self.client_memory.lost().items():
            self.listener.note("lost", name, location)
        if isinstance(result, Fault) and not result.diverged:
            error = result.error
            location = (error_location(error) if error else "") or code_location(
                type(pipeline.algorithm).train
            )
            self.listener.faults.append(Finding(f"a client fails: {result.reason}", location))
        return [result]

    def personalised(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> list[tuple[int, Tensor, Tensor | None]]:
        with self._client_half(pipeline):
            return super().personalised(pipeline, round, jobs)

    def cohort(self, round: Round, jobs: Sequence[Job]) -> Cohort:
        cohort = super().cohort(round, jobs)
        self.client_memory = cohort.memory = ListeningMemory(self.store, cohort.clients)
        return cohort

    @contextmanager
    def _client_half(self, pipeline: Pipeline) -> Iterator[None]:
        """Note, while the method is at a client, its reads of the server's state and its writes to
        itself.
        """
        method = pipeline.parts[0] if pipeline.parts else pipeline.algorithm
        attributes, states = (
            _attributes(method),
            [component.state for component in components(method)],
        )
        for component, state in zip(components(method), states, strict=True):
            component.state = GuardedState(state, self.listener)
        try:
            yield
        finally:
            for component, state in zip(components(method), states, strict=True):
                component.state = state
        for name, location in _written(method, attributes):
            self.listener.note("written", name, location)


def _globals(method: Method) -> dict[tuple[str, str], object]:
    """Return a fingerprint of the variables in the user's modules that hold a method, by module and
    name.
    """
    modules = {kind.__module__: sys.modules.get(kind.__module__) for kind in kinds(method)}
    return {
        (where, name): _trace(value)
        for where, module in modules.items()
        if where != "__main__" and is_user_code(getattr(module, "__file__", None) or "")
        for name, value in vars(module).items()
        if not name.startswith("__") and not callable(value) and not inspect.ismodule(value)
    }


def _attributes(method: Method) -> dict[tuple[int, str], object]:
    return {
        (k, name): _trace(value)
        for k, inner in enumerate(components(method))
        for name, value in vars(inner).items()
        if name not in ("state", "plan", "stages") and not isinstance(value, Method)
    }


def _trace(value: object) -> object:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, list | dict | set):
        return id(value), repr(value)
    plain = value is None or isinstance(value, bool | int | float | str | tuple)
    return value if plain else id(value)


def _written(
    method: Method, attributes: Mapping[tuple[int, str], object]
) -> Iterator[tuple[str, str]]:
    """Find the attributes that have changed since, and the lines that write them."""
    for (k, name), value in _attributes(method).items():
        if (k, name) not in attributes or attributes[k, name] != value:
            yield name, source_match(method, rf"self\.{name}\b(?!\()")[0]


def _missing_in_setup(federation: Federation, initial: set[str]) -> Iterator[Finding]:
    method = federation.algorithm
    if any(stages_in(method)):  # stages have no state before they begin
        return
    for full in federation.server_state():
        name = full.rpartition(".")[2]
        # figures in a name: one for each client, as they come
        if full not in initial and not re.search(r"\d", name):
            near = difflib.get_close_matches(name, [path.rpartition(".")[2] for path in initial], 1)
            location, _ = source_match(method, rf"state\[.{re.escape(name)}.\]")
            remedy = (
                f"did you mean {near[0]!r}?"
                if near
                else "make it in setup, with the value that it begins with"
            )
            yield Finding(
                f"self.state[{name!r}] is not there after setup, but after a round",
                location,
                remedy,
            )


# --- the other ways, which must agree with the reference ---


class _LockStepEngine(StackedEngine):
    """The stacked engine, which never trains clients one by one instead."""

    def _results(
        self, pipeline: Pipeline, jobs: Sequence[Job], work: Callable[[Sequence[Job]], list[T]]
    ) -> Iterator[T]:
        for chunk in self._chunks(pipeline, jobs):
            yield from work(chunk)


class _ElsewhereEngine(RowsEngine):
    """The rows engine with a method that is sent to each client without its state, as to a worker
    process.
    """

    def train_chunk(
        self, pipeline: Pipeline, round: Round, expected: Specs, jobs: Sequence[Job]
    ) -> list[Answer | Fault]:
        return super().train_chunk(self._sent(pipeline), round, expected, jobs)

    def personalised(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> list[tuple[int, Tensor, Tensor | None]]:
        return super().personalised(self._sent(pipeline), round, jobs)

    def _sent(self, pipeline: Pipeline) -> Pipeline:
        sent: Pipeline = load(*dump(pipeline), task=self.task)
        return sent


_NOT_SEEDED = (
    r"\b(time\.\w+\(.*?\)|[\w.]*(default_rng|Random)\(\)|[\w.]*urandom\(|"
    r"(secrets|uuid|datetime)\.\w+\(|((np|numpy)\.)?random\.\w+\(.*?\))"
)
"""Code that gives something else each time."""


_TOGETHER = "clients that advance together"
_WAYS = {
    "again": (
        "two runs with one seed come to other models: {0} is not of the seed",
        "draw from round.stream('...') or cohort.stream('...')",
    ),
    _TOGETHER: (
        f"{_TOGETHER} come to other models than one by one",
        "treat every row of the leading client axis by itself: no index 0, no mean over all clients, random numbers from "
        "cohort.stream; what belongs to clients and enters steps goes into context",
    ),
    "in worker processes": (
        "clients in worker processes come to other models than here",
        "train may depend on its inbox, its samples, its memory and the method's fields alone",
    ),
    "killed after a round and resumed": (
        "a run that is killed and resumed comes to another model",
        "what the server must remember goes into self.state, and every draw comes from round.stream",
    ),
    "as the beginning of a longer run": (
        "the first rounds depend on how many there will be",
        "facts = Facts(needs_total_rounds=True) says so",
    ),
}
"""Ways of running the rounds, the problem where one comes to another state than the reference, and
its remedy.
"""


def _in_other_ways(trial: _Trial, reference: _Reference) -> list[Finding]:
    """Return the finding of the first way of running the rounds that fails, or comes to another
    state than the reference.
    """
    task, proof = trial.task, trial.proof
    unseeded, text = source_match(trial.method, _NOT_SEEDED)
    ways: list[tuple[Callable[[], Federation], str]] = [
        (lambda: trial.outcome(RowsEngine(task, proof)), unseeded),
        (lambda: trial.outcome(_LockStepEngine(task, proof)), ""),
        (lambda: trial.outcome(_ElsewhereEngine(task, proof)), ""),
        (trial.resumed, trial.server_location),
    ]
    if not needs_total_rounds(trial.method):
        location = source_match(trial.method, r"\.rounds\b")[0]
        ways.append((lambda: trial.outcome(RowsEngine(task, proof), rounds=2 * ROUNDS), location))
    for (outcome, location), (way, (problem, remedy)) in zip(ways, _WAYS.items(), strict=False):
        try:
            off = _off(
                outcome(),
                reference.federation,
                task.initial,
                TOLERANCE if way == _TOGETHER else 0.0,
            )
        except Exception as error:
            return [replace(_failure(error, location or trial.location, f"{way}: "), remedy=remedy)]
        if off:
            problem = f"{problem.format(text or 'a clock or a generator')} ({off})"
            return [Finding(problem, location or trial.location, remedy)]
    return []


def _off(outcome: Federation, expected: Federation, initial: Tensor, tolerance: float = 0.0) -> str:
    """Return how far a federation's states are from those expected, or "" within a share of how far
    these have moved.
    """
    states, references = (
        {**federation.server_state(), "model": federation.model()}
        for federation in (outcome, expected)
    )
    moved = float((references["model"] - initial).abs().max())
    for name, reference in references.items():
        state = states.get(name)
        if state is None or state.shape != reference.shape:
            return f"{name} is {'missing' if state is None else list(state.shape)}"
        if torch.equal(state, reference) or not state.is_floating_point():
            continue
        off = float((state - reference).abs().nan_to_num().max())
        if off > tolerance * max(moved, float(reference.abs().max()) if name != "model" else moved):
            return f"{name} is off by {off:.2g}"
    return ""


# --- findings ---


def _failure(error: Exception, location: str, prefix: str = "") -> Finding:
    """Return an error as a finding, with its location out of the text."""
    text = str(error) if isinstance(error, FedloomError) else error_text(error)
    match = re.fullmatch(r"(.*) \(at ([^()]*)\)", text, re.S)
    problem, stated = (match[1], match[2]) if match else (text, "")
    if isinstance(error, Diverged):
        return Finding(f"{prefix}{problem}", location)
    return Finding(f"{prefix}{problem}", error_location(error) or stated or location)


def _in_state(full: str) -> str:
    """Return the name in a method's code of a checkpoint's tensor: `inner0.model` is
    self.state['model'] (inner0).
    """
    path, _, name = full.rpartition(".")
    return f"self.state[{name!r}]{path and f' ({path})'}"


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
