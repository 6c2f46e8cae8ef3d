"""A site's answer to each kind of message; a step that needs no model loads no PyTorch."""

from __future__ import annotations

import logging

from flwr.app import Context, Message, RecordDict

from fedloom.errors import FedloomError, one_line
from fedloom.sites.messages import ARRAYS, PARCEL, Refusal, any_tensors, pack, parcel_of, words_of

_logger = logging.getLogger("flwr.fedloom")


def answer(kind: str, message: Message, context: Context) -> RecordDict:
    """Return the site's answer, or its reason for giving none: one line, of which the site's own log tells more."""
    try:
        return _answer(kind, message, context)
    except Refusal as refusal:
        words = {**refusal.words, "refused": str(refusal)}
    except FedloomError as error:
        words = {"refused": one_line(str(error))}
    except Exception as error:
        _logger.exception("this site could not answer")
        words = {"refused": one_line(f"{type(error).__name__}: {error}")}
    _logger.error("%s", words["refused"])
    return pack(words)


def _answer(kind: str, message: Message, context: Context) -> RecordDict:
    words = words_of(message, ARRAYS, PARCEL)
    if kind == "exchange":
        from fedloom.sites.site_peer import go_on

        parcel = parcel_of(message)
        answered = go_on(context.node_config, words, parcel)
        if answered is not None:
            return answered
    from fedloom.sites.site import Site

    site = Site.of(context.run_config, context.node_config)
    match kind:
        case "hello":
            return site.hello(words)
        case "exchange":
            return site.exchange(words, any_tensors(message), parcel)
        case "train":
            return site.train(words, any_tensors(message))
        case _:
            return site.evaluate(words, any_tensors(message))
