"""The runs in progress in a folder, and their report so far, for `fedloom watch`."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedloom.common.digest import digest
from fedloom.common.errors import CheckpointError
from fedloom.objectives import ACCURACY
from fedloom.report import summary as figures
from fedloom.report.layouts import templates
from fedloom.report.page import render, usual_sheet
from fedloom.report.summary import RunSummary
from fedloom.runs.directory import RunDirectory, readable
from fedloom.study.stored_runs import distinct

DEEPEST = 5
"""Levels of folders below the watched one that are searched for runs."""

QUIET = 60.0
"""Seconds without a round after which a run counts as quiet; ten rounds where these take longer."""

REFRESH = 10.0
"""Seconds between two readings of the report, at least."""

_PACE = 20  # rounds for the mean time, the pace
_LIVE = (
    "configuration.json",
    "metrics.jsonl",
    "timings.jsonl",
    "result.json",
    "recording.json",
    "model.safetensors",
)
_NO_NETWORK = "default-src 'none';"


class Watched:
    """The runs below a folder, read again only when their files have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, tuple[Any, RunSummary | None]] = {}

    def state(self) -> dict[str, Any]:
        """Return the progress of the runs by group. The version of a group changes with its
        report.
        """
        groups = [self._group(name, paths) for name, paths in self._groups().items()]
        return {"folder": str(self.folder), "refresh": REFRESH, "groups": groups}

    def page(self, group: str | None) -> str | None:
        """Return a page of reports.

        Args:
            group: Name of a group of runs; None for the page of all groups.

        Returns:
            The HTML page; None for a group that does not exist.
        """
        state, groups = self.state(), self._groups()
        if group is None and len(groups) == 1:
            (group,) = groups
        if group is not None and group not in groups:
            return None
        summaries = {path: self._summary(path) for path in groups.get(group or "", ())}
        runs = distinct({path: run for path, run in summaries.items() if run and run.records})
        name = self.folder.resolve().name
        page = _rendered(group if group and group != "." else name, runs)
        if not page:
            template = templates().get_template("empty.html")
            page = template.render(folder=self.folder, name=name, any_runs=bool(groups))
        versions = {entry["name"]: entry["version"] for entry in state["groups"]}
        version = versions.get(group, "")
        return _dressed(page, {"state": state, "group": group, "version": version})

    def _groups(self) -> dict[str, list[Path]]:
        """Return the runs by the folder of their task, which holds methods, and in them seeds."""
        groups: dict[str, list[Path]] = {}
        for path in sorted(_runs(self.folder)):
            inside = path.relative_to(self.folder)
            name = inside.parents[1].as_posix() if len(inside.parents) > 1 else "."
            groups.setdefault(name, []).append(path)
        return groups

    def _group(self, name: str, paths: Sequence[Path]) -> dict[str, Any]:
        summaries = filter(None, map(self._summary, paths))
        metric = next((run.metric for run in summaries), ACCURACY)
        unit = f",{metric.unit}" if metric.unit else ""
        return {
            "name": name,
            "version": digest(repr([(str(path), _stamp(path)) for path in paths]))[:16],
            "heads": [f"{word}{unit}" for word in (metric.title, "Best")],
            "runs": [row for path in paths if (row := self._progress(path))],
        }

    def _summary(self, path: Path) -> RunSummary | None:
        """Return a run's figures so far; None if the run has only begun or its files are
        damaged.
        """
        stamp = _stamp(path)
        if path not in self._read or self._read[path][0] != stamp:
            self._read[path] = stamp, None
            with suppress(CheckpointError):
                self._read[path] = stamp, RunDirectory(path).summary()
        return self._read[path][1]

    def _progress(self, path: Path) -> dict[str, Any] | None:
        """Return the progress of a run as the page's script reads it; `left` and `quiet` are
        seconds.
        """
        summary, ended = self._summary(path), (path / "result.json").exists()
        if summary is None and not ended:
            return None
        seed = path.name.removeprefix("seed-")
        run = summary or RunSummary(path.parent.name, int(seed) if seed.isdecimal() else 0, [])
        rounds, total = len(run.records), run.configuration.get("rounds")
        left = max(0, total - rounds) if isinstance(total, int) and not ended else None
        seconds = [float(line["seconds"]) for line in run.timings[-_PACE:] if "seconds" in line]
        pace = sum(seconds) / len(seconds) if seconds else None
        changed = max((changed for _, changed, _ in _stamp(path)), default=0) / 1e9
        quiet = max(0.0, time.time() - changed)
        score, best = figures.final(run), figures.best(run)
        if summary is None:
            state = "damaged"
        elif ended:
            state = "finished"
        else:
            state = "running" if quiet < max(QUIET, 10 * (pace or 0)) else "quiet"
        return {
            "algorithm": run.algorithm,
            "seed": run.seed,
            "state": state,
            "rounds": rounds,
            "total": total if isinstance(total, int) else rounds,
            "score": "–" if score is None else run.metric.text(score),
            "best": "–" if best is None else run.metric.text(best),
            "pace": pace,
            "left": pace * left if pace and left is not None else None,
            "quiet": quiet,
        }


def _rendered(title: str, runs: Sequence[RunSummary]) -> str:
    """Return the report of the runs that can be drawn, or ""."""
    with suppress(CheckpointError), readable(Path(title)):
        return render(title, runs, sheet=usual_sheet(_comparable(runs))) if runs else ""
    drawn = [run for run in runs if len(runs) > 1 and _rendered(title, [run])]
    return _rendered(title, drawn) if len(drawn) < len(runs) else ""


def _comparable(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Return the runs with all their rounds; without any, all runs cut to an equal length."""
    ended = [run for run in runs if len(run.records) >= run.configuration.get("rounds", 0)]
    if ended:
        return ended
    fewest = min(len(run.records) for run in runs)
    return [
        replace(run, records=run.records[:fewest], timings=run.timings[:fewest]) for run in runs
    ]


def _runs(folder: Path) -> Iterator[Path]:
    """Yield the directories of runs; links are not followed, and runs are not searched."""
    for path, below, names in os.walk(folder):
        inside = Path(path)
        if "configuration.json" in names:
            yield inside
            below.clear()
        deeper = len(inside.relative_to(folder).parts) < DEEPEST
        below[:] = [name for name in below if deeper and not name.startswith(".")]


def _stamp(path: Path) -> list[tuple[str, int, int]]:
    """Return name, time and size of the files that change during a run."""
    with suppress(OSError):
        entries = [(entry.name, entry.stat()) for entry in os.scandir(path) if entry.name in _LIVE]
        return sorted((name, status.st_mtime_ns, status.st_size) for name, status in entries)
    return []


def _dressed(page: str, about: dict[str, Any]) -> str:
    """Return the report's page with the script that updates it from this server only."""
    assets = files("fedloom.report") / "assets"
    state = json.dumps(about).replace("<", "\\u003c")
    added = (
        f"<style>{(assets / 'watch.css').read_text(encoding='utf-8')}</style>"
        f'<script type="application/json" id="watched">{state}</script>'
        f"<script>{(assets / 'watch.js').read_text(encoding='utf-8')}</script>"
    )
    head, end, tail = page.rpartition("</body>")
    return head.replace(_NO_NETWORK, f"{_NO_NETWORK} connect-src 'self';", 1) + added + end + tail
