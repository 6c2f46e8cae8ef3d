"""What a user wants of a table or figure (which cells, and how much less than the whole protocol), and the runs that it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.config.checks import require_at_least
from fedloom.config.expression import Call, parse
from fedloom.errors import InvalidValue, UnknownName, suggestion
from fedloom.experiment.configuration import Configuration, configuration, put
from fedloom.experiment.events import RunName
from fedloom.experiment.jobs import Job
from fedloom.experiment.run import run_directory
from fedloom.papers.paper_data import data_of, facts, families, family, in_folder
from fedloom.papers.protocols import Baseline, Exhibit, PaperCell, Setting, folder_of
from fedloom.rounds.schedule import NEUTRAL

PLACES = ("workers", "threads", "engine", *NEUTRAL)
"""Keys that change nothing of what is measured, but for the last digits of sums."""

_REFUSED = {
    "name": "--directory",
    "directory": "--directory",
    "algorithm": "--rows",
    "algorithms": "--rows",
    "seed": "--seeds",
    "seeds": "--seeds",
    "rounds": "--rounds",
    "settings": "--columns",
}
"""Keys that have an option of their own."""


@dataclass(frozen=True)
class ReproduceOptions:
    """What a user wants: `rows` and `columns` choose cells (all where empty), `rounds` is the most that a run has, `samples` how
    many of a data set's samples are used; `folders` are those of the data by name, `changes` are `key=value`."""

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rounds: int | None = None
    seeds: tuple[int, ...] | None = None
    samples: int | None = None
    folders: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    directory: Path = Path("runs/reproduce")

    def __post_init__(self) -> None:
        if self.rounds is not None:
            require_at_least("--rounds", self.rounds, 1)
        if self.samples is not None:
            require_at_least("--samples", self.samples, 2)
        for seed in self.seeds or ():
            require_at_least("--seeds", seed, 0)
        if self.seeds is not None and len(set(self.seeds)) < max(1, len(self.seeds)):
            raise InvalidValue(f"--seeds must differ from each other, not {', '.join(map(str, self.seeds))}")
        for name in self.folders:
            if name not in families():
                raise UnknownName("data set", name, families())
        for change in self.changes:
            key = change.partition("=")[0].strip()
            if key in _REFUSED:
                raise InvalidValue(f"{key} is not set here: use {_REFUSED[key]}")


@dataclass(frozen=True)
class ReproducePlan:
    """The chosen cells with what it takes to fill them: the configuration of each setting, by the setting's name, what of the
    protocol is left out there (`partial`, empty for all of it), and the runs."""

    exhibit: Exhibit
    options: ReproduceOptions
    cells: list[PaperCell]
    configurations: dict[str, Configuration]
    partial: dict[str, tuple[str, ...]]
    jobs: list[Job]

    @property
    def reasons(self) -> list[str]:
        """Everything that is left out, in any cell."""
        return list(dict.fromkeys(reason for reasons in self.partial.values() for reason in reasons))

    @property
    def label(self) -> str:
        """`PARTIAL`, or nothing when every chosen cell follows the whole protocol."""
        return "PARTIAL" if self.reasons else ""

    @property
    def folder(self) -> Path:
        """Where the files about this table or figure go."""
        return self.options.directory / self.exhibit.id

    def jobs_of(self, where: PaperCell | Baseline) -> list[Job]:
        """The runs of a cell, or of its baseline, a seed each."""
        wanted = str(parse(where.algorithm))
        key = setting_key(where.setting)
        return [job for job in self.jobs if job.name.setting == key and job.name.algorithm == wanted]


def setting_key(setting: Setting) -> str:
    """What tells the settings of one table apart: their names, with the method that has one of its own."""
    return f"{setting.name} ({setting.only})" if setting.only else setting.name


