"""Common parts of all engines: registry, client memory, integer buffers and checks of replies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm.records import INTEGERS, Message, Specs
from fedloom.common.errors import InvalidValue, NotFinite, RefusedReply, code_location, in_brackets
from fedloom.common.registry import Registry
from fedloom.common.round import Round
from fedloom.local.cohort import Cohort, Trained
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Engine
from fedloom.state.store import ClientStore
from fedloom.task import Task

# An engine is a class (task, *, options) that registers itself: @engines.register("rows").
engines: Registry[Callable[..., Any]] = Registry("engine", "fedloom.engines", "fedloom.engines.ray")


@dataclass(frozen=True)
class Choice:
    """The name of an engine, and the reason if the rule has chosen it."""

    name: str
    reason: str = ""

    @property
    def named(self) -> bool:
        """True if the user has named the engine."""
        return not self.reason

    def __str__(self) -> str:
        return self.name if self.named else f"{self.name} ({self.reason})"


def load_integers(cohort: Cohort, inbox: Message, initial: Tensor) -> bool:
    """Load the integer buffers of a cohort into its module.

    Args:
        cohort: The clients.
        inbox: Messages of the clients. Its integer buffers are removed.
        initial: Initial buffers, `[Z]`. Used for clients without buffers in inbox and memory.

    Returns:
        True if the inbox contained the buffers.
    """
    sent = inbox.pop(INTEGERS, None)
    if cohort.layout.integers:
        integers = cohort.memory.get(INTEGERS, initial.unsqueeze(0)) if sent is None else sent
        cohort.flat_module.load_integers(integers)
    return sent is not None


def store_integers(cohort: Cohort, reply: Message, sent: bool) -> None:
    """Store the trained integer buffers of a cohort.

    Args:
        cohort: The clients.
        reply: The replies. The buffers are added if the server has sent them.
        sent: True if the server has sent the buffers. Otherwise they are written to the memory of
            the uploading clients.
    """
    if sent:
        reply[INTEGERS] = cohort.flat_module.integers()
    elif cohort.layout.integers:
        cohort.memory.write(INTEGERS, cohort.flat_module.integers(), cohort.uploads)


class LocalEngine(Engine):
    """Base class of engines that this process controls, with one store of the clients' memory.

    Args:
        memory_budget: Bytes of client memory in this process. If clients need more, the memory of
            the least recently used clients is moved to files.
    """

    chosen: Choice | None = None  # set by `make_engine`
    task: Task

    def __init__(self, memory_budget: int) -> None:
        self.store = ClientStore(budget=memory_budget)
        self.notices: list[str] = []
        self._initial_notices: list[str] | None = None

    def reset_notices(self) -> None:
        """Remove the notices of earlier rounds.

        They were reported already, or belong to another federation.
        """
        if self._initial_notices is None:
            self._initial_notices = list(self.notices)
        self.notices = list(self._initial_notices)

    def notice(self, text: str) -> None:
        """Add a notice, unless it exists already."""
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
    """Train a cohort and check its replies.

    Args:
        pipeline: Pipeline of the round.
        cohort: The clients.
        inbox: Messages of the clients, `[k, ...]` or `[1, ...]` by name.

    Returns:
        The replies by name, `[k, ...]`, without autograd graph.

    Raises:
        InvalidValue: If a reply does not have one row per client, or training changed the inbox.
    """
    versions = [(name, rows, rows._version) for name, rows in inbox.items()]
    message = pipeline.work(cohort, inbox)
    fault = _message_fault(message, len(cohort.clients))
    changed = [name for name, rows, version in versions if rows._version != version]
    if not fault and changed:
        fault = (
            f"changed inbox[{changed[0]!r}] in place, but other clients receive the same tensor: "
            "change a clone() of it"
        )
    if fault:
        kind = type(pipeline.algorithm)
        location = in_brackets(code_location(kind.train))
        raise InvalidValue(f"{kind.__name__}.train {fault}{location}")
    return {name: rows.detach() for name, rows in message.items()}


def _message_fault(message: object, clients: int) -> str:
    """Return the fault of a message and its remedy, or "" if it has one row per client."""
    if message is None:
        example = '{"model": cohort.fit(inbox["model"]).model}'
        return f"returned nothing: it must return a message, such as {example}"
    if isinstance(message, Trained):
        return 'returned the whole result of cohort.fit: return {"model": trained.model}'
    if not isinstance(message, Mapping):
        example = '{"model": weights}'
        kind = type(message).__name__
        return f"returned a {kind}: it must return named tensors, such as {example}"
    for name, rows in message.items():
        if not isinstance(rows, Tensor):
            value = (
                "its .model" if isinstance(rows, Trained) else "a tensor with one row per client"
            )
            return f"returned {name!r} as {type(rows).__name__}: return {value}"
        if rows.dim() == 0 or len(rows) != clients:
            return (
                f"returned {name!r} of shape {list(rows.shape)}, without one row for each of "
                f"{clients} clients: keep the leading client axis, [{clients}, ...]"
            )
    return ""


def inspect_reply(
    pipeline: Pipeline, round: Round, tensors: Mapping[str, Tensor], expected: Specs
) -> None:
    """Check the reply of one client, also after decoding.

    Args:
        pipeline: Pipeline of the round.
        round: The round.
        tensors: Tensors of the reply by name.
        expected: Shapes and types of the reply by name.

    Raises:
        RefusedReply: If names, shapes or types differ from `expected`, or a value is not finite.
    """
    kind = type(pipeline.algorithm).__name__
    if tensors.keys() != expected.keys():
        missing = [f"lacks {name!r}" for name in sorted(expected.keys() - tensors.keys())]
        unexpected = [f"holds {name!r}" for name in sorted(tensors.keys() - expected.keys())]
        fault = " and ".join([*missing, *unexpected])
        raise RefusedReply(f"the reply {fault}, contrary to `expects`")
    for name, (shape, dtype) in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shape):
            raise RefusedReply(
                f"{name!r} has shape {list(tensor.shape)}, but `expects` requires {list(shape)}"
            )
        if tensor.is_complex():
            raise RefusedReply(f"{name!r} has complex numbers: only real numbers are allowed")
        if dtype is not None and tensor.dtype != dtype:
            received = _short(tensor.dtype)
            raise RefusedReply(
                f"{kind}.train returned {name!r} as {received}, not {_short(dtype)}: convert it, "
                f"such as {name}.to(inbox['model']), or set its TensorSpec in `expects` to "
                f"{received}"
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
        # An infinite norm is refused too: values computed from the tensor would be infinite.
        if tensor.is_floating_point() and not bool(torch.linalg.vector_norm(tensor).isfinite()):
            fault = "has no finite length" if bool(tensor.isfinite().all()) else "is not finite"
            raise NotFinite(f"{name!r} {fault}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
