"""ClientApp of Flower, which a SuperNode starts at a site, as a new process, for each message.

The process hands the message to the site's worker, which has PyTorch loaded, and answers itself where there is none.
"""

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.sites.messages import Kind, pack
from fedloom.sites.site_worker import answer, end_worker, handed_over

app = ClientApp()


def _answering(kind: Kind) -> Callable[[Message, Context], Message]:
    def reply(message: Message, context: Context) -> Message:
        answered = handed_over(kind, message, context)
        return Message(answer(kind, message, context) if answered is None else answered, reply_to=message)

    return reply


app.query()(_answering("hello"))
app.query("statistics")(_answering("statistics"))
app.query("exchange")(_answering("exchange"))
app.train()(_answering("train"))
app.evaluate()(_answering("evaluate"))


@app.query("end")
def end(message: Message, context: Context) -> Message:
    """End the worker of a run that is over."""
    end_worker(context)
    return Message(pack({}), reply_to=message)
