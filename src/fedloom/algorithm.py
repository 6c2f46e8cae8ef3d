"""The one interface that a method implements: a server half that owns its state, and a client half that never sees it."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, is_dataclass, replace
from functools import reduce
from typing import Any, ClassVar, NamedTuple, dataclass_transform

import torch
from torch import Tensor, nn

from fedloom.config.expression import show
from fedloom.config.fields import parameters, require_fields
from fedloom.config.registry import Registry
from fedloom.errors import InvalidValue, code_location, in_brackets
from fedloom.flat.layout import Layout, Unit
from fedloom.flat.population import weighted_mean
from fedloom.local.cohort import Cohort as Cohort
from fedloom.round import Round as Round
from fedloom.state.pool_files import PoolFiles
from fedloom.training import Training

BLOCK_BYTES, LEAST_SLOTS, MOST_SLOTS = 16 << 20, 16, 128
"""Models of a block of slots: about so many bytes of them, and how many at least and at most."""

Message = dict[str, Tensor]
"""Named tensors with one row for all receivers, `[1, ...]`, or one each, `[k, ...]`; where k > 1, idle clients have row k + 1."""


SERVER_MODEL = "@server_model"
"""Name in an inbox of the model that the server sent, where a wrapper has changed `inbox["model"]`. Names that begin with @ are
the library's own, which no method's tensors may have."""


def server_model(inbox: Message) -> Tensor:
    """The model that the server sent, `[k, ...]`: the centre of a proximal term, the origin of a displacement.

    Local work starts from `inbox["model"]`, which is the same unless a wrapper has changed the start, as `ala` and `umf` do.
    """
    return inbox.get(SERVER_MODEL, inbox["model"])


def started_from(start: Tensor, inbox: Message) -> Message:
    """Return the inbox for local work from `start [k, ...]` on, where the model that the server sent stays what it is."""
    return {**inbox, "model": start, SERVER_MODEL: server_model(inbox)}


@dataclass(frozen=True)
class Plan:
    """The run as a method knows it before the first round.

    `initial [P]` is the model to start from; `sizes` gives the training samples of clients (`[k]` numbers to `[k]`);
    `module` is the architecture, whose own weights mean nothing. Where clients are `remote`, sites of their own, they exchange
    layers themselves, so that a method must not rehearse it on the server, and noise that hides anything must not be repeatable.
    `poisson` is as in `Round`. `pools` makes what holds many models. `training` are the settings of local training.
    `awaited` replies end a round: fewer than `participants` where more clients are selected than are waited for.
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

    def empty_rows(self, count: int) -> Tensor:
        """Uninitialised models `[count, P]`, in a file where so many are larger than the run's `pool_budget`."""
        return self.pools.empty((count, *self.initial.shape), self.initial.dtype, self.initial.device)

    def opening(self) -> Round:
        """Round 1 as if clients 0 to K - 1 were selected, without a learning rate: to ask a method what it would send."""
        facts = (1, self.rounds, self.seed, self.clients, self.participants, math.nan, math.nan)
        return Round(*facts, selected=tuple(range(self.participants)), poisson=self.poisson)


class AnyClient(NamedTuple):
    """Facts about any client in a round, under the names of a `Cohort`, where there is no cohort."""

    layout: Layout
    module: nn.Module
    round: Round


@dataclass(frozen=True)
class Selection:
    """The clients of a round: those that train and upload, in the order of the slots, and the idle ones that only train (FedUmf).

    `weights`, where given, replace the clients' sample counts when replies are averaged. `receivers` counts the clients that
    are sent the message, when that is more than those that train.
    """

    clients: tuple[int, ...]
    idle: tuple[int, ...] = ()
    weights: tuple[float, ...] | None = None
    receivers: int | None = None


