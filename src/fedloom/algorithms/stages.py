from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm import (
    Algorithm,
    AnyClient,
    Exchange,
    Message,
    Plan,
    Replies,
    Selection,
    Wrapper,
    algorithms,
    server_model,
)
from fedloom.algorithms.statistics import divided
from fedloom.config.fields import Count, Probability
from fedloom.errors import InvalidValue
from fedloom.flat.layout import Unit
from fedloom.flat.population import weighted_mean
from fedloom.local.cohort import Cohort
from fedloom.round import Round

STAGE, HELD_OUT_LOSS = "@stage", "@held_out_loss"
"""Names in messages that no method can use."""

HELD_OUT = 0.1
"""Share of a client's samples that are held out in a stage that ends by itself."""

Stage = tuple[Algorithm, int | Literal["auto"] | None]
"""A method and its last round: a number, "auto", or None for the end of the run."""


@algorithms.register("stages")
class Stages(Wrapper):
    """Several methods in turn: `stages(fedavg:100, fedmr)` is two-stage FedMR-100.

    The number after a method's colon is its last round; the next method starts from the global model of that round.
    `stages(fedavg:auto, fedmr)` lets the run choose: an `auto` stage ends when the mean held-out loss of the models that it
    sends is not lower, by the share `improvement`, over the last `patience` rounds than over as many before. In such a stage
    each client holds out a tenth of its training samples (the same in every round), trains on the others, and returns the
    loss of the received model on the tenth. Source: FedMR, section 4.3 (two-stage training).
    Use it to let averaging learn the coarse model fast and recombination finish it, or to change between any methods.

    Args:
        stages: Methods with their last rounds; the last method runs to the end.
        patience: Rounds of a mean of held-out losses.
        improvement: Least relative decrease of that mean.
    """

    stages: list[Stage]
    patience: Count = 5
    improvement: Probability = 0.01

    method: Algorithm = field(init=False, repr=False, compare=False)  # of this round or, between two, of the next

    wraps: ClassVar[tuple[str, ...]] = ("stages", "method")
    variadic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = [end for _, end in self.stages]
        if not ends or None in ends[:-1]:
            raise InvalidValue("stages needs methods, all but the last with last rounds: stages(fedavg:100, fedmr)")
        if ends[-1] == "auto":
            raise InvalidValue("stages: the last method goes on to the end of the run, so it takes no :auto")
        if self.automatic and any(isinstance(p, Stages) and p.automatic for m in self.inner() for p in m.nested()):
            raise InvalidValue("stages: of stages inside each other only one may end by :auto")
        rounds = [0, *(end for end in ends if isinstance(end, int))]
        if rounds != sorted(set(rounds)):
            raise InvalidValue(f"stages: last rounds must grow from 1 on, not {', '.join(map(str, rounds[1:]))}")
        self.method = self.stages[0][0]

    def inner(self) -> list[Algorithm]:
        return [method for method, _ in self.stages]

    @property
    def automatic(self) -> bool:
        """True if the run chooses when some method ends."""
        return any(end == "auto" for _, end in self.stages)

    @property
    def scheduled(self) -> bool:
        return not self.automatic and super().scheduled

    @property
    def foreseeable(self) -> bool:
        return not self.automatic and super().foreseeable

    @property
    def personal(self) -> bool:
        return self.method.personal

    @property
    def one_model_each(self) -> bool:
        return bool(self.method.one_model_each)

    @property
    def updates_without_replies(self) -> bool:
        return bool(self.method.updates_without_replies)

    @property
    def reply_dtypes(self) -> Mapping[str, torch.dtype]:
        return self.method.reply_dtypes

    def active(self, number: int) -> Iterator[Algorithm]:
        yield self
        yield from self._leading(number).active(number)

    # --- the server half: the state is the stage's index and, where the run chooses, its last held-out losses ---

    def setup(self, plan: Plan) -> None:
        self.plan, self.state, self.method = plan, self._at(0), self.stages[0][0]
        for method in self.inner():
            method.setup(plan)
            fits = method.single_download and method.expects(plan.opening()).get("model") == (plan.layout.size,)
            if self.automatic and not fits:
                raise InvalidValue(f"stages: clients of {method} do not exchange one whole model, which :auto needs")

    def _at(self, stage: int) -> dict[str, Tensor]:
        """Return the state at the beginning of a stage."""
        state = {"stage": torch.tensor([stage])}
        return state | {"losses": torch.empty(0, dtype=torch.float64)} if self.automatic else state

    def restore(self, full: Mapping[str, Tensor]) -> None:
        super().restore(full)
        self.method = self.stages[int(self.state["stage"])][0]

    def _leading(self, number: int) -> Algorithm:
        """Return the method of round `number`; where the run chooses, the current one."""
        return self.method if self.automatic else self.stages[self._stage_of(number)][0]

    def _stage_of(self, number: int, since: int = 0) -> int:
        """Return the index of the first stage, from stage `since` on, that lasts until round `number`; else of the last one."""
        last = len(self.stages) - 1
        ends = ((k, self.stages[k][1]) for k in range(since, last))
        return next((k for k, end in ends if not isinstance(end, int) or number <= end), last)

    @property
    def _waits(self) -> bool:
        """Return True if the current stage ends when its loss stops improving."""
        return self.stages[int(self.state["stage"])][1] == "auto"

    def select(self, round: Round) -> Selection:
        return self._leading(round.number).select(round)

    def outgoing(self, round: Round, message: Message) -> Message:
        return message | {STAGE: self.state["stage"].unsqueeze(0)} if self.automatic else message

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        return self.outgoing(round, self.method.deploy(round, clients))

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {**self.method.expects(round), **({HELD_OUT_LOSS: ()} if self._waits else {})}

    def decoded(self, round: Round, tensors: Message) -> Message:
        # Workers, which decode too, have no state; stages that the run chooses return whole models, which are not encoded.
        return tensors if self.automatic else self._leading(round.number).decoded(round, tensors)

    def incoming(self, round: Round, replies: Replies) -> Replies:
        if not self._waits:
            return replies.inward()
        if len(replies):
            loss = weighted_mean(replies[HELD_OUT_LOSS].double(), replies.weights)
            self.state["losses"] = torch.cat([self.state["losses"], loss.reshape(1).cpu()])[-2 * self.patience :]
        return replies.inward({name: matrix for name, matrix in replies.matrices.items() if name != HELD_OUT_LOSS})

    @property
    def folds(self) -> bool:
        return not self._waits and super().folds

    def finish(self, round: Round, exchange: Exchange) -> None:
        super().finish(round, exchange)
        stage = int(self.state["stage"])
        over = self._waits and has_stopped_improving(self.state["losses"], self.patience, self.improvement)
        # A stage whose last round passed during an earlier one is skipped.
        if (successor := self._stage_of(round.number + 1, stage + over)) != stage:
            following = self.stages[successor][0]
            following.setup(replace(self.plan, initial=self.model().clone()))
            for method in following.nested():
                if isinstance(method, Stages):  # last rounds count from the first round of the run
                    method.state = method._at(method._stage_of(round.number + 1))
                    method.method = method._leading(round.number + 1)
            self.state, self.method = self._at(successor), following

    def diagnose(self) -> dict[str, float]:
        figures = super().diagnose() | ({"stage": float(self.state["stage"])} if self.automatic else {})
        # `pool_progress` is measured from the run's initial model, and a later stage begins with another.
        return {name: value for name, value in figures.items() if name != "pool_progress" or not self.state["stage"]}

    # --- the client half: the server sends the stage where the run chooses it ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        (method, end), message = self._read_stage(cohort, inbox)
        if end != "auto":
            return method.train(cohort, message)
        held_out, training = divided(cohort, "held_out", lambda count: max(1, round(HELD_OUT * count)))
        loss = held_out.loss(server_model(inbox))
        return method.train(training, message) | {HELD_OUT_LOSS: loss.to(inbox["model"].dtype)}

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        (method, _), message = self._read_stage(cohort, inbox)
        return method.personalise(cohort, message)

    def _read_stage(self, cohort: Cohort, inbox: Message) -> tuple[Stage, Message]:
        """Return the stage that a client is in, and the message without it."""
        stage = int(inbox[STAGE].max()) if self.automatic else self._stage_of(cohort.round.number)
        return self.stages[stage], {n: rows for n, rows in inbox.items() if n != STAGE or not self.automatic}

    def travels(self, cohort: Cohort | AnyClient) -> Unit:
        if self.automatic:
            return (slice(0, cohort.layout.size),)
        return self._leading(cohort.round.number).travels(cohort)

    def complete(self, cohort: Cohort, model: Tensor) -> Tensor:
        return model if self.automatic else self._leading(cohort.round.number).complete(cohort, model)


def has_stopped_improving(losses: Tensor, patience: int, improvement: float) -> bool:
    """Return True if the mean of the last `patience` losses is not lower, by the share `improvement`, than of those before."""
    if len(losses) < 2 * patience:
        return False
    older, newer = losses[-2 * patience :].chunk(2)
    return bool(newer.mean() >= (1 - improvement) * older.mean())
