"""A model from its name, or from the import path of a user's own function or class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fedloom.config.expression import parse, plain
from fedloom.config.plugins import found_at
from fedloom.data import DataSpec
from fedloom.errors import FedloomError, InvalidValue
from fedloom.models import models
from fedloom.randomness import global_stream

_ALLOWED = "a registered name or 'package.module:callable'"


def build_model(expression: str, spec: DataSpec, seed: int) -> nn.Module:
    """The model of `mlp(hidden=[100])` or `package.module:callable(width=3)`. Raises as `make_model`."""
    path, bracket, inside = expression.partition("(")
    if ":" not in path:
        entry, options = models.read(expression)
        return make_model(entry.name, spec, seed, options)
    call = parse(f"model({inside}" if bracket else "model")
    if call.positional:
        raise InvalidValue(f"model {expression!r}: arguments need their names, such as width=3")
    return make_model(path, spec, seed, {name: plain(value) for name, value in call.named.items()})


def make_model(name: str, spec: DataSpec, seed: int, options: Mapping[str, Any]) -> nn.Module:
    """The model `name` for data like `spec`, on the CPU, its initial weights drawn from the stream (`seed`, "model").

    `name` is a registered name, or `package.module:callable` for a function or class that is called with `options`, and
    with `spec` where it has a parameter of that name. The current directory is searched too. PyTorch's own random state
    is left as it was.

    Raises `UnknownName` for a name that is not registered and `InvalidValue` for an option the model does not take, data
    it does not fit, a path that does not lead to a callable, or a callable that fails or returns no `nn.Module`.
    """
    # A default device would draw from an accelerator's generator. A user's file may draw numbers when it is first imported, so it
    # is found before.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        make = found_at(name, "model", _ALLOWED) if ":" in name else models[name].make
        with global_stream(seed, "model"):
            if ":" in name:
                return _called(name, make, spec, options)
            return make(spec, **models[name].options((), dict(options)))


def _called(path: str, make: Callable[..., Any], spec: DataSpec, options: Mapping[str, Any]) -> nn.Module:
    """The module that `make`, found at `path`, returns."""
    named = dict(options)
    if "spec" in named:
        raise InvalidValue(f"model {path!r}: 'spec' describes the data and is no option")
    try:
        if "spec" in inspect.signature(make).parameters:
            named["spec"] = spec
        built = make(**named)
    except FedloomError:
        raise
    except Exception as error:
        raise InvalidValue(f"model {path!r} with options {dict(options)!r}: {_one_line(error)}") from error
    if not isinstance(built, nn.Module):
        raise InvalidValue(f"model {path!r} must return a torch.nn.Module, not {type(built).__name__}")
    return built


def _one_line(error: Exception) -> str:
    """Kind and text of an error, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
