"""Checks of what a method sends and keeps, and of a model that has diverged."""

import math

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, overrides
from fedloom.errors import Diverged, InvalidValue, RefusedReply, code_location, in_brackets
from fedloom.method import Method, components
from fedloom.parts.pipeline import Pipeline
from fedloom.records import Exchange
from fedloom.round import Round
from fedloom.rounds.engine import Fault
from fedloom.task import Task

DIVERGED = 1000
"""A global model whose loss is this many times that of guessing has diverged: training cannot
repair it.
"""


def require_message(exchange: Exchange, algorithm: Algorithm) -> None:
    """Raise `InvalidValue` unless the names of the tensors are free, and the message has one row for
    all receivers or one for each.
    """
    kind = type(algorithm)
    for name in (*exchange.sent, *algorithm.expects(exchange.round)):
        if name.startswith("@"):
            function = kind.send if name in exchange.sent else kind.expects
            location = in_brackets(code_location(function))
            reason = f"names that begin with @ are reserved for fedloom{location}"
            raise InvalidValue(f"{kind.__name__} names a tensor {name!r}: {reason}")
    selected, idle = len(exchange.selection.clients), exchange.selection.idle
    allowed = (1, selected + 1) if idle else (1, selected, selected + 1)
    for name, rows in exchange.wire.items():
        if len(rows) not in allowed:
            others = " and those that only train" if idle else ""
            choices = (
                "one for all, such as model.unsqueeze(0), "
                f"or one for each of {selected} selected clients{others}"
            )
            location = in_brackets(code_location(kind.send))
            text = f"{kind.__name__}.send gives {name!r} {len(rows)} rows: give it {choices}"
            raise InvalidValue(f"{text}{location}")


def checked_model(
    pipeline: Pipeline, method: Method, initial: Tensor, function: str = ""
) -> Tensor:
    """Return the global model after the server's step.

    Args:
        pipeline: The pipeline of the next round.
        method: The expression as written.
        initial: A model of the same shape and type, `[P]`.
        function: Name of the function that made the model; by default the server's step.

    Returns:
        The model, `[P]`.

    Raises:
        InvalidValue: If the function left no model like `initial`, or a state that a checkpoint
            cannot save.
    """
    wrong = _wrong_state(method)
    algorithm = pipeline.algorithm
    model = initial if wrong else pipeline.model()
    if model.shape != initial.shape:
        remedy = "of one row for each client take one, such as weighted_mean(replies['model'], replies.weights)"
        wrong = (
            f"left a global model of shape {list(model.shape)}, not {list(initial.shape)}: {remedy}"
        )
    elif model.dtype != initial.dtype:
        remedy = "convert it, such as model.float()"
        wrong = f"left a global model of {model.dtype}, not {initial.dtype}: {remedy}"
    if wrong:
        kind = type(algorithm)
        receives = overrides(kind, Algorithm, ("receive",))
        name = function or ("receive" if receives else "update")
        location = in_brackets(code_location(getattr(kind, name)))
        raise InvalidValue(f"{kind.__name__}.{name} {wrong}{location}")
    for component in components(method):  # no graph is kept longer than its round
        component.state = {
            name: tensor if tensor.grad_fn is None else tensor.detach()
            for name, tensor in component.state.items()
        }
    return model.detach()


def _wrong_state(method: Method) -> str:
    for component in components(method):
        if not hasattr(component, "state"):
            return "has not kept the plan and made the state: begin it with super().setup(plan)"
        for name, value in component.state.items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                return f"left {kind} in self.state[{name!r}], where a checkpoint holds tensors: make it one"
            if "." in name or "@" in name:
                reserved = "a name there has no dot or @, which stand for what fedloom adds"
                return f"left self.state[{name!r}]: {reserved}"
    return ""


def require_converging(task: Task, round: Round, model: Tensor, loss: float | None) -> None:
    """Raise `Diverged` if the global model is not finite, or its loss is far beyond that of
    guessing.
    """
    if not bool(torch.isfinite(model).all()):
        raise diverged(round, "the global model is not finite any more")
    guess = task.objective.guess(task.dataset.spec.outputs)
    if loss is not None and not loss < DIVERGED * guess:
        beyond = f", over {DIVERGED} times that of guessing" if math.isfinite(loss) else ""
        raise diverged(round, f"the global model's loss is {loss:.3g}{beyond}")


def diverged(round: Round, reason: str) -> Diverged:
    """Return the error of a round in which training diverged."""
    last = round.number - 1
    model = f"the model of round {last} is kept" if last else "there is no model before that"
    rate = f"learning rate {round.learning_rate:g}"
    return Diverged(f"round {round.number}: training diverged ({rate}): {reason}; {model}")


def raise_unless_absent(algorithm: Algorithm, round: Round, faults: list[Fault]) -> None:
    """Raise the reason why a round has no reply, unless its clients were only absent."""
    if faults and all(fault.diverged for fault in faults):
        raise diverged(round, "no client's model is finite any more")
    for fault in faults:
        if isinstance(fault.error, RefusedReply):
            kind = type(algorithm)
            location = in_brackets(code_location(kind.train))
            reason = f"that of client {fault.job.client}: {fault.reason}{location}"
            text = f"round {round.number}: no reply to {kind.__name__} can be used; {reason}"
            raise RefusedReply(text) from fault.error
        if fault.error is not None:
            raise fault.error
