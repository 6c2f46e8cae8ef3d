"""The order of batches, shared by naive computations and local training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedloom.common.training import Passes


def batch_order(
    samples: int, generator: torch.Generator | None, **settings: Any
) -> Iterator[Tensor]:
    """Yield the sample positions of each batch; `settings` as in `Passes`."""
    for order, sizes in Passes(**settings).orders(samples, generator):
        yield from order.split(sizes)