@dataclass(frozen=True)
class Exchange:
    """One round as the server knows it, made once and read by everybody: who was selected, what was sent, who is awaited.

    `sent` holds named tensors, rows `[1, ...]` for all or one for each slot (and one more for those that train without
    uploading). `awaited [K]` is False for clients that dropped out or are late. A wrapper's exchange has that of the method
    inside it as `inner`, with what this one sent before the wrapper changed it.
    """

    round: Round
    selection: Selection
    sent: Message
    inner: "Exchange | None" = None
    awaited: Tensor | None = None

    def awaiting(self, awaited: Tensor) -> "Exchange":
        """Return the exchange with the mask `awaited [K]`, on every level."""
        return replace(self, awaited=awaited, inner=self.inner and self.inner.awaiting(awaited))

    def among(self, clients: tuple[int, ...]) -> "Exchange":
        """Return an exchange of the same messages with other clients, on every level."""
        inner = self.inner and self.inner.among(clients)
        return Exchange(replace(self.round, selected=clients), Selection(clients), self.sent, inner)

    @property
    def shared(self) -> bool:
        """Return True if everybody was sent the same, on every level."""
        return all(len(rows) == 1 for rows in self.sent.values()) and (self.inner is None or self.inner.shared)

    def within(self) -> "Exchange":
        """Return the exchange of the wrapped method."""
        assert self.inner is not None, "a wrapper's exchange holds that of its method"
        return self.inner


@dataclass
class Replies:
    """Replies of a round, or of some consecutive slots of it: a matrix by slot for each name, and who answered.

    `matrices [S, ...]` have a row for each slot, from slot `offset` on; they are never rearranged, and the rows of clients
    without a reply are zero. Of the r clients that answered, `clients [r]` are the numbers, `slots [r]` the slots, ascending,
    and `weights [r]` the sample counts (or what the selection gives instead); `replies[name]` are their rows, `[r, ...]`.
    `exchange` is the round's record, `metrics [r]` the clients' figures (NaN: none), `finish [r]` the simulated time of arrival.
    """

    matrices: dict[str, Tensor]
    clients: Tensor
    slots: Tensor
    weights: Tensor
    exchange: Exchange | None = None
    offset: int = 0
    metrics: dict[str, Tensor] = field(default_factory=dict)
    finish: Tensor | None = None

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, name: str) -> Tensor:
        """Return the rows `[r, ...]` of the clients that answered, in the order of their slots."""
        matrix = self.matrices[name]
        if len(matrix) == len(self):
            return matrix
        if matrix.stride()[:1] == (0,):  # the same row for everybody
            return matrix[: len(self)]
        return matrix.index_select(0, self.index.to(matrix.device))

    @property
    def index(self) -> Tensor:
        """Return the rows of the matrices that hold replies, `[r]`."""
        return self.slots - self.offset

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the rows of all names, as `replies[name]` gives them."""
        return {name: self[name] for name in self.matrices}

    def sent(self, name: str) -> Tensor:
        """Return the rows that the clients that answered were sent: `[1, ...]` for all, or `[r, ...]`."""
        rows = self._sent[name]
        return rows if len(rows) == 1 else rows[self.slots.to(rows.device)]

    def sent_by_slot(self, name: str) -> Tensor:
        """Return the rows that the clients of these slots were sent: `[1, ...]` for all, or `[S, ...]`."""
        rows = self._sent[name]
        return rows if len(rows) == 1 else rows[self.offset : self.offset + len(self.matrices[name])]

    def by_slot(self, name: str) -> Tensor:
        """Return the matrix `[S, ...]` in which whoever did not answer has what it was sent."""
        matrix = self.matrices[name]
        if len(self) < len(matrix):
            sent = self.sent_by_slot(name)
            for row in set(range(len(matrix))).difference(self.index.tolist()):
                matrix[row] = sent[row if len(sent) > 1 else 0]
        return matrix

    def weights_by_slot(self, weights: Tensor | None = None) -> Tensor:
        """Return the weights (or those given, `[r]`) by slot, `[S]`: 0 for whoever did not answer."""
        size = max((len(matrix) for matrix in self.matrices.values()), default=0)
        weights = self.weights if weights is None else weights
        return weights.new_zeros(size).index_copy_(0, self.index, weights)

    def inward(self, matrices: dict[str, Tensor] | None = None) -> "Replies":
        """Return the replies as the wrapped method receives them, with other `matrices` where the wrapper changed them."""
        inner = None if self.exchange is None else self.exchange.within()
        return replace(self, exchange=inner, matrices=self.matrices if matrices is None else matrices)

    def aggregate(
        self, *, weighted: bool = True, mean: Message | None = None, total: Message | None = None
    ) -> "AggregatedReplies":
        """Return means and sums of rows `[r, ...]`.

        Args:
            weighted: weigh means by `weights`; False takes plain means.
            mean: the rows to average; by default every tensor of the replies that is not in `total`.
            total: the rows to add up.
        """
        total = total or {}
        weights = self.weights if weighted else None
        if mean is None:  # by slot, where whoever did not answer weighs nothing, so that no row is copied
            mean = {name: matrix for name, matrix in self.matrices.items() if name not in total}
            if any(len(matrix) > len(self) for matrix in mean.values()):
                weights = self.weights_by_slot(None if weighted else torch.ones_like(self.weights))
        return AggregatedReplies(
            {name: weighted_mean(rows, weights) for name, rows in mean.items()},
            {name: rows.sum(0) for name, rows in total.items()},
            float(self.weights.sum()) if weighted else len(self),
            len(self),
        )

    def blocks(self, slots: int) -> "Iterator[Replies]":
        """Yield the replies from each run of so many slots, without their figures; views."""
        start = 0
        numbers, counts = torch.unique_consecutive(self.slots // slots, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            answered = slice(start, start := start + count)
            offset = number * slots
            matrices = {name: matrix[max(0, offset - self.offset) :][:slots] for name, matrix in self.matrices.items()}
            numbered = self.clients[answered], self.slots[answered], self.weights[answered]
            yield Replies(matrices, *numbered, self.exchange, max(offset, self.offset))

    @property
    def _sent(self) -> Message:
        assert self.exchange is not None, "these replies are of no exchange"
        return self.exchange.sent


@dataclass(frozen=True)
class AggregatedReplies:
    """Means and totals over many replies: `count` of them, by name, without a client axis. In the means they weigh `weight`
    together. `exchange` is the round's record, for `update`; aggregates of blocks have none."""

    mean: Message
    total: Message
    weight: float
    count: int
    exchange: Exchange | None = None

    def joined(self, other: "AggregatedReplies") -> "AggregatedReplies":
        """Return the aggregate of both's replies."""
        if not (self.count and other.count):
            return self if self.count else other
        if self.weight and other.weight:
            share = other.weight / (self.weight + other.weight)
            mean = {name: value.lerp(other.mean[name], share) for name, value in self.mean.items()}
        else:  # the mean of what weighs nothing is undefined
            mean = (self if self.weight else other).mean
        return AggregatedReplies(
            mean,
            {name: value + other.total[name] for name, value in self.total.items()},
            self.weight + other.weight,
            self.count + other.count,
        )

    def inward(self) -> "AggregatedReplies":
        """Return the aggregate as the wrapped method's `update` receives it."""
        return self if self.exchange is None else replace(self, exchange=self.exchange.within())

    def sent(self, name: str) -> Tensor:
        """Return what the round's clients were sent, `[1, ...]` or `[K, ...]`."""
        assert self.exchange is not None, "this aggregate is of no exchange"
        return self.exchange.sent[name]


