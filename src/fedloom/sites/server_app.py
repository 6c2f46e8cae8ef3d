"""ServerApp of Flower: waits for the sites, then runs the federation like `fedloom run`."""

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
from fedloom.data.dataset import Dataset, make_dataset
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
from fedloom.task import Task
from fedloom.task.making import make_task

PAUSE = 1.0
"""Seconds between two checks for replies."""

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
    """Run or continue the federation and write its report, or only collect statistics.

    Args:
        grid: Flower's connection to the sites.
        run_config: Run configuration of the app.
        pause: Seconds between two checks for replies.

    Returns:
        The summary of the run; None if only statistics were collected.

    Raises:
        InvalidValue: The configuration is not valid, or sites are missing.
        CheckpointError: The folder contains another run.
        Diverged: No site's model is finite any more.
    """
    settings = deployment(run_config)
    gathering = Gathering(settings, Mailbox(grid, pause))
    if settings.only == "statistics":
        if (settings.output / SITES).exists():
            remedy = "choose another output for the new ones"
            raise InvalidValue(
                f"{settings.output} contains a run that has its own statistics: {remedy}"
            )
        with locked(settings.output / ".lock"):
            gathering.statistics(gathering.first_sites())
        return None
    require_supported(build(settings.algorithm))
    # Settings of where and how one machine runs must not decide whether this run may continue.
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
    """Facts of a federation that are fixed at its start and hold for all rounds.

    Attributes:
        federation: Name of the federation at the sites.
        own: True if the sites have their own data.
        samples: Training samples of each site; None if it was not connected.
        tests: Test samples of each site; None if it was not connected.
        preprocessing: The columns on which tables agree, as JSON.
    """

    federation: str
    own: bool
    samples: list[int | None]
    tests: list[int | None]
    preprocessing: str | None = None

    @classmethod
    def read(cls, path: Path, count: int) -> "Opening | None":
        """Read the opening in a file; None if the file does not exist.

        Raises:
            CheckpointError: The file cannot be read.
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
    """Return the numbers of samples that `count` sites count with (`capped`).

    Args:
        claims: Samples that sites claim, by number.
        count: Number of sites.
        share: Largest share of one site.

    Returns:
        A number for each site; None for sites without a claim.
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
            text = f"site {number} claims {claim} samples and counts with {credited[number]}"
            _logger.warning("%s (largest_share = %g)", text, share)
    return [credited.get(number) for number in range(count)]


class Gathering:
    """The sites of one deployment, and their common task."""

    def __init__(self, settings: Deployment, mailbox: Mailbox) -> None:
        self.settings, self.mailbox = settings, mailbox

    def task(self, seed: int) -> Task:
        """Wait for the sites and return their task.

        If sites take their shares of the configuration's data, this is the task of a simulation.
        The numbers of samples are fixed at the start, also if the run continues later.
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
                remedy = "check that its data and its version of NumPy are the same as here"
                raise InvalidValue(
                    f"site {number} has {site.samples} samples, but {expected}: {remedy}"
                )
        return task

    def _agreed_columns(self) -> Preprocessing | None:
        """Return the preprocessing of the sites' own tables, from statistics of their columns.

        None for other data.
        """
        roles = table_roles(self.settings.configuration)
        if roles is None or not of_columns(self.settings.configuration):
            return None
        sites = self.first_sites()
        if not any(site.has_own_data for site in sites.known.values()):
            return None
        return agreed_table(self.statistics(sites), roles)

    def first_sites(self) -> KnownSites:
        """Wait for the sites before they agree on columns.

        If the data are not a table with columns, the sites already agree on the server's data.
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
        """Return statistics of the sites' columns, after showing and saving them.

        The cost of noise is in the ledger before any site answers. Statistics with noise are
        requested once, since a second request would cost the same privacy again.
        """
        folder, survey = self.settings.output, self.settings.survey
        path, ledger = folder / "statistics.json", ReleaseLedger(folder / RELEASED, "")
        ledger.resume(0)
        statistics = Statistics.read(path) if path.exists() else None
        if statistics is not None and statistics.noise and not ledger.statistics():
            raise CheckpointError(
                f"{ledger.path} has no entry for the cost of {path}: use another folder"
            )
        if statistics is None or not statistics.noise:
            statistics = collect(lambda request: self._answers(sites, request, ledger), survey)
            for suffix in (".json", ".html"):
                statistics.save(path.with_suffix(suffix))
        else:
            _logger.info(
                "statistics with noise are read from %s: new ones would cost the same privacy "
                "again",
                path,
            )
        table = statistics_table(statistics)
        lines = ([escape_markdown(cell.text) for cell in line] for line in table.to_numpy())
        text = markdown_table([column.title for column in table.columns], lines)
        shown = f"statistics of the sites' data:\n\n{text}\n{caption(statistics)}"
        _logger.info(f"{shown}\nall numbers, and a page: {folder}")  # several lines on purpose
        return statistics

    def _answers(
        self, sites: KnownSites, request: Words, ledger: ReleaseLedger
    ) -> dict[int, Words]:
        """Return every site's answer about its columns.

        Raises:
            InvalidValue: A site returned no statistics.
        """
        if request["noise"] and request["step"] == "sums":
            length = math.sqrt(request["releases"])
            ledger.append(Release(0, STATISTICS, request["noise"] / length, length))
        seconds, content = (
            self.settings.deadline or self.settings.wait,
            pack({**request, **sites.briefing}),
        )
        send, introduced = self.mailbox.send, sites.known.items()
        sent = {send(site.node, "query.statistics", content): number for number, site in introduced}
        answers = {}
        for message_id, reply in self.mailbox.collect(filter(None, sent), seconds):
            try:
                answers[sent[message_id]] = dict(words_of(reply)["answer"])
            except (FedloomError, KeyError, TypeError, ValueError) as error:
                raise InvalidValue(
                    f"site {sent[message_id]} returned no statistics: {error}"
                ) from None
        if silent := sorted({*sent.values()} - answers.keys()):
            raise InvalidValue(f"site {silent[0]} returned no statistics within {seconds:g} s")
        return answers

    def engine(self, task: Task) -> FlowerEngine:
        """Return the engine that lets the sites train."""
        newcomers = self.settings.configuration.schedule.newcomers(task.clients)
        _, numbers = newcomers_last(task, newcomers, self.settings.configuration.seed)
        self.sites.federation, self.sites.numbers = self.opening.federation, numbers
        return FlowerEngine(self.sites, self.settings.largest_share if self.opening.own else 1.0)

    def _task_of(
        self, dataset: Dataset, samples: Sequence[int], tests: Sequence[int] | None, seed: int
    ) -> Task:
        """Return the task of sites with these numbers of samples.

        Args:
            dataset: The data set; its test set is the global one, on the server.
            samples: Training samples of each site.
            tests: Test samples of each site; None if the sites have no own data.
            seed: Seed of the initial weights.
        """
        configuration, data = self.settings.configuration, self.settings.configuration.data
        simulated = {
            "merge": data.merge,
            "validation": data.validation is not None,
            "shift": data.shift != "none",
        }
        if tests is not None and any(simulated.values()):
            key = next(key for key, used in simulated.items() if used)
            remedy = "leave it out if sites have their own data"
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
