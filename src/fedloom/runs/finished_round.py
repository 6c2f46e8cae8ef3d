"""A finished round as a function of the user sees it: figures, the global model, client models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from fedloom.algorithm.records import Replies
from fedloom.common.errors import InvalidValue
from fedloom.common.round import Round
from fedloom.recording.recorder import partial_models
from fedloom.recording.run_recording import exchanged_models
from fedloom.rounds.engine import Job
from fedloom.rounds.evaluation import Record
from fedloom.rounds.federation import Federation
from fedloom.state.store import BUDGET
from fedloom.task import Task

Upload = tuple[Tensor, Tensor | None]
"""A model `[P]` and its integer buffers."""


@dataclass(frozen=True)
class FinishedRound:
    """A finished round, for the argument `on_round` of `fl.run`.

    Attributes:
        number: Number of the round, from 1.
        figures: Its figures, as in `metrics.jsonl`.
        times: Its seconds, as in `timings.jsonl`.
    """

    number: int
    figures: Record
    times: Record
    _federation: Federation
    _uploads: dict[int, Upload]
    _missing: str

    @cached_property
    def model(self) -> nn.Module:
        """The global model after the round, as a new module in evaluation mode."""
        federation = self._federation
        return trained_module(federation.task, federation.model(), federation.integers)

    @property
    def clients(self) -> list[int]:
        """Numbers of the clients that have a model in this round."""
        return sorted(self._uploads)

    def client_model(self, client: int) -> nn.Module:
        """Return the model that a client sent in this round, after its local training.

        Args:
            client: Number of the client.

        Returns:
            A new module in evaluation mode.

        Raises:
            InvalidValue: The client has no model in this round.
        """
        if client not in self._uploads:
            listed = ", ".join(map(str, self.clients[:20])) or "none"
            reason = self._missing or f"it sent no model; these did: {listed}"
            raise InvalidValue(f"client {client} has no model in round {self.number}: {reason}")
        return trained_module(self._federation.task, *self._uploads[client])


class RoundHook:
    """Calls a function of the user after each round, with copies of the clients' models.

    Args:
        call: The function.
        task: The task.
        participants: Largest number of clients in a round.

    Attributes:
        log: None, since nothing is stored.
        keeps_models: True if the models of a round fit in memory. Only then is it an observer.
    """

    log = None

    def __init__(
        self, call: Callable[[FinishedRound], None], task: Task, participants: int
    ) -> None:
        self._call = call
        self._uploads: dict[int, Upload] = {}
        self._missing = ""
        size = participants * task.initial.nbytes
        self.keeps_models = size <= BUDGET
        if not self.keeps_models:
            gigabytes = size / 1e9
            self._missing = (
                f"the models of a round have {gigabytes:.1f} GB, too many to copy; record "
                "client_models(clients=[...]) stores some of them"
            )

    def begin(self, federation: Federation) -> None:
        """Note the federation, before its first round."""
        self._federation = federation
        self._missing = self._missing or partial_models(federation.algorithm)

    def observe(self, round: Round, jobs: Sequence[Job], replies: Replies) -> None:
        """Copy the models of a round: the server's step may change them in place.

        Args:
            round: The round.
            jobs: Jobs of the round, with the messages that clients received.
            replies: Valid replies.
        """
        if self._missing:
            return
        numbers = self._federation.numbers
        self._uploads = {
            numbers[one.client]: (
                one.uploaded.clone(),
                None if one.uploaded_integers is None else one.uploaded_integers.clone(),
            )
            for one in exchanged_models(jobs, replies)
        }

    def commit(self, number: int) -> None:
        """Do nothing: the function is called after the figures are written."""

    def report(self, figures: Record, times: Record) -> None:
        """Call the function, then release the models.

        Args:
            figures: Line of `metrics.jsonl`.
            times: Line of `timings.jsonl`.
        """
        number = int(figures["round"])
        federation = self._federation
        self._call(FinishedRound(number, figures, times, federation, self._uploads, self._missing))
        self._uploads = {}


def trained_module(task: Task, row: Tensor, integers: Tensor | None) -> nn.Module:
    """Return a new module in evaluation mode.

    Args:
        task: The task.
        row: Parameters of the model, `[P]`.
        integers: Integer buffers of the model, `[Z]`.

    Returns:
        The module. Its weights are a copy of the row.
    """
    module = task.module(row)
    if integers is not None:
        task.layout.load_integers(module, integers)
    return module.eval()
