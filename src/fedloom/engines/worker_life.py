"""Start and end of worker processes, for engines, for pools of runs and for sites.

This module imports only the standard library, so that a worker watches its parent before it imports
PyTorch. That import takes seconds.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

WATCH_SECONDS = 0.25
"""Seconds between two checks if a worker is still needed."""

STARTS_WORKERS = hasattr(os, "fork")
"""False on Windows, where worker processes cannot inherit pipes and files by number."""


def start_python(
    arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a Python process with the import path of this process. Ctrl-C does not reach it.

    Args:
        arguments: Arguments of the interpreter.
        environment: Additional variables. The process also has the variables of this process.
        descriptors: File descriptors that the process inherits.

    Returns:
        The process. It has its own process group and no standard input.
    """
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": import_path(), **environment},
        pass_fds=descriptors,
        process_group=0,
    )


def start_worker(
    program: str,
    threads: int,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a worker process.

    Args:
        program: Python code to execute. It must call `join_parent` first.
        threads: Number of threads of the worker.
        environment: Additional variables. The worker also has the variables of this process.
        descriptors: File descriptors that the worker inherits.

    Returns:
        The process, and this end of the pipe to it.
    """
    connection, remote = Pipe()
    numbers = os.getpid(), threads, remote.fileno(), *descriptors
    process = start_python(["-c", program, *map(str, numbers)], environment or {}, numbers[2:])
    remote.close()
    return process, connection


def join_parent() -> list[int]:
    """Ignore Ctrl-C and watch the parent, in a process of `start_worker`.

    Returns:
        The threads, and the file descriptors of the pipe and of the other files.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent saves and then ends its workers
    parent, *numbers = map(int, sys.argv[1:])
    exit_with_parent(parent)
    return numbers


def import_path() -> str:
    """Return this process's import path as a value of `PYTHONPATH`."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def exit_with_parent(parent: int | None = None) -> None:
    """Exit at once when this process loses its parent.

    `parent` is the id of the expected parent, by default of the current one.
    """
    pid = os.getppid() if parent is None else parent
    exit_unless(lambda: os.getppid() == pid)


def exit_unless(needed: Callable[[], bool]) -> None:
    """Call `needed` periodically in a daemon thread, and exit at once when it returns False."""

    def watch() -> None:
        while needed():
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def importing() -> Iterator[None]:
    """Exclude objects that are created in the block from garbage collection, such as modules."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def exit_text(code: int) -> str:
    """Return `killed by SIGKILL` or `exit code 1` for the exit code of a process."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
