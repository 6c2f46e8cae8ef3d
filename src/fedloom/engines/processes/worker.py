"""A worker process: it finds the pipe to its parent open under a descriptor, and ends when the other end of the pipe is gone."""

from __future__ import annotations

import os
import select
import sys
import threading

VARIABLE = "FEDLOOM_WORKER"
"""Set in the environment of worker processes."""


def main() -> None:
    """Serve on the pipe that the parent opened; arguments are its descriptor and the number of threads.

    The parent may end while all else is still being imported, so it is watched from the start.
    """
    descriptor, threads = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with_the_parent, args=(descriptor,), daemon=True).start()
    _serve(descriptor, threads)


def _end_with_the_parent(descriptor: int) -> None:
    """Wait until the other end of the pipe is closed, by whatever ended the parent, and end at once."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are always reported, and nothing else here
    poll.poll()
    os._exit(0)


def _serve(descriptor: int, threads: int) -> None:
    """Do what the parent asks for, until nobody asks any more."""
    import signal
    from multiprocessing.connection import Connection

    import torch

    from fedloom.engines.client_work import ClientTrainer
    from fedloom.engines.processes.channel import Channel, pack
    from fedloom.engines.processes.shared_memory import SharedMemory
    from fedloom.flat.allocator import keep_pages

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which decides
    torch.set_num_threads(threads)
    keep_pages()
    memory = SharedMemory()
    channel, trainer = Channel(Connection(descriptor), memory), ClientTrainer()
    answer = pack(None, memory)  # imports are done
    try:
        while True:
            channel.send("answer", answer)
            while (received := channel.receive())[0] != "work":
                kind, message = received
                trainer.begin(message) if kind == "begin" else trainer.assign(message)
            answer = pack(trainer.work(received[1]), memory)
    except (EOFError, OSError):
        return
