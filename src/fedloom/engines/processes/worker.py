"""Program of a worker process. The process inherits one end of a pipe, and ends with its parent."""

import signal

from fedloom.engines.worker_life import importing, join_parent

VARIABLE = "FEDLOOM_WORKER"
"""Set in the environment of worker processes."""


def main() -> None:
    """Answer the parent's messages until the pipe is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent saves and then ends its workers
    threads, pipe, parent_memory, memory = join_parent()
    with importing():
        from multiprocessing.connection import Connection

        import torch

        from fedloom.common.device import keep_pages
        from fedloom.engines.client_work import ClientTrainer
        from fedloom.engines.processes.channel import Channel, SharedMemory, pack

        torch.set_num_threads(threads)
        keep_pages()
        channel = Channel(Connection(pipe), SharedMemory(memory), parent_memory)
        trainer = ClientTrainer()
        answer = pack(None, channel.memory)  # the first answer reports that imports are finished
    try:
        while True:
            channel.send(answer)
            answer = pack(trainer.take(*channel.receive()), channel.memory)
    except (EOFError, OSError):
        return
