"""The runs under way in a folder, and their report so far, for `fedloom watch`."""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedloom.errors import CheckpointError
from fedloom.experiment.directory import RunDirectory, readable
from fedloom.objectives import ACCURACY
from fedloom.report import summary as figures
from fedloom.report.page import render, templates
from fedloom.report.summary import RunSummary
from fedloom.state.digest import digest

DEEPEST = 5
"""Levels of folders below the watched one that are searched for runs."""

QUIET = 60.0
"""Seconds without a round after which a run counts as quiet; ten rounds where these take longer."""

_PACE = 20  # rounds whose mean time is the pace
_LIVE = ("configuration.json", "metrics.jsonl", "timings.jsonl", "result.json", "recording.json", "model.safetensors")
_NO_NETWORK = "default-src 'none';"


class Watched:
    """The runs below a folder, read again only when their files have changed. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._read: dict[Path, tuple[Any, RunSummary | None]] = {}
        self._pages: dict[str, tuple[str, str, float]] = {}

    def state(self) -> dict[str, Any]:
        """Return all that the page shows of the runs, by group, with a version that changes when the group's report does."""
        with self._lock:
            groups = self._groups()
            time_now = time.time()
            return {
                "folder": str(self.folder),
                "groups": [
                    {
                        "name": name,
                        "version": self._version(paths),
                        "refresh": self._refresh(name),
                        "heads": self._heads(paths),
                        "runs": [row for path in paths if (row := self._progress(name, path, time_now))],
                    }
                    for name, paths in groups.items()
                ],
            }

    def page(self, group: str | None) -> str | None:
        """Return the page of a group's report, or of all groups (None); None for a group that does not exist."""
        state = self.state()
        names = [entry["name"] for entry in state["groups"]]
        if group is None and len(names) == 1:
            group = names[0]
        if group is not None and group not in names:
            return None
        with self._lock:
            body = None if group is None else self._report(group)
        about = {"state": state, "group": group, "version": self._pages[group][0] if body and group else ""}
        # Without a report: all groups, or nothing yet.
        empty = templates().get_template("empty.html")
        return _dressed(
            body or empty.render(folder=self.folder, name=self.folder.resolve().name, any_runs=bool(names)), about
        )

    def _report(self, group: str) -> str | None:
        """Return the group's report, rendered again if its figures changed; None while no run has a round."""
        paths = self._groups()[group]
        version = self._version(paths)
        if group not in self._pages or self._pages[group][0] != version:
            began = time.perf_counter()
            runs = [run for path in paths if (run := self._summary(path)) is not None and run.records]
            text = _rendered(group if group != "." else self.folder.resolve().name, runs)
            self._pages[group] = version, text, time.perf_counter() - began
        return self._pages[group][1] or None

    def _refresh(self, group: str) -> float:
        """Return the seconds between two updates: rendering takes at most a tenth of one processor."""
        return max(5.0, 10 * self._pages[group][2]) if group in self._pages else 2.0

    def _groups(self) -> dict[str, list[Path]]:
        """Return the runs by the folder of their task, which holds methods, and in them seeds."""
        groups: dict[str, list[Path]] = {}
        for path in sorted(_runs(self.folder)):
            inside = path.relative_to(self.folder)
            name = inside.parents[1].as_posix() if len(inside.parents) > 1 else "."
            groups.setdefault(name, []).append(path)
        return groups

    def _version(self, paths: Sequence[Path]) -> str:
        return digest(repr([(str(path), _stamp(path)) for path in paths]))[:16]

    def _summary(self, path: Path) -> RunSummary | None:
        """Return a run's figures so far; None for a run that has only begun, or whose files are damaged."""
        stamp = _stamp(path)
        if path not in self._read or self._read[path][0] != stamp:
            self._read[path] = stamp, None
            with suppress(CheckpointError):
                self._read[path] = stamp, RunDirectory(path).summary()
        return self._read[path][1]

    def _heads(self, paths: Sequence[Path]) -> list[str]:
        """Return the titles of the columns of the final and the best score."""
        metric = next((run.metric for path in paths if (run := self._summary(path)) is not None), ACCURACY)
        return [f"{word},{metric.unit}" if metric.unit else word for word in (metric.title, "Best")]

    def _progress(self, group: str, path: Path, time_now: float) -> dict[str, Any] | None:
        """Return the progress of a run as the page's script reads it; `left` and `quiet` are seconds."""
        run, ended = self._summary(path), (path / "result.json").exists()
        seed = path.name.removeprefix("seed-")
        row = {
            "group": group,
            "algorithm": path.parent.name,
            "seed": int(seed) if seed.isdecimal() else 0,
            "state": "damaged",
            **dict.fromkeys(("rounds", "total", "quiet"), 0),
            **dict.fromkeys(("score", "best"), "–"),
            **dict.fromkeys(("pace", "left")),
        }
        if run is None:
            return row if ended else None
        rounds, configured = len(run.records), run.configuration.get("rounds")
        total = configured if isinstance(configured, int) else rounds
        seconds = [float(timing["seconds"]) for timing in run.timings[-_PACE:] if "seconds" in timing]
        pace = sum(seconds) / len(seconds) if seconds else None
        quiet = max(0.0, time_now - max((stamp[0] for stamp in _stamp(path) if stamp), default=0) / 1e9)
        state = "finished" if ended else "running" if quiet < max(QUIET, 10 * (pace or 0)) else "quiet"
        scores = {"score": figures.final(run), "best": figures.best(run)}
        return row | {
            "algorithm": run.algorithm,
            "seed": run.seed,
            "state": state,
            "rounds": rounds,
            "total": total,
            **{name: run.metric.text(value) for name, value in scores.items() if value is not None},
            "pace": pace,
            "left": None if pace is None or ended else pace * max(0, total - rounds),
            "quiet": quiet,
        }


