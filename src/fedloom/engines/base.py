"""Shared by all engines: their registry, client memory, integer buffers and the inspection of
replies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.config.registry import Registry
from fedloom.errors import InvalidValue, NotFinite, RefusedReply, code_location, in_brackets
from fedloom.local.cohort import Cohort, Trained
from fedloom.parts.pipeline import Pipeline
from fedloom.records import INTEGERS, Message, Specs
from fedloom.round import Round
from fedloom.rounds.engine import Engine
from fedloom.state.store import ClientStore
from fedloom.task import Task

# An engine is a class (task, *, options) that registers itself: @engines.register("rows").
engines: Registry[Callable[..., Any]] = Registry("engine", "fedloom.engines", "fedloom.engines.ray")


@dataclass(frozen=True)
class Choice:
    """The selected engine, and the reason for a selection by the rule."""

    name: str
    reason: str = ""

    @property
    def named(self) -> bool:
        """True if the user named the engine."""
        return not self.reason

    def __str__(self) -> str:
        return self.name if self.named else f"{self.name} ({self.reason})"


def load_integers(cohort: Cohort, inbox: Message, initial: Tensor) -> bool:
    """Load the integer buffers of the inbox, or else those that clients remember (at first
    `initial`); True if sent.
    """
    sent = inbox.pop(INTEGERS, None)
    if cohort.layout.integers:
        integers = cohort.memory.get(INTEGERS, initial.unsqueeze(0)) if sent is None else sent
        cohort.flat_module.load_integers(integers)
    return sent is not None


def keep_integers(cohort: Cohort, reply: Message, sent: bool) -> None:
    """Put the trained integer buffers into the reply if they were `sent`, else into the memory of
    the clients that upload.
    """
    if sent:
        reply[INTEGERS] = cohort.flat_module.integers()
    elif cohort.layout.integers:
        cohort.memory.write(INTEGERS, cohort.flat_module.integers(), cohort.uploads)


class LocalEngine(Engine):
    """Base of the engines that this process directs, with one store of the clients' memory.

    Args:
        memory_budget: Bytes of client memory kept in this process; beyond it, the least recently
            used clients go to files.
    """

    chosen: Choice | None = None  # of this engine, if `make_engine` made it
    task: Task

    def __init__(self, memory_budget: int) -> None:
        self.store = ClientStore(budget=memory_budget)
        self.notices: list[str] = []
        self._standing: list[str] | None = None

    def renew_notices(self) -> None:
        """Keep the notices from before the first round alone: all others were reported, or are of
        another federation.
        """
        if self._standing is None:
            self._standing = list(self.notices)
        self.notices = list(self._standing)

    def notice(self, text: str) -> None:
        """Add a notice of the run, once."""
        if text not in self.notices:
            self.notices.append(text)

    def commit(self) -> None:
        self.store.commit()

    def rollback(self) -> bool:
        return self.store.rollback()

    def memory(self) -> dict[str, Tensor]:
        return self.store.state()

    def release_memory(self) -> None:
        self.store.release()

    def restore_memory(self, memory: dict[str, Tensor]) -> None:
        self.store.restore(memory)

    def close(self) -> None:
        self.store.close()


def run_training(pipeline: Pipeline, cohort: Cohort, inbox: Message) -> Message:
    """Return the replies of a cohort; `InvalidValue` if it has not one row a client, or the inbox
    was changed.
    """
    versions = [(name, rows, rows._version) for name, rows in inbox.items()]
    message = pipeline.work(cohort, inbox)
    fault = _message_fault(message, len(cohort.clients))
    changed = [name for name, rows, version in versions if rows._version != version]
    if not fault and changed:
        fault = f"changed inbox[{changed[0]!r}] in place, which others are sent too: change a clone() of it"
    if fault:
        clients = ", ".join(map(str, cohort.clients[:3])) + (
            ", ..." if len(cohort.clients) > 3 else ""
        )
        kind = type(pipeline.algorithm)
        location = in_brackets(code_location(kind.train))
        raise InvalidValue(f"{kind.__name__}.train of client {clients} {fault}{location}")
    # no reply keeps the graph of its training
    return {name: rows.detach() for name, rows in message.items()}


def _message_fault(message: object, clients: int) -> str:
    """Return the reason why that is no message with one row for each client, and a remedy; empty if
    it is one.
    """
    if message is None:
        return 'returned nothing: it must return a message, such as {"model": cohort.fit(inbox["model"]).model}'
    if isinstance(message, Trained):
        return 'returned all that cohort.fit gives: return {"model": trained.model}'
    if not isinstance(message, Mapping):
        return f'returned a {type(message).__name__}: it must return named tensors, such as {{"model": weights}}'
    for name, rows in message.items():
        if not isinstance(rows, Tensor):
            cure = (
                "give its .model"
                if isinstance(rows, Trained)
                else "give a tensor with one row a client"
            )
            return f"returned {name!r} as {type(rows).__name__}: {cure}"
        if rows.dim() == 0 or len(rows) != clients:
            cure = f"keep the leading client axis, [{clients}, ...]"
            return f"returned {name!r} of shape {list(rows.shape)}, without one row for each of {clients} clients: {cure}"
    return ""


def inspect_reply(
    pipeline: Pipeline, round: Round, tensors: Mapping[str, Tensor], expected: Specs
) -> None:
    """Raise `RefusedReply` unless a reply has the expected names, shapes and types and is finite,
    decoded too.
    """
    kind = type(pipeline.algorithm).__name__
    if tensors.keys() != expected.keys():
        lacking = [f"lacks {name!r}" for name in sorted(expected.keys() - tensors.keys())]
        holding = [f"holds {name!r}" for name in sorted(tensors.keys() - expected.keys())]
        raise RefusedReply(
            f"the reply {' and '.join([*lacking, *holding])}, other than `expects` says"
        )
    for name, (shape, dtype) in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape):
            raise RefusedReply(
                f"{name!r} has shape {list(tensor.shape)}, not {list(shape)} as `expects` says"
            )
        if tensor.is_complex():
            raise RefusedReply(f"{name!r} holds complex numbers")
        if dtype is not None and tensor.dtype != dtype:
            received, example = _short(tensor.dtype), f"{name}.to(inbox['model'])"
            cure = f"convert it, such as {example}, or give {name!r} a TensorSpec of {received} in `expects`"
            raise RefusedReply(
                f"{kind}.train returned {name!r} as {received}, not {_short(dtype)}: {cure}"
            )
    _require_finite(tensors)
    if any(dtype is None for _, dtype in expected.values()):
        return
    rows = {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}
    decoded = pipeline.decoded(round, rows)
    if decoded is not rows:
        _require_finite(decoded)


def _require_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        # A length beyond the floats is as good as infinite: nothing that is computed from it would
        # be finite.
        if tensor.is_floating_point() and not bool(torch.linalg.vector_norm(tensor).isfinite()):
            fault = "has no finite length" if bool(tensor.isfinite().all()) else "is not finite"
            raise NotFinite(f"{name!r} {fault}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
