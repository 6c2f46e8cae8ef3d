"""Arguments that several commands share, progress on stderr, and a graceful Ctrl-C."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from fedloom.cli.catalog import cached_catalog
from fedloom.common.errors import FedloomError, InvalidValue, quoted

if TYPE_CHECKING:
    from fedloom.runs.events import RunName
    from fedloom.runs.progress import Display, Rounds

option = partial(typer.Option, show_default=False)
"""An option with its default in its help text: typer would escape the brackets around it."""

# The help of each command describes its arguments: not every version of click shows them.
File = Annotated[Path, typer.Argument(metavar="FILE.toml", hidden=True)]


def complete_override(incomplete: str) -> list[str]:
    """Return the keys, or the names that fit a key, for the completion of `KEY=VALUE`."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        from fedloom.runs.config_file import KEYS

        return [f"{name}=" for name in KEYS if name.startswith(key)]
    names = cached_catalog().get(KINDS_OF_KEYS.get(key, ""), {})
    return [f"{key}={name}" for name in names if name.startswith(value)]


KINDS_OF_KEYS = {
    "algorithm": "algorithms",
    "model": "models",
    "engine": "engines",
    "objective": "objectives",
    "data.name": "datasets",
    "data.partition": "partitions",
}
"""Kinds of the names that are values of keys."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", hidden=True, autocompletion=complete_override),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start again, also after a finished run.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only the result, no progress.")]
Trials = Annotated[
    int | None, option(metavar="N", help="Number of trials; a grid is sampled at random.")
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Import your own model by its path; this runs its code."),
]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", hidden=True)]
Folder = Annotated[Path, typer.Argument(metavar="DIR", hidden=True)]
Places = Annotated[
    list[str] | None, typer.Option("--data", metavar="NAME=FOLDER", help="Folder of a data set.")
]


class RunsFailed(FedloomError):
    """Some runs failed; the results of the others are shown and written as usual."""


def require_finished(failed: Mapping[RunName, str], runs: int) -> None:
    """Raise `RunsFailed`, with the first reason, if any of the runs failed.

    Args:
        failed: Reasons of the failed runs by name, each on one line.
        runs: Number of all runs, for the message.

    Raises:
        RunsFailed: `failed` is not empty.
    """
    for name, reason in failed.items():
        raise RunsFailed(f"{len(failed)} of {runs} runs failed, the first ({name}): {reason}")


def resuming_command(arguments: Sequence[str]) -> str:
    """Return the command that resumes this one: the same without a fresh start."""
    dropped = ("--fresh", "--quiet", "-q")
    return shlex.join(["fedloom", *(argument for argument in arguments if argument not in dropped)])


def this_command() -> str:
    """Return the current command in its resuming form, for its report."""
    return resuming_command(click.get_current_context().obj)


@contextmanager
def shown(runs: int, rounds: Rounds, quiet: bool) -> Iterator[tuple[Display, Callable[[], bool]]]:
    """Yield a display on stderr, and a function that returns True after a first Ctrl-C.

    The command then stops after the round. A second Ctrl-C stops at once.

    Args:
        runs: Number of runs.
        rounds: Number of rounds, of all runs or by run.
        quiet: Show no progress.

    Yields:
        The display, to be called with each event of a run, and the function.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed twice, or before a run has started.
    """
    from fedloom.runs.progress import progress

    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        if stopping or not watch.finished:
            raise KeyboardInterrupt
        stopping = True
        watch.line("finishing the round; Ctrl-C again stops at once")

    with progress(runs, rounds, quiet) as watch, ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, stop))
        yield watch, lambda: stopping


def short_help(command: Callable[..., Any]) -> str:
    """Return the first line of a command's help."""
    return " ".join((command.__doc__ or "").partition("\n\n")[0].split())


def folders_of(texts: Sequence[str] | None) -> dict[str, str]:
    """Return `--data mnist=FOLDER` by name, as absolute paths.

    With absolute paths, runs can be resumed from any folder.
    """
    folders = {}
    for text in texts or ():
        name, equals, folder = text.partition("=")
        if not equals or not folder:
            raise InvalidValue(
                f"--data {quoted(text)} is not NAME=FOLDER, such as mnist=data/MNIST"
            )
        folders[name] = str(Path(folder).expanduser().resolve())
    return folders
