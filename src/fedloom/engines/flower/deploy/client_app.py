"""Flower's ClientApp: what a SuperNode starts at a site for each message.

A message that needs no model loads none: PyTorch would take longer than most steps of an exchange.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedloom.engines.flower.messages import Refusal, Words, any_tensors, pack, parcel_of, words_of
from fedloom.errors import FedloomError, one_line

if TYPE_CHECKING:
    from fedloom.engines.flower.deploy.site import Site

_logger = logging.getLogger("flwr.fedloom")

app = ClientApp()


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Say which client this site is."""
    return _answered(message, lambda words: _site(context).hello(words))


@app.query("exchange")
def exchange(message: Message, context: Context) -> Message:
    """Exchange layers with other sites."""

    def step(words: Words) -> RecordDict:
        from fedloom.engines.flower.deploy.site_peer import go_on

        parcel = parcel_of(message)
        found = go_on(context.node_config, words, parcel)
        return _site(context).exchange(words, any_tensors(message), parcel) if found is None else found

    return _answered(message, step)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on what the server sent."""
    return _answered(message, lambda words: _site(context).train(words, any_tensors(message)))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Judge a model on the site's own test data."""
    return _answered(message, lambda words: _site(context).evaluate(words, any_tensors(message)))


def _site(context: Context) -> Site:
    from fedloom.engines.flower.deploy.site import Site

    return Site.of(context.run_config, context.node_config)


def _answered(message: Message, work: Callable[[Words], RecordDict]) -> Message:
    """The site's answer, or its reason for giving none: one line, of which the site's own log tells more."""
    try:
        return Message(work(words_of(message)), reply_to=message)
    except Refusal as refusal:
        words = {**refusal.words, "refused": str(refusal)}
    except FedloomError as error:
        words = {"refused": one_line(str(error))}
    except Exception as error:
        _logger.exception("this site could not answer")
        words = {"refused": one_line(f"{type(error).__name__}: {error}")}
    _logger.error("%s", words["refused"])
    return Message(pack(words), reply_to=message)
