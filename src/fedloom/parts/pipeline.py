"""The pipeline of a round: one algorithm, and the parts around it in the order of the text."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, as_spec, is_personal, overrides
from fedloom.algorithm.method import Method
from fedloom.algorithm.records import (
    INTEGERS,
    NOTHING,
    Aggregate,
    Exchange,
    Message,
    Plan,
    Replies,
    Selection,
    Specs,
    TensorSpec,
    block_slots,
    merged_integers,
    uniform,
)
from fedloom.algorithms.sharing import complement, put, take
from fedloom.common.round import Round
from fedloom.flat.layout import Unit
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import HOOKS, Part

STAGE = "@stage"
"""Name in a message of the stage and its first round, `[1, 2]`, if the run chooses the end of a
stage.
"""

INITIAL = "@initial"
"""Name in a message of the columns that clients take from the initial model of their stage."""

Work = Callable[[Cohort, Message], Message]
"""A function from a cohort and its inbox to its replies."""

Watch = Callable[[Work, Cohort, Message], Message]
"""Called instead of a client's work, with the work, the cohort and the inbox."""


class Pipeline:
    """Runs the moments of a round: calls each hook of the parts in the right order.

    Attributes:
        algorithm: The algorithm.
        parts: The parts around it, outermost first.
        stage: If messages contain the stage, its number and the number of parts outside the stages;
            otherwise None.
        number: The round of the pipeline, if pipelines differ between rounds.
        following: Returns the pipeline of another round, on the server.
        around: The part outside this pipeline, if any.
        watch: Observes the work of clients in this process.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        parts: Sequence[Part] = (),
        stage: tuple[int, int] | None = None,
        number: int = 0,
        following: "Callable[[int], Pipeline] | None" = None,
        around: Part | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.parts = tuple(parts)
        self.stage = stage
        self.number = number
        self.following = following
        self.around = around
        self.watch: Watch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Omit derived attributes and those for the server."""
        return Pipeline, (self.algorithm, self.parts, self.stage, self.number)

    def __str__(self) -> str:
        return str(self.parts[0] if self.parts else self.algorithm)

    @property
    def plan(self) -> Plan:
        """The plan of the run or, within stages, the plan of the stage."""
        return self.algorithm.plan

    def components(self) -> Iterator[Method]:
        """Yield the parts and the algorithm."""
        yield from self.parts
        yield self.algorithm

    def inside(self, part: Part) -> "Pipeline":
        """Return the pipeline of the algorithm and the parts inside `part`, or this pipeline if it
        does not contain the part.
        """
        return self._inside.get(id(part), self)

    @cached_property
    def _inside(self) -> "dict[int, Pipeline]":
        inside = {}
        for k, part in enumerate(self.parts):
            stage = None
            if self.stage is not None and self.stage[1] > k:
                stage = self.stage[0], self.stage[1] - k - 1
            parts = self.parts[k + 1 :]
            inner = Pipeline(self.algorithm, parts, stage, self.number, self.following, part)
            inside[id(part)] = inner
        return inside

    @cached_property
    def acting(self) -> dict[str, list[Part]]:
        """The parts that act in each hook, outermost first."""
        acting: dict[str, list[Part]] = {name: [] for name in HOOKS}
        for part in self.parts:
            for name in part.hooks():
                acting[name].append(part)
        return acting

    # --- facts ---

    @property
    def one_model_each(self) -> bool:
        """True if every selected client receives a different model."""
        return bool(self.algorithm.facts.one_model_each)

    @property
    def foreseeable(self) -> bool:
        """True if the next selection is known before this round's replies."""
        return all(method.facts.foreseeable for method in self.components())

    @property
    def unstackable(self) -> Method | None:
        """The component that trains one client at a time, or None."""
        return next((method for method in self.components() if not method.facts.stackable), None)

    @property
    def personal(self) -> bool:
        """True if clients can use other models than the received model."""
        parts = self.acting["personalise"] or self.acting["deploy"]
        return is_personal(self.algorithm) or bool(parts)

    @property
    def waits(self) -> bool:
        """True if a round ends before all replies have arrived."""
        return bool(self.acting["close"])

    @property
    def step_replies(self) -> int | None:
        """Number of replies for a step of the server, or None if a round waits for all replies."""
        return next((int(getattr(part, "k", 1)) for part in self.acting["close"]), None)

    @property
    def spent(self) -> bool:
        """True if no further round is allowed."""
        return any(part.spent for part in self.parts)

    @property
    def releases_once(self) -> bool:
        """True if a round must not be repeated after a failure."""
        return any(part.releases_once for part in self.parts)

    @property
    def folds(self) -> bool:
        """True if replies can be folded as they arrive, so that they need not all be stored."""
        if self.acting["release"]:
            return True
        reading = ("exchange", "close", "observe", "rewrite")
        reads = any(self.acting[hook] for hook in reading)
        return not reads and not overrides(type(self.algorithm), Algorithm, ("receive",))

    @property
    def block_size(self) -> int:
        """Number of consecutive slots in one matrix of replies."""
        return block_slots(self.plan.layout.row_bytes) if self.folds else sys.maxsize

    # --- the round on the server ---

    def select(self, round: Round) -> Selection:
        """Return the clients of a round. The round can be a later one."""
        pipeline = self._of_round(round.number)
        for part in pipeline._selecting:
            return part.select(round, pipeline._after(part))
        return Selection(uniform(round))

    @cached_property
    def _selecting(self) -> list[Part]:
        """The parts that select, in the order of calls. A sampler chooses before other parts add
        clients.
        """
        return sorted(self.acting["select"], key=lambda part: not part.facts.independent)

    def _after(self, part: Part) -> "Pipeline":
        """Return the selection without `part` and the selecting parts outside of it."""
        k = next(k for k, other in enumerate(self._selecting) if other is part)
        parts = self._selecting[k + 1 :]
        return Pipeline(self.algorithm, parts, None, self.number, self.following, part)

    def _of_round(self, number: int) -> "Pipeline":
        if self.following is None or number == self.number:
            return self
        later = self.following(number)
        if self.around is None:
            return later
        if any(part is self.around for part in later.parts):
            return later._after(self.around)
        return self

    def open(self, round: Round, selection: Selection) -> Exchange:
        """Return the record of a round with its messages: from the algorithm, after moves, and as
        they travel.

        Args:
            round: The round.
            selection: Its clients.

        Returns:
            The record. All parts read it, and the federation sends its `wire`.
        """
        sent = dict(self.algorithm.send(round))
        moved = self._with_stage(sent)
        for part in reversed(self.acting["message"]):
            moved = part.message(round, moved)
        if selection.receivers is not None:
            moved = self._with_idle_row(round, moved)
        for part in reversed(self.acting["move"]):
            moved = part.move(round, moved)
        wire = dict(moved)
        for part in reversed(self.acting["encode_down"]):
            wire = part.encode_down(round, wire, self.inside(part))
        return Exchange(round, selection, sent, moved, wire)

    def _with_stage(self, message: Message) -> Message:
        """Add the data about their stage that clients need."""
        if self.stage is not None:
            began = self.plan.first_round
            message = {**message, STAGE: torch.tensor([[self.stage[0], began]])}
        if self.plan.first_round > 1 and (unit := self._initial_unit):
            message = {**message, INITIAL: take(self.plan.initial.unsqueeze(0), unit)}
        return message

    @cached_property
    def _initial_unit(self) -> Unit:
        """The columns that clients take from the initial model of the method."""
        kind = self.algorithm.facts.initial
        layout = self.plan.layout
        if kind == "private":
            return complement(self.algorithm.shared(self.plan.module, layout), layout)
        return (slice(0, layout.size),) if kind == "all" else ()

    def _without_stage(self, cohort: Cohort, inbox: Message) -> Message:
        """Remove the data about the stage from the inbox and apply it to the cohort."""
        if INITIAL in inbox:
            rows = cohort.initial
            cohort.start_from(put(rows, self._initial_unit, inbox[INITIAL][:1]))
        return {name: rows for name, rows in inbox.items() if name not in (STAGE, INITIAL)}

    def _with_idle_row(self, round: Round, message: Message) -> Message:
        """Add a row with the global model for idle clients, if each client receives a different
        model.
        """
        model = message.get("model")
        if model is None or (
            len(model) == 1 and not (self.one_model_each and len(round.selected) == 1)
        ):
            return message
        rows = self.plan.empty_rows(len(model) + 1)
        torch.cat([model, self.algorithm.model().unsqueeze(0)], out=rows)
        return {**message, "model": rows}

    def expected(self, round: Round) -> dict[str, TensorSpec]:
        """Return the contents of a reply as it travels.

        Integer buffers, such as batch norm's counters, travel only with whole models.
        """
        specs = self._specs(round)
        for part in self._coders:
            specs = part.coded(round, specs, self.inside(part))
        integers = self.plan.layout.integers
        if integers and self.returns_whole(round):
            return {**specs, INTEGERS: TensorSpec((integers,), torch.int64)}
        return dict(specs)

    def expected_names(self, round: Round) -> set[str]:
        """Return the names of the tensors in a reply before coding."""
        return set(self._specs(round))

    def returns_whole(self, round: Round) -> bool:
        """Return True if a reply contains a whole model. Integer buffers then travel with it."""
        layout = self.plan.layout
        model = self.algorithm.expects(round).get("model")
        return model is not None and as_spec(model, layout).shape == (layout.size,)

    def _specs(self, round: Round) -> Specs:
        layout = self.plan.layout
        expects = self.algorithm.expects(round).items()
        specs: Specs = {name: as_spec(value, layout) for name, value in expects}
        for part in reversed(self.acting["expects"]):
            specs = part.expects(round, specs)
        return specs

    @cached_property
    def _coders(self) -> list[Part]:
        """The parts that code replies, in the order of coding: noise first, otherwise innermost
        first.
        """
        coders = list(reversed(self.acting["encode"]))
        return sorted(coders, key=lambda part: "coded" in part.hooks())

    def decoded(self, round: Round, message: Message) -> Message:
        """Return the decoded contents of replies, with updates instead of models.

        Args:
            round: The round.
            message: Replies as they travel, `[r, ...]` by name.

        Returns:
            Replies before coding. After a code, "model" is w - w_t.
        """
        if not self.acting["decode"]:
            return message
        specs = self._specs(round)
        chain = []
        for part in self._coders:
            chain.append((part, specs))
            specs = part.coded(round, specs, self.inside(part))
        for part, before in reversed(chain):
            if "decode" in part.hooks():
                message = part.decode(round, before, message, self.inside(part))
        return message

    def _decoded(self, round: Round, replies: Replies) -> Replies:
        if not self.acting["decode"] or not len(replies):
            return replies
        coded = "model" not in replies.matrices
        matrices = dict(self.decoded(round, dict(replies.matrices)))
        if coded and "model" in matrices:
            matrices["model"] += replies.received_by_slot("model")
        return replies.with_matrices(matrices)

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        """Return the aggregate of some replies for the server's step.

        Args:
            round: The round.
            replies: Replies of a block of slots, as they travel.

        Returns:
            Sums over these replies.
        """
        replies = self._decoded(round, replies)
        for part in self.acting["release"]:
            return part.fold(round, replies)
        return self.algorithm.fold(round, replies)

    def close(self, exchange: Exchange, outcome: Replies | Aggregate | None) -> None:
        """Make the server's step.

        Args:
            exchange: Record of the round.
            outcome: The replies, or their aggregate if they were folded; None without replies.
        """
        round = exchange.round
        if self.acting["release"]:
            self._release(exchange, outcome)
        elif isinstance(outcome, Aggregate):
            self.algorithm.update(round, replace(outcome, exchange=exchange))
        else:
            self._step(exchange, outcome)

    def _release(self, exchange: Exchange, outcome: Replies | Aggregate | None) -> None:
        (part,) = self.acting["release"]
        if isinstance(outcome, Replies):
            blocks = outcome.blocks(self.block_size)
            folded = (self.fold(exchange.round, block) for block in blocks)
            outcome = reduce(Aggregate.joined, folded, NOTHING)
        aggregate = replace(outcome or NOTHING, exchange=exchange)
        self._receive(exchange.round, part.release(exchange.round, aggregate))

    def _step(self, exchange: Exchange, outcome: Replies | None) -> None:
        round = exchange.round
        replies = outcome
        if replies is not None:
            replies = self._decoded(round, replies)
            for part in self.acting["exchange"]:
                replies = part.exchange(round, replies)
        for part in self.acting["close"]:
            replies = part.close(exchange, replies)
        if replies is not None:
            for part in reversed(self.acting["observe"]):
                part.observe(round, replies)
            self._receive(round, replies)

    def _receive(self, round: Round, replies: Replies) -> None:
        rewritten: Replies | None = replies
        for part in self.acting["rewrite"]:
            if rewritten is not None:
                rewritten = part.rewrite(round, rewritten)
        if rewritten is not None:
            self.algorithm.receive(round, rewritten)

    def finish(self, exchange: Exchange) -> None:
        """End a round, with or without replies: mix models and count used resources."""
        for part in reversed(self.acting["mix"]):
            part.mix(exchange.round, self.algorithm)
        for part in reversed(self.acting["follow"]):
            part.follow(exchange.round, self.algorithm.model())
        for part in reversed(self.acting["account"]):
            part.account(exchange.round, exchange.selection)

    def merge_integers(self, rows: Tensor, current: Tensor) -> Tensor:
        """Return the server's integer buffers.

        Args:
            rows: Integer buffers of the replies, `[r, Z]`.
            current: The server's present buffers, `[Z]`.

        Returns:
            Integer buffers, `[Z]`.
        """
        for part in self.acting["integers"]:
            return part.integers(rows, current)
        return merged_integers(rows, current)

    def model(self) -> Tensor:
        """Return the global model to evaluate and to deploy, `[P]`."""
        model = self.algorithm.model()
        for part in reversed(self.acting["evaluated"]):
            model = part.evaluated(model)
        return model

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        """Return the message from which clients personalise before `round`.

        Args:
            round: The round that follows the present state of the server.
            clients: The clients that personalise.

        Returns:
            The message, one row for all clients or one for each.
        """
        message = self._with_stage(dict(self.algorithm.deploy(round, clients)))
        model = message.get("model")
        whole = model is not None and model.shape == (1, self.plan.layout.size)
        if self.acting["evaluated"] and whole:
            message["model"] = self.model().unsqueeze(0)
        for part in reversed(self.acting["deploy"]):
            message = part.deploy(round, clients, message)
        return message

    def diagnose(self) -> dict[str, float]:
        """Return figures about the server's state."""
        figures = dict(self.algorithm.diagnose())
        for part in reversed(self.parts):
            figures |= part.diagnose()
        return figures if self.stage is None else figures | {"stage": float(self.stage[0])}

    def report(self) -> dict[str, float]:
        """Return figures to record after every round."""
        figures: dict[str, float] = {}
        for part in reversed(self.acting["report"]):
            figures |= part.report()
        return figures

    def state(self) -> dict[str, Tensor]:
        """Return the state of all components by position, for a worker that folds replies."""
        return {
            f"{k}.{name}": tensor
            for k, method in enumerate(self.components())
            for name, tensor in method.state.items()
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore a state that `state` returned."""
        for k, method in enumerate(self.components()):
            prefix = f"{k}."
            names = [name for name in state if name.startswith(prefix)]
            method.state = {name.removeprefix(prefix): state[name] for name in names}

    # --- the clients ---

    def work(self, cohort: Cohort, inbox: Message) -> Message:
        """Return the replies of a cohort to a message: decode, train, corrupt and encode.

        Args:
            cohort: The clients.
            inbox: The message as it travels, one row for all clients or one for each.

        Returns:
            The replies as they travel, `[k, ...]` by name.
        """
        if self.watch is not None:
            return self.watch(self._work, cohort, inbox)
        return self._work(cohort, inbox)

    def _work(self, cohort: Cohort, inbox: Message) -> Message:
        received = self._without_stage(cohort, inbox)
        for part in self.acting["decode_down"]:
            received = part.decode_down(cohort.round, received, self.inside(part))
        reply = self.train(cohort, received)
        for part in reversed(self.acting["corrupt"]):
            reply = part.corrupt(cohort, received, reply, self.inside(part))
        for part in self._coders:
            reply = part.encode(cohort, received, reply, self.inside(part))
        return reply

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        """Train a cohort and return its replies before coding.

        Args:
            cohort: The clients.
            inbox: Decoded message.

        Returns:
            The replies, `[k, ...]` by name.
        """
        for part in self.acting["train"]:
            return part.train(cohort, inbox, self.inside(part))
        return self.algorithm.train(cohort, inbox)

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        """Return the model that each client would use.

        Args:
            cohort: The clients.
            inbox: The message of `deploy`.

        Returns:
            The models, `[k, P]`.
        """
        inbox = self._without_stage(cohort, inbox)
        for part in self.acting["personalise"]:
            return part.personalise(cohort, inbox, self.inside(part))
        return self.algorithm.personalise(cohort, inbox)
