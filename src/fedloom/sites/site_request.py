"""Checks of a message from the server, before a site uses it."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm.records import INTEGERS, TensorSpec
from fedloom.common.errors import RefusedReply
from fedloom.common.round import SIMULATED, Round
from fedloom.sites.messages import whole_number
from fedloom.task import Task


def shapes_of(value: Any) -> dict[str, TensorSpec] | None:
    """Return the names and shapes of the expected reply; None if no reply is expected.

    Raises:
        RefusedReply: The value is not a table of shapes.
    """
    if value is None:
        return None
    try:
        return {
            str(name): TensorSpec(tuple(int(size) for size in shape), None)
            for name, shape in value.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise RefusedReply("the server sent no valid shapes of the expected reply") from None


def round_of(value: Any) -> Round:
    """Return the round in the words.

    Raises:
        RefusedReply: It is not valid.
    """
    try:
        entries = {
            field.name: value[field.name] for field in fields(Round) if field.name not in SIMULATED
        }
        entries["selected"] = tuple(int(client) for client in entries["selected"])
        rates = [
            entries[name] for name in ("learning_rate", "initial_learning_rate", "rate_change")
        ]
        sound = all(0 < rate < math.inf for rate in rates) and type(entries["poisson"]) is bool
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise RefusedReply("the server sent no valid round")
    for name in ("number", "rounds", "clients", "participants", "seed"):
        whole_number(entries, name, 0, 1 << 62)
    return Round(**entries)


def require_sound(task: Task, inbox: Mapping[str, Tensor]) -> None:
    """Check that the server's message has one row of each tensor, and a model of this task.

    Args:
        task: The site's task, with the layout of the model.
        inbox: Tensors that the server sent, by name, `[1, ...]`.

    Raises:
        RefusedReply: A tensor has another number of rows, or the model has another type or size or
            is not finite.
    """
    for name, rows in inbox.items():
        if rows.dim() == 0 or len(rows) != 1:
            raise RefusedReply(
                f"the server sent {name!r:.40} of shape {list(rows.shape)}, expected one row"
            )
    model = inbox.get("model")
    layout = task.layout
    if model is not None:
        if model.dtype != layout.dtype or model.dim() != 2 or model.shape[1] > layout.size:
            shape = f"{model.dtype} {list(model.shape)}"
            raise RefusedReply(f"the server sent a model of {shape}, not a model of this task")
        if not bool(torch.isfinite(model).all()):
            raise RefusedReply("the server sent a model that is not finite")
    integers = inbox.get(INTEGERS)
    if integers is not None and (integers.dtype, tuple(integers.shape)) != (
        torch.int64,
        (1, layout.integers),
    ):
        raise RefusedReply("the server sent integer buffers of another model")
