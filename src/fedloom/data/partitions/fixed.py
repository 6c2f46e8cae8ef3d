"""A partition read from a file."""

from __future__ import annotations

import numpy as np

from fedloom.data.partition import Indices, Partition, partitions
from fedloom.errors import DataError, InvalidValue


@partitions.register("fixed")
def fixed(labels: Indices, clients: int, seed: int, groups: Indices | None, *, file: str = "split.npz") -> Partition:
    """The partition in `file`, as `Partition.save` wrote it, whatever the seed; the file's number of clients, or 0.

    Args:
        file: The path of the npz file.

    Raises:
        DataError: For a file that is missing, damaged or of other data (a sample that does not exist or has two clients).
        InvalidValue: For another number of clients.
    """
    partition = Partition.load(file)
    if clients not in (0, len(partition)):
        raise InvalidValue(f"clients must be {len(partition)}, as many as {file} holds, or 0, not {clients}")
    outside = partition.indices[(partition.indices < 0) | (partition.indices >= len(labels))]
    if len(outside):
        raise DataError(f"{file} holds sample {outside[0]}, but the data end at sample {len(labels) - 1}")
    holders = np.bincount(partition.indices, minlength=len(labels))
    if (holders > 1).any():
        raise DataError(f"{file} holds sample {holders.argmax()} {holders.max()} times: every sample has one client")
    return partition
