"""The program of a worker process. It inherits one end of a pipe and ends with its parent."""

import signal

from fedloom.engines.worker_life import importing, join_parent

VARIABLE = "FEDLOOM_WORKER"
"""Set in the environment of worker processes."""


def main() -> None:
    """Answer the parent's messages until the pipe is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent saves and then ends its workers
    threads, pipe, other, own = join_parent()
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
