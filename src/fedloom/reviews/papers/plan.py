"""The options of a reproduction (the cells, and departures from the protocol), and the runs that it
takes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedloom.common.digest import digest_of_json
from fedloom.common.errors import InvalidValue, UnknownName, suggestion
from fedloom.common.expression import Call, parse
from fedloom.reviews.papers.paper_data import FACTS, data_of, families, family
from fedloom.reviews.papers.protocols import Exhibit, PaperCell, PaperRun, Setting
from fedloom.rounds.schedule import NEUTRAL
from fedloom.runs.config_file import configuration, put
from fedloom.runs.configuration import Configuration
from fedloom.runs.configured import run_directory
from fedloom.runs.events import RunName
from fedloom.state.files import slug
from fedloom.study.cores import runs_side_by_side
from fedloom.study.jobs import RunJob

PLACES = ("workers", "threads", "engine", *NEUTRAL)
"""Keys that change nothing in the figures but the last digits of sums."""

_OPTIONS = ("name", "directory", "algorithm", "algorithms", "seed", "seeds", "rounds", "settings")
"""Keys that the command's options set."""


@dataclass(frozen=True)
class ReproduceOptions:
    """A user's options: `rows` and `columns` choose cells (all where empty), `rounds` is the most
    that a run has, `samples` the number of a data set's samples that are used; `folders` are those
    of the data by name, `changes` are `key=value`.
    """

    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    rounds: int | None = None
    seeds: Sequence[int] | None = None
    samples: int | None = None
    folders: Mapping[str, str] = field(default_factory=dict)
    changes: Sequence[str] = ()
    directory: Path = Path("runs/reproduce")

    def __post_init__(self) -> None:
        for name in self.folders:
            if name not in families():
                raise UnknownName("data set", name, families())
        for change in self.changes:
            key = change.partition("=")[0].strip()
            if key in _OPTIONS:
                raise InvalidValue(
                    f"{key} is not set here: the options of fedloom paper reproduce say so (--help)"
                )


@dataclass(frozen=True)
class ReproducePlan:
    """The chosen cells with the runs that fill them, and the configuration of each setting and its
    departures from the protocol (`partial`), by the setting's name.
    """

    exhibit: Exhibit
    options: ReproduceOptions
    cells: list[PaperCell]
    configurations: dict[str, Configuration]
    partial: dict[str, tuple[str, ...]]
    jobs: list[RunJob]

    @property
    def configuration(self) -> Configuration:
        """The configuration of the first setting, with the number of runs at a time."""
        first = next(iter(self.configurations.values()))
        return replace(first, workers=runs_side_by_side(first, len(self.jobs)))

    @property
    def reasons(self) -> list[str]:
        """Everything that is left out, in any cell."""
        return list(
            dict.fromkeys(reason for reasons in self.partial.values() for reason in reasons)
        )

    @property
    def folder(self) -> Path:
        """The folder of the files about this table or figure."""
        return self.options.directory / self.exhibit.id

    def jobs_of(self, run: PaperRun) -> list[RunJob]:
        """Return the runs of a cell, or of its baseline, a seed each."""
        return [job for job in self.jobs if (job.name.setting, job.name.algorithm) == run.key]

    def waiting(self, fresh: bool) -> list[RunJob]:
        """Return the runs that are not finished yet; all of them if they are made afresh."""
        return [job for job in self.jobs if fresh or not job.finished]


