"""Inputs of a data set that does not fit into memory, read sample by sample when they are used."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.common.errors import InvalidValue
from fedloom.data.convert import as_inputs


@dataclass(frozen=True)
class LazyInputs:
    """Stand-in for a tensor like `empty [0, ...]`. Row k is the first entry of `item(rows[k])`;
    `read` returns the tensor.
    """

    item: Callable[[int], tuple[Any, ...]]
    rows: Tensor
    empty: Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), *self.empty.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.empty.dtype

    @property
    def device(self) -> torch.device:
        return self.empty.device

    @property
    def nbytes(self) -> int:
        """The bytes in memory."""
        return self.rows.nbytes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor | slice) -> "LazyInputs":
        return replace(self, rows=self.rows[index if isinstance(index, slice) else index.cpu()])

    def to(self, device: torch.device) -> "LazyInputs":
        """Return these inputs, to be read to `device`."""
        return replace(self, empty=self.empty.to(device))

    def read(self) -> Tensor:
        """Return the inputs as a tensor; raises `InvalidValue` for a sample of another shape or
        type.
        """
        if not len(self.rows):
            return self.empty
        items = [np.asarray(self.item(row)[0]) for row in self.rows.tolist()]
        shapes = {item.shape for item in items}
        inputs = as_inputs(np.stack(items)) if len(shapes) == 1 else None
        if inputs is None or inputs.shape[1:] != self.empty.shape[1:] or inputs.dtype != self.dtype:
            raise InvalidValue(
                f"samples of shapes {', '.join(str(list(shape)) for shape in sorted(shapes))} "
                "are among those that were to be "
                f"{list(self.empty.shape[1:])} of {self.dtype}: resize or pad them"
            )
        return inputs.to(self.device)


def in_memory(inputs: Tensor | LazyInputs) -> Tensor:
    """Return the inputs as a tensor, read if they are lazy."""
    return inputs.read() if isinstance(inputs, LazyInputs) else inputs
