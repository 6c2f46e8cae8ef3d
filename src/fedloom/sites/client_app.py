"""ClientApp of Flower. A SuperNode starts it at a site, as a new process, for each message.

The process hands the message to the site's worker, where PyTorch is loaded. Without a worker it
answers the message itself.
"""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.sites.site_worker import answer, handed_over

app = ClientApp()


def reply(message: Message, context: Context) -> Message:
    """Answer a message through the worker, or in this process if no worker answers.

    Args:
        message: The server's message.
        context: Flower's context of the SuperNode, with its node configuration.

    Returns:
        The answer. A refusal is an answer too.
    """
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
