"""Statistics of the sites' columns, as the server requests and saves them."""

import logging
import math

from fedloom.common.errors import CheckpointError, FedloomError, InvalidValue
from fedloom.report.export import markdown_table
from fedloom.sites.agreement import Deployment
from fedloom.sites.known_sites import UNAVAILABLE, KnownSites
from fedloom.sites.messages import Words, pack, words_of
from fedloom.state.released import RELEASED, STATISTICS, Release, ReleaseLedger
from fedloom.survey.column_statistics import Statistics, caption, statistics_table
from fedloom.survey.federated_statistics import collect

_logger = logging.getLogger("flwr.fedloom")


def site_statistics(settings: Deployment, sites: KnownSites) -> Statistics:
    """Return statistics of the sites' columns, after showing and saving them.

    The cost of noise is in the ledger before any site answers. Statistics with noise are
    requested once, since a second request would cost the same privacy again.

    Args:
        settings: The deployment, with the folder of the output and the settings of the statistics.
        sites: The sites to request the statistics from.

    Returns:
        The statistics, also written to `statistics.json` and `statistics.html`.

    Raises:
        CheckpointError: The folder has statistics with noise but not their cost.
    """
    folder = settings.output
    survey = settings.survey
    path = folder / "statistics.json"
    ledger = ReleaseLedger(folder / RELEASED, "")
    ledger.resume(0)
    statistics = Statistics.read(path) if path.exists() else None
    if statistics is not None and statistics.noise and not ledger.statistics():
        raise CheckpointError(
            f"{ledger.path} has no entry for the cost of {path}: use another folder"
        )
    if statistics is None or not statistics.noise:
        statistics = collect(lambda request: _answers(settings, sites, request, ledger), survey)
        for suffix in (".json", ".html"):
            statistics.save(path.with_suffix(suffix))
    else:
        _logger.info(
            "statistics with noise are read from %s: new ones would cost the same privacy again",
            path,
        )
    table = markdown_table(statistics_table(statistics))
    shown = f"statistics of the sites' data:\n\n{table}\n{caption(statistics)}"
    _logger.info(f"{shown}\nall numbers, and a page: {folder}")  # several lines on purpose
    return statistics


def _answers(
    settings: Deployment, sites: KnownSites, request: Words, ledger: ReleaseLedger
) -> dict[int, Words]:
    """Return the answers of the connected sites about their columns.

    A lost site is not asked again.

    Raises:
        InvalidValue: A site refused, or no site is left.
    """
    if request["noise"] and request["step"] == "sums":
        length = math.sqrt(request["releases"])
        ledger.append(Release(0, STATISTICS, request["noise"] / length, length))
    seconds = settings.deadline or settings.wait
    content = pack({**request, **sites.briefing})
    asked = sorted(sites.known)
    sent = {
        sites.mailbox.send(sites.known[number].node, "query.statistics", content): number
        for number in asked
    }
    answers = {}
    for message_id, reply in sites.mailbox.collect(filter(None, sent), seconds):
        if reply.has_error() and reply.error.code in UNAVAILABLE:
            sites.lose(sent[message_id], "the site has disconnected")
            continue
        try:
            answers[sent[message_id]] = dict(words_of(reply)["answer"])
        except (FedloomError, KeyError, TypeError, ValueError) as error:
            raise InvalidValue(f"site {sent[message_id]} returned no statistics: {error}") from None
    for number in sorted(sites.known.keys() - answers.keys()):
        sites.lose(number, f"no statistics within {seconds:g} s")
    if not answers:
        number = asked[0]
        raise InvalidValue(f"no site returned statistics; site {number}: {sites.lost[number]}")
    return answers
