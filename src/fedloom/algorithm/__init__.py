"""Algorithm interface: a server half with the state, and a client half without access to it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce
from typing import ClassVar

from torch import Tensor, nn

from fedloom.algorithm.method import Facts as Facts
from fedloom.algorithm.method import Method
from fedloom.algorithm.method import algorithms as algorithms
from fedloom.algorithm.method import name_of as name_of
from fedloom.algorithm.records import (
    NOTHING,
    Aggregate,
    Message,
    Plan,
    Replies,
    TensorSpec,
    block_slots,
)
from fedloom.algorithm.records import Selection as Selection
from fedloom.algorithm.records import server_model as server_model
from fedloom.algorithm.records import started_from as started_from
from fedloom.common.round import Round as Round
from fedloom.flat.layout import Layout, Unit
from fedloom.local.cohort import Cohort as Cohort


class Algorithm(Method):
    """A federated algorithm, such as FedAvg.

    The server half runs in one place and stores its memory in `self.state`. The client half
    (`train`, `personalise`) runs where the data is, without `self.state`.

    Attributes:
        sends: Names of the tensors in the state that clients receive, one row for all.
    """

    sends: ClassVar[tuple[str, ...]] = ("model",)
    client_figures: ClassVar[tuple[str, ...]] = ("training_loss",)

    # --- the server half ---

    def setup(self, plan: Plan) -> None:
        """Check and store the plan, and initialise the state."""
        self._require_plan(plan)
        self.state = {"model": plan.initial.clone()}

    def send(self, round: Round) -> Message:
        """Return the message to the selected clients. Called once in a round."""
        return {name: self.state[name].unsqueeze(0) for name in self.sends}

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...] | TensorSpec]:
        """Return the shape of each tensor in a client's reply; other replies are refused.

        A `TensorSpec` also gives the type, if it differs from the model's.
        """
        return {"model": (self.plan.layout.size,)}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        """Return the summary of some replies that `update` needs.

        It may read the state from before the round.

        Args:
            round: The round.
            replies: Replies of a block of slots.

        Returns:
            By default means of the replies, weighted by samples.
        """
        return replies.aggregate()

    def update(self, round: Round, aggregate: Aggregate) -> None:
        """Update the state; by default the mean of the replies becomes the model.

        Args:
            round: The round.
            aggregate: Aggregate of all replies.
        """
        self.state["model"] = aggregate.mean["model"]

    def receive(self, round: Round, replies: Replies) -> None:
        """Update the state from all replies: by default `fold` them block by block, then `update`.

        An algorithm that needs all replies at the same time overrides this; then all are stored.

        Args:
            round: The round.
            replies: All replies of the round.
        """
        blocks = replies.blocks(block_slots(self.plan.layout.row_bytes))
        folded = reduce(Aggregate.joined, (self.fold(round, block) for block in blocks), NOTHING)
        self.update(round, replace(folded, exchange=replies.exchange))

    def model(self) -> Tensor:
        """Return the global model `[P]` to deploy and to evaluate."""
        return self.state["model"]

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        """Return the message from which clients `personalise` before `round`.

        By default this is the global model.

        Args:
            round: The next round.
            clients: Clients that receive the message. Clients from number `plan.clients` on never
                train.

        Returns:
            Tensors with one row for all clients or one row each, as in `send`.
        """
        return {"model": self.model().unsqueeze(0)}

    # --- the client half ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        """Train the k clients of a cohort and return their replies.

        Args:
            cohort: The clients; training starts from `inbox["model"]`.
            inbox: Messages, one row each, `[k, ...]`. `server_model(inbox)` is the model that the
                server sent.

        Returns:
            The replies, one row each, `[k, ...]`.
        """
        return {"model": cohort.fit(inbox["model"]).model}

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        """Return the model that each client would use; by default its received model.

        Args:
            cohort: The clients. Neither memory nor random streams may change.
            inbox: The message of `deploy`, one row each, `[k, ...]`.

        Returns:
            The models, `[k, P]`.
        """
        return inbox["model"]

    def shared(self, module: nn.Module, layout: Layout) -> Unit:
        """Return the slices of a row that travel as "model"; by default the whole row.

        Args:
            module: The architecture. Methods choose layers by it; its weights have no meaning.
            layout: Position of each tensor in a row `[P]`.

        Returns:
            Slices in increasing order.
        """
        return (slice(0, layout.size),)

    def complete(self, cohort: Cohort, model: Tensor) -> Tensor:
        """Return whole models from the slices that travel.

        Args:
            cohort: The clients, with their memory.
            model: The slices that travel as "model", `[k, ...]`.

        Returns:
            The models, `[k, P]`.
        """
        return model

    def units(self) -> list[Unit]:
        """Return the slices of a row that move together when clients exchange layers."""
        return self.plan.layout.units("layer", 1.0)


def as_spec(value: tuple[int, ...] | TensorSpec, layout: Layout) -> TensorSpec:
    """Return an entry of `Algorithm.expects` with its type, by default the model's type.

    Args:
        value: A shape without the dimension of clients, or a shape with a type.
        layout: Layout of the model, which gives the default type.

    Returns:
        The shape of one client's tensor, and its type.
    """
    return value if isinstance(value, TensorSpec) else TensorSpec(tuple(value), layout.dtype)


def overrides(kind: type[Method], base: type[Method], names: Iterable[str]) -> bool:
    """Return True if a class of methods overrides one of the named functions of `base`.

    Args:
        kind: The class to examine.
        base: The interface with the default functions.
        names: Names of functions of `base`.

    Returns:
        False if all these functions are the defaults.
    """
    return any(getattr(kind, name) is not getattr(base, name) for name in names)


DEPLOYMENT = ("deploy", "personalise", "complete")
"""Functions of an algorithm that decide which model a client uses."""


def is_personal(algorithm: Algorithm) -> bool:
    """Return True if clients may use a model that differs from the global one."""
    deploys = algorithm.facts.deploys
    if deploys is None:
        return overrides(type(algorithm), Algorithm, DEPLOYMENT)
    return bool(deploys != "received")
