"""Inputs of a data set that does not fit into memory: read sample by sample, where a client trains or a batch is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data.convert import as_inputs
from fedloom.errors import InvalidValue


@dataclass(frozen=True)
class LazyInputs:
    """Stands in `Samples.inputs` for a tensor `[n, ...]`, of which it has the shape, the type and the device.

    `item` gives the inputs of a sample by its number, the same ones every time; `rows [n]` are the numbers of these samples, and
    `none [0, ...]` is like what is read, without samples. A part, `inputs[index]`, is not read either before `read` says so.
    """

    item: Callable[[int], Any]
    rows: Tensor
    none: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), *self.none.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.none.dtype

    @property
    def device(self) -> torch.device:
        return self.none.device

    @property
    def nbytes(self) -> int:
        """The bytes that lie in memory."""
        return self.rows.nbytes

    def is_floating_point(self) -> bool:
        return self.none.is_floating_point()

    def dim(self) -> int:
        return self.none.dim()

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor | slice) -> LazyInputs:
        return replace(self, rows=self.rows[index if isinstance(index, slice) else index.cpu()])

    def to(self, device: torch.device) -> LazyInputs:
        """The same, read to that device."""
        return replace(self, none=self.none.to(device))

    def read(self) -> Tensor:
        """The inputs as a tensor. Raises `InvalidValue` for a sample of another shape or type."""
        if not len(self.rows):
            return self.none
        found = [np.asarray(self.item(row)) for row in self.rows.tolist()]
        shapes = {one.shape for one in found}
        made = as_inputs(np.stack(found)) if len(shapes) == 1 else None
        if made is None or made.shape[1:] != self.none.shape[1:] or made.dtype != self.dtype:
            raise InvalidValue(
                f"samples of shapes {', '.join(str(list(shape)) for shape in sorted(shapes))} are among those that were to be "
                f"{list(self.none.shape[1:])} of {self.dtype}: resize or pad them"
            )
        return made.to(self.device)


def in_memory(inputs: Tensor | LazyInputs) -> Tensor:
    """The inputs as a tensor, read where they are not yet."""
    return inputs.read() if isinstance(inputs, LazyInputs) else inputs
