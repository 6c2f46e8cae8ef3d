"""The life of a process that works for another: its start, its watch over whoever started it, its
end.

For every kind of worker: of the engines, of pools of runs, of sites. Only the standard library is
imported here, since a worker begins to watch before it imports PyTorch, which takes seconds in
which its parent may die.
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

WATCH_SECONDS = 0.25
"""Time between two checks of whether a worker is still needed."""


def start_python(
    arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start another Python with this one's import path, out of reach of Ctrl-C, which inherits the
    `descriptors`.
    """
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": import_path(), **environment},
        pass_fds=descriptors,
        process_group=0,
    )


def import_path() -> str:
    """Return this process's import path as a value of `PYTHONPATH`."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def exit_with_parent(parent: int | None = None) -> None:
    """Exit, whatever this process is doing, when the process `parent` (by default the present one)
    is no longer its parent.
    """
    pid = os.getppid() if parent is None else parent
    exit_unless(lambda: os.getppid() == pid)


def exit_unless(needed: Callable[[], bool]) -> None:
    """Exit, whatever this process is doing, as soon as `needed()` is False. A thread of its own
    asks.
    """

    def watch() -> None:
        while needed():
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def importing() -> Iterator[None]:
    """Spare the objects of the modules imported inside the block from garbage collection, during
    the imports and afterwards.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def exit_text(code: int) -> str:
    """Return `killed by SIGKILL` or `exit code 1` for the exit code of a process."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
