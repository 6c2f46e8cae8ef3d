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
        """Train clients without the parts outside, and without coding their replies.

        Args:
            cohort: The clients, as the part has changed them.
            inbox: Decoded message, one row for all clients or one for each.

        Returns:
            The replies before coding, `[k, ...]` by name.
        """

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        """Return the models that clients would use without the parts outside.

        Args:
            cohort: The clients. Neither memory nor random streams may change.
            inbox: The message of `deploy`.

        Returns:
            The models, `[k, P]`.
        """

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
    reveals: ClassVar[str] = ""
    """Uploads that describe the samples without noise, which private parts refuse."""

    def setup(self, plan: Plan, inner: Inner) -> None:
        """Check and store the plan, and create the initial state. The parts inside are set up
        before.

        Args:
            plan: Description of the run; within stages, of the stage.
            inner: The algorithm and the parts inside.

        Raises:
            InvalidValue: The settings do not fit the plan.
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
        """Answer the poll at the clients.

        Args:
            cohort: The clients of the poll.
            inbox: The message for personalisation.
            inner: The algorithm and the parts inside.

        Returns:
            One number for each client, `[k]`, with the name `loss`.
        """
        raise NotImplementedError

    def on_poll(self, replies: Replies) -> None:
        """Process the answers to the poll. There is at least one."""

    def select(self, round: Round, inner: Inner) -> Selection:
        """Return the clients of the round.

        This must be a pure function of the round and the state, since it is called several times.

        Args:
            round: The round, with its random streams.
            inner: The algorithm and the parts inside.

        Returns:
            The clients in the order of their slots, with weights if they are not the sizes.
        """
        return inner.select(round)

    def message(self, round: Round, message: Message) -> Message:
        """Return the message that replaces the algorithm's. Innermost first.

        Args:
            round: The round.
            message: The message before this part.

        Returns:
            The message, one row for all clients or one for each.
        """
        return message

    def move(self, round: Round, message: Message) -> Message:
        """Return the message after clients have exchanged layers before training.

        Args:
            round: The round.
            message: The message with one model for each client.

        Returns:
            The message with the exchanged models.
        """
        return message

    def encode_down(self, round: Round, message: Message, inner: Inner) -> Message:
        """Return the coded message for the network. Innermost first.

        Args:
            round: The round.
            message: The message before coding.
            inner: The algorithm and the parts inside.

        Returns:
            The message as it travels to the clients.
        """
        return message

    def deploy(self, round: Round, clients: tuple[int, ...], message: Message) -> Message:
        """Return the message from which these clients personalise. Innermost first.

        Args:
            round: The next round, which may never begin.
            clients: The clients that personalise.
            message: The message before this part.

        Returns:
            The message, one row for all clients or one for each.
        """
        return message

    # --- at the clients ---

    def decode_down(self, round: Round, inbox: Message, inner: Inner) -> Message:
        """Return the inbox, decoded from the network's message. Outermost first.

        Args:
            round: The round.
            inbox: The message as it travels.
            inner: The algorithm and the parts inside.

        Returns:
            The message before coding, except for the loss of a lossy code.
        """
        return inbox

    def train(self, cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        """Train the clients: change the cohort or the inbox, call `inner.train`, and process the
        reply.

        Args:
            cohort: The clients.
            inbox: Decoded message.
            inner: The algorithm and the parts inside.

        Returns:
            The replies before coding, `[k, ...]` by name.
        """
        return inner.train(cohort, inbox)

    def personalise(self, cohort: Cohort, inbox: Message, inner: Inner) -> Tensor:
        """Return the model that each client would use.

        Args:
            cohort: The clients. Neither memory nor random streams may change.
            inbox: The message of `deploy`.
            inner: The algorithm and the parts inside.

        Returns:
            The models, `[k, P]`.
        """
        return inner.personalise(cohort, inbox)

    def corrupt(self, cohort: Cohort, inbox: Message, reply: Message, inner: Inner) -> Message:
        """Return the replies of malicious clients, in a simulation.

        Args:
            cohort: The clients, honest and malicious.
            inbox: Decoded message.
            reply: The honest replies, `[k, ...]` by name.
            inner: The algorithm and the parts inside.

        Returns:
            The replies, `[k, ...]` by name. Replies of honest clients stay unchanged.
        """
        return reply

    def encode(self, cohort: Cohort, inbox: Message, reply: Message, inner: Inner) -> Message:
        """Return the coded reply for the network. Innermost first.

        Args:
            cohort: The clients.
            inbox: Decoded message.
            reply: The replies before this code, `[k, ...]` by name.
            inner: The algorithm and the parts inside.

        Returns:
            The coded replies, `[k, ...]` by name.
        """
        return reply

    # --- after training, on the server ---

    def expects(self, round: Round, specs: Specs) -> Specs:
        """Return the contents of replies.

        Args:
            round: The round.
            specs: The contents that the algorithm and the parts inside expect.

        Returns:
            Shapes and types of the tensors in a reply, by name.
        """
        return specs

    def coded(self, round: Round, specs: Specs, inner: Inner) -> Specs:
        """Return the contents of coded replies, given the contents before coding.

        Args:
            round: The round.
            specs: Contents before this code.
            inner: The algorithm and the parts inside.

        Returns:
            Shapes and types of the tensors in a coded reply, by name.
        """
        return specs

    def decode(self, round: Round, specs: Specs, message: Message, inner: Inner) -> Message:
        """Return decoded replies. Outermost first.

        Args:
            round: The round.
            specs: Contents of the replies before coding.
            message: The coded replies.
            inner: The algorithm and the parts inside.

        Returns:
            The replies before coding, except for the loss of a lossy code.
        """
        return message

    def exchange(self, round: Round, replies: Replies) -> Replies:
        """Return the replies after clients have exchanged layers before the upload, in a
        simulation.

        Args:
            round: The round.
            replies: Decoded replies.

        Returns:
            The replies with the exchanged models.
        """
        return replies

    def close(self, exchange: Exchange, replies: Replies | None) -> Replies | None:
        """Return the replies for the server's step, or None if this round has no step.

        Args:
            exchange: Record of the round.
            replies: Decoded replies of the round; None without replies.

        Returns:
            Replies of this or earlier rounds.
        """
        return replies

    def observe(self, round: Round, replies: Replies) -> None:
        """Read the replies of the round.

        Args:
            round: The round.
            replies: The replies for the server's step, which must not be changed.
        """

    def rewrite(self, round: Round, replies: Replies) -> Replies | None:
        """Return the replies that replace these, or None to skip the round. Outermost first.

        Args:
            round: The round.
            replies: The replies for the server's step.

        Returns:
            New replies, for example with clipped updates.
        """
        return replies

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        """Return the aggregate of some replies that `release` needs.

        Args:
            round: The round.
            replies: Decoded replies of a block of slots.

        Returns:
            Sums over these replies. Aggregates of blocks are added later.
        """
        raise NotImplementedError

    def release(self, round: Round, aggregate: Aggregate) -> Replies:
        """Return the replies that replace the ones in the aggregate. Only one part may read them
        (`private`).

        Args:
            round: The round.
            aggregate: Sums of `fold` over all replies.

        Returns:
            The replies that the other parts and the algorithm receive.
        """
        raise NotImplementedError

    def integers(self, rows: Tensor, current: Tensor) -> Tensor:
        """Return the server's integer buffers.

        Args:
            rows: Integer buffers of the replies, `[r, Z]`.
            current: The server's present buffers, `[Z]`.

        Returns:
            Integer buffers, `[Z]`.
        """
        raise NotImplementedError

    def mix(self, round: Round, algorithm: Algorithm) -> None:
        """Change the models after the server's step.

        Args:
            round: The round.
            algorithm: The algorithm. Its state may be changed.
        """

    def follow(self, round: Round, model: Tensor) -> None:
        """Read the server's model after the round.

        Args:
            round: The round.
            model: The model, `[P]`. It must not be changed.
        """

    def evaluated(self, model: Tensor) -> Tensor:
        """Return the model to evaluate in place of the server's model, `[P]`."""
        return model

    # --- accounting ---

    def account(self, round: Round, selection: Selection) -> None:
        """Count the resources that the round has used.

        Args:
            round: The round.
            selection: The clients that took part.
        """

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
