"""What runs in a Ray actor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

from fedloom.engines.client_work import ClientTrainer
from fedloom.engines.ray.arrays import PackedArrays, pack_arrays, unpack_arrays
from fedloom.flat.allocator import keep_pages


class TrainingActor:
    """Trains clients in a process of its own, on whichever node has room.

    It copies the clients' inboxes, which a method may write to: the object store ends a process that writes to its memory.
    """

    def __init__(self, paths: Sequence[str], threads: int, gpu: bool) -> None:
        sys.path += [path for path in paths if path not in sys.path and os.path.exists(path)]
        torch.set_num_threads(threads)
        keep_pages()
        self.trainer = ClientTrainer(torch.device("cuda" if gpu else "cpu"))

    def process(self) -> int:
        """Its process id."""
        return os.getpid()

    def begin(self, setup: PackedArrays) -> None:
        self.trainer.begin(unpack_arrays(setup))

    def assign(self, assignment: PackedArrays) -> None:
        self.trainer.assign(unpack_arrays(assignment))

    def work(self, work: PackedArrays) -> PackedArrays:
        """The packed answers to a piece of work."""
        return pack_arrays(self.trainer.work(unpack_arrays(work)))
