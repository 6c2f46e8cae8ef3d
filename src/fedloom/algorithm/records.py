"""Records of a round: the selected clients, the messages to them and their replies."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedloom.common.errors import InvalidValue
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.flat.layout import Layout
from fedloom.flat.population import weighted_mean
from fedloom.state.pool_files import PoolFiles

Message = dict[str, Tensor]
"""Named tensors with one row for all receivers, `[1, ...]`, or one row each, `[k, ...]`."""

SERVER_MODEL = "@server_model"
"""Name in an inbox of the server's model, if a part has changed `inbox["model"]`.

Names that begin with @ are reserved for fedloom.
"""

INTEGERS = "@integers"
"""Name under which a model's integer buffers travel."""

BLOCK_BYTES = 16 << 20
LEAST_SLOTS = 16
MOST_SLOTS = 128
"""Size of a block of slots: about this many bytes of models, within the least and most slots."""


def server_model(inbox: Message) -> Tensor:
    """Return the model that the server sent, `[k, ...]`.

    It is the center of a proximal term and the origin of an update. Local training starts from
    `inbox["model"]`, which differs if a part has changed the start (`ala`, `umf`).
    """
    return inbox.get(SERVER_MODEL, inbox["model"])


def started_from(start: Tensor, inbox: Message) -> Message:
    """Return the inbox for local training from another model; `server_model` stays the same.

    Args:
        start: The models to start from, `[k, ...]`.
        inbox: The inbox with the server's model.

    Returns:
        A new inbox. The given inbox stays unchanged.
    """
    return {**inbox, "model": start, SERVER_MODEL: server_model(inbox)}


def start_is_changed(inbox: Message) -> bool:
    """Return True if a part has changed where local training starts."""
    return SERVER_MODEL in inbox


class TensorSpec(NamedTuple):
    """Shape and type of one tensor of a client's reply, without the client axis.

    A site does not check types: its specifications have the type None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def bytes(self) -> int:
        """Return the size of the tensor in bytes; 0 if the type is None."""
        return math.prod(self.shape) * (0 if self.dtype is None else self.dtype.itemsize)


Specs = Mapping[str, TensorSpec]
"""Required tensors of a client's reply, by name."""


@dataclass(frozen=True)
class Plan:
    """Description of a run for a method, before the first round.

    Attributes:
        layout: Maps the model to a row `[P]`.
        initial: The model that training starts from, `[P]`.
        clients: Number of clients that train.
        participants: Number of clients that are selected in a round.
        rounds: Number of rounds of the run.
        seed: Seed of all random streams.
        classes: Number of classes; 0 if targets are not classes.
        sizes: Returns the numbers of training samples of clients (`[k]` numbers to `[k]`).
        module: The architecture; its weights have no meaning.
        remote: True if clients are sites. They exchange layers themselves, and noise that protects
            them must not be reproducible.
        poisson: True if each client takes part independently (see `Round`).
        pools: Allocates matrices of models.
        training: Settings of local training.
        awaited: Number of replies that end a round; fewer than `participants` with over-selection.
        first_round: First round of the method; within `stages`, the first round of its stage.
    """

    layout: Layout
    initial: Tensor
    clients: int
    participants: int
    rounds: int
    seed: int
    classes: int
    sizes: Callable[[Tensor], Tensor]
    module: nn.Module
    remote: bool = False
    poisson: bool = False
    pools: PoolFiles = field(default_factory=PoolFiles)
    training: Training = field(default_factory=Training)
    awaited: int | None = None
    first_round: int = 1

    def empty_rows(self, count: int) -> Tensor:
        """Return uninitialized models `[count, P]`, in a file if they exceed `pool_budget`."""
        shape = (count, *self.initial.shape)
        return self.pools.empty(shape, self.initial.dtype, self.initial.device)

    def passed(self, number: int) -> int:
        """Return the number of rounds of the method before round `number` of the run."""
        return number - self.first_round

    def opening(self) -> Round:
        """Return round 1 with clients 0 to K - 1 selected, to predict the messages of a method."""
        return Round(
            number=1,
            rounds=self.rounds,
            seed=self.seed,
            clients=self.clients,
            participants=self.participants,
            learning_rate=math.nan,
            initial_learning_rate=math.nan,
            selected=tuple(range(self.participants)),
            poisson=self.poisson,
        )


