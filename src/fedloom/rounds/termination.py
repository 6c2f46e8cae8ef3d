"""SIGTERM, which schedulers of clusters send some seconds before they kill, interrupts as Ctrl-C
does.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """This process was sent SIGTERM."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises `Terminated` within the block, once: another one does not disturb what is
    saved then.

    Nothing changes where SIGTERM has a handler already, nor in other threads than the main one,
    which alone takes signals.
    """
    if not _takes_signals() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block has ended."""
    if not _takes_signals():
        yield
        return
    waiting: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for arrived in waiting:
            signal.raise_signal(arrived)


def _takes_signals() -> bool:
    """Only the main thread does."""
    return threading.current_thread() is threading.main_thread()
