"""The program of a worker process. It inherits one end of a pipe and ends with its parent."""

import signal
import sys

from fedloom.engines.worker_life import exit_with_parent, importing

VARIABLE = "FEDLOOM_WORKER"
"""Set in the environment of worker processes."""


def main() -> None:
    """Work for the parent; the arguments are the parent's process id, the pipe's file descriptor and the number of threads."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the parent, which saves and then ends its workers
    parent, descriptor, threads = map(int, sys.argv[1:])
    exit_with_parent(parent)
    _serve(descriptor, threads)


def _serve(descriptor: int, threads: int) -> None:
    """Answer the parent's messages until the pipe is closed."""
    with importing():
        from multiprocessing.connection import Connection

        import torch

        from fedloom.engines.client_work import ClientTrainer
        from fedloom.engines.processes.channel import Channel, SharedMemory, pack
        from fedloom.flat.device import keep_pages

        torch.set_num_threads(threads)
        keep_pages()
        memory = SharedMemory()
        channel, trainer = Channel(Connection(descriptor), memory), ClientTrainer()
        answer = pack(None, memory)  # the first answer says that imports are done
    try:
        while True:
            channel.send("answer", answer)
            while (answers := trainer.take(*channel.receive())) is None:
                pass
            answer = pack(answers, memory)
    except (EOFError, OSError):
        return
