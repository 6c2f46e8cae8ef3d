"""Clients in errors: their names in the user's data, and the round in which they failed."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fedloom.common.errors import FedloomError, listed, located, quoted, shortened
from fedloom.common.round import Round
from fedloom.rounds.engine import Fault
from fedloom.rounds.replies import RoundReplies
from fedloom.task import Task

LISTED = 3
"""Number of clients that an error names. More are counted."""

MOST_NOTICES = 10
"""Largest number of notices about clients that failed in a run."""

_CLIENTS = "fedloom_clients"
"""Attribute of an error that stores the clients that were in work."""


class ClientLabels:
    """Names of clients in texts for the user.

    Args:
        task: The task, with the names of its clients, if the data have some.
        numbers: The user's number of each client.
    """

    def __init__(self, task: Task, numbers: Sequence[int]) -> None:
        self._task = task
        self._numbers = numbers

    def of(self, clients: Sequence[int]) -> str:
        """Return `client 'berlin'`, or `clients 3, 7, 8 and 12 more`."""
        names = self._task.client_names
        texts = [
            str(self._numbers[client]) if names is None else quoted(names[client])
            for client in clients
        ]
        return f"client{'s' if len(clients) > 1 else ''} {listed(texts, LISTED)}"

    def highest_loss(self, answers: RoundReplies) -> str:
        """Return the client with the highest training loss as the end of a sentence, or ""."""
        losses = answers.metrics.get("training_loss")
        if losses is None or bool(losses.isnan().all()):
            return ""
        worst = int(losses.nan_to_num(nan=-math.inf, posinf=math.inf).argmax())
        label = self.of([answers.arrived[worst].job.client])
        return f"; {label} has the highest training loss, {float(losses[worst]):.3g}"


def mark_clients(error: Exception, clients: Sequence[int]) -> None:
    """Store in an error the clients that were in work, unless it has clients already."""
    if not clients_of(error):
        setattr(error, _CLIENTS, tuple(clients))


def clients_of(error: Exception) -> tuple[int, ...]:
    """Return the clients that `mark_clients` has stored in an error."""
    clients: tuple[int, ...] = getattr(error, _CLIENTS, ())
    return clients


@contextmanager
def marking_clients(clients: Sequence[int]) -> Iterator[None]:
    """Store `clients` in an error that the block raises."""
    try:
        yield
    except Exception as error:
        mark_clients(error, clients)
        raise


@contextmanager
def naming_clients(round: Round, labels: ClientLabels) -> Iterator[None]:
    """Add the round and the stored clients to the text of an error that the block raises.

    An error of fedloom begins with them. An error of the user's code has them as a note, which
    Python prints below the error, because its arguments can have any meaning.
    """
    try:
        yield
    except Exception as error:
        if clients := clients_of(error):
            delattr(error, _CLIENTS)
            _add(error, f"round {round.number}, {labels.of(clients)}")
        raise


def _add(error: Exception, text: str) -> None:
    if not isinstance(error, FedloomError):
        error.add_note(text)
        return
    error.args = (f"{text}: {error}", *error.args[1:])
    if isinstance(error, ImportError):
        error.msg = error.args[0]


def fault_notices(round: Round, faults: Sequence[Fault], labels: ClientLabels) -> dict[str, str]:
    """Return a notice for each reason of clients that failed in a round.

    Clients that dropped out or are late have raised no error and get no notice.

    Args:
        round: The round.
        faults: Faults of its clients.
        labels: Names of the clients.

    Returns:
        The notices by reason.
    """
    by_reason: dict[str, tuple[Exception, list[int]]] = {}
    for fault in faults:
        if fault.error is not None:
            _, clients = by_reason.setdefault(fault.reason, (fault.error, []))
            clients.append(fault.job.client)
    notices = {}
    for reason, (error, clients) in by_reason.items():
        text = located(error, shortened(" ".join(reason.split())))
        notices[reason] = (
            f"round {round.number} continues without a reply of {labels.of(clients)}: {text}"
        )
    return notices
