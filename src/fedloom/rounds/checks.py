"""Checks of a method's messages and state, and of diverged models."""

import math

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, overrides
from fedloom.algorithm.method import Method, components
from fedloom.algorithm.records import Exchange
from fedloom.common.errors import Diverged, InvalidValue, RefusedReply, code_location, in_brackets
from fedloom.common.round import Round
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.client_errors import ClientLabels, mark_clients
from fedloom.rounds.engine import Fault
from fedloom.task import Task

DIVERGED = 1000
"""Ratio of the loss to the loss of guessing, from which a model counts as diverged.

Further training does not repair such a model.
"""


def require_message(exchange: Exchange, algorithm: Algorithm) -> None:
    """Check the tensors that an algorithm sends.

    Args:
        exchange: Record of the round.
        algorithm: The algorithm that sends the message.

    Raises:
        InvalidValue: If a name begins with @, or if the number of rows is neither one nor the
            number of receivers.
    """
    kind = type(algorithm)
    for name in (*exchange.sent, *algorithm.expects(exchange.round)):
        if name.startswith("@"):
            function = kind.send if name in exchange.sent else kind.expects
            location = in_brackets(code_location(function))
            reason = f"names that begin with @ are reserved for fedloom{location}"
            raise InvalidValue(f"{kind.__name__} names a tensor {name!r}: {reason}")
    selected = len(exchange.selection.clients)
    idle = exchange.selection.idle
    allowed = (1, selected + 1) if idle else (1, selected, selected + 1)
    for name, rows in exchange.wire.items():
        if len(rows) not in allowed:
            unselected = " and one for the other clients that train" if idle else ""
            choices = (
                "one row for all clients, such as model.unsqueeze(0), "
                f"or one for each of {selected} selected clients{unselected}"
            )
            location = in_brackets(code_location(kind.send))
            text = f"{kind.__name__}.send returned {name!r} with {len(rows)} rows: return {choices}"
            raise InvalidValue(f"{text}{location}")


def checked_model(
    pipeline: Pipeline, method: Method, initial: Tensor, function: str = ""
) -> Tensor:
    """Check and return the global model after the server's step.

    Args:
        pipeline: The pipeline of the next round.
        method: The whole method, with all stages.
        initial: A model with the required shape and type, `[P]`.
        function: Name of the function that computed the model. By default the server's step.

    Returns:
        The model, `[P]`.

    Raises:
        InvalidValue: If shape or type of the model differ from `initial`, or a checkpoint cannot
            save the state.
    """
    wrong = _wrong_state(method)
    algorithm = pipeline.algorithm
    model = initial if wrong else pipeline.model()
    if model.shape != initial.shape:
        wrong = (
            f"left a global model of shape {list(model.shape)}, not {list(initial.shape)}: "
            "combine the rows of the clients, such as with "
            "weighted_mean(replies['model'], replies.weights)"
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
    for component in components(method):  # autograd graphs must not grow over rounds
        component.state = {
            name: tensor if tensor.grad_fn is None else tensor.detach()
            for name, tensor in component.state.items()
        }
    return model.detach()


def _wrong_state(method: Method) -> str:
    for component in components(method):
        if not hasattr(component, "state"):
            return "has not stored the plan and the state: call super().setup(plan) first"
        for name, value in component.state.items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                return (
                    f"left {kind} in self.state[{name!r}], but checkpoints only save tensors: "
                    "convert it to a tensor"
                )
            if "." in name or "@" in name:
                reserved = "fedloom reserves names with a dot or @: use another name"
                return f"left self.state[{name!r}]: {reserved}"
    return ""


def require_converging(
    task: Task, round: Round, model: Tensor, loss: float | None, suspect: str
) -> None:
    """Raise an error if the global model has diverged.

    Args:
        task: The task, with the objective.
        round: The finished round.
        model: Global model after the round, `[P]`.
        loss: Loss of the model, if the round measured it.
        suspect: Client that may be the cause, as the end of a sentence, or "".

    Raises:
        Diverged: If the model is not finite, or its loss exceeds `DIVERGED` times the loss of
            guessing.
    """
    if not bool(torch.isfinite(model).all()):
        raise diverged(round, f"the global model has infinite or NaN values{suspect}")
    guess = task.objective.guess(task.dataset.spec.outputs)
    if loss is not None and not loss < DIVERGED * guess:
        beyond = f", over {DIVERGED} times the loss of guessing" if math.isfinite(loss) else ""
        raise diverged(round, f"the global model's loss is {loss:.3g}{beyond}{suspect}")


def diverged(round: Round, reason: str) -> Diverged:
    """Return the error of a round in which training diverged.

    Args:
        round: The failed round.
        reason: How the divergence was detected.

    Returns:
        The error, with the learning rate and the round that remains valid. The caller raises it.
    """
    previous = round.number - 1
    model = f"the model of round {previous} remains" if previous else "there is no earlier model"
    rate = f"learning rate {round.learning_rate:g}"
    return Diverged(f"round {round.number}: training diverged ({rate}): {reason}; {model}")


def raise_unless_absent(
    algorithm: Algorithm, round: Round, faults: list[Fault], labels: ClientLabels
) -> None:
    """Raise the error of a round without replies, unless the clients were only absent.

    Args:
        algorithm: The algorithm of the round.
        round: The round.
        faults: Faults of all its clients.
        labels: Names of the clients.

    Raises:
        Diverged: If the training of all clients diverged.
        RefusedReply: If a reply was refused.
        Exception: The error of a client.
    """
    if faults and all(fault.diverged for fault in faults):
        clients = labels.of([fault.job.client for fault in faults])
        raise diverged(round, f"no reply is finite, {clients}")
    for fault in faults:
        if isinstance(fault.error, RefusedReply):
            kind = type(algorithm)
            location = in_brackets(code_location(kind.train))
            reason = f"{labels.of([fault.job.client])}: {fault.reason}{location}"
            text = f"round {round.number}: no reply to {kind.__name__} is valid; {reason}"
            raise RefusedReply(text) from fault.error
        if fault.error is not None:
            mark_clients(fault.error, [fault.job.client])
            raise fault.error