def _rendered(title: str, runs: Sequence[RunSummary]) -> str:
    """The report of the runs, without those of which no report can be made; empty where none is left."""
    with suppress(CheckpointError), readable(Path(title)):
        return render(title, runs) if runs else ""
    drawn = []
    for run in runs:
        with suppress(CheckpointError), readable(Path(title)):
            render(title, [run])
            drawn.append(run)
    return render(title, drawn) if 0 < len(drawn) < len(runs) else ""


def _runs(folder: Path) -> Iterator[Path]:
    """Yield the directories of runs; links are not followed, and runs are not searched."""
    for path, below, names in os.walk(folder):
        inside = Path(path)
        if "configuration.json" in names:
            yield inside
            below.clear()
        deeper = len(inside.relative_to(folder).parts) < DEEPEST
        below[:] = [name for name in below if deeper and not name.startswith(".")]


def _stamp(path: Path) -> tuple[tuple[int, int] | None, ...]:
    """Return time and size of the files that change as the run goes on."""
    stamps: dict[str, tuple[int, int] | None] = dict.fromkeys(_LIVE)
    for name in _LIVE:
        with suppress(OSError):
            status = (path / name).stat()
            stamps[name] = status.st_mtime_ns, status.st_size
    return tuple(stamps.values())


def _dressed(page: str, about: dict[str, Any]) -> str:
    """Return the report's page with the script that updates it, which may ask this server and no other."""
    assets = files("fedloom.report") / "assets"
    state = json.dumps(about).replace("<", "\\u003c")
    added = (
        f"<style>{(assets / 'watch.css').read_text(encoding='utf-8')}</style>"
        f'<script type="application/json" id="watched">{state}</script>'
        f"<script>{(assets / 'watch.js').read_text(encoding='utf-8')}</script>"
    )
    head, end, tail = page.rpartition("</body>")
    return head.replace(_NO_NETWORK, f"{_NO_NETWORK} connect-src 'self';", 1) + added + end + tail
