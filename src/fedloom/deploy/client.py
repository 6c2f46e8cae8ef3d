"""Flower's ClientApp: what a SuperNode starts at a site for each message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedloom.deploy.site import Answer, Site
from fedloom.engines.flower_messages import Refusal, Words, any_tensors, encoded, one_line, pack, parcel_of, words_of
from fedloom.errors import FedloomError

_logger = logging.getLogger("flwr.fedloom")

app = ClientApp()


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Say which client this site is."""
    return _answered(message, context, lambda site, words, _: site.hello(words))


@app.query("exchange")
def exchange(message: Message, context: Context) -> Message:
    """Exchange layers with other sites."""
    return _answered(message, context, lambda site, words, inbox: site.exchange(words, inbox, parcel_of(message)))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on what the server sent."""
    return _answered(message, context, Site.train)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Judge a model on the site's own test data."""
    return _answered(message, context, Site.evaluate)


def _answered(
    message: Message, context: Context, work: Callable[[Site, Words, Mapping[str, Tensor]], Answer]
) -> Message:
    """The site's answer, or its reason for giving none: one line, of which the site's own log tells more."""
    try:
        answer = work(Site.of(context.run_config, context.node_config), words_of(message), any_tensors(message))
    except Refusal as refusal:
        words = {**refusal.words, "refused": str(refusal)}
    except FedloomError as error:
        words = {"refused": one_line(str(error))}
    except Exception as error:
        _logger.exception("this site could not answer")
        words = {"refused": one_line(f"{type(error).__name__}: {error}")}
    else:
        arrays = {name: encoded(tensor) for name, tensor in answer.tensors.items()}
        return Message(pack(answer.words, arrays, answer.figures, answer.parcel), reply_to=message)
    _logger.error("%s", words["refused"])
    return Message(pack(words), reply_to=message)
