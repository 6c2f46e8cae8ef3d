"""The Ray actor that trains clients."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedloom.engines.worker_life import exit_with_parent

if TYPE_CHECKING:
    from fedloom.engines.pickling import Packed


class TrainingActor:
    """Trains clients in a Ray process.

    Inboxes are copied, because the object store kills processes that write to its memory.
    """

    def __init__(self, paths: Sequence[str], threads: int, gpu: bool) -> None:
        # Watch Ray's agent of the node: on a busy machine Ray's check takes more than five seconds.
        exit_with_parent()
        sys.path += [path for path in paths if path not in sys.path and os.path.exists(path)]
        import torch

        from fedloom.common.device import keep_pages
        from fedloom.engines.client_work import ClientTrainer
        from fedloom.engines.pickling import dump

        torch.set_num_threads(threads)
        keep_pages()
        self.trainer = ClientTrainer(torch.device("cuda" if gpu else "cpu"))
        self.dump = dump

    def process(self) -> int:
        """Return the process id."""
        return os.getpid()

    def take(self, setup: Packed | None, assignment: Packed | None, work: Packed) -> Packed:
        """Handle packed messages, and return the packed answer (see `ClientTrainer.take`).

        Args:
            setup: Packed `Setup`, if it is new.
            assignment: Packed `Assignment`, if it is new.
            work: Packed `Work`.

        Returns:
            Packed `WorkDone`, or the packed exception that the parent raises.
        """
        return self.dump(self.trainer.take(setup, assignment, work))
