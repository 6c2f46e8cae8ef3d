"""ClientApp of Flower, which a SuperNode starts at a site, as a new process, for each message.

The process hands the message to the site's worker, which has PyTorch loaded, and answers itself
where there is none.
"""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.sites.site_worker import answer, handed_over

app = ClientApp()


def reply(message: Message, context: Context) -> Message:
    """Answer a message, by the worker where there is one."""
    answered = handed_over(message, context)
    return Message(answer(message, context) if answered is None else answered, reply_to=message)


for register in (
    app.query(),
    app.query("statistics"),
    app.query("exchange"),
    app.train(),
    app.evaluate(),
):
    register(reply)
