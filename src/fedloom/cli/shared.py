"""What several commands share: their arguments, progress on stderr, and a patient Ctrl-C."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.errors import FedloomError

if TYPE_CHECKING:
    from rich.console import Console

    from fedloom.experiment.configuration import Configuration
    from fedloom.experiment.progress import Display, Rounds

# The help of each command says what its arguments are: not every version of click shows theirs.
File = Annotated[Path, typer.Argument(metavar="FILE.toml", hidden=True)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", hidden=True)]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start again, also where a run is finished or has other settings.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress: only the result.")]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", hidden=True)]


class Failed(FedloomError):
    """Some runs of a comparison failed; the others are told of in the usual way."""


def again(arguments: Sequence[str]) -> str:
    """The command that goes on: the same, but never from the start."""
    return shlex.join(["fedloom", *(argument for argument in arguments if argument != "--fresh")])


def use_threads(configuration: Configuration) -> None:
    import torch

    if configuration.threads is not None:
        torch.set_num_threads(configuration.threads)


@contextmanager
def shown(runs: int, rounds: Rounds, quiet: bool) -> Iterator[Display]:
    """Progress on stderr, so that stdout holds the result alone."""
    from rich.console import Console

    from fedloom.experiment.progress import display

    console: Console = Console(stderr=True, quiet=quiet, highlight=False)
    with display(console, runs, rounds) as watch:
        yield watch


@contextmanager
def patient(watch: Display) -> Iterator[Any]:
    """Ctrl-C lets the round under way finish; a second one, or one before the first round, stops at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked or not watch.finished:
            raise KeyboardInterrupt
        asked = True
        watch.line("finishing the round; Ctrl-C again stops at once")

    here = threading.current_thread() is threading.main_thread()  # only there does Python take signals
    before = signal.signal(signal.SIGINT, ask) if here else None
    try:
        yield lambda: asked
    finally:
        if here:
            signal.signal(signal.SIGINT, before)
