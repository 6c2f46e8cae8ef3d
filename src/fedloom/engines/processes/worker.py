"""The program of a worker process. It inherits one end of a pipe and ends with its parent."""

import signal
import sys

from fedloom.engines.worker_life import exit_with_parent, importing

VARIABLE = "FEDLOOM_WORKER"
"""Set in the environment of worker processes."""


def main() -> None:
    """Answer the parent's messages until the pipe is closed.

    The arguments are the parent's process id, the threads, and the file descriptors of the pipe,
    the parent's memory and its own.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # they are for the parent, which saves and then ends its workers
        signal.signal(number, signal.SIG_IGN)
    parent, threads, pipe, other, own = map(int, sys.argv[1:])
    exit_with_parent(parent)
    with importing():
        from multiprocessing.connection import Connection

        import torch

        from fedloom.engines.client_work import ClientTrainer
        from fedloom.engines.processes.channel import Channel, SharedMemory, pack
        from fedloom.flat.device import keep_pages

        torch.set_num_threads(threads)
        keep_pages()
        channel, trainer = Channel(Connection(pipe), SharedMemory(own), other), ClientTrainer()
        answer = pack(None, channel.memory)  # the first answer says that imports are done
    try:
        while True:
            channel.send(answer)
            answer = pack(trainer.take(*channel.receive()), channel.memory)
    except (EOFError, OSError):
        return
