"""The order of batches that naive computations share with local training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedloom.training import epoch_orders


def batch_order(samples: int, generator: torch.Generator | None, **settings: Any) -> Iterator[Tensor]:
    """Positions of each batch's samples, batch after batch; `settings` as in `epoch_orders`."""
    for order, sizes in epoch_orders(samples, generator, **settings):
        yield from order.split(sizes)
