"""Interrupts by SIGTERM, with the same effect as Ctrl-C.

Cluster schedulers send SIGTERM some seconds before they kill a process.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Terminated(KeyboardInterrupt):
    """This process received SIGTERM."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise `Terminated` on the first SIGTERM within the block.

    Further SIGTERMs are ignored, so that they do not interrupt the final checkpoint. Nothing
    changes if SIGTERM already has a handler, or outside the main thread: Python handles signals
    only in the main thread.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    try:
        signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # this system cannot handle it
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block has ended."""
    if not _in_main_thread():
        yield
        return
    delayed: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        with suppress(ValueError):  # this system cannot handle it
            signal.signal(number, lambda number, frame: delayed.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            with suppress(ValueError):
                signal.signal(number, handler or signal.SIG_DFL)
        for received in delayed:
            signal.raise_signal(received)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
