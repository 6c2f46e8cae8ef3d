from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm.method import algorithms
from fedloom.common.fields import Count
from fedloom.flat.layout import Layout
from fedloom.parts.codec import Codec, Streams


@algorithms.register("lowrank")
class LowRank(Codec):
    """Updates of low rank: each matrix M [m, n] of an update travels as P [m, r] and Q [n, r],
    decoded as P Q^T.

    A convolution's weight is a matrix with one row for each output channel. From a random Q: P =
    orthonormal(M Q), Q = M^T P, and both a second time, which is near the best approximation of
    this rank. Vectors, and matrices with r (m + n) >= m n, travel in full. Source: Vogels et al.
    2019, "PowerSGD", algorithm 1, with a second step of the power iteration instead of a warm
    start, since clients do not take part in every round; Konecny et al. 2016 (structured updates).
    Use it for models with large linear layers and updates of nearly low rank.

    Args:
        rank: r (Vogels et al.: 1 to 4).
        feedback: Add the error of the approximation to the client's next update.
    """

    rank: Count = 4
    feedback: bool = True

    requires: ClassVar[tuple[str, ...]] = ("one update", "whole replies")

    def matrices(self, size: int, layout: Layout) -> Iterator[tuple[slice, int, int, int]]:
        """Yield the matrix of each tensor in a row.

        Args:
            size: Number of columns of the row.
            layout: Layout of the model.

        Yields:
            Columns, height, width, and the number of floats that travel.
        """
        for tensor in layout.slices:
            if tensor.stop <= size:
                height = tensor.shape[0] if len(tensor.shape) > 1 else 1
                width = (tensor.stop - tensor.start) // max(1, height)
                yield tensor.slice, height, width, min(self.rank * (height + width), height * width)

    def code_shapes(self, size: int, layout: Layout) -> dict[str, tuple[int, ...]]:
        return {"factors": (sum(sent for *_, sent in self.matrices(size, layout)),)}

    def encode_rows(self, rows: Tensor, streams: Streams, layout: Layout) -> dict[str, Tensor]:
        factors = []
        generators = streams()
        for columns, height, width, sent in self.matrices(rows.shape[1], layout):
            if sent == height * width:
                factors.append(rows[:, columns])
                continue
            matrices = rows[:, columns].reshape(-1, height, width)
            starts = [torch.randn(width, self.rank, generator=stream) for stream in generators]
            basis, factor = low_rank(matrices, torch.stack(starts).to(rows))
            factors += [basis.flatten(1), factor.flatten(1)]
        return {"factors": torch.cat(factors, 1)}

    def decode_rows(self, code: Mapping[str, Tensor], size: int, layout: Layout) -> Tensor:
        rows = []
        begin = 0
        for _, height, width, sent in self.matrices(size, layout):
            values = code["factors"][:, begin : begin + sent]
            begin = begin + sent
            if sent < height * width:
                basis, factor = values.split([height * self.rank, width * self.rank], 1)
                basis = basis.unflatten(1, (height, -1))
                factor = factor.unflatten(1, (width, -1))
                values = (basis @ factor.mT).flatten(1)
            rows.append(values)
        return torch.cat(rows, 1)


def low_rank(matrix: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Approximate matrices by two steps of power iteration.

    Args:
        matrix: Matrices, `[k, m, n]`.
        start: Initial Q, `[k, n, r]`.

    Returns:
        P, orthonormal, `[k, m, r]`, and Q, `[k, n, r]`. P Q^T is close to the matrix.
    """
    basis = torch.linalg.qr(matrix @ start).Q
    basis = torch.linalg.qr(matrix @ (matrix.mT @ basis)).Q
    return basis, matrix.mT @ basis
