"""The sites of a deployment, and their common task."""

import logging
import secrets

import torch

import fedloom
from fedloom.common.errors import InvalidValue
from fedloom.data.preprocessing import Preprocessing
from fedloom.rounds.evaluation import newcomers_last
from fedloom.runs.directory import SITES
from fedloom.sites.agreement import Deployment, layout_digest
from fedloom.sites.flower_engine import FlowerEngine
from fedloom.sites.known_sites import KnownSites
from fedloom.sites.messages import Mailbox
from fedloom.sites.server_task import server_data, task_of_sites
from fedloom.sites.site_data import DataAgreement
from fedloom.sites.site_opening import Opening, credited
from fedloom.sites.site_statistics import site_statistics
from fedloom.sites.site_tables import agreed_table, of_columns, table_roles
from fedloom.task import Task

_logger = logging.getLogger("flwr.fedloom")


class Gathering:
    """The sites of one deployment, and their common task."""

    def __init__(self, settings: Deployment, mailbox: Mailbox) -> None:
        self.settings = settings
        self.mailbox = mailbox
        self._lost: dict[int, str] = {}  # sites that were lost during the statistics

    def task(self, seed: int) -> Task:
        """Wait for the sites and return their task.

        If sites take their shares of the configuration's data, this is the task of a simulation.
        The numbers of samples are fixed at the start, also if the run continues later.
        """
        configuration = self.settings.configuration
        count = self.settings.clients
        path = self.settings.output / SITES
        opening = Opening.read(path, count)
        agreed = self._agreed_columns() if opening is None else None
        if opening is not None and opening.preprocessing is not None:
            agreed = Preprocessing.from_json(opening.preprocessing, str(path))
        dataset = server_data(configuration, agreed)
        blank = task_of_sites(configuration, dataset, [1] * count, None, seed)
        briefing = {"data": DataAgreement.of(dataset).words()}
        alike = {"fedloom": fedloom.__version__, "layout": layout_digest(blank)}
        limits = self.settings.deadline, self.settings.wait
        self.sites = KnownSites(self.mailbox, count, briefing, alike, *limits)
        self.sites.lost |= self._lost
        needed = max(1, self.settings.sites - len(self._lost))
        _logger.info("waiting for %d of %d sites", needed, count)
        # if the sites have agreed on columns already, the loss of one does not end the run
        least = 1 if agreed is not None and opening is None else None
        self.sites.wait(needed, self.settings.wait, least=least)
        introduced = self.sites.known
        if opening is None:
            have_data = any(site.has_own_data for site in introduced.values())
            share = self.settings.largest_share if have_data else 1.0
            opening = Opening(
                secrets.token_hex(8),
                have_data,
                credited(
                    {number: site.samples for number, site in introduced.items()}, count, share
                ),
                credited({number: site.tests for number, site in introduced.items()}, count, share),
                None if agreed is None else agreed.to_json(),
                sum(site.samples for site in introduced.values()) if have_data else None,
            )
            opening.write(path)
        self.opening = opening
        self.sites.registered |= {
            n: size for n, size in enumerate(opening.samples) if size is not None
        }
        if opening.own:
            counted = [samples for samples in opening.samples if samples is not None]
            mean = max(1, round(sum(counted) / len(counted)))
            samples = [mean if size is None else size for size in opening.samples]
            return task_of_sites(
                configuration, dataset, samples, [size or 0 for size in opening.tests], seed
            )
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
        statistics = site_statistics(self.settings, sites)
        self._lost = sites.lost
        return agreed_table(statistics, roles)

    def first_sites(self) -> KnownSites:
        """Wait for the sites before they agree on columns.

        If the data are not a table with columns, the sites already agree on the server's data.
        """
        configuration = self.settings.configuration
        count = self.settings.clients
        briefing = {}
        if table_roles(configuration) is None or not of_columns(configuration):
            briefing = {"data": DataAgreement.of(server_data(configuration)).words()}
        sites = KnownSites(self.mailbox, count, briefing, {"fedloom": fedloom.__version__})
        _logger.info(
            "waiting for %d of %d sites, to compare their columns", self.settings.sites, count
        )
        sites.wait(self.settings.sites, self.settings.wait)
        return sites

    def engine(self, task: Task) -> FlowerEngine:
        """Return the engine that lets the sites train."""
        newcomers = self.settings.configuration.schedule.newcomers(task.clients)
        _, numbers = newcomers_last(task, newcomers, self.settings.configuration.seed)
        self.sites.federation = self.opening.federation
        self.sites.numbers = numbers
        return FlowerEngine(self.sites, self.settings.largest_share if self.opening.own else 1.0)
