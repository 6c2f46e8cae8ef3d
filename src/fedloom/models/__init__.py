"""Models of the papers as plain modules, one file per family. `models` lists them by name."""

from collections.abc import Callable

from torch import nn

from fedloom.common.registry import Registry

# A model is a function (spec: DataSpec, *, options with defaults) -> nn.Module. It raises
# `InvalidValue` for data of an unsuitable shape.
models: Registry[Callable[..., nn.Module]] = Registry("model", "fedloom.models")