def plan(exhibit: Exhibit, options: ReproduceOptions) -> ReproducePlan:
    """Return the runs for a table or figure.

    Args:
        exhibit: The table or figure.
        options: Chosen rows and columns, and changed values.

    Returns:
        The cells, their configurations, and the runs they need.

    Raises:
        InvalidValue: A row or column is unknown, no cell is in both, or a value is not allowed. The
            text is one line.
    """
    rows = _matching("row", options.rows, [cell.row for cell in exhibit.cells])
    columns = _matching("column", options.columns, [cell.column for cell in exhibit.cells])
    cells = [cell for cell in exhibit.cells if cell.row in rows and cell.column in columns]
    if not cells:
        raise InvalidValue(
            f"{exhibit.id} has no cell in both the rows and the columns that were given"
        )
    configurations: dict[str, Configuration] = {}
    partial: dict[str, tuple[str, ...]] = {}
    runs = [run for cell in cells for run in (cell.baseline, cell) if run is not None]
    for run in runs:
        if run.key[0] not in configurations:
            configurations[run.key[0]], partial[run.key[0]] = _configured(run.setting, options)
    counted = [
        run.key for run in runs if not isinstance(run, PaperCell) or run.measure.kind != "weights"
    ]
    jobs = [
        RunJob(configured, RunName(method, seed, key), run_directory(configured, method, seed).path)
        for key, configured in configurations.items()
        for seed in configured.seeds
        for method in dict.fromkeys(method for name, method in counted if name == key)
    ]
    return ReproducePlan(exhibit, options, cells, configurations, partial, jobs)


def _matching(kind: str, texts: Sequence[str], labels: Sequence[str]) -> set[str]:
    """Return the labels that any of the texts matches; a text without a match may be several with
    commas between them.
    """
    unique = list(dict.fromkeys(labels))
    words = [
        word for text in texts for word in ([text] if _hits(text, unique) else text.split(","))
    ]
    for word in words:
        if not _hits(word, unique):
            near = suggestion(
                word, [*unique, *(name for label in unique for name in label.split())]
            )
            raise InvalidValue(
                f"no {kind} has {word!r} in its name{near} (there is {', '.join(unique[:12])})"
            )
    return set[str]().union(*(_hits(word, unique) for word in words)) or set(unique)


def _hits(text: str, labels: Sequence[str]) -> set[str]:
    """Return the labels that are this text; or else those that have all of its words; or else those
    that contain it.
    """
    small = text.casefold().strip()
    equal = {label for label in labels if label.casefold() == small}
    words = {
        label
        for label in labels
        if small.split() and set(small.split()) <= set(label.casefold().split())
    }
    inside = {label for label in labels if small and small in label.casefold()}
    return equal or words or inside


def _configured(
    setting: Setting, options: ReproduceOptions
) -> tuple[Configuration, tuple[str, ...]]:
    """Return the configuration of a setting and how it departs from the paper's."""
    rounds = setting.rounds if options.rounds is None else min(setting.rounds, options.rounds)
    seeds = options.seeds or setting.seeds
    departures = [f"{rounds} of {setting.rounds:,} rounds"] if rounds < setting.rounds else []
    departures += (
        [f"{len(seeds)} of {len(setting.seeds)} seeds"] if len(seeds) < len(setting.seeds) else []
    )
    table = setting.table(rounds)
    call = parse(setting.data)
    name = data_of(setting.data)
    if folder := options.folders.get(family(name)):
        call = replace(call, named={**call.named, "folder": folder})
    if options.samples is not None and FACTS[name].files:
        call = Call("part", named={"of": str(call), "samples": options.samples})
        departures.append(f"{options.samples:,} samples of the data")
        if "steps" in table["training"]:
            share = min(1.0, options.samples / (FACTS[name].train + FACTS[name].test))
            table["training"]["steps"] = math.ceil(share * table["training"]["steps"])
    table["data"]["name"] = str(call)
    for change in options.changes:
        put(table, change)
    departures += [
        change for change in options.changes if change.partition("=")[0].strip() not in PLACES
    ]
    # Partial runs have another folder than runs of the whole protocol. Folders and numbers of
    # workers do not change the experiment.
    digest = digest_of_json({key: value for key, value in table.items() if key not in PLACES})[:8]
    directory = (
        options.directory / setting.paper / f"{slug(setting.key.lower().replace('%', ''))}-{digest}"
    )
    table |= {"name": setting.paper, "directory": str(directory), "seeds": list(seeds)}
    return configuration(table), tuple(departures)
