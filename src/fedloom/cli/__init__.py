"""The command line.

Errors are one line on stderr. The exit code is 2 for a mistake in the input, 1 if a run failed or
the disk is full, and 130 after Ctrl-C or SIGTERM.
"""

import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

import fedloom
from fedloom.cli import (
    checking,
    federation_files,
    listing,
    predicting,
    proving,
    reproducing,
    running,
    showing,
    starting,
    tuning,
)
from fedloom.cli.options import RunsFailed, resuming_command, short_help
from fedloom.common.errors import DiskFull, Diverged, FedloomError, error_text, located, one_line
from fedloom.common.termination import sigterm_interrupts

Command = Callable[..., Any]
"""A function with the arguments and the help of a command."""

# A command's heavy imports are inside its function.
commands: dict[str, dict[str, Command]] = {
    "Train": {
        "new": starting.new,
        "run": running.run,
        "compare": running.compare,
        "tune": tuning.tune,
    },
    "Look up and check": {
        "list": listing.list_names,
        "check": checking.check,
        "statistics": showing.statistics,
    },
    "Results": {
        "watch": showing.watch,
        "report": showing.report,
        "predict": predicting.predict,
        "evaluate": predicting.evaluate,
        "export": predicting.export,
    },
}
"""The commands by task, in the order of --help; `paper` and `flower` follow."""


paper_commands: dict[str, Command] = {
    "reproduce": reproducing.reproduce,
    "bundle": proving.bundle,
    "replay": proving.replay,
    "referee": checking.referee,
}

LISTS = ("algorithms", "models", "datasets", "partitions", "objectives")

RENAMED = {name: ["list", name] for name in LISTS} | {
    name: ["paper", name] for name in paper_commands
}
"""Commands of an earlier version, and the words that replace each of them."""

RESUMED = ("run", "compare", "tune", "paper")
"""Commands that continue after an interruption."""


class GroupedHelp(TyperGroup):
    """Lists commands under the titles of `commands`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of commands for each task."""
        sections = {title: list(members) for title, members in commands.items()}
        sections["More"] = ["paper", "flower"]
        for title, names in sections.items():
            listed = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(name, command.get_short_help_str(200)) for name, command in listed if command]
            with formatter.section(title):
                formatter.write_dl(rows)


_LONGEST_LINE = 2000
"""Largest number of characters of an error: quoted values are shorter, but a path may be long."""

app = typer.Typer(
    cls=GroupedHelp,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for members in commands.values():
    for name, command in members.items():
        app.command(name, short_help=short_help(command))(command)
paper_app = typer.Typer(
    name="paper",
    help="Reproduce published tables, and check results: reproduce, bundle, replay, referee.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for name, command in paper_commands.items():
    paper_app.command(name, short_help=short_help(command))(command)
app.add_typer(paper_app)
app.add_typer(federation_files.app)
app.command("schema", hidden=True)(listing.schema)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # PyTorch reads it once, at its import: waiting threads then give up their core instead of
    # spinning.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may support only ASCII
            stream.reconfigure(errors="replace")
    try:
        old = words[0] if words else ""
        words[:1] = RENAMED.get(old, words[:1])
        with sigterm_interrupts():
            code = app(words, prog_name="fedloom", standalone_mode=False, obj=words)
        if old in RENAMED:
            new = " ".join(RENAMED[old])
            _print_error(
                f"fedloom {old} is now fedloom {new}; the next version removes the old name"
            )
        if code == 130:  # a KeyboardInterrupt
            resumes = words[0] in RESUMED
            _print_error(
                f"stopped; to continue: {resuming_command(words)}" if resumes else "stopped"
            )
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        _print_usage_error(error, words)
        return 2
    except (Diverged, DiskFull, RunsFailed) as error:
        _print_error(str(error))
        return 1
    except FedloomError as error:
        _print_error(located(error, str(error)))
        return 2
    except OSError as error:
        _print_error(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return 1
    except Exception as error:
        if "FEDLOOM_TRACEBACK" in os.environ:
            traceback.print_exc()
        _print_error(
            f"{located(error, error_text(error))} (FEDLOOM_TRACEBACK=1 prints the traceback)"
        )
        return 1


def _print_usage_error(error: click.ClickException, words: Sequence[str]) -> None:
    if "\n" in error.format_message():
        error.show()  # without arguments: the help
    else:
        # typer and click each add the same suggestion
        text = re.sub(r"( Did you mean [^?]*\?)\1", r"\1", error.format_message())
        command = (
            error.ctx.command_path
            if isinstance(error, click.UsageError) and error.ctx
            else "fedloom"
        )
        if isinstance(error, click.NoSuchOption) and (hint := _key_form(error, words)):
            text = f"{error.option_name} is a key of the configuration: write {hint}"
        _print_error(f"{text.rstrip('.')} (see {command} --help)")


def _key_form(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """Return `rounds=5` for the words `--rounds 5`, or "" where the option is no key."""
    if error.possibilities:  # a mistyped option: reading the keys would load PyTorch
        return ""
    from fedloom.runs.config_file import KEYS

    key = error.option_name.lstrip("-").replace("-", "_")
    if key not in KEYS:
        return ""
    for number, word in enumerate(words):
        if word.startswith(f"{error.option_name}="):
            return f"{key}={word.partition('=')[2]}"
        if word == error.option_name and number + 1 < len(words):
            return f"{key}={words[number + 1]}"
    return f"{key}=..."


def _print_error(text: str) -> None:
    print(f"fedloom: {one_line(text, _LONGEST_LINE)}", file=sys.stderr)


def _show_version(show: bool) -> None:
    if show:
        print(f"fedloom {fedloom.__version__}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Federated learning on clients with different data: train, compare and look up methods."""
