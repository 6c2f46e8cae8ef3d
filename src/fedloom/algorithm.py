"""The one interface that a method implements: a server half that owns its state, and a client half that never sees it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from fedloom.config.expression import Call, parse, plain, show
from fedloom.config.fields import require_fields
from fedloom.config.plugins import found_at
from fedloom.config.registry import Entry, Registry
from fedloom.errors import InvalidValue, code_place, in_brackets, quoted
from fedloom.flat.layout import Layout, Unit
from fedloom.flat.population import weighted_mean
from fedloom.local.cohort import Cohort
from fedloom.round import Round
from fedloom.state.pool_files import PoolFiles
from fedloom.training import Training

BLOCK_BYTES, LEAST_SLOTS, MOST_SLOTS = 16 << 20, 16, 128
"""Models of a block of slots: about so many bytes of them, and how many at least and at most."""

Message = dict[str, Tensor]
"""Named tensors; each has one row for all receivers, `[1, ...]`, or one row each, `[k, ...]`. Where k > 1, clients that train
without uploading are sent a row k + 1."""


def server_model(inbox: Message) -> Tensor:
    """The model that the server sent, `[k, ...]`: the centre of a proximal term, the origin of a displacement.

    Local work starts from `inbox["model"]`. The two are the same unless a wrapper has changed the start (`ala` blends the
    download with the client's old model, `umf` adds a stored update) and handed the download on under this name. A method
    that compares its weights with "the global model" asks for it here, and so stays right under every wrapper.
    """
    return inbox.get("server_model", inbox["model"])


@dataclass(frozen=True)
class Plan:
    """What a method is told before the first round.

    `initial [P]` is the model to start from; `sizes` gives the training samples of clients (`[k]` numbers to `[k]`);
    `module` is the architecture, whose own weights mean nothing. Where clients are `remote`, sites of their own, they exchange
    layers themselves, so that a method must not rehearse it on the server, and noise that hides anything must not be repeatable.
    `poisson` is as in `Round`. `pools` makes what holds many models. `training` are the settings of local training.
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

    @cached_property
    def distinct_sizes(self) -> tuple[Tensor, Tensor]:
        """Each number of training samples that some client has, `[s]`, and which of these every client has, `[N]`."""
        sizes, of = self.sizes(torch.arange(self.clients)).unique(return_inverse=True)
        return sizes, of

    def empty_rows(self, count: int) -> Tensor:
        """Uninitialised models `[count, P]`, in a file where so many are larger than the run's `pool_budget`."""
        return self.pools.empty((count, *self.initial.shape), self.initial.dtype, self.initial.device)

    def starting_from(self, model: Tensor) -> Plan:
        """The same plan with another initial model."""
        return replace(self, initial=model.clone())

    def opening(self) -> Round:
        """Round 1 as if clients 0 to K - 1 were selected: for asking a method what it would send or whom it would choose
        (the learning rate is not known here)."""
        rate = float("nan")
        selected = tuple(range(self.participants))
        more = {"selected": selected, "poisson": self.poisson}
        return Round(1, self.rounds, self.seed, self.clients, self.participants, rate, rate, **more)  # type: ignore[arg-type]


class AnyClient(NamedTuple):
    """What there is to know of any client in a round, as on a `Cohort`, where there is no cohort."""

    layout: Layout
    module: nn.Module
    round: Round


@dataclass(frozen=True)
class Selection:
    """Who trains and uploads, in the order of the slots, and who trains without uploading (FedUmf).

    `weights`, where given, replace the clients' sample counts when replies are averaged. `receivers` counts the clients that
    are sent the message, when that is more than those that train.
    """

    clients: tuple[int, ...]
    idle: tuple[int, ...] = ()
    weights: tuple[float, ...] | None = None
    receivers: int | None = None


@dataclass
class Replies:
    """What came back: `tensors` by name, one row a client that replied, `[r, ...]`.

    `clients [r]` are their numbers, `slots [r]` their places in the selection, `weights [r]` their sample counts (or what the
    selection gives instead). Rows are in the order of the slots, whoever answered first. `matrices` have a row for every slot,
    the first r of which are these tensors. `finish [r]` are the seconds of the simulated clock at which they are there.
    """

    tensors: dict[str, Tensor]
    clients: Tensor
    slots: Tensor
    weights: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    matrices: dict[str, Tensor] = field(default_factory=dict)
    finish: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def by_slot(self, name: str, before: Tensor) -> Tensor:
        """The tensors of that name in the rows of their slots, `[K, ...]`, and those `before` in all other rows. Where `matrices`
        has room for them, rows are moved there, and `tensors` mean nothing afterwards."""
        rows, matrix = self.tensors[name], self.matrices.get(name)
        if len(rows) == len(before):
            return rows
        if matrix is None or matrix.data_ptr() != rows.data_ptr() or matrix.shape != before.shape:
            return before.index_copy(0, self.slots.to(rows.device), rows)
        places = {slot: place for place, slot in enumerate(self.slots.tolist())}
        for slot in reversed(range(len(matrix))):
            matrix[slot] = matrix[places[slot]] if slot in places else before[slot]
        return matrix

    def __len__(self) -> int:
        return len(self.clients)

    def aggregate(
        self, *, weighted: bool = True, mean: Message | None = None, total: Message | None = None
    ) -> AggregatedReplies:
        """Means of the rows `mean` (by default of every tensor that is not in `total`), by weight or plain, and sums of the rows
        `total`."""
        total = total or {}
        if mean is None:
            mean = {name: rows for name, rows in self.tensors.items() if name not in total}
        weights = self.weights if weighted else None
        return AggregatedReplies(
            {name: weighted_mean(rows, weights) for name, rows in mean.items()},
            {name: rows.sum(0) for name, rows in total.items()},
            float(self.weights.sum()) if weighted else len(self),
            len(self),
        )

    def blocks(self, slots: int) -> Iterator[Replies]:
        """The replies from each run of so many slots (without their figures); views."""
        start = 0
        for count in torch.unique_consecutive(self.slots // slots, return_counts=True)[1].tolist():
            part = slice(start, start := start + count)
            tensors = {name: rows[part] for name, rows in self.tensors.items()}
            yield Replies(tensors, self.clients[part], self.slots[part], self.weights[part])


@dataclass(frozen=True)
class AggregatedReplies:
    """What a method needs of many replies at once: `count`, how many they are, and by name means and totals of their tensors,
    without a client axis. In the means they weigh `weight` together."""

    mean: Message
    total: Message
    weight: float
    count: int

    def joined(self, other: AggregatedReplies) -> AggregatedReplies:
        """The aggregate of both's replies."""
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


def block_slots(row_bytes: int) -> int:
    """How many replies of models of so many bytes are aggregated at a time. Means depend on it in the last digit, so it is a
    function of the model alone."""
    return min(MOST_SLOTS, max(LEAST_SLOTS, BLOCK_BYTES // row_bytes))


class Algorithm:
    """A federated method. Subclasses are dataclasses whose fields are the hyper-parameters.

    The types of the fields say what they may be: `mu: NonNegative = 0.01`, `rule: Literal["mean", "median"] = "mean"`.

    The server half runs in one place and keeps everything it must remember in `self.state`, named tensors, which is what a
    checkpoint holds. It replaces tensors there and never edits one in place, so that the state before a round can be kept at
    no cost until the round has succeeded. The client half (`train`, `personalise`) runs where the data is and never touches
    `self.state`.
    """

    state: dict[str, Tensor]
    plan: Plan
    wraps: ClassVar[tuple[str, ...]] = ()  # names of the fields that hold inner methods
    single_download: ClassVar[bool] = True  # a client is sent one model, so that a wrapper can change where it starts
    fixed_participants: ClassVar[bool] = False  # every round needs the same number of clients
    asynchronous: ClassVar[bool] = False  # a round need not wait for the replies of the clients selected in it
    stackable: ClassVar[bool] = True  # the client half treats every row by itself, so that clients may advance together
    variadic: ClassVar[bool] = False  # positional arguments are (method, last round) pairs of the first field
    averages: ClassVar[bool] = True  # the server half needs only the mean of the replies, or an estimate of it
    client_figures: ClassVar[tuple[str, ...]] = ("training_loss",)  # names that `train` writes to `cohort.metrics`

    def __post_init__(self) -> None:
        """Check the hyper-parameters against the types of their fields, ranges included (`fedloom.config.fields`)."""
        require_fields(self)
        for method in self.inner():
            for part in method.nested():
                part.require_inside(self)

    def require_inside(self, outer: Algorithm) -> None:
        """Raise `InvalidValue` in one line where `outer`, which wraps this method, however deep, would break what it does."""

    # --- the server half ---

    def setup(self, plan: Plan) -> None:
        """Keep the plan and make the initial state."""
        self.plan = plan
        self.state = {"model": plan.initial.clone()}

    def select(self, round: Round) -> Selection:
        """Which clients take part: `participants` of them, drawn uniformly without replacement. A function of the round alone, so
        that the next selection can be known ahead."""
        return Selection(uniform(round))

    def send(self, round: Round) -> Message:
        """What the selected clients are sent."""
        return {"model": self.state["model"].unsqueeze(0)}

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each tensor in one client's reply; replies with others are refused."""
        return {"model": (self.plan.layout.size,)}

    @property
    def reply_dtypes(self) -> Mapping[str, torch.dtype]:
        """Of tensors in a reply that are not of the model's dtype."""
        return {}

    def returns_whole(self, round: Round) -> bool:
        """Whether a client's reply stands for a whole model, which its integer buffers then accompany."""
        whole = (self.layout.size,)
        return self.expects(round).get("model", whole) == whole

    def fold(self, round: Round, replies: Replies) -> AggregatedReplies:
        """What `update` needs of some of the round's replies; by default the mean of each tensor, weighted by samples. The state
        is that before the round."""
        return replies.aggregate()

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        """Update the state from the aggregate of all replies; by default the new model is their mean."""
        self.state["model"] = aggregate.mean["model"]

    def receive(self, round: Round, replies: Replies) -> None:
        """Update the state from all replies: by default `fold` them, some slots after the other, and `update`.

        A method that needs the single replies together overrides this, and then all are kept until the last one is there.
        """
        blocks = replies.blocks(block_slots(self.layout.row_bytes))
        self.update(round, reduce(AggregatedReplies.joined, (self.fold(round, block) for block in blocks)))

    @property
    def folds(self) -> bool:
        """Whether replies may be folded as they come, so that the server need not hold all of them."""
        return type(self).receive is Algorithm.receive

    def finish(self, round: Round) -> None:
        """Called at the end of every round, also of one without any reply, in which `receive` is not called."""
        for method in self.inner():
            method.finish(round)

    def model(self) -> Tensor:
        """The global model `[P]` to deploy and to evaluate."""
        return self.state["model"]

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        """What these clients are sent in order to `personalise`, before `round` has begun; by default the global model. One row
        for all or one each, as in `send`. Clients from number `plan.clients` on never train."""
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
    def scores_start(self) -> bool:
        """Whether `personalise` depends on where training would start, and not on memory alone."""
        inner = self.inner()
        return inner[0].scores_start if len(inner) == 1 else True

    @property
    def personal(self) -> bool:
        """Whether a client may deploy another model than the global one. Where none does, all their test samples are scored in
        one pass."""
        own = [kind for kind in type(self).__mro__ if kind not in (Algorithm, Wrapper)]
        changed = any({"personalise", "deploy"} & vars(kind).keys() for kind in own)
        return changed or any(method.personal for method in self.inner())

    def travels(self, cohort: Cohort | AnyClient) -> Unit:
        """The slices of a row that travel as "model"; by default all of it. A wrapper's are those of its inner method."""
        inner = self.inner()
        return inner[0].travels(cohort) if len(inner) == 1 else (slice(0, cohort.layout.size),)

    def complete(self, cohort: Cohort, model: Tensor) -> Tensor:
        """Whole models `[k, P]`, made of the slices that travel and of what each client has in its memory of the others."""
        inner = self.inner()
        return inner[0].complete(cohort, model) if len(inner) == 1 else model

    # --- what wrappers and checkpoints need ---

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    def inner(self) -> list[Algorithm]:
        """The methods that this one wraps."""
        found: list[Algorithm] = []
        for name in self.wraps:
            value = getattr(self, name)
            held = value if isinstance(value, list) else [] if value is None else [value]
            found += [item[0] if isinstance(item, tuple) else item for item in held]
        return found

    def nested(self) -> Iterator[Algorithm]:
        """This method and all that it wraps, however deep."""
        yield self
        for method in self.inner():
            yield from method.nested()

    def active(self, number: int) -> Iterator[Algorithm]:
        """This method, and those of the methods in it that take part in round `number`."""
        yield self
        for method in self.inner():
            yield from method.active(number)

    @property
    def scheduled(self) -> bool:
        """Whether a round's number alone decides which methods are `active` in it."""
        return all(method.scheduled for method in self.inner())

    @property
    def anonymous_replies(self) -> bool:
        """Whether the server half treats all replies of a round alike, and never asks whose a model is or what it weighs."""
        return False

    @property
    def foreseeable(self) -> bool:
        """Whether `select` gives the next round's selection before this round's replies are in."""
        return all(method.foreseeable for method in self.inner())

    @property
    def needs_total_rounds(self) -> bool:
        """Whether anything depends on the number of rounds, `round.rounds`. Such a run cannot be lengthened later."""
        return any(method.needs_total_rounds for method in self.inner())

    @property
    def spent(self) -> bool:
        """Whether no further round may be run, since that would cost more privacy than was allowed."""
        return any(method.spent for method in self.inner())

    @property
    def releases_once(self) -> bool:
        """Whether no round may be repeated after a failure, so that each must be on the disk before the next begins."""
        return any(method.releases_once for method in self.inner())

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


@dataclass
class Wrapper(Algorithm):
    """A method around another one: everything is left to `method` unless a subclass overrides it."""

    method: Algorithm

    wraps: ClassVar[tuple[str, ...]] = ("method",)

    def setup(self, plan: Plan) -> None:
        self.plan = plan
        self.state = {}
        self.method.setup(plan)

    def select(self, round: Round) -> Selection:
        return self.method.select(round)

    def send(self, round: Round) -> Message:
        return self.method.send(round)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return self.method.expects(round)

    def returns_whole(self, round: Round) -> bool:
        return self.method.returns_whole(round)

    def handed_on(self, round: Round, replies: Replies) -> Replies:
        """The replies as the inner method takes them, row by row."""
        return replies

    def fold(self, round: Round, replies: Replies) -> AggregatedReplies:
        return self.method.fold(round, self.handed_on(round, replies))

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        self.method.update(round, aggregate)

    def receive(self, round: Round, replies: Replies) -> None:
        self.method.receive(round, self.handed_on(round, replies))

    @property
    def folds(self) -> bool:
        return type(self).receive is Wrapper.receive and self.method.folds

    def model(self) -> Tensor:
        return self.method.model()

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        return self.method.deploy(round, clients)

    def diagnose(self) -> dict[str, float]:
        return self.method.diagnose()

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return self.method.train(cohort, inbox)


def uniform(round: Round) -> tuple[int, ...]:
    """`participants` of the clients, drawn uniformly without replacement, in random order. The cost grows with them alone.

    Robert Floyd's sampling, then a shuffle. In a `poisson` round each client takes part by itself, with probability
    `participants` / `clients`, so that their number varies and may be 0.
    """
    generator = round.stream("select")
    if round.poisson:
        drawn = torch.rand(round.clients, generator=generator, dtype=torch.float64)
        return tuple((drawn < round.participants / round.clients).nonzero()[:, 0].tolist())
    chosen: list[int] = []
    seen: set[int] = set()
    for last in range(round.clients - round.participants, round.clients):
        candidate = int(torch.randint(last + 1, (), generator=generator))
        candidate = last if candidate in seen else candidate
        seen.add(candidate)
        chosen.append(candidate)
    order = torch.randperm(len(chosen), generator=generator).tolist()
    return tuple(chosen[k] for k in order)


def _argument(make: type[Algorithm], name: str, value: Any) -> Any:
    return build(value) if name in make.wraps and isinstance(value, Call) else plain(value)


# A method is a dataclass that extends `Algorithm` and registers itself: @algorithms.register("fedavg").
algorithms: Registry[type[Algorithm]] = Registry("algorithm", "fedloom.algorithms", _argument)


def build(expression: str | Call | Algorithm) -> Algorithm:
    """The method of an expression such as `fedmr(unit=segment, fraction=0.5)`, `stages(fedavg:100, fedmr)` or
    `my_methods:HalfStep(step=0.9)`.

    Raises `UnknownName` or `InvalidValue` in one line for whatever does not fit.
    """
    if isinstance(expression, Algorithm):
        _require_dataclass(type(expression))
        return expression
    call = parse(expression) if isinstance(expression, str) else expression
    if call.until is not None:
        raise InvalidValue(f"{quoted(call, str)}: a last round (:{quoted(call.until, str)}) belongs inside stages(...)")
    if ":" in call.name and call.name not in algorithms:
        call = replace(call, name=_registered(call.name))
    _require_dataclass(algorithms[call.name].make)
    if algorithms[call.name].make.variadic:
        call = replace(call, positional=([_stage(value) for value in call.positional],))
    return cast(Algorithm, algorithms.build(call))


def _registered(path: str) -> str:
    """The name under which the class at `module:Class` is registered, which is its path where it has given itself none."""
    kind = found_at(path, "algorithm", "a registered name or 'package.module:Class'")
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise InvalidValue(f"algorithm {quoted(path)} is no method: a method is a class that extends fedloom.Algorithm")
    known = algorithms.of(kind)
    if known is None:
        algorithms.register(path)(kind)
    return path if known is None else known.name


def _require_dataclass(kind: type) -> None:
    """Raise `InvalidValue` where fields of a method count for nothing, since their class is no `@dataclass`."""
    for base in kind.__mro__[: kind.__mro__.index(Algorithm)]:
        written = () if "__dataclass_fields__" in vars(base) else vars(base).get("__annotations__", {}).items()
        names = [
            name for name, hint in written if "ClassVar" not in str(hint) and name not in Algorithm.__annotations__
        ]
        if names:
            raise InvalidValue(
                f"{base.__name__} has {', '.join(names)}, but no @dataclass above its class to make parameters of that"
                + in_brackets(code_place(base))
            )


def _stage(value: Any) -> tuple[Algorithm, Any]:
    if not isinstance(value, Call):
        raise InvalidValue(f"{quoted(value, show)} is not a method with its last round, such as fedavg:100")
    return build(replace(value, until=None)), value.until


def entry_of(algorithm: Algorithm) -> Entry[type[Algorithm]] | None:
    """The registry's entry of a method; None where it is not registered."""
    return algorithms.of(type(algorithm))


def name_of(algorithm: Algorithm) -> str:
    """The name under which a method is registered; that of its class where it is not."""
    entry = entry_of(algorithm)
    return type(algorithm).__name__ if entry is None else entry.name


def require_one_model(name: str, method: Algorithm, opening: Round) -> None:
    """Raise `InvalidValue`, which begins with `name`, unless clients of `method` return an update of one model that they are
    sent."""
    expected, sent = method.expects(opening).get("model"), method.send(opening)
    if "model" not in sent or tuple(sent["model"].shape[1:]) != expected:
        raise InvalidValue(
            f"{name}: clients of {describe(method)} do not return an update of one model that they are sent"
        )


def describe(algorithm: Algorithm) -> str:
    """The expression that builds this method again: its name and the fields that differ from their defaults."""
    entry = entry_of(algorithm)
    if entry is None:
        return type(algorithm).__name__.lower()
    values = {name: getattr(algorithm, name) for name in entry.parameters}
    shown = [
        (name, _show(value))
        for name, value in values.items()
        if entry.parameters[name].default is inspect.Parameter.empty or entry.parameters[name].default != value
    ]
    texts = [_show(item) for item in values[algorithm.wraps[0]]] if entry.make.variadic else []
    for name, text in shown:
        needed = entry.parameters[name].default is inspect.Parameter.empty
        if not (needed and entry.make.variadic):
            texts.append(text if needed and name in algorithm.wraps else f"{name}={text}")
    inside = ", ".join(texts)
    return f"{entry.name}({inside})" if inside else entry.name


def _show(value: Any) -> str:
    if isinstance(value, Algorithm):
        return describe(value)
    if isinstance(value, tuple) and value and isinstance(value[0], Algorithm):
        return describe(value[0]) + ("" if value[1] is None else f":{value[1]}")
    return show(value)
