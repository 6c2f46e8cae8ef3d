"""The instrumented run, one client after another, that all other runs are compared with."""

import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.algorithm import Cohort
from fedloom.algorithm.method import Method, components
from fedloom.algorithm.records import Specs
from fedloom.common.errors import (
    Diverged,
    NotFinite,
    code_location,
    error_location,
    is_user_code,
)
from fedloom.common.round import Round
from fedloom.engines.proof import Proof
from fedloom.engines.rows import RowsEngine
from fedloom.parts.pipeline import Pipeline
from fedloom.parts.stages import stages_in
from fedloom.reviews.checker.findings import Finding, kinds, source_match
from fedloom.reviews.checker.listening import GuardedState, Listener, ListeningMemory
from fedloom.reviews.checker.trial import ROUNDS, CheckTrial, failure
from fedloom.rounds.engine import Answer, Fault, Job
from fedloom.rounds.federation import Federation
from fedloom.task import Task


class ReferenceRun:
    """The instrumented run that all others are compared with."""

    def __init__(self, trial: CheckTrial) -> None:
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
            finding = failure(error, trial.location)
            changed = next(iter(self.listener.notes["changed"].values()), "")
            arose = self.listener.nan_location if isinstance(error, Diverged | NotFinite) else ""
            self.findings.append(replace(finding, location=changed or arose or finding.location))
            self.listener.notes["changed"].clear()
            self.listener.faults.clear()  # the first of which is why no round came about
        self.findings += self.listener.findings()
        for (module, name), value in _globals(trial.method).items():
            if value != variables.get((module, name)):
                problem = (
                    f"{name} of {module} changes while rounds go on, and each process "
                    "has one of its own"
                )
                location = source_match(trial.method, rf"\b{name}\b")[0] or trial.location
                remedy = "send it with the message; a client remembers in cohort.memory"
                self.findings.append(Finding(problem, location, remedy))
        moved = self.findings or not torch.equal(self.federation.model(), trial.task.initial)
        if not moved and not self.federation.pipeline.personal:
            problem = f"the global model has not moved in {ROUNDS} rounds"
            remedy = (
                "update (or receive) must put a new model into self.state['model'], and "
                "train reply with trained weights"
            )
            self.findings.append(Finding(problem, trial.server_location, remedy))

    def _rounds(self, engine: "_ListeningEngine") -> None:
        method = self.federation.algorithm
        initial = set(self.federation.server_state())
        attributes = _attributes(method)
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
        attributes = _attributes(method)
        states = [component.state for component in components(method)]
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


def _in_state(full: str) -> str:
    """Return the name in a method's code of a checkpoint's tensor: `inner0.model` is
    self.state['model'] (inner0).
    """
    path, _, name = full.rpartition(".")
    return f"self.state[{name!r}]{path and f' ({path})'}"


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
