"""What goes on in a folder of runs, and its report as it stands, for `fedloom watch`."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedloom.errors import CheckpointError
from fedloom.experiment.directory import RunDirectory
from fedloom.objectives import ACCURACY
from fedloom.report import summary as figures
from fedloom.report.page import render, templates
from fedloom.report.summary import RunSummary

DEEPEST = 5
"""Levels of folders below the watched one that are searched for runs."""

QUIET = 60.0
"""Seconds without a round, at least, after which a run is no longer said to be going on; ten rounds where these take longer."""

_PACE = 20  # rounds whose mean time says how long the rest will take
_LIVE = ("configuration.json", "metrics.jsonl", "timings.jsonl", "result.json", "recording.json")
_NO_NETWORK = "default-src 'none';"


@dataclass(frozen=True)
class Standing:
    """Where one run stands. `left` seconds are needed for the rest at the pace of the last rounds (None: not known);
    `quiet` seconds have passed since it last wrote something."""

    group: str
    algorithm: str
    seed: int
    state: str  # "finished", "running", "quiet", or of a finished run with damaged files "damaged"
    rounds: int
    total: int
    score: str
    best: str
    pace: float | None
    left: float | None
    quiet: float


class Watched:
    """The runs below a folder, read again only when their files have changed. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._read: dict[Path, tuple[Any, RunSummary | None]] = {}
        self._pages: dict[str, tuple[str, str, float]] = {}

    def state(self) -> dict[str, Any]:
        """All that the page shows of the runs, by group, and what changes when a group's report would."""
        with self._lock:
            groups = self._groups()
            now = time.time()
            return {
                "folder": str(self.folder),
                "groups": [
                    {
                        "name": name,
                        "version": self._version(paths),
                        "refresh": self._refresh(name),
                        "heads": self._heads(paths),
                        "runs": [asdict(standing) for path in paths if (standing := self._standing(name, path, now))],
                    }
                    for name, paths in groups.items()
                ],
            }

    def page(self, group: str | None) -> str | None:
        """The page of a group's report, or of all groups (None); None for a group that is not there."""
        state = self.state()
        names = [one["name"] for one in state["groups"]]
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
        """The group's report, rendered when it is not that of these figures; None while no run has a round."""
        paths = self._groups()[group]
        version = self._version(paths)
        if group not in self._pages or self._pages[group][0] != version:
            began = time.perf_counter()
            runs = [run for path in paths if (run := self._summary(path)) is not None and run.records]
            text = render(group if group != "." else self.folder.resolve().name, runs) if runs else ""
            self._pages[group] = version, text, time.perf_counter() - began
        return self._pages[group][1] or None

    def _refresh(self, group: str) -> float:
        """Seconds between two refreshments, so that rendering takes no more than a tenth of one processor."""
        return max(5.0, 10 * self._pages[group][2]) if group in self._pages else 2.0

    def _groups(self) -> dict[str, list[Path]]:
        """The runs by the folder that holds those of one task: methods, and in them seeds."""
        groups: dict[str, list[Path]] = {}
        for path in sorted(_runs(self.folder, DEEPEST)):
            inside = path.relative_to(self.folder)
            name = inside.parents[1].as_posix() if len(inside.parents) > 1 else "."
            groups.setdefault(name, []).append(path)
        return groups

    def _version(self, paths: Sequence[Path]) -> str:
        return hashlib.sha256(repr([(str(path), _stamp(path)) for path in paths]).encode()).hexdigest()[:16]

    def _summary(self, path: Path) -> RunSummary | None:
        """What a run has left so far; None for one that has only begun, or whose files are damaged."""
        stamp = _stamp(path)
        if path not in self._read or self._read[path][0] != stamp:
            found = None
            with suppress(CheckpointError, OSError, ValueError, KeyError, TypeError):
                found = RunDirectory(path).summary()
            self._read[path] = stamp, found
        return self._read[path][1]

    def _heads(self, paths: Sequence[Path]) -> list[str]:
        """What the columns of the last and the best score of these runs are called."""
        metric = next((run.metric for path in paths if (run := self._summary(path)) is not None), ACCURACY)
        return [f"{word},{metric.unit}" if metric.unit else word for word in (metric.title, "Best")]

    def _standing(self, group: str, path: Path, now: float) -> Standing | None:
        run, ended = self._summary(path), (path / "result.json").exists()
        if run is None:
            seed = path.name.removeprefix("seed-")
            number = int(seed) if seed.isdecimal() else 0
            damaged = Standing(group, path.parent.name, number, "damaged", 0, 0, "–", "–", None, None, 0.0)
            return damaged if ended else None
        measured = [figures.final(run), figures.best(run)]
        final, best = ("–" if value is None else run.metric.text(value) for value in measured)
        rounds, total = len(run.records), int(run.configuration.get("rounds", len(run.records)))
        last = [float(timing["seconds"]) for timing in run.timings[-_PACE:] if "seconds" in timing]
        pace = sum(last) / len(last) if last else None
        quiet = max(0.0, now - max((stamp[0] for stamp in _stamp(path) if stamp), default=0) / 1e9)
        state = "finished" if ended else "running" if quiet < max(QUIET, 10 * (pace or 0)) else "quiet"
        return Standing(
            group,
            run.algorithm,
            run.seed,
            state,
            rounds,
            total,
            final,
            best,
            pace,
            None if pace is None or ended else pace * max(0, total - rounds),
            quiet,
        )


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    """The directories of runs; links are not followed, and what lies inside a run is not searched."""
    if (folder / "configuration.json").is_file():
        yield folder
        return
    with suppress(OSError):
        below = [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)] if depth else []
        for path in below:
            if not Path(path).name.startswith("."):
                yield from _runs(Path(path), depth - 1)


def _stamp(path: Path) -> tuple[tuple[int, int] | None, ...]:
    """Time and size of the files that say how far a run is."""
    found: list[tuple[int, int] | None] = []
    for name in _LIVE:
        try:
            status = (path / name).stat()
            found.append((status.st_mtime_ns, status.st_size))
        except OSError:
            found.append(None)
    return tuple(found)


def _dressed(page: str, about: dict[str, Any]) -> str:
    """The report's page with what keeps it up to date. It may ask this server, and only it."""
    assets = files("fedloom.report") / "assets"
    told = json.dumps(about).replace("<", "\\u003c")
    added = (
        f"<style>{(assets / 'watch.css').read_text(encoding='utf-8')}</style>"
        f'<script type="application/json" id="watched">{told}</script>'
        f"<script>{(assets / 'watch.js').read_text(encoding='utf-8')}</script>"
    )
    head, end, tail = page.rpartition("</body>")
    return head.replace(_NO_NETWORK, f"{_NO_NETWORK} connect-src 'self';", 1) + added + end + tail
