"""ClientApp of Flower, which a SuperNode starts at a site, as a new process, for each message.

The process hands the message to the site's worker, which has PyTorch loaded, and answers itself where there is none.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.sites.messages import Kind, pack
from fedloom.sites.site_worker import answer, end_worker, handed_over

app = ClientApp()


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Say which client this site is."""
    return _reply("hello", message, context)


@app.query("exchange")
def exchange(message: Message, context: Context) -> Message:
    """Exchange layers with other sites."""
    return _reply("exchange", message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on what the server sent."""
    return _reply("train", message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Judge a model on the site's own test data."""
    return _reply("evaluate", message, context)


@app.query("end")
def end(message: Message, context: Context) -> Message:
    """End the worker of a run that is over."""
    end_worker(context)
    return Message(pack({}), reply_to=message)


def _reply(kind: Kind, message: Message, context: Context) -> Message:
    answered = handed_over(kind, message, context)
    return Message(answer(kind, message, context) if answered is None else answered, reply_to=message)
