"""The papers' models as plain modules, one family a file; `models` lists them by name."""

from collections.abc import Callable

from torch import nn

from fedloom.config.registry import Registry

# A model is a function (spec: DataSpec, *, parameters with defaults) -> nn.Module.
models: Registry[Callable[..., nn.Module]] = Registry("model", "fedloom.models")

__all__ = ["models"]
