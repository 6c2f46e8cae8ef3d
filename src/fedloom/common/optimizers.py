"""Optimizers of local training: by name, by the path of a class, or as a class or function."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import WrapValidator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from fedloom.common.errors import InvalidValue, quoted
from fedloom.common.fields import ImportPath
from fedloom.common.plugins import found_at

OptimizerName = Literal[
    "sgd", "adam", "adamw", "adamax", "nadam", "radam", "adagrad", "adadelta", "rmsprop", "rprop",
    "asgd",
]  # fmt: skip
"""Optimizers that treat every element alike, so one flat tensor gives the same result."""

MakeOptimizer = Callable[..., torch.optim.Optimizer]
"""An optimizer's class, or a function that returns an optimizer, of the parameters and `lr`."""

_BY_NAME = {name.lower(): getattr(torch.optim, name) for name in torch.optim.__all__}
_OF_TORCH: dict[str, MakeOptimizer] = {name: _BY_NAME[name] for name in get_args(OptimizerName)}


class OptimizerPath(str):
    """The path `module:Class` of a class or function of the user, which travels with it.

    Attributes:
        make: The class or function.
    """

    make: MakeOptimizer


def _as_text(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Return the name or the path of an optimizer. Refuse classes that no path names."""
    if not callable(value):
        return value if isinstance(value, OptimizerPath) else validate(value)
    for name, make in _OF_TORCH.items():
        if value is make:
            return name
    qualified = getattr(value, "__qualname__", "<partial>")
    if "<" in qualified:
        place = "a class or function at the top level of a module"
        reason = "the path of others cannot be stored"
        raise PydanticCustomError("optimizer", f"{place} ({reason})")
    path = OptimizerPath(f"{value.__module__}:{qualified}")
    path.make = value
    return path


Optimizer = Annotated[
    OptimizerName | ImportPath | SkipJsonSchema[MakeOptimizer], WrapValidator(_as_text)
]
"""An optimizer in settings. A class or function becomes its path."""


def optimizer_class(optimizer: str) -> MakeOptimizer:
    """Return the class or function of an optimizer.

    Args:
        optimizer: A name, or the path of a user's class or function.

    Raises:
        InvalidValue: The module cannot be imported, or has no optimizer at the path.
    """
    if ":" not in optimizer:
        return _OF_TORCH[optimizer]
    if isinstance(optimizer, OptimizerPath):
        kind: Any = optimizer.make
    else:
        kind = found_at(optimizer, "optimizer", "a name or 'module:Class'")
    if isinstance(kind, type) and not issubclass(kind, torch.optim.Optimizer):
        raise InvalidValue(
            f"optimizer {quoted(optimizer)} must be a subclass of torch.optim.Optimizer"
        )
    return kind  # type: ignore[no-any-return]
