"""Scripts in processes that start at once: a server with fedloom loaded forks one for each."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn


class Scripts:
    """Runs one script at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def run(self, script: Path, folder: Path, output: Path, *, strict: bool = False) -> str:
        """Return the output of a script in `folder`, through the file `output`.

        If `strict`, warnings are errors.
        """
        errors = output.with_suffix(".errors")
        request = {
            "script": str(script),
            "folder": str(folder),
            "files": [str(output), str(errors)],
            "strict": strict,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = os.waitstatus_to_exitcode(int(self.process.stdout.readline()))
        assert code == 0, errors.read_text()
        return output.read_text()


@contextmanager
def serving() -> Iterator[Scripts]:
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Scripts(process)
    finally:
        process.communicate(timeout=60)


def _serve() -> None:
    with warnings.catch_warnings(action="ignore"):
        import torch

        import fedloom as fl
        from fedloom.algorithm import algorithms

        torch.set_num_threads(1)
        list(algorithms)
        _ = [getattr(fl, name) for name in fl.__all__]
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            _obey(json.loads(line))
        print(os.waitpid(pid, 0)[1], flush=True)


def _obey(request: dict[str, Any]) -> NoReturn:
    for descriptor, file in enumerate(request["files"], start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(request["folder"])
    if request["strict"]:
        warnings.simplefilter("error")
    code = 1
    try:
        sys.argv[:], sys.path[0] = [request["script"]], os.path.dirname(request["script"])
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()  # which `os._exit` skips: it removes temporary folders
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
