"""Models of the papers as plain modules, one family a file; `models` lists them by name."""

from collections.abc import Callable

from torch import nn

from fedloom.config.registry import Registry

# A model is a function (spec: DataSpec, *, options with defaults) -> nn.Module; it raises
# `InvalidValue` for data that do not fit it.
models: Registry[Callable[..., nn.Module]] = Registry("model", "fedloom.models")