NOTHING = AggregatedReplies({}, {}, 0.0, 0)
"""The aggregate of no replies."""


class Capability:
    """A fact about a method: what it can or needs.

    Args:
        combine: Rule for wrappers that say nothing of their own: `all` wrapped methods must, or `any` may.
        default: What a method says that wraps none; by default True for `all`.
    """

    def __init__(self, combine: Callable[[Iterable[bool]], bool], default: bool | None = None) -> None:
        self.combine = combine
        self.default = combine is all if default is None else default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, method: "Algorithm | None", owner: type) -> Any:
        if method is None:
            return self
        inner = method.inner()
        return self.combine(bool(getattr(each, self.name)) for each in inner) if inner else self.default


def block_slots(row_bytes: int) -> int:
    """Return how many replies are aggregated at a time: by a model's bytes alone, since means depend on it in the last digit."""
    return min(MOST_SLOTS, max(LEAST_SLOTS, BLOCK_BYTES // row_bytes))


@dataclass_transform(field_specifiers=(field,))
class Algorithm:
    """A federated method. Subclasses are dataclasses by themselves, whose fields are the hyper-parameters.

    The types of the fields say what they may be: `mu: NonNegative = 0.01`, `rule: Literal["mean", "median"] = "mean"`.

    The server half runs in one place and keeps everything it must remember in `self.state`, named tensors, which is what a
    checkpoint holds. It replaces tensors there and never edits one in place, so that the state before a round can be kept at
    no cost until the round has succeeded. The client half (`train`, `personalise`) runs where the data is, without `self.state`.
    """

    state: dict[str, Tensor]
    plan: Plan
    sends: ClassVar[tuple[str, ...]] = ("model",)  # names in the state of what clients are sent, one row for all
    wraps: ClassVar[tuple[str, ...]] = ()  # names of the fields that hold inner methods
    variadic: ClassVar[bool] = False  # positional arguments are (method, last round) pairs of the first field
    needs: ClassVar[
        tuple[Callable[[str, Plan], None], ...]
    ] = ()  # checks, by the method's name, that raise `InvalidValue`
    client_figures: ClassVar[tuple[str, ...]] = ("training_loss",)  # names that `train` writes to `cohort.metrics`

    def __init_subclass__(cls) -> None:
        """Make the subclass a dataclass. A `@dataclass` above it, which then comes second, changes nothing."""
        fields = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        if not is_dataclass(cls) or vars(cls).get("__annotations__"):
            dataclass(cls)
        for name, value in fields.items():
            setattr(cls, name, value)

    def __post_init__(self) -> None:
        """Check the hyper-parameters against the types of their fields, ranges included (`fedloom.config.fields`)."""
        require_fields(self)
        for method in self.inner():
            for nested in method.nested():
                nested.require_inside(self)

    def __str__(self) -> str:
        """Return the expression that builds this method again: its name and the fields that differ from their defaults."""
        entry, texts = algorithms.of(type(self)), []
        for name, parameter in parameters(type(self)).items():
            value, needed = getattr(self, name), parameter.default is parameter.empty
            if needed and self.variadic:
                texts += [f"{method}" if end is None else f"{method}:{end}" for method, end in value]
            elif needed or value != parameter.default:
                texts.append(show(value) if needed and name in self.wraps else f"{name}={show(value)}")
        name = type(self).__name__.lower() if entry is None else entry.name
        return f"{name}({', '.join(texts)})" if texts else name

    def require_inside(self, outer: "Algorithm") -> None:
        """Raise `InvalidValue` in one line where `outer`, which wraps this method, however deep, would break what it does."""

    # --- the server half ---

    def setup(self, plan: Plan) -> None:
        """Check and keep the plan, and make the initial state."""
        for require in self.needs:
            require(name_of(self), plan)
        self.plan, self.state = plan, {"model": plan.initial.clone()}

    def select(self, round: Round) -> Selection:
        """Return who takes part: by default drawn uniformly. A function of the round alone, so that it can be known ahead."""
        return Selection(uniform(round))

    def question(self, round: Round) -> "tuple[Algorithm, tuple[int, ...]] | None":
        """Return what is asked before `select`, and the clients: they `train` it on what it `deploy`s. By default nothing."""
        return None

    def hear(self, replies: Replies) -> None:
        """Take the replies to the `question`, of which there is one at least."""

    def send(self, round: Round) -> Message:
        """Return what the selected clients are sent. A function of the round and the state, called once a round."""
        return {name: self.state[name].unsqueeze(0) for name in self.sends}

    def exchange(self, round: Round, selection: Selection) -> Exchange:
        """Return the record of a round's exchange, with what is sent. Raises `InvalidValue` where a name begins with @."""
        message = dict(self.send(round))
        for name in (*message, *self.expects(round)):
            if name.startswith("@"):
                location = in_brackets(code_location(type(self).send if name in message else type(self).expects))
                reason = f"names that begin with @ are fedloom's own{location}"
                raise InvalidValue(f"{type(self).__name__} names a tensor {name!r}: {reason}")
        return Exchange(round, selection, message)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each tensor in one client's reply; replies with others are refused."""
        return {"model": (self.plan.layout.size,)}

    @property
    def reply_dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the types of tensors in a reply that are not of the model's dtype, with those of wrapped methods."""
        return {name: dtype for method in self.inner() for name, dtype in method.reply_dtypes.items()}

    @property
    def step_replies(self) -> int | None:
        """Return the number of replies with which an asynchronous method makes a step; None where a round waits for all."""
        return next((method.step_replies for method in self.inner() if method.step_replies is not None), None)

    def returns_whole(self, round: Round) -> bool:
        """Return True if a client's reply stands for a whole model, which its integer buffers then accompany."""
        shape = (self.layout.size,)
        return self.expects(round).get("model", shape) == shape

    def decoded(self, round: Round, tensors: Message) -> Message:
        """Return what a client's reply, `[1, ...]`, stands for: itself, unless a wrapper codes it. It is checked in this form."""
        return tensors

    def fold(self, round: Round, replies: Replies) -> AggregatedReplies:
        """Return what `update` needs of some replies, by the state before the round: by default means, weighted by samples."""
        return replies.aggregate()

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        """Update the state from the aggregate of all replies; by default the new model is their mean."""
        self.state["model"] = aggregate.mean["model"]

    def receive(self, round: Round, replies: Replies) -> None:
        """Update the state from all replies: by default `fold` them, some slots after the other, and `update`.

        A method that needs the single replies together overrides this, and then all are kept until the last one is there.
        """
        blocks = replies.blocks(block_slots(self.layout.row_bytes))
        folded = reduce(AggregatedReplies.joined, (self.fold(round, block) for block in blocks), NOTHING)
        self.update(round, replace(folded, exchange=replies.exchange))

    def merge_integers(self, rows: Tensor, current: Tensor) -> Tensor:
        """Return the server's integer buffers `[Z]`, such as batch norm's counters, from those of the clients that answered,
        `rows [r, Z]`, and its `current` ones `[Z]`: by default the largest, but no growth counts as more than 4 median ones."""
        growth = (rows.double() - current).clamp(0, 2.0**60).sort(0).values
        return current + torch.minimum(growth[-1], 4 * growth[(len(rows) - 1) // 2]).long()

    @property
    def folds(self) -> bool:
        """Return True if replies may be folded as they come, so that the server need not hold all of them."""
        return type(self).receive is Algorithm.receive

    @property
    def slots_together(self) -> int:
        """Return how many consecutive slots have their replies in one matrix: those of a block that is folded, or all."""
        return block_slots(self.layout.row_bytes) if self.folds else sys.maxsize

    def finish(self, round: Round, exchange: Exchange) -> None:
        """End a round; called after every one, also after one without any reply, in which `receive` is not called."""

    def model(self) -> Tensor:
        """The global model `[P]` to deploy and to evaluate."""
        return self.state["model"]

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        """Return what these clients are sent in order to `personalise`, before `round` has begun; by default the global model.
        One row for all or one each, as in `send`. Clients from number `plan.clients` on never train."""
        return {"model": self.model().unsqueeze(0)}

    def diagnose(self) -> dict[str, float]:
        """Figures about the server's state, recorded beside the accuracy."""
        return {}

    # --- the client half ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        """Local work of the cohort's k clients on messages with one row each, `[k, ...]`; the reply has one row each too.

        Training starts from `inbox["model"]` and ends in `reply["model"]`; what the server sent is `server_model(inbox)`.
        """
        return {"model": cohort.fit(inbox["model"]).model}

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        """The model `[k, P]` that each client would deploy; by default what it received, or what the one inner method makes of
        it. Neither memory nor random streams may change."""
        inner = self.inner()
        return inner[0].personalise(cohort, inbox) if len(inner) == 1 else inbox["model"]

    @property
    def personal(self) -> bool:
        """Return True if a client may deploy another model than the global one; else all test samples are scored in one pass."""
        return personalises(type(self)) or any(method.personal for method in self.inner())

    def travels(self, cohort: Cohort | AnyClient) -> Unit:
        """The slices of a row that travel as "model"; by default all of it. A wrapper's are those of its inner method."""
        inner = self.inner()
        return inner[0].travels(cohort) if len(inner) == 1 else (slice(0, cohort.layout.size),)

    def travelling(self, round: Round) -> Unit:
        """The slices of a row that travel as "model" to and from any client in `round`."""
        return self.travels(AnyClient(self.layout, self.plan.module, round))

    def complete(self, cohort: Cohort, model: Tensor) -> Tensor:
        """Whole models `[k, P]`, made of the slices that travel and of what each client has in its memory of the others."""
        inner = self.inner()
        return inner[0].complete(cohort, model) if len(inner) == 1 else model

    # --- what wrappers and checkpoints need ---

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    def inner(self) -> "list[Algorithm]":
        """The methods that this one wraps."""
        return [method for name in self.wraps if (method := getattr(self, name)) is not None]

    def nested(self) -> "Iterator[Algorithm]":
        """This method and all that it wraps, however deep."""
        yield self
        for method in self.inner():
            yield from method.nested()

    def active(self, number: int) -> "Iterator[Algorithm]":
        """This method, and those of the methods in it that take part in round `number`."""
        yield self
        for method in self.inner():
            yield from method.active(number)

    # --- what a method can or needs; `reply_dtypes` are joined, and what else a wrapper delegates stands in `Wrapper` ---

    single_download: ClassVar[Any] = Capability(all)
    """True if a client is sent one model, so that a wrapper can change where it starts."""
    one_model_each: ClassVar[Any] = Capability(any)
    """True if every selected client is sent a model of its own, by its slot."""
    fixed_participants: ClassVar[Any] = Capability(any)
    """True if every round needs the same number of clients."""
    asynchronous: ClassVar[Any] = Capability(any)
    """True if a round need not wait for the replies of the clients selected in it."""
    stackable: ClassVar[Any] = Capability(all)
    """True if the client half treats every row by itself, so that clients may advance together."""
    fits_once: ClassVar[Any] = Capability(all)
    """True if clients read their data by one plain `Cohort.fit` a round alone."""
    averages: ClassVar[Any] = Capability(all)
    """True if the server half needs only the mean of the replies, or an estimate of it."""
    anonymous_replies: ClassVar[Any] = Capability(all, default=False)
    """True if the server half treats all replies alike, and never asks whose a model is or what it weighs."""
    scores_start: ClassVar[Any] = Capability(all)
    """True if `personalise` depends on where training would start, and not on memory alone."""
    scheduled: ClassVar[Any] = Capability(all)
    """True if a round's number alone decides which methods are `active` in it."""
    foreseeable: ClassVar[Any] = Capability(all)
    """True if `select` gives the next round's selection before this round's replies are in."""
    needs_total_rounds: ClassVar[Any] = Capability(any)
    """True if anything depends on `round.rounds`, the number of rounds: such a run cannot be lengthened later."""
    needs_every_reply: ClassVar[Any] = Capability(any)
    """True if no reply may displace another one, as the first ones of an over-selected round do."""
    updates_without_replies: ClassVar[Any] = Capability(any)
    """True if a round in which nobody answers changes the state too: `receive` or `update` is called with nothing."""
    spent: ClassVar[Any] = Capability(any)
    """True if no further round may be run, since that would cost more privacy than was allowed."""
    releases_once: ClassVar[Any] = Capability(any)
    """True if no round may be repeated after a failure, so that each must be on the disk before the next begins."""

    def account(self) -> dict[str, float]:
        """Figures recorded after every round, whether or not anything is evaluated: what has been used up."""
        return {name: value for method in self.inner() for name, value in method.account().items()}

    def full_state(self) -> dict[str, Tensor]:
        """The state of this method and of those it wraps, by path."""
        full = dict(self.state)
        for k, method in enumerate(self.inner()):
            full |= {f"inner{k}.{name}": tensor for name, tensor in method.full_state().items()}
        return full

    def restore(self, full: Mapping[str, Tensor]) -> None:
        """Take back what `full_state` returned, after `setup`."""
        self.state = {name: tensor for name, tensor in full.items() if "." not in name}
        for k, method in enumerate(self.inner()):
            prefix = f"inner{k}."
            method.restore({n.removeprefix(prefix): t for n, t in full.items() if n.startswith(prefix)})


CAPABILITIES = {name: value for name, value in vars(Algorithm).items() if isinstance(value, Capability)}
"""Capabilities of methods, by name."""


def source_of(method: Algorithm, capability: str) -> Algorithm | None:
    """Return the innermost method for whose sake `capability` is not as in a method that wraps none; None where it is."""
    default = CAPABILITIES[capability].default
    return next((inner for inner in reversed([*method.nested()]) if getattr(inner, capability) != default), None)


class Wrapper(Algorithm):
    """A method around another one: everything is left to `method` unless a subclass overrides it.

    Args:
        method: Inner method.
    """

    method: Algorithm

    wraps: ClassVar[tuple[str, ...]] = ("method",)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state = {}
        self.method.setup(plan)

    def select(self, round: Round) -> Selection:
        return self.method.select(round)

    def outgoing(self, round: Round, message: Message) -> Message:
        """Return what is sent in place of the wrapped method's message."""
        return message

    def incoming(self, round: Round, replies: Replies) -> Replies:
        """Return the replies as the wrapped method receives them."""
        return replies.inward()

    def send(self, round: Round) -> Message:
        return self.outgoing(round, dict(self.method.send(round)))

    def exchange(self, round: Round, selection: Selection) -> Exchange:
        inner = self.method.exchange(round, selection)
        overridden = type(self).send is not Wrapper.send
        sent = self.send(round) if overridden else self.outgoing(round, dict(inner.sent))
        return Exchange(round, selection, dict(sent), inner)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return self.method.expects(round)

    def returns_whole(self, round: Round) -> bool:
        return self.method.returns_whole(round)

    def decoded(self, round: Round, tensors: Message) -> Message:
        return self.method.decoded(round, tensors)

    def fold(self, round: Round, replies: Replies) -> AggregatedReplies:
        return self.method.fold(round, self.incoming(round, replies))

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        self.method.update(round, aggregate.inward())

    def receive(self, round: Round, replies: Replies) -> None:
        self.method.receive(round, self.incoming(round, replies))

    def merge_integers(self, rows: Tensor, current: Tensor) -> Tensor:
        return self.method.merge_integers(rows, current)

    @property
    def folds(self) -> bool:
        return type(self).receive is Wrapper.receive and self.method.folds

    def finish(self, round: Round, exchange: Exchange) -> None:
        self.method.finish(round, exchange.within())

    def model(self) -> Tensor:
        return self.method.model()

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        return self.method.deploy(round, clients)

    def diagnose(self) -> dict[str, float]:
        return self.method.diagnose()

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return self.method.train(cohort, inbox)


def personalises(kind: type[Algorithm]) -> bool:
    """Return True if a class of methods has clients deploy other models than the global one."""
    return any(
        {"personalise", "deploy"} & vars(base).keys() for base in kind.__mro__ if base not in (Algorithm, Wrapper)
    )


def uniform(round: Round) -> tuple[int, ...]:
    """`participants` of the clients, drawn uniformly without replacement, in random order. The cost grows with them alone.

    Robert Floyd's sampling, then a shuffle. In a `poisson` round each client takes part by itself, with probability
    `participants` / `clients`, so that their number varies and may be 0.
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


# A method extends `Algorithm` and registers itself: @algorithms.register("fedavg").
algorithms: Registry[type[Algorithm]] = Registry("algorithm", "fedloom.algorithms")


def name_of(algorithm: Algorithm) -> str:
    """Return the name under which a method is registered; that of its class where it is not."""
    entry = algorithms.of(type(algorithm))
    return type(algorithm).__name__ if entry is None else entry.name


def require_one_model(name: str, method: Algorithm, opening: Round) -> None:
    """Raise `InvalidValue`, beginning with `name`, unless clients of `method` return an update of the one model they are sent."""
    expected, sent = method.expects(opening).get("model"), method.send(opening)
    if "model" not in sent or tuple(sent["model"].shape[1:]) != expected:
        raise InvalidValue(f"{name}: clients of {method} do not return an update of one model that they are sent")


def exchanges_models(method: Algorithm, plan: Plan) -> bool:
    """Return True if clients of `method` are sent a whole model and return one."""
    opening, shape = plan.opening(), (plan.layout.size,)
    sent = method.send(opening)
    return "model" in sent and tuple(sent["model"].shape[1:]) == shape == method.expects(opening).get("model")
