from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm.method import algorithms
from fedloom.common.fields import Share
from fedloom.flat.layout import Layout
from fedloom.parts.codec import Codec, Streams


@algorithms.register("sparse")
class Sparse(Codec):
    """Sparse updates: a client sends only the numbers of its update with the largest magnitude, a
    `share` of all.

    Of n numbers max(1, floor(share n)) travel as 32-bit indices, in ascending order, and values;
    the others count as zero.
    Source: Aji and Heafield 2017 (gradient dropping); Stich et al. 2018, "Sparsified SGD with
    memory", algorithm 1.
    Use it when uploads are expensive and clients take part often, since the stored errors of rare
    clients are stale.

    Args:
        share: Share of the numbers that travel (Aji and Heafield: 0.01).
        feedback: Add the omitted numbers to the client's next update; otherwise small numbers never
            arrive.
    """

    share: Share = 0.01
    feedback: bool = True

    code_types: ClassVar[Mapping[str, torch.dtype]] = {"indices": torch.int32}

    def code_shapes(self, size: int, layout: Layout) -> dict[str, tuple[int, ...]]:
        count = max(1, int(self.share * size + 1e-9))
        return {"indices": (count,), "values": (count,)}

    def encode_rows(self, rows: Tensor, streams: Streams, layout: Layout) -> dict[str, Tensor]:
        count = self.code_shapes(rows.shape[1], layout)["values"][0]
        indices = rows.abs().topk(count, sorted=False).indices.sort().values
        return {"indices": indices.to(torch.int32), "values": rows.gather(1, indices)}

    def decode_rows(self, code: Mapping[str, Tensor], size: int, layout: Layout) -> Tensor:
        indices = code["indices"].long()
        values = code["values"]
        # Indices outside the row, from a hostile site, are ignored.
        inside = (indices >= 0) & (indices < size)
        rows = values.new_zeros(len(values), size)
        return rows.scatter_add_(1, indices.clamp(0, size - 1), values * inside)
