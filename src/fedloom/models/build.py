"""A model from its name, or from the import path of a user's own function or class."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fedloom.config.expression import parse, plain
from fedloom.config.plugins import found_at
from fedloom.data import DataSpec
from fedloom.errors import LONGEST_QUOTED, FedloomError, InvalidValue, one_line, quoted
from fedloom.models import models
from fedloom.randomness import global_stream, preserved_generator


def build_model(model: str | Callable[..., Any], spec: DataSpec, seed: int) -> nn.Module:
    """Build a registered model, or that of `package.module:callable(width=3)` or of a callable, on
    the CPU, by the seed.
    """
    if not isinstance(model, str) and not callable(model):
        raise InvalidValue(
            f"model must be a name, a torch.nn.Module or a function that makes one, not {quoted(model)}"
        )
    name = (
        quoted(model)
        if isinstance(model, str)
        else getattr(model, "__name__", type(model).__name__)
    )
    # A default device would draw from an accelerator's generator. A user's file may draw numbers
    # when it is imported, so that happens before the stream begins.
    with preserved_generator(), torch.device("cpu"):
        try:
            make = _read(model, spec) if isinstance(model, str) else _with_spec(model, spec)
            with global_stream(seed, "model"):
                module = make()
        except FedloomError:
            raise
        except Exception as error:  # of the user's code, or more weights than there is memory for
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
            f"model {quoted(expression)}: arguments need their names, such as width=3"
        )
    if "spec" in call.named:
        raise InvalidValue(
            f"model {quoted(expression)}: 'spec' describes the data and is no option"
        )
    make = found_at(path, "model", "a registered name or 'package.module:callable'")
    options = {name: plain(value) for name, value in call.named.items()}
    return partial(_with_spec(make, spec), **options)


def _with_spec(make: Callable[..., Any], spec: DataSpec) -> Callable[..., Any]:
    """Return a callable with the description of the data, if it takes that."""
    return partial(make, spec=spec) if "spec" in inspect.signature(make).parameters else make
