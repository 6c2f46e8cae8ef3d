"""Runs, comparisons, predictions, exports and reports do not need what only POSIX systems have.

A subprocess lacks `fcntl`, `resource`, `os.fork`, /proc, Unix sockets, handlers of SIGTERM, and
folders that can be opened. It is not Windows: paths and the file system remain those of this one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Modules of fedloom cannot import `fcntl` and `resource`; Python's own may need them on this system.
PREAMBLE = """
import builtins, os, signal, socket, stat, sys
import_module, open_file, handle = builtins.__import__, os.open, signal.signal

def imported(name, globals=None, *rest, **options):
    if name in ("fcntl", "resource") and (globals or {}).get("__name__", "").startswith("fedloom"):
        raise ModuleNotFoundError(name)
    return import_module(name, globals, *rest, **options)

def opened(path, *rest, **options):
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if caller.startswith("fedloom") and os.path.isdir(path):
        raise PermissionError(13, "a folder", path)
    return open_file(path, *rest, **options)

def handled(number, handler):
    if number == signal.SIGTERM:
        raise ValueError("no such signal")
    return handle(number, handler)

def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith("/proc"):
        raise FileNotFoundError(2, "there is no /proc")

import asyncio, multiprocessing.connection
builtins.__import__, os.open, signal.signal = imported, opened, handled
sys.addaudithook(watch)
for module, name in ((os, "fork"), (os, "forkpty"),
                     (os, "sched_getaffinity"), (socket, "AF_UNIX")):
    delattr(module, name)
"""

PROGRAM = """
import json, os
import numpy as np
import fedloom as fl
from fedloom.cli import main

def make(engine, folder):
    task = fl.make_task("digits", clients=4, partition="iid", model="mlp(hidden=[8])")
    run = fl.run("fedavg", task, rounds=2, engine=engine, directory=folder, quiet=True)
    return run.history[-1]["accuracy"]

figures = {engine: make(engine, engine) for engine in ("rows", "stacked", "auto")}
codes = {}
with open("job.toml", "w") as file:
    file.write('algorithms = ["fedavg", "fedprox"]\\nrounds = 2\\nseeds = [0]\\nworkers = 2\\n'
               'model = "mlp(hidden=[8])"\\n[data]\\nname = "digits"\\nclients = 4\\n')
codes["compare"] = main(["compare", "job.toml", "directory=compared", "-q"])
codes["resume"] = main(["compare", "job.toml", "directory=compared", "-q"])
np.savez("new.npz", inputs=np.zeros((3, 1, 8, 8), np.float32))
codes["predict"] = main(["predict", "rows", "new.npz", "--to", "answers.csv"])
codes["export"] = main(["export", "rows", "--to", "torch", "--output", "model.pt2"])
codes["report"] = main(["report", "compared", "-q"])
codes["processes"] = main(["run", "job.toml", "algorithm=fedavg", "engine=processes", "-q"])
with open("outcome.json", "w") as file:
    json.dump([figures, codes], file)
"""


def test_a_system_without_posix_runs_compares_predicts_exports_and_reports(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + PROGRAM],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (tmp_path / "outcome.json").exists(), done.stderr[-3000:]
    figures, codes = json.loads((tmp_path / "outcome.json").read_text())
    assert max(figures.values()) - min(figures.values()) < 1e-3
    refused = codes.pop("processes")
    assert set(codes.values()) == {0}, done.stderr[-3000:]
    assert refused == 2
    (line,) = [text for text in done.stderr.splitlines() if "processes" in text]
    assert line.endswith(
        "engine 'processes' needs Linux or macOS: use engine = 'rows' or 'stacked'"
    )
    assert len((tmp_path / "answers.csv").read_text().splitlines()) == 4
    assert (tmp_path / "compared" / "report.html").stat().st_size > 1000
