"""Base of the parts that use the last updates of clients that do not take part in a round."""

from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm.method import Facts, Method
from fedloom.algorithm.records import Message, Plan, Replies, server_model
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.round import Round
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Inner, Part


def plain_average() -> Method:
    """Return FedAvg with equal weights, which the parts with stale updates use by default."""
    return FedAvg(weighted=False)


class UsesStaleUpdates(Part):
    """Base of the parts that estimate the mean update of all clients from their last updates.

    Args:
        method: Method that trains the clients and averages them with equal weights.
    """

    method: Method = field(default_factory=plain_average)

    once: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ("one download", "whole models", "averages")


class StaleUpdates(UsesStaleUpdates):
    """Adds the mean of all clients' last updates to the step, and lets clients upload only changes.

    Client i stores y_i, its last update D_i = w_i - w_t over the trainable parameters `[T]`, 0 at
    first. It uploads w_i - y_i, so that the server needs no vector for each client: y = (1/N) sum_i
    y_i changes by the sum of the uploads. A lost reply does not change y_i.

    Args:
        rescale: Multiply y_i by the change of the learning rate since the client's last update.
    """

    rescale: bool = False

    facts = Facts(anonymous=True)

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self.state["mean_update"] = torch.zeros_like(plan.initial[: plan.layout.trainable])

    def encode(self, cohort: Cohort, inbox: Message, reply: Message, inner: Inner) -> Message:
        trainable = slice(cohort.layout.trainable)
        sent = server_model(inbox)[:, trainable]
        unit = self.unit(cohort.round)
        update = reply["model"][:, trainable] - sent
        stored = cohort.memory.get("stale_update", torch.zeros_like(update))
        if unit > torch.finfo(update.dtype).tiny:
            cohort.memory.write("stale_update", update / unit, cohort.uploads)
        return self.upload(reply, update, stored * unit)

    def upload(self, reply: Message, update: Tensor, stale: Tensor) -> Message:
        """Return the upload of the clients.

        Args:
            reply: The replies, with the trained models `[k, P]`.
            update: D_i, `[k, T]`.
            stale: y_i, `[k, T]`.

        Returns:
            The replies, with the model w_i - y_i.
        """
        return {**reply, "model": _shifted(reply["model"], -stale)}

    def rewrite(self, round: Round, replies: Replies) -> Replies:
        trainable = slice(self.plan.layout.trainable)
        sent = replies.sent("model")[:, trainable]
        change = replies["model"][:, trainable] - sent
        step = self.step(round, replies, change)
        rows = replies["model"].clone()
        rows[:, trainable] = sent + step
        self._remember(round, self.changes(replies, change))
        return replies.with_rows("model", rows)

    def _remember(self, round: Round, changes: Tensor) -> None:
        """Add the changes of the clients' updates `[r, T]` to the mean over all clients."""
        unit = self.unit(round)
        if unit > torch.finfo(changes.dtype).tiny:
            added = changes.sum(0) / (unit * self.plan.clients)
            self.state["mean_update"] = self.state["mean_update"] + added

    def changes(self, replies: Replies, change: Tensor) -> Tensor:
        """Return the changes of a_i y_i, with a_i the weight of client i in y.

        Args:
            replies: The replies.
            change: Uploaded changes, `[r, T]`.

        Returns:
            Changes, `[r, T]`.
        """
        return change

    def step(self, round: Round, replies: Replies, change: Tensor) -> Tensor:
        """Return the updates that the inner method averages.

        Args:
            round: The round.
            replies: The replies.
            change: Uploaded changes D_i - y_i, `[r, T]`.

        Returns:
            Updates, `[r, T]`.
        """
        raise NotImplementedError

    def unit(self, round: Round) -> float:
        """Return the unit in which updates are stored: the learning rate with `rescale`, else 1."""
        return round.learning_rate if self.rescale else 1.0

    def mean_update(self, round: Round) -> Tensor:
        """Return y, the mean of the last updates of all clients before this round, `[T]`."""
        return self.state["mean_update"] * self.unit(round)


def _shifted(rows: Tensor, shift: Tensor) -> Tensor:
    """Return models `[k, P]` with `shift [k, T]` added to their trainable parameters."""
    shifted = rows.clone()
    shifted[:, : shift.shape[1]] += shift
    return shifted
