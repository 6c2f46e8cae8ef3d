"""The interface of a part: a hook for each moment of a round."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from fedloom.algorithm import Algorithm, overrides
from fedloom.algorithm.method import Method
from fedloom.algorithm.records import Aggregate, Exchange, Message, Plan, Replies, Selection, Specs
from fedloom.common.round import Round
from fedloom.local.cohort import Cohort


class Inner(Protocol):
    """The algorithm and the parts inside a part, as the part can use them."""

    algorithm: Algorithm

    @property
    def foreseeable(self) -> bool:
        """True if the next selection is known before this round's replies."""

    def select(self, round: Round) -> Selection:
        """Return the selection without the parts outside."""

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        """Train clients without the parts outside, and without coding their replies."""

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        """Return the models that clients would use without the parts outside."""

    def expected_names(self, round: Round) -> set[str]:
        """Return the names of the tensors in a reply before coding."""


@dataclass(frozen=True)
class Poll:
    """A question to clients before the selection. `part` answers it at each client (`answer`)."""

    part: "Part"
    clients: tuple[int, ...]


class Part(Method):
    """A component around an algorithm. It overrides the hooks of the moments of a round in which it
    acts.

    A part has its own state and file, and imports no other part. The pipeline calls a hook of all
    parts in the order of the expression; "outermost first" is the order of the text. In `train`,
    `personalise` and `select` a part calls `inner` to continue with the parts inside it.

    The arguments are the same in all hooks: `round` describes the round, `cohort` the clients in
    one call, `message` and `inbox` are tensors by name with one row for all clients or one for
    each, and `inner` is the algorithm with the parts inside.

    Args:
        method: Inner method.
    """

    method: Method

    once: ClassVar[bool] = False
    """True if a pipeline may contain the part only once."""
    hint: ClassVar[str] = ""
    """Remedy at the end of the error for an algorithm that does not meet `requires`."""
    requires: ClassVar[Any] = ()
    """Names of `REQUIREMENTS` that the algorithm and the parts inside must meet."""

    def setup(self, plan: Plan, inner: Inner) -> None:
        """Check and store the plan, and create the initial state. The parts inside are set up
        before.
        """
        self._require_plan(plan)
        self.state = {}

    def hooks(self) -> frozenset[str]:
        """Return the names of the hooks in which the part acts: by default the overridden hooks."""
        return hooks_of(type(self))

    # --- before training, on the server ---

    def poll(self, round: Round) -> Poll | None:
        """Ask clients for a number before the selection. Only the outermost poll is sent."""
        return None

    def answer(self, cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        """Answer the poll at the clients, with one number for each, `[k]`."""
        raise NotImplementedError

    def on_poll(self, replies: Replies) -> None:
        """Process the answers to the poll. There is at least one."""

    def select(self, round: Round, inner: Inner) -> Selection:
        """Return the clients of the round.

        This must be a pure function of the round and the state, since it is called several times.
        """
        return inner.select(round)

    def message(self, round: Round, message: Message) -> Message:
        """Return the message that replaces the algorithm's. Innermost first."""
        return message

    def move(self, round: Round, message: Message) -> Message:
        """Return the message after clients have exchanged layers before training."""
        return message

    def encode_down(self, round: Round, message: Message, inner: Inner) -> Message:
        """Return the coded message for the network. Innermost first."""
        return message

    def deploy(self, round: Round, clients: tuple[int, ...], message: Message) -> Message:
        """Return the message from which these clients personalise. Innermost first."""
        return message

    # --- at the clients ---

    def decode_down(self, round: Round, inbox: Message, inner: Inner) -> Message:
        """Return the inbox, decoded from the network's message. Outermost first."""
        return inbox

    def train(self, cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        """Train the clients: change the cohort or the inbox, call `inner.train`, and process the
        reply.
        """
        return inner.train(cohort, inbox)

    def personalise(self, cohort: Cohort, inbox: Message, inner: Inner) -> Tensor:
        """Return the model `[k, P]` that each client would use."""
        return inner.personalise(cohort, inbox)

    def corrupt(self, cohort: Cohort, inbox: Message, reply: Message, inner: Inner) -> Message:
        """Return the replies of malicious clients, in a simulation."""
        return reply

    def encode(self, cohort: Cohort, inbox: Message, reply: Message, inner: Inner) -> Message:
        """Return the coded reply for the network. Innermost first."""
        return reply

    # --- after training, on the server ---

    def expects(self, round: Round, specs: Specs) -> Specs:
        """Return the contents of replies.

        Args:
            round: The round.
            specs: The contents that the algorithm and the parts inside expect.
        """
        return specs

    def coded(self, round: Round, specs: Specs, inner: Inner) -> Specs:
        """Return the contents of coded replies, given the contents before coding."""
        return specs

    def decode(self, round: Round, specs: Specs, message: Message, inner: Inner) -> Message:
        """Return decoded replies. Outermost first.

        Args:
            round: The round.
            specs: Contents of the replies before coding.
            message: The coded replies.
            inner: The algorithm and the parts inside.
        """
        return message

    def exchange(self, round: Round, replies: Replies) -> Replies:
        """Return the replies after clients have exchanged layers before the upload, in a
        simulation.
        """
        return replies

    def close(self, exchange: Exchange, replies: Replies | None) -> Replies | None:
        """Return the replies for the server's step, or None if this round has no step."""
        return replies

    def observe(self, round: Round, replies: Replies) -> None:
        """Read the replies of the round."""

    def rewrite(self, round: Round, replies: Replies) -> Replies | None:
        """Return the replies that replace these, or None to skip the round. Outermost first."""
        return replies

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        """Return the aggregate of some replies that `release` needs."""
        raise NotImplementedError

    def release(self, round: Round, aggregate: Aggregate) -> Replies:
        """Return the replies that replace the ones in the aggregate. Only one part may read them
        (`private`).
        """
        raise NotImplementedError

    def integers(self, rows: Tensor, current: Tensor) -> Tensor:
        """Return the server's integer buffers, `[Z]`.

        Args:
            rows: Integer buffers of the replies, `[r, Z]`.
            current: The server's present buffers, `[Z]`.
        """
        raise NotImplementedError

    def mix(self, round: Round, algorithm: Algorithm) -> None:
        """Change the models after the server's step."""

    def follow(self, round: Round, model: Tensor) -> None:
        """Read the server's model `[P]` after the round."""

    def evaluated(self, model: Tensor) -> Tensor:
        """Return the model to evaluate in place of the server's model, `[P]`."""
        return model

    # --- accounting ---

    def account(self, round: Round, selection: Selection) -> None:
        """Count the resources that the round has used."""

    def report(self) -> dict[str, float]:
        """Return figures to record after every round."""
        return {}

    def require_resources(self) -> None:
        """Raise errors about missing libraries or impossible choices, before the first round."""

    @property
    def spent(self) -> bool:
        """True if no further round is allowed."""
        return False

    @property
    def releases_once(self) -> bool:
        """True if a round must not be repeated after a failure. Each round is then saved before the
        next begins.
        """
        return False


HOOKS = (
    "poll",
    "select",
    "message",
    "move",
    "encode_down",
    "deploy",
    "decode_down",
    "train",
    "personalise",
    "corrupt",
    "encode",
    "expects",
    "coded",
    "decode",
    "exchange",
    "close",
    "observe",
    "rewrite",
    "release",
    "integers",
    "mix",
    "follow",
    "evaluated",
    "account",
    "report",
)
"""Hooks in the order in which a round calls them."""


def hooks_of(kind: type[Part]) -> frozenset[str]:
    """Return the names of the hooks that a class of parts overrides."""
    return frozenset(name for name in HOOKS if overrides(kind, Part, (name,)))


def parts_of(method: Method) -> Iterator[Part]:
    """Yield the parts of an expression in the order of its text."""
    if isinstance(method, Part):
        yield method
    for inner in method._inner():
        yield from parts_of(inner)


def shared_trainable(inner: Inner) -> int:
    """Return the number of trainable parameters among the travelling columns of "model". They come
    first.
    """
    plan = inner.algorithm.plan
    trainable = plan.layout.trainable
    size = 0
    for columns in inner.algorithm.shared(plan.module, plan.layout):
        size += min(columns.stop, trainable) - min(columns.start, trainable)
    return size
