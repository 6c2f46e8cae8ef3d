"""Protection of the task's tensors from user code that changes its arguments in place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedloom.common.errors import InvalidValue

_functorch: Any = torch._C._functorch


class IntactInputs:
    """Calls user code, such as a model, with tensors that must not change.

    The first call receives a copy. If it changes the copy, all later calls receive copies.
    Otherwise they receive the tensor itself, and a call costs only one comparison of two numbers.
    Changes are detected by PyTorch's version counter of each tensor.
    """

    def __init__(self) -> None:
        self._copies: dict[bool, bool] = {}

    def call(
        self, function: Callable[[Tensor], Any], tensor: Tensor, training: bool = False
    ) -> Any:
        """Call a function with a tensor.

        Args:
            function: The user's code.
            tensor: Its argument. It is never changed.
            training: Mode of the function. Each mode has its own decision about copies.

        Returns:
            The result of the function.

        Raises:
            InvalidValue: If the function has changed its argument, but not in its first call.
        """
        copies = self._copies.get(training)
        argument = tensor if copies is False else tensor.clone()
        version = _version(argument)
        result = function(argument)
        changed = _version(argument) != version
        if copies is None:
            self._copies[training] = changed
        elif changed and not copies:
            remedy = "compute with new tensors, such as x = x - 1 instead of x.sub_(1)"
            raise InvalidValue(
                "the model or loss changes its input in place in some calls but not in others, "
                f"so it would change the data set: {remedy}"
            )
        return result


def _version(tensor: Tensor) -> int:
    """Return the number of changes in place of a tensor's memory, also inside `vmap` and `grad`."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return 0 if tensor.is_inference() else tensor._version
