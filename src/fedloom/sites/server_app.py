"""ServerApp of Flower: it waits for the sites, and runs the federation in its directory as `fedloom
run` does on one machine.
"""

import json
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedloom
from fedloom.config.expression import parse
from fedloom.config.fields import checked
from fedloom.data.dataset import Dataset
from fedloom.data.partition import Partition
from fedloom.data.preprocessing import Preprocessing
from fedloom.errors import CheckpointError, FedloomError, InvalidValue
from fedloom.flat.population import capped
from fedloom.parts.building import build
from fedloom.report.export import escape_markdown, markdown_table
from fedloom.report.page import render, write_page
from fedloom.report.summary import RunSummary
from fedloom.rounds.evaluation import newcomers_last
from fedloom.runs.configured import run_configured
from fedloom.runs.directory import SITES, locked
from fedloom.runs.events import Event, RunName
from fedloom.sites.agreement import Deployment, deployment, layout_digest
from fedloom.sites.flower_engine import FlowerEngine
from fedloom.sites.known_sites import KnownSites
from fedloom.sites.messages import Mailbox, Words, pack, words_of
from fedloom.sites.secure_round import require_supported
from fedloom.sites.site_data import (
    DataAgreement,
    agreed_table,
    of_columns,
    server_table,
    table_roles,
)
from fedloom.state.files import read_file, write_text
from fedloom.state.released import RELEASED, STATISTICS, Release, ReleaseLedger
from fedloom.survey.column_statistics import Statistics, caption, statistics_table
from fedloom.survey.federated_statistics import collect
from fedloom.task import Task, make_dataset, make_task

PAUSE = 1.0
"""Seconds between two looks for replies."""

_logger = logging.getLogger("flwr.fedloom")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the app's run configuration describes (see `fedloom.sites`)."""
    try:
        serve(grid, context.run_config)
    except FedloomError as error:
        _logger.error("%s", error)  # one line above Flower's traceback
        raise


def serve(grid: Grid, run_config: Mapping[str, Any], pause: float = PAUSE) -> RunSummary | None:
    """Run the federation to its end, or go on with it, and write the report; or ask for statistics
    alone. `pause` is in seconds.

    Raises `InvalidValue` for a configuration that does not fit, or sites that do not come;
    `CheckpointError` for the folder of another run; `Diverged` when no site's model is finite any
    more.
    """
    settings = deployment(run_config)
    gathering = Gathering(settings, Mailbox(grid, pause))
    if settings.only == "statistics":
        if (settings.output / SITES).exists():
            remedy = "choose another output for these"
            raise InvalidValue(
                f"{settings.output} holds a run with statistics of its own: {remedy}"
            )
        with locked(settings.output / ".lock"):
            gathering.statistics(gathering.first_sites())
        return None
    require_supported(build(settings.algorithm))
    # What only says where and how runs of one machine are made must not decide whether this one may
    # go on.
    configuration = replace(settings.configuration, engine="rows")
    name = RunName(str(parse(settings.algorithm)), configuration.seed)
    summary = run_configured(
        configuration,
        name,
        _log_event,
        make_task=gathering.task,
        path=settings.output,
        engine=gathering.engine,
    )
    page = settings.output / "report.html"
    write_page(page, render(str(name), [summary], configuration.targets))
    folder = settings.output.resolve()
    _logger.info(
        "the run is in %s: model.safetensors, metrics.jsonl, result.json, report.html", folder
    )
    return summary


@dataclass(frozen=True)
class Opening:
    """Facts of a federation's beginning, which hold for all of its rounds: its name at the sites,
    whether they have data of their own, the training and test samples of each site, None for one
    that was not there, and the columns on which tables agree.
    """

    federation: str
    own: bool
    samples: list[int | None]
    tests: list[int | None]
    preprocessing: str | None = None

    @classmethod
    def read(cls, path: Path, count: int) -> "Opening | None":
        """Read the opening in a file; None when there is no file. Raises `CheckpointError` when it
        cannot be read.
        """
        if not path.exists():
            return None
        try:
            opening = cls(**checked(cls, json.loads(read_file(path))))
            if len(opening.samples) == len(opening.tests) == count:
                return opening
        except (OSError, ValueError, TypeError, AttributeError, RecursionError, InvalidValue):
            pass
        raise CheckpointError(f"{path} is damaged or of another run: use another folder")


