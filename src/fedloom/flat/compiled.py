"""A step's gradient as one compiled function, for steps that come again and again in the same shape."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedloom.data.formats.cache import cache_folder
from fedloom.errors import FedloomError, first_line

Tensors = Sequence[Tensor]

Loss = Callable[[Any, Tensor], Tensor]
"""(what the model puts out, labels) -> the mean loss of a batch."""

_Function = Callable[[Tensors, Tensors, Tensor, Tensor], tuple[Tensors, tuple[Tensor, Tensors]]]
"""(trained, held, inputs, labels) -> the gradients, and the loss with what layers have moved."""

_Arguments = tuple[Tensors, Tensors, Tensor, Tensor]


class CompiledGradient:
    """The loss of a batch and its gradient, forward and backward pass in one function that torch.compile made.

    It is compiled when it is first called with so many models, samples and trained tensors, and kept on disk for the next
    process (in `compiled` in the cache folder, unless TORCHINDUCTOR_CACHE_DIR says where). Sums come in another order than in
    eager torch, so numbers agree to float tolerance; random numbers are torch's own. On CUDA it is captured as a CUDA graph. Of
    `module`, in training mode, only the architecture counts: it is called with the tensors that are given.

    The first step of each shape is computed in eager torch too. Where the two differ, compiled code is not used for this shape,
    and `notice` is told.
    """

    def __init__(self, module: nn.Module, batch_size: int, loss: Loss, notice: Callable[[str], None]) -> None:
        # Set before torch's compiler is imported, which settles on a folder then; the import takes seconds.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
        from torch._dynamo.exc import TorchDynamoException

        self.batch_size = batch_size
        self._module, self._loss, self._notice = module, loss, notice
        self._functions: dict[tuple[Any, ...], _Function] = {}
        self._refusal: type[Exception] = TorchDynamoException

    def __call__(
        self, trained: dict[str, Tensor], held: dict[str, Tensor], inputs: Tensor, labels: Tensor, *, stacked: bool
    ) -> tuple[Tensor, Tensors, dict[str, Tensor]]:
        """Loss, the gradient of each of `trained` (on CUDA overwritten by the next call), and `held` as batch norm has moved it.

        All tensors have a leading axis of models where they are `stacked`. Raises `FedloomError` where it cannot be
        compiled.
        """
        key = (tuple(trained), labels.shape)
        moving = [tensor.detach() for tensor in trained.values()]
        arguments = moving, list(held.values()), inputs, labels
        if key not in self._functions:
            eager = self._function(tuple(trained), tuple(held), stacked)
            self._functions[key] = self._proven(eager, arguments)
        gradients, (loss, after) = self._functions[key](*arguments)
        found = loss.clone()  # a graph's next run overwrites what this one gave
        return found, gradients, dict(zip(held, after, strict=True))

    def _proven(self, eager: _Function, arguments: _Arguments) -> _Function:
        """The compiled function, or the eager one where their numbers differ."""
        compiled = _compiled(eager, cuda=arguments[3].is_cuda)
        devices = [arguments[3].device] if arguments[3].is_cuda else []
        with torch.random.fork_rng(devices=devices):
            expected = _numbers(eager(*arguments))
        try:
            with torch.random.fork_rng(devices=devices):
                found = _numbers(compiled(*arguments))
        except self._refusal as error:
            raise FedloomError(f"compiled=true: torch.compile has no way here: {first_line(error)}") from error
        scale = max(1.0, *(float(tensor.abs().max()) for tensor in expected if tensor.numel()))
        tolerance = scale * (1e-9 if arguments[0][0].dtype == torch.float64 else 1e-3)
        pairs = zip(found, expected, strict=True)
        if all(torch.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True) for a, b in pairs):
            return compiled
        self._notice("steps are not compiled: for this model torch.compile gives other numbers than PyTorch without it")
        return eager

    def _function(self, trained: Sequence[str], held: Sequence[str], stacked: bool) -> _Function:
        def loss_of_one(moving: Tensors, resting: Tensors, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensors]:
            after = [tensor.clone(memory_format=torch.contiguous_format) for tensor in resting]
            tensors = dict(zip((*trained, *held), (*moving, *after), strict=True))
            return self._loss(functional_call(self._module, tensors, (inputs,)), labels), after

        one: _Function = grad_and_value(loss_of_one, has_aux=True)
        return vmap(one) if stacked else one


def _compiled(function: _Function, cuda: bool) -> _Function:
    # Layers that draw take the numbers that they take in eager torch; on CUDA a step is one graph of kernels; compiling starts
    # no processes, which would stay.
    options: dict[str, Any] = {"fallback_random": True, "triton.cudagraphs": cuda, "compile_threads": 1}
    compiled: _Function = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    return compiled


def _numbers(answer: tuple[Tensors, tuple[Tensor, Tensors]]) -> list[Tensor]:
    """All tensors that a function returned, in double precision: loss, gradients, and buffers that layers have updated."""
    gradients, (loss, after) = answer
    return [tensor.detach().double() for tensor in (loss, *gradients, *after)]