@dataclass(frozen=True)
class Selection:
    """The clients of a round.

    Attributes:
        clients: Clients that train and upload, in the order of their slots.
        idle: Clients that train without uploading (FedUmf).
        weights: Weights of the replies in means; None: the clients' numbers of samples.
        receivers: Number of clients that receive the message, if more than those that train.
    """

    clients: tuple[int, ...]
    idle: tuple[int, ...] = ()
    weights: tuple[float, ...] | None = None
    receivers: int | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidValue` for weights with which a mean is undefined."""
        for client, weight in zip(self.clients, self.weights or (), strict=False):
            if not 0 < weight < math.inf:
                reason = "a weight must be finite and above 0; select only clients that count"
                raise InvalidValue(f"client {client} was selected with weight {weight:g}: {reason}")


@dataclass(frozen=True)
class Exchange:
    """The server's record of a round after the messages are made.

    Each message has one row for all receivers, `[1, ...]`, or one row for each slot; with idle
    clients, one more row for them.

    Attributes:
        round: The round, with its selected clients.
        selection: The clients of the round.
        sent: The message as the algorithm made it.
        moved: The message after clients have exchanged layers before training.
        wire: The message as it travels, possibly compressed.
    """

    round: Round
    selection: Selection
    sent: Message
    moved: Message = field(default_factory=dict)
    wire: Message = field(default_factory=dict)

    def among(self, clients: tuple[int, ...]) -> "Exchange":
        """Return the same messages in an exchange with other clients."""
        return replace(
            self,
            round=replace(self.round, selected=clients),
            selection=Selection(clients),
        )

    @property
    def shared(self) -> bool:
        """Return True if all clients received the same message."""
        messages = (self.sent, self.moved, self.wire)
        return all(len(rows) == 1 for message in messages for rows in message.values())


@dataclass
class Replies:
    """Replies of a round, or of a block of its slots.

    Attributes:
        matrices: For each name a matrix `[S, ...]` with a row for each slot, from slot `offset` on.
            Rows of clients that did not reply are zero. Rows are never rearranged.
        clients: Clients that replied, `[r]`.
        slots: Their slots, ascending, `[r]`.
        weights: Their weights in means, `[r]`.
        exchange: The record of the round.
        offset: First slot of the matrices.
        metrics: Figures of the clients by name, `[r]` (NaN: none).
        finish: Simulated times of arrival, `[r]`.
        integers: The models' integer buffers by slot, `[S, Z]`. Slots without a reply have the
            buffers that the server sent. None if the model has no buffers or they do not travel.
    """

    matrices: dict[str, Tensor]
    clients: Tensor
    slots: Tensor
    weights: Tensor
    exchange: Exchange | None = None
    offset: int = 0
    metrics: dict[str, Tensor] = field(default_factory=dict)
    finish: Tensor | None = None
    integers: Tensor | None = None

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, name: str) -> Tensor:
        """Return the rows `[r, ...]` of the clients that replied, in the order of their slots."""
        matrix = self.matrices[name]
        if len(matrix) == len(self):
            return matrix
        if matrix.stride()[:1] == (0,):  # all rows are the same
            return matrix[: len(self)]
        return matrix.index_select(0, self.index.to(matrix.device))

    @property
    def index(self) -> Tensor:
        """Return the rows of the matrices that contain replies, `[r]`."""
        return self.slots - self.offset

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the rows of all names, as `replies[name]` gives them."""
        return {name: self[name] for name in self.matrices}

    def sent(self, name: str) -> Tensor:
        """Return the algorithm's message to the clients that replied.

        Returns:
            `[1, ...]` if all clients received the same row, else `[r, ...]`.
        """
        rows = self._exchange.sent[name]
        return rows if len(rows) == 1 else rows[self.slots.to(rows.device)]

    def sent_by_slot(self, name: str) -> Tensor:
        """Return the algorithm's message to these slots: `[1, ...]` for all or `[S, ...]`."""
        return self._of_slots(self._exchange.sent, name)

    def received_by_slot(self, name: str) -> Tensor:
        """Return the rows from which these slots trained: `[1, ...]` for all or `[S, ...]`."""
        return self._of_slots(self._exchange.moved, name)

    def by_slot(self, name: str) -> Tensor:
        """Return the matrix `[S, ...]`; clients without a reply get the row that they received."""
        matrix = self.matrices[name]
        if len(self) < len(matrix):
            sent = self.sent_by_slot(name)
            for row in set(range(len(matrix))).difference(self.index.tolist()):
                matrix[row] = sent[row if len(sent) > 1 else 0]
        return matrix

    def weights_by_slot(self, weights: Tensor | None = None) -> Tensor:
        """Return the weights (or the given ones, `[r]`) by slot, `[S]`; 0 where no reply came."""
        size = max((len(matrix) for matrix in self.matrices.values()), default=0)
        weights = self.weights if weights is None else weights
        return weights.new_zeros(size).index_copy_(0, self.index, weights)

    def with_rows(self, name: str, rows: Tensor) -> "Replies":
        """Return the same replies with other rows of one name; the matrix is copied.

        Args:
            name: Name of the tensor.
            rows: The new rows, `[r, ...]` as `replies[name]` has them, or one for all.

        Returns:
            New replies. Tensors with other names are shared, not copied.
        """
        matrix = self.matrices[name].clone()
        matrix[self.index.to(matrix.device)] = rows
        return self.with_matrices({**self.matrices, name: matrix})

    def with_matrices(self, matrices: dict[str, Tensor]) -> "Replies":
        """Return the same replies with other matrices."""
        return replace(self, matrices=matrices)

    def aggregate(
        self, *, weighted: bool = True, mean: Message | None = None, total: Message | None = None
    ) -> "Aggregate":
        """Return means and sums of rows `[r, ...]`.

        Args:
            weighted: Weigh means by `weights`; False takes plain means.
            mean: Rows to average; by default all tensors of the replies that are not in `total`.
            total: Rows to add up.

        Returns:
            Means and sums by name, without a client axis.
        """
        total = total or {}
        weights = self.weights if weighted else None
        if mean is None:  # by slot, where clients without a reply weigh 0, so that no row is copied
            mean = {name: matrix for name, matrix in self.matrices.items() if name not in total}
            if any(len(matrix) > len(self) for matrix in mean.values()):
                weights = self.weights_by_slot(None if weighted else torch.ones_like(self.weights))
        return Aggregate(
            {name: weighted_mean(rows, weights) for name, rows in mean.items()},
            {name: rows.sum(0) for name, rows in total.items()},
            float(self.weights.sum()) if weighted else len(self),
            len(self),
        )

    def blocks(self, slots: int) -> "Iterator[Replies]":
        """Yield the replies of each block of `slots` slots, as views and without their figures."""
        start = 0
        numbers, counts = torch.unique_consecutive(self.slots // slots, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            replied = slice(start, start + count)
            start += count
            offset = number * slots
            matrices = {
                name: matrix[max(0, offset - self.offset) :][:slots]
                for name, matrix in self.matrices.items()
            }
            yield Replies(
                matrices,
                self.clients[replied],
                self.slots[replied],
                self.weights[replied],
                self.exchange,
                max(offset, self.offset),
            )

    @property
    def _exchange(self) -> Exchange:
        assert self.exchange is not None, "these replies belong to no exchange"
        return self.exchange

    def _of_slots(self, message: Message, name: str) -> Tensor:
        rows = message[name]
        if len(rows) == 1:
            return rows
        slots = max(len(matrix) for matrix in self.matrices.values())
        return rows[self.offset : self.offset + slots]


@dataclass(frozen=True)
class Aggregate:
    """Means and totals over replies, by name, without a client axis.

    Attributes:
        mean: Means by name.
        total: Sums by name.
        weight: Weight of all replies in the means.
        count: Number of replies.
        exchange: The record of the round, for `update`; aggregates of blocks have none.
    """

    mean: Message
    total: Message
    weight: float
    count: int
    exchange: Exchange | None = None

    def joined(self, other: "Aggregate") -> "Aggregate":
        """Return the aggregate of the replies of both."""
        if not (self.count and other.count):
            return self if self.count else other
        if self.weight and other.weight:
            share = other.weight / (self.weight + other.weight)
            mean = {name: rows.lerp(other.mean[name], share) for name, rows in self.mean.items()}
        else:  # a mean with weight 0 is undefined
            mean = (self if self.weight else other).mean
        return Aggregate(
            mean,
            {name: value + other.total[name] for name, value in self.total.items()},
            self.weight + other.weight,
            self.count + other.count,
        )

    def sent(self, name: str) -> Tensor:
        """Return the algorithm's message to the clients of the round, `[1, ...]` or `[K, ...]`."""
        assert self.exchange is not None, "this aggregate belongs to no exchange"
        return self.exchange.sent[name]


NOTHING = Aggregate({}, {}, 0.0, 0)
"""The aggregate of no replies."""


def block_slots(row_bytes: int) -> int:
    """Return the number of replies that are aggregated at a time, given the bytes of a model.

    It may depend on no other value, since the last digits of means depend on it.
    """
    return min(MOST_SLOTS, max(LEAST_SLOTS, BLOCK_BYTES // row_bytes))


def merged_integers(rows: Tensor, current: Tensor) -> Tensor:
    """Return the server's integer buffers, such as batch norm's counters, after a round.

    The result is the largest of the clients' values, but growth is limited to 4 times the lower
    median growth.

    Args:
        rows: Buffers of the clients that replied, `[r, Z]`.
        current: The server's buffers, `[Z]`.

    Returns:
        The new buffers, `[Z]`.
    """
    growth = (rows.double() - current).clamp(0, 2.0**60).sort(0).values
    return current + torch.minimum(growth[-1], 4 * growth[(len(rows) - 1) // 2]).long()


def uniform(round: Round) -> tuple[int, ...]:
    """Draw `participants` of the clients uniformly without replacement, in random order.

    The cost grows with the participants only: Robert Floyd's sampling, then a shuffle. In a
    `poisson` round each client takes part independently with probability `participants` /
    `clients`, so the number of participants varies and may be 0.

    Args:
        round: The round, with its numbers of clients and participants and its random stream.

    Returns:
        The clients in the order of their slots.
    """
    generator = round.stream("select")
    if round.poisson:
        chances = torch.rand(round.clients, generator=generator, dtype=torch.float64)
        return tuple((chances < round.participants / round.clients).nonzero()[:, 0].tolist())
    chosen: list[int] = []
    drawn: set[int] = set()
    for largest in range(round.clients - round.participants, round.clients):
        candidate = int(torch.randint(largest + 1, (), generator=generator))
        candidate = largest if candidate in drawn else candidate
        drawn.add(candidate)
        chosen.append(candidate)
    order = torch.randperm(len(chosen), generator=generator).tolist()
    return tuple(chosen[k] for k in order)
