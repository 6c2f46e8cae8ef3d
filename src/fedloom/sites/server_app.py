"""ServerApp of Flower: waits for the sites, then runs the federation like `fedloom run`."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.common.expression import parse
from fedloom.parts.building import build
from fedloom.report.page import render, write_page
from fedloom.report.summary import RunSummary
from fedloom.runs.configured import run_configured
from fedloom.runs.directory import SITES, locked
from fedloom.runs.events import Event, RunName
from fedloom.sites.agreement import deployment
from fedloom.sites.gathering import Gathering
from fedloom.sites.messages import Mailbox
from fedloom.sites.secure_round import require_supported
from fedloom.sites.site_statistics import site_statistics

PAUSE = 1.0
"""Seconds between two checks for replies."""

_logger = logging.getLogger("flwr.fedloom")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the app's run configuration describes (see `fedloom.sites`).

    Args:
        grid: Flower's connection to the SuperNodes.
        context: Flower's context, with the run configuration.

    Raises:
        FedloomError: The federation failed; the error is logged before.
    """
    try:
        serve(grid, context.run_config)
    except FedloomError as error:
        _logger.error("%s", error)
        logging.getLogger("flwr").addFilter(_is_news)
        raise


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for Flower's traceback of an error that is in the log already."""
    return not (record.exc_info and isinstance(record.exc_info[1], FedloomError))


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
            site_statistics(settings, gathering.first_sites())
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


def _log_event(event: Event) -> None:
    """Write an event to Flower's log."""
    if event.kind == "round":
        record = event.record
        score = event.score and f", {event.metric.noun} {event.score}"
        _logger.info("round %d: %.1f s%s", record["round"], event.seconds, score)
        for fault in record["faults"]:
            _logger.warning(
                "round %d: site %d: %s", record["round"], fault["client"], fault["reason"]
            )
    elif event.kind == "notice":
        _logger.warning("%s", event.text)
    elif event.kind in ("started", "skipped"):
        _logger.info("%s: %s, %d rounds are finished", event.run, event.kind, event.finished)
