"""A model from its name, or from the import path of a user's own function or class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fedloom.config.expression import parse, plain
from fedloom.config.plugins import found_at
from fedloom.data import DataSpec
from fedloom.errors import LONGEST_QUOTED, FedloomError, InvalidValue, one_line, quoted
from fedloom.models import models
from fedloom.randomness import global_stream


def build_model(expression: str, spec: DataSpec, seed: int) -> nn.Module:
    """The model of `mlp(hidden=[100])` or `package.module:callable(width=3)` for data like `spec`, on the CPU, its initial
    weights drawn from the stream (`seed`, "model").

    What the path leads to is called with the arguments, and with `spec` where it has a parameter of that name. The current
    directory is searched too. PyTorch's own random state is left as it was.

    Raises `UnknownName` for a name that is not registered and `InvalidValue` for an option the model does not take, data
    it does not fit, a path that does not lead to a callable, or a callable that fails or returns no `nn.Module`.
    """
    # A default device would draw from an accelerator's generator. A user's file may draw numbers when it is first imported, so it
    # is found before.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        make = _read(expression, spec)
        with global_stream(seed, "model"):
            try:
                return make()
            except (RuntimeError, MemoryError, OverflowError) as error:  # more weights than there is memory for
                reason = one_line(str(error), LONGEST_QUOTED)
                raise InvalidValue(f"model {quoted(expression)} cannot be built: {reason}") from error


def _read(expression: str, spec: DataSpec) -> Callable[[], nn.Module]:
    """What makes the model that an expression names."""
    path, bracket, inside = expression.partition("(")
    if ":" not in path:
        entry, options = models.read(expression)
        return partial(entry.make, spec, **options)
    call = parse(f"model({inside}" if bracket else "model")
    if call.positional:
        raise InvalidValue(f"model {quoted(expression)}: arguments need their names, such as width=3")
    make = found_at(path, "model", "a registered name or 'package.module:callable'")
    return partial(_called, path, make, spec, {name: plain(value) for name, value in call.named.items()})


def _called(path: str, make: Callable[..., Any], spec: DataSpec, options: Mapping[str, Any]) -> nn.Module:
    """The module that `make`, found at `path`, returns."""
    named = dict(options)
    if "spec" in named:
        raise InvalidValue(f"model {quoted(path)}: 'spec' describes the data and is no option")
    try:
        if "spec" in inspect.signature(make).parameters:
            named["spec"] = spec
        built = make(**named)
    except FedloomError:
        raise
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}", LONGEST_QUOTED)
        raise InvalidValue(f"model {quoted(path)} with options {quoted(dict(options))}: {reason}") from error
    if not isinstance(built, nn.Module):
        raise InvalidValue(f"model {quoted(path)} must return a torch.nn.Module, not {type(built).__name__}")
    return built