def _credited(claims: Mapping[int, int], count: int, share: float) -> list[int | None]:
    """Return the numbers of samples with which `count` sites count, of which some claim these
    (`capped`).
    """
    taken = (
        capped(torch.tensor(list(claims.values()), dtype=torch.int64), share)
        .double()
        .round()
        .long()
        .tolist()
    )
    credited: dict[int, int] = dict(zip(claims, taken, strict=True))
    for number, claim in claims.items():
        if credited[number] < claim:
            text = f"site {number} says it has {claim} samples: it counts with {credited[number]}"
            _logger.warning("%s (largest_share = %g)", text, share)
    return [credited.get(number) for number in range(count)]


class Gathering:
    """The sites of one deployment, and the task that they make together."""

    def __init__(self, settings: Deployment, mailbox: Mailbox) -> None:
        self.settings, self.mailbox = settings, mailbox

    def task(self, seed: int) -> Task:
        """Wait for the sites. Return their task, or, where they take their shares of the
        configuration's data, that of a simulation. Their numbers of samples are those of the start,
        also when the run goes on later.
        """
        configuration, count = self.settings.configuration, self.settings.clients
        path = self.settings.output / SITES
        opening = Opening.read(path, count)
        agreed = self._agreed_columns() if opening is None else None
        if opening is not None and opening.preprocessing is not None:
            agreed = Preprocessing.from_json(opening.preprocessing, str(path))
        dataset = (
            make_dataset(configuration.data.name)
            if agreed is None
            else server_table(agreed, configuration)
        )
        blank = self._task_of(dataset, [1] * count, None, seed)
        briefing = {"data": DataAgreement.of(dataset).words()}
        alike = {"fedloom": fedloom.__version__, "layout": layout_digest(blank)}
        limits = self.settings.deadline, self.settings.wait
        self.sites = KnownSites(self.mailbox, count, briefing, alike, *limits)
        _logger.info("waiting for %d of %d sites", self.settings.sites, count)
        self.sites.wait(self.settings.sites, self.settings.wait)
        introduced = self.sites.known
        if opening is None:
            have_data = any(site.has_own_data for site in introduced.values())
            share = self.settings.largest_share if have_data else 1.0
            opening = Opening(
                secrets.token_hex(8),
                have_data,
                _credited(
                    {number: site.samples for number, site in introduced.items()}, count, share
                ),
                _credited(
                    {number: site.tests for number, site in introduced.items()}, count, share
                ),
                None if agreed is None else agreed.to_json(),
            )
            write_text(path, json.dumps(asdict(opening)) + "\n")
        self.opening = opening
        self.sites.registered |= {
            n: size for n, size in enumerate(opening.samples) if size is not None
        }
        if opening.own:
            counted = [samples for samples in opening.samples if samples is not None]
            mean = max(1, round(sum(counted) / len(counted)))
            samples = [mean if size is None else size for size in opening.samples]
            return self._task_of(dataset, samples, [size or 0 for size in opening.tests], seed)
        task = configuration.task(seed, lambda name: dataset)
        sizes = task.sizes(torch.arange(task.clients)).tolist()
        for number, site in introduced.items():
            if site.samples != sizes[number]:
                expected = f"its share of {task.dataset.name} has {sizes[number]}"
                remedy = "are the data or the versions of NumPy others there?"
                raise InvalidValue(
                    f"site {number} has {site.samples} samples, but {expected}: {remedy}"
                )
        return task

    def _agreed_columns(self) -> Preprocessing | None:
        """Return the preprocessing of the sites' own tables, from statistics of their columns; None
        for other data.
        """
        roles = table_roles(self.settings.configuration)
        if roles is None or not of_columns(self.settings.configuration):
            return None
        sites = self.first_sites()
        if not any(site.has_own_data for site in sites.known.values()):
            return None
        return agreed_table(self.statistics(sites), roles)

    def first_sites(self) -> KnownSites:
        """Wait for the sites before they agree on anything but the server's data, where these are
        no table of columns.
        """
        configuration, count, briefing = self.settings.configuration, self.settings.clients, {}
        if table_roles(configuration) is None or not of_columns(configuration):
            briefing = {"data": DataAgreement.of(make_dataset(configuration.data.name)).words()}
        sites = KnownSites(self.mailbox, count, briefing, {"fedloom": fedloom.__version__})
        _logger.info(
            "waiting for %d of %d sites, to compare their columns", self.settings.sites, count
        )
        sites.wait(self.settings.sites, self.settings.wait)
        return sites

    def statistics(self, sites: KnownSites) -> Statistics:
        """Return statistics of the sites' columns, which are shown and written; the cost of noise
        is in the ledger before any site answers. With noise they are asked for once: asking again
        would cost as much again.
        """
        folder, survey = self.settings.output, self.settings.survey
        path, ledger = folder / "statistics.json", ReleaseLedger(folder / RELEASED, "")
        ledger.resume(0)
        statistics = Statistics.read(path) if path.exists() else None
        if statistics is not None and statistics.noise and not ledger.statistics():
            raise CheckpointError(
                f"{ledger.path} does not say what {path} cost: use another folder"
            )
        if statistics is None or not statistics.noise:
            statistics = collect(lambda request: self._answers(sites, request, ledger), survey)
            for suffix in (".json", ".html"):
                statistics.save(path.with_suffix(suffix))
        else:
            _logger.info(
                "statistics with noise are those of %s: other ones would cost as much again", path
            )
        table = statistics_table(statistics)
        lines = ([escape_markdown(cell.text) for cell in line] for line in table.to_numpy())
        text = markdown_table([column.title for column in table.columns], lines)
        told = f"statistics of the sites' data:\n\n{text}\n{caption(statistics)}"
        _logger.info(f"{told}\nall numbers, and a page: {folder}")  # several lines on purpose
        return statistics

    def _answers(
        self, sites: KnownSites, request: Words, ledger: ReleaseLedger
    ) -> dict[int, Words]:
        """Return every site's answer about its columns. Raises `InvalidValue` where one has none."""
        if request["noise"] and request["step"] == "sums":
            length = math.sqrt(request["releases"])
            ledger.append(Release(0, STATISTICS, request["noise"] / length, length))
        seconds, content = (
            self.settings.deadline or self.settings.wait,
            pack({**request, **sites.briefing}),
        )
        send, known = self.mailbox.send, sites.known.items()
        sent = {send(site.node, "query.statistics", content): number for number, site in known}
        answers = {}
        for message_id, reply in self.mailbox.collect(filter(None, sent), seconds):
            try:
                answers[sent[message_id]] = dict(words_of(reply)["answer"])
            except (FedloomError, KeyError, TypeError, ValueError) as error:
                raise InvalidValue(
                    f"site {sent[message_id]} tells no statistics: {error}"
                ) from None
        if silent := sorted({*sent.values()} - answers.keys()):
            raise InvalidValue(f"site {silent[0]} tells no statistics within {seconds:g} s")
        return answers

    def engine(self, task: Task) -> FlowerEngine:
        """Return the engine in which the sites train."""
        newcomers = self.settings.configuration.schedule.newcomers(task.clients)
        _, numbers = newcomers_last(task, newcomers, self.settings.configuration.seed)
        self.sites.federation, self.sites.numbers = self.opening.federation, numbers
        return FlowerEngine(self.sites, self.settings.largest_share if self.opening.own else 1.0)

    def _task_of(
        self, dataset: Dataset, samples: Sequence[int], tests: Sequence[int] | None, seed: int
    ) -> Task:
        """Return the task of sites with so many samples of their own; the global test set is the
        server's.
        """
        configuration, data = self.settings.configuration, self.settings.configuration.data
        simulated = {
            "merge": data.merge,
            "validation": data.validation is not None,
            "shift": data.shift != "none",
        }
        if tests is not None and any(simulated.values()):
            key = next(key for key, used in simulated.items() if used)
            remedy = "leave it out where sites have data of their own"
            raise InvalidValue(f"data.{key} needs all data in one place: {remedy}")
        task = make_task(
            replace(dataset, train=dataset.train[:0]),
            partition=Partition.counted(samples),
            model=configuration.model,
            training=configuration.training,
            objective=configuration.objective,
            metrics=configuration.metrics,
            seed=seed,
        )
        return (
            task
            if tests is None or not any(tests)
            else replace(task, local_test=Partition.counted(tests))
        )


def _log_event(event: Event) -> None:
    """Write an event to Flower's log."""
    if event.kind == "round":
        record, score = event.record, event.score and f", {event.metric.noun} {event.score}"
        _logger.info("round %d: %.1f s%s", record["round"], event.seconds, score)
        for fault in record["faults"]:
            _logger.warning(
                "round %d: site %d: %s", record["round"], fault["client"], fault["reason"]
            )
    elif event.kind == "notice":
        _logger.warning("%s", event.text)
    elif event.kind in ("started", "skipped"):
        _logger.info("%s: %s, %d rounds are finished", event.run, event.kind, event.finished)
