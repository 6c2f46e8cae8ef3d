"""The command line in processes that start at once: a loaded server forks one for each command.

A command can die (SIGKILL) in the middle of its n-th file operation. With n = -1 it lists its file
operations.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

with warnings.catch_warnings():
    # typer uses a function of click that newer versions of click deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from fedloom.cli import main as main


Say = Callable[..., tuple[int, str, str]]
"""Runs a command in this process: its arguments -> exit code, stdout and stderr."""


def saying(capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that runs a command in this process."""

    def say(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return say


def require_one_short_line(text: str) -> None:
    """Assert that the text is one printable line and that long values are shortened."""
    assert text.isprintable()
    assert not re.search(r"(\S)\1{300}|(y ){150}", text)
    assert len(text) < 2100


OPERATIONS = "operations.txt"
"""The list of a command's file operations, in its folder: the names of the files, one per line."""

OUTPUT = "output.txt"
"""The output of a command, in its folder."""


class Command:
    """A running `fedloom ...`."""

    def __init__(self, server: subprocess.Popen[str], pid: int, output: Path) -> None:
        self.server, self.pid, self.output = server, pid, output

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def running(self) -> bool:
        """Return True until the process has ended."""
        with suppress(FileNotFoundError):
            return " Z " not in Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2][:4]
        return False

    def wait(self) -> tuple[int, str]:
        """Return the exit code and all output; a negative code is the signal of the kill."""
        assert self.server.stdout is not None
        code = os.waitstatus_to_exitcode(int(self.server.stdout.readline()))
        # a process that was cut in the middle of a write was killed too
        code = -signal.SIGKILL if code == -signal.SIGXFSZ else code
        return code, self.output.read_text()


class Server:
    """Runs one command at a time in `folder`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder

    def start(self, *arguments: str, die_at: int = 0) -> Command:
        output = self.folder / OUTPUT
        output.touch()  # it may be killed before it writes
        request = {
            "arguments": arguments,
            "output": str(output),
            "folder": str(self.folder),
            "die_at": die_at,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Command(self.process, int(self.process.stdout.readline()), output)

    def run(self, *arguments: str, die_at: int = 0) -> tuple[int, str]:
        return self.start(*arguments, die_at=die_at).wait()


@contextmanager
def serving() -> Iterator[subprocess.Popen[str]]:
    """Start the process of a server."""
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.communicate(timeout=60)


def _serve() -> None:
    import torch

    from fedloom.algorithm import algorithms
    from fedloom.data.dataset import datasets
    from fedloom.data.partition import partitions

    torch.set_num_threads(1)
    for registry in (algorithms, datasets, partitions):
        list(registry)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _obey(request)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


def _obey(request: dict[str, Any]) -> NoReturn:
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.chdir(request["folder"])
    if request["die_at"]:
        _die_at(request["die_at"])
    arguments: Sequence[str] = request["arguments"]
    code = main(arguments)
    atexit._run_exitfuncs()  # which `os._exit` skips: it removes temporary folders
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_at(number: int) -> None:
    """Die in file operation `number`: in the middle of a write, or before the rename of a file.

    Python's audit events report the operations of all libraries. From the beginning of a write, the
    system limits the growth of files to one byte and ends a process that exceeds it, also in code
    of other languages. With -1, the names of the files are listed in `OPERATIONS` instead.
    """
    done = 0
    home = os.path.realpath(os.getcwd())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it

    def count(name: str) -> bool:
        nonlocal done
        done += 1
        if number < 0:
            with open(OPERATIONS, "a") as file:
                file.write(f"{name}\n")
        return done == number

    def heed(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and _inside(home, arguments[1]):
            if count(f"rename to {Path(os.fsdecode(arguments[1])).name}"):
                os.kill(os.getpid(), signal.SIGKILL)
        elif event == "open" and _writes(home, *arguments):
            path = Path(os.fsdecode(arguments[0]))
            if count(path.name):
                size = path.stat().st_size if path.exists() else 0
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1, hard))

    sys.addaudithook(heed)


def _inside(home: str, path: Any) -> bool:
    """Return True for a path in the folder of the command, except the files of this module."""
    if isinstance(path, int):
        return False
    name = os.path.realpath(os.fsdecode(path))
    return name.startswith(home) and os.path.basename(name) not in (OPERATIONS, OUTPUT)


def _writes(home: str, path: Any, mode: str | None, flags: int) -> bool:
    """Return True for the audit event of a file that is opened for writing."""
    return bool(flags & (os.O_WRONLY | os.O_RDWR)) and _inside(home, path)


if __name__ == "__main__":
    _serve()
