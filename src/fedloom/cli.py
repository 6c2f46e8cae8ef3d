"""The command line. Errors are one line on stderr: 2 where the input is to blame, 1 where a run failed, 130 after Ctrl-C."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

import fedloom
from fedloom.errors import Diverged, FedloomError, InvalidValue

if TYPE_CHECKING:
    from rich.console import Console

    from fedloom.experiment.configuration import Configuration
    from fedloom.experiment.progress import Display
    from fedloom.registry import Registry

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(given, prog_name="fedloom", standalone_mode=False)  # which makes 130 of a KeyboardInterrupt
        if code == 130:
            _say(f"stopped; to go on: {_again(given)}" if given[0] in ("run", "compare") else "stopped")
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        if "\n" in error.format_message():
            error.show()  # called without anything: the help
        else:
            # typer and click each add the same suggestion
            text = re.sub(r"( Did you mean [^?]*\?)\1", r"\1", error.format_message())
            _say(f"{text.rstrip('.')} (see fedloom --help)")
        return 2
    except (Diverged, Failed) as error:
        _say(str(error))
        return 1
    except FedloomError as error:
        _say(str(error))
        return 2
    except OSError as error:
        _say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return 1
    except Exception as error:
        if "FEDLOOM_TRACEBACK" in os.environ:
            traceback.print_exc()
        _say(f"{type(error).__name__}: {error} (FEDLOOM_TRACEBACK=1 shows where)")
        return 1


def _say(text: str) -> None:
    print(f"fedloom: {' '.join(text.split())}", file=sys.stderr)


def _again(arguments: Sequence[str]) -> str:
    """The command that goes on: the same, but never from the start."""
    return shlex.join(["fedloom", *(argument for argument in arguments if argument != "--fresh")])


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedloom {fedloom.__version__}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Federated learning on clients whose data differ: train, compare and look up methods."""


@app.command()
def run(file: File, overrides: Overrides = None, fresh: Fresh = False, quiet: Quiet = False) -> None:
    """Train one method with one seed.

    FILE.toml is the configuration; KEY=VALUE changes one of its keys, such as algorithm=fedmr or training.learning_rate=0.1.
    The same command goes on after an interruption.
    """
    from fedloom.experiment.configuration import load
    from fedloom.experiment.events import RunName
    from fedloom.experiment.run import run_configured, run_directory
    from fedloom.expression import parse
    from fedloom.report import summary as figures
    from fedloom.report import write_report
    from fedloom.report.tables import byte_text, time_text

    configuration = load(file, overrides or [])
    listed = configuration.algorithms
    algorithm = configuration.algorithm or (listed[0] if len(listed) == 1 else None)
    if algorithm is None:
        choice = f"the file compares {', '.join(map(repr, listed))}" if listed else "such as algorithm=fedmr"
        raise InvalidValue(f"no method to run: give algorithm=..., {choice}")
    name = RunName(str(parse(algorithm)), configuration.seed)
    place = run_directory(configuration, algorithm, configuration.seed)
    _use_threads(configuration)
    with _shown(1, configuration.schedule.rounds, quiet) as watch, _patient(watch) as stopped:

        def passing(event: Any) -> None:
            watch(event)
            if stopped():
                raise KeyboardInterrupt

        found = run_configured(configuration, name, passing, fresh=fresh)
    page = place.path / "report.html"
    if fresh or not page.exists():
        write_report(page, str(name), [found], configuration.targets, _again(["run", str(file), *(overrides or [])]))
    final, best, seconds = figures.final(found), figures.best(found), figures.seconds(found)
    print(f"{name}: test accuracy {100 * (final or 0):.2f} %, best {100 * (best or 0):.2f} %")
    print(f"{len(found.records)} rounds, {byte_text(figures.bytes_down(found))} down, ", end="")
    print(f"{byte_text(figures.bytes_up(found))} up, {time_text(seconds or 0)}")
    print(f"model:  {place.path / 'model.safetensors'}\nreport: {page}")


@app.command()
def compare(file: File, overrides: Overrides = None, fresh: Fresh = False, quiet: Quiet = False) -> None:
    """Compare methods, over several seeds, on the same data.

    FILE.toml is the configuration, KEY=VALUE changes one of its keys, such as seeds=[0,1,2] or rounds=50. Every method has
    the same clients, samples and initial models. The same command goes on after an interruption.
    """
    from rich.console import Console

    from fedloom.experiment.comparison import Comparison
    from fedloom.experiment.configuration import load
    from fedloom.experiment.tables import comparison_table

    configuration = load(file, overrides or [])
    comparison = Comparison.of(configuration, _again(["compare", str(file), *(overrides or [])]))
    _use_threads(configuration)
    with _shown(len(comparison.names), configuration.schedule.rounds, quiet) as watch, _patient(watch) as stopped:
        failed = comparison.run(watch, fresh=fresh, stopped=stopped)
    summaries = comparison.summaries(failed)
    if summaries:
        Console().print(comparison_table(comparison.rows(summaries), Console().width))
    folder = configuration.folder
    print(f"figures: {folder / 'comparison.csv'}, {folder / 'comparison.json'}\nreport:  {folder / 'report.html'}")
    if failed:
        name, reason = next(iter(failed.items()))
        raise Failed(f"{len(failed)} of {len(comparison.names)} runs failed, the first ({name}): {reason}")


@app.command()
def algorithms(name: Name = None) -> None:
    """List the methods, or describe the one called NAME."""
    from fedloom.algorithm import algorithms as registry

    _list(registry, name)


@app.command()
def models(name: Name = None) -> None:
    """List the models, or describe the one called NAME."""
    from fedloom.models import models as registry

    _list(registry, name)


@app.command()
def datasets(name: Name = None) -> None:
    """List the data sets, or describe the one called NAME."""
    from fedloom.data.dataset import datasets as registry

    _list(registry, name)


@app.command()
def partitions(name: Name = None) -> None:
    """List the ways to share data out to clients, or describe the one called NAME."""
    from fedloom.data.partition import partitions as registry

    _list(registry, name)


def _list(registry: Registry[Any], name: str | None) -> None:
    from rich.console import Console

    from fedloom.experiment.tables import description, overview

    if name is None:
        Console().print(overview(registry))
    else:
        print(description(registry[name]))


def _use_threads(configuration: Configuration) -> None:
    import torch

    if configuration.threads is not None:
        torch.set_num_threads(configuration.threads)


@contextmanager
def _shown(runs: int, rounds: int, quiet: bool) -> Iterator[Display]:
    """Progress on stderr, so that stdout holds the result alone."""
    from rich.console import Console

    from fedloom.experiment.progress import display

    console: Console = Console(stderr=True, quiet=quiet, highlight=False)
    with display(console, runs, rounds) as shown:
        yield shown


@contextmanager
def _patient(watch: Display) -> Iterator[Any]:
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
