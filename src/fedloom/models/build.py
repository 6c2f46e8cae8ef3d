"""Build a model from its name, or from a user's function or class."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fedloom.common.errors import LONGEST_QUOTED, FedloomError, InvalidValue, one_line, quoted
from fedloom.common.expression import parse, plain
from fedloom.common.plugins import found_at
from fedloom.common.randomness import global_stream, preserved_generator
from fedloom.data import DataSpec
from fedloom.models import models


def build_model(model: str | Callable[..., Any], spec: DataSpec, seed: int) -> nn.Module:
    """Build a model on the CPU.

    Args:
        model: An expression with a registered model, a path `package.module:callable(width=3)`, or
            a callable.
        spec: Shape of the data. A callable gets it if it has a parameter `spec`.
        seed: Seed of the initial weights.

    Returns:
        The model, with weights that depend only on `seed`.

    Raises:
        InvalidValue: The model cannot be built, or is not a `torch.nn.Module`.
    """
    if not isinstance(model, str) and not callable(model):
        raise InvalidValue(
            "model must be a name, a torch.nn.Module or a function that returns one, "
            f"not {quoted(model)}"
        )
    name = (
        quoted(model)
        if isinstance(model, str)
        else getattr(model, "__name__", type(model).__name__)
    )
    # With another default device, weights would be drawn by an accelerator's generator. A user's
    # file can draw numbers when it is imported, so the import happens before the stream begins.
    with preserved_generator(), torch.device("cpu"):
        try:
            make = _read(model, spec) if isinstance(model, str) else _with_spec(model, spec)
            with global_stream(seed, "model"):
                module = make()
        except FedloomError:
            raise
        except Exception as error:  # an error of the user's code, or not enough memory
            reason = one_line(f"{type(error).__name__}: {error}", LONGEST_QUOTED)
            remedy = f" (give {name}(...) itself, or a function)" if isinstance(model, type) else ""
            raise InvalidValue(f"model {name}: {reason}{remedy}") from error
    if not isinstance(module, nn.Module):
        raise InvalidValue(
            f"model {name} must return a torch.nn.Module, not {type(module).__name__}"
        )
    return module


def _read(expression: str, spec: DataSpec) -> Callable[[], Any]:
    path, bracket, inside = expression.partition("(")
    if ":" not in path:
        entry, options = models.read(expression)
        return partial(entry.make, spec, **options)
    call = parse(f"model({inside}" if bracket else "model")
    if call.positional:
        raise InvalidValue(
            f"model {quoted(expression)}: write arguments with their names, such as width=3"
        )
    if "spec" in call.named:
        raise InvalidValue(f"model {quoted(expression)}: fedloom sets 'spec'. Remove it")
    make = found_at(path, "model", "a registered name or 'package.module:callable'")
    options = {name: plain(value) for name, value in call.named.items()}
    return partial(_with_spec(make, spec), **options)


def _with_spec(make: Callable[..., Any], spec: DataSpec) -> Callable[..., Any]:
    """Bind the shape of the data if the callable takes it."""
    return partial(make, spec=spec) if "spec" in inspect.signature(make).parameters else make
