"""What runs in a worker process. It inherits one end of a pipe, and ends when its parent's end is closed."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading

VARIABLE = "FEDLOOM_WORKER"
"""Set in the environment of worker processes."""


def main() -> None:
    """Work for the parent; the arguments are the pipe's file descriptor and the number of threads.

    Importing PyTorch takes seconds, in which the parent may end: the thread that watches it starts before that.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the parent, which saves and then ends its workers
    descriptor, threads = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with_the_parent, args=(descriptor,), daemon=True).start()
    _serve(descriptor, threads)


def _end_with_the_parent(descriptor: int) -> None:
    """Wait until the parent's end of the pipe is closed, for whatever reason, and exit at once."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are always reported, and nothing else here
    poll.poll()
    os._exit(0)


def _serve(descriptor: int, threads: int) -> None:
    """Answer the parent's messages until the pipe is closed."""
    gc.disable()  # it would go over all that is being imported, again and again
    from multiprocessing.connection import Connection

    import torch

    from fedloom.engines.client_work import ClientTrainer
    from fedloom.engines.processes.channel import Channel, pack
    from fedloom.engines.processes.shared_memory import SharedMemory
    from fedloom.flat.allocator import keep_pages

    torch.set_num_threads(threads)
    keep_pages()
    memory = SharedMemory()
    channel, trainer = Channel(Connection(descriptor), memory), ClientTrainer()
    answer = pack(None, memory)  # imports are done
    gc.freeze()
    gc.enable()
    try:
        while True:
            channel.send("answer", answer)
            while (received := channel.receive())[0] != "work":
                kind, message = received
                trainer.begin(message) if kind == "begin" else trainer.assign(message)
            answer = pack(trainer.work(received[1]), memory)
    except (EOFError, OSError):
        return