def plan(exhibit: Exhibit, options: ReproduceOptions) -> ReproducePlan:
    """What is to be run. Raises `InvalidValue`, in one line, for rows, columns or values that there are not."""
    cells = chosen(exhibit, options)
    configurations: dict[str, Configuration] = {}
    partial: dict[str, tuple[str, ...]] = {}
    methods: dict[str, list[str]] = {}
    for where in [place for cell in cells for place in (cell.baseline, cell) if place is not None]:
        key = setting_key(where.setting)
        if key not in configurations:
            seeds = options.seeds or where.setting.seeds
            configurations[key] = _configured(where.setting, key, options, seeds)
            partial[key] = _left_out(where.setting, options, seeds)
        if isinstance(where, Baseline) or where.measure.kind != "weights":
            methods.setdefault(key, [])
            methods[key] += [text for text in [str(parse(where.algorithm))] if text not in methods[key]]
    jobs = []
    for key, texts in methods.items():
        own = configurations[key]
        for seed in own.seeds:
            for text in texts:
                place = run_directory(own, text, seed)
                jobs.append(Job(own, RunName(text, seed, key), place.path))
    return ReproducePlan(exhibit, options, cells, configurations, partial, jobs)


def chosen(exhibit: Exhibit, options: ReproduceOptions) -> list[PaperCell]:
    """The cells in the rows and columns that are asked for."""
    rows = _matching("row", options.rows, [cell.row for cell in exhibit.cells])
    columns = _matching("column", options.columns, [cell.column for cell in exhibit.cells])
    found = [cell for cell in exhibit.cells if cell.row in rows and cell.column in columns]
    if not found:
        raise InvalidValue(f"{exhibit.id} has no cell in both the rows and the columns that were given")
    return found


def _matching(kind: str, texts: Sequence[str], labels: Sequence[str]) -> set[str]:
    """The labels that any of the texts means; a text that means none may be several with commas between them."""
    known = list(dict.fromkeys(labels))
    if not texts:
        return set(known)
    found: set[str] = set()
    for text in texts:
        whole = _meant(text, known)
        for part in [] if whole else [part.strip() for part in text.split(",")]:
            hits = _meant(part, known)
            if not hits:
                near = suggestion(part, [*known, *(word for label in known for word in label.split())])
                raise InvalidValue(f"no {kind} has {part!r} in its name{near} (there are: {_few(known)})")
            whole |= hits
        found |= whole
    return found


def _meant(text: str, labels: Sequence[str]) -> set[str]:
    """The labels that are this text; or else those that have all of its words; or else those that it is part of."""
    small = text.casefold()
    same = {label for label in labels if label.casefold() == small}
    words = {label for label in labels if small.split() and set(small.split()) <= set(label.casefold().split())}
    inside = {label for label in labels if small.strip() and small in label.casefold()}
    return same or words or inside


def _few(labels: Sequence[str], most: int = 12) -> str:
    more = f", and {len(labels) - most} more" if len(labels) > most else ""
    return ", ".join(labels[:most]) + more


def _configured(setting: Setting, key: str, options: ReproduceOptions, seeds: Sequence[int]) -> Configuration:
    rounds = min(setting.rounds, options.rounds or setting.rounds)
    table = setting.table(rounds)
    data: dict[str, Any] = table["data"]
    name = data_of(setting.data)
    known = facts()[name]
    data["name"] = in_folder(setting.data, options.folders.get(family(name)))
    if options.samples is not None and not known.generated:
        data["name"] = str(Call("part", named={"of": data["name"], "samples": options.samples}))
        if "steps" in table["training"]:
            share = min(1.0, options.samples / (known.train + known.test))
            table["training"]["steps"] = math.ceil(share * table["training"]["steps"])
    for change in options.changes:
        put(table, change)
    # Where something lies or how many work at it makes no other experiment.
    place = options.directory / setting.paper / folder_of(key, {k: v for k, v in table.items() if k not in PLACES})
    return configuration({**table, "name": setting.paper, "directory": str(place), "seeds": list(seeds)})


def _left_out(setting: Setting, options: ReproduceOptions, seeds: Sequence[int]) -> tuple[str, ...]:
    """What makes runs of this setting less than, or other than, the paper's; empty when they are the same."""
    found = []
    if options.rounds is not None and options.rounds < setting.rounds:
        found.append(f"{options.rounds} of {setting.rounds:,} rounds")
    if len(seeds) < len(setting.seeds):
        found.append(f"{len(seeds)} of {len(setting.seeds)} seeds")
    if options.samples is not None and not facts()[data_of(setting.data)].generated:
        found.append(f"{options.samples:,} samples of the data")
    found += [change for change in options.changes if change.partition("=")[0].strip() not in PLACES]
    return tuple(found)
