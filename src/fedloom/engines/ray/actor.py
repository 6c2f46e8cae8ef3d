"""What runs in a Ray actor."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedloom.engines.ray.arrays import PackedArrays

WATCH_SECONDS = 0.25
"""Time between two looks of an actor for Ray's agent of its node."""


def end_with_the_node() -> None:
    """Let this process end, whatever it is doing, when Ray's agent of its node is gone, which started it, as after a SIGKILL of
    the program that started the cluster. Ray's own watch may need longer than five seconds on a busy machine.

    Importing PyTorch takes seconds, in which the agent may end: an actor calls this before that.
    """
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class TrainingActor:
    """Trains clients in a process of its own, on whichever node has room.

    It copies the clients' inboxes, which a method may write to: the object store ends a process that writes to its memory.
    """

    def __init__(self, paths: Sequence[str], threads: int, gpu: bool) -> None:
        end_with_the_node()
        sys.path += [path for path in paths if path not in sys.path and os.path.exists(path)]
        import torch

        from fedloom.engines.client_work import ClientTrainer
        from fedloom.engines.ray.arrays import pack_arrays, unpack_arrays
        from fedloom.flat.allocator import keep_pages

        torch.set_num_threads(threads)
        keep_pages()
        self.trainer = ClientTrainer(torch.device("cuda" if gpu else "cpu"))
        self.pack, self.unpack = pack_arrays, unpack_arrays

    def process(self) -> int:
        """Its process id."""
        return os.getpid()

    def begin(self, setup: PackedArrays) -> None:
        self.trainer.begin(self.unpack(setup))

    def assign(self, assignment: PackedArrays) -> None:
        self.trainer.assign(self.unpack(assignment))

    def work(self, work: PackedArrays) -> PackedArrays:
        """The packed answers to a piece of work."""
        return self.pack(self.trainer.work(self.unpack(work)))
