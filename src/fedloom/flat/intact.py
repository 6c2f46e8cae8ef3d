"""Protects tensors of the task from user code that changes its arguments in place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import InvalidValue

_functorch: Any = torch._C._functorch


class IntactInputs:
    """Calls user code, such as a model, with tensors that must stay as they are.

    The first call gets a copy. If it changes the copy, all later calls get copies, and otherwise
    the tensor itself, so that user code without changes in place costs one comparison of two
    numbers a call. Changes are seen by the version that PyTorch counts for each tensor.
    """

    def __init__(self) -> None:
        self._copies: dict[bool, bool] = {}

    def call(
        self, function: Callable[[Tensor], Any], tensor: Tensor, training: bool = False
    ) -> Any:
        """Call a function with a tensor.

        Args:
            function: The user's code.
            tensor: Its argument, which stays unchanged.
            training: Mode of the function. Each mode has its own decision about copies.

        Returns:
            The result of the function.

        Raises:
            InvalidValue: The function has changed its argument, though it did not in its first
                call.
        """
        copies = self._copies.get(training)
        given = tensor if copies is False else tensor.clone()
        before = _version(given)
        result = function(given)
        changed = _version(given) != before
        if copies is None:
            self._copies[training] = changed
        elif changed and not copies:
            remedy = "compute with new tensors, such as x = x - 1 instead of x.sub_(1)"
            raise InvalidValue(
                f"the model or loss changes its input in place in some calls and not in others, "
                f"which would change the data set: {remedy}"
            )
        return result


def _version(tensor: Tensor) -> int:
    """Return the number of changes in place of a tensor's memory, also inside `vmap` and `grad`."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return 0 if tensor.is_inference() else tensor._version
