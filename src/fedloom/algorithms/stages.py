"""Stages: one method after another on the same model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, Plan, Replies, Selection, algorithms
from fedloom.cohort import Cohort
from fedloom.errors import InvalidValue
from fedloom.layout import Unit
from fedloom.round import Round


@algorithms.register("stages")
@dataclass
class Stages(Algorithm):
    """Several methods in turn: `stages(fedavg:100, fedmr)` is two-stage FedMR-100.

    A method leads until its last round, which follows its colon; the next one starts from the global model that it leaves.
    Source: FedMR, section 4.3 (two-stage training).
    """

    stages: list[tuple[Algorithm, int | None]]

    wraps: ClassVar[tuple[str, ...]] = ("stages",)
    variadic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        lasts = [last for _, last in self.stages]
        if not lasts:
            raise InvalidValue("stages needs at least one method, such as stages(fedavg:100, fedmr)")
        if None in lasts[:-1]:
            raise InvalidValue(
                "stages: every method but the last needs its last round, such as stages(fedavg:100, fedmr)"
            )
        known = [0, *(last for last in lasts if last is not None)]
        if known != sorted(set(known)):
            raise InvalidValue(f"stages: last rounds must grow from 1 on, not {', '.join(map(str, known[1:]))}")

    def leading(self, number: int) -> Algorithm:
        """The method that leads round `number`; the last one also after its own last round."""
        for method, last in self.stages:
            if last is None or number <= last:
                return method
        return self.stages[-1][0]

    def setup(self, plan: Plan) -> None:
        self.plan = plan
        self.state = {"finished": torch.zeros(1, dtype=torch.int64)}
        for method in self.inner():
            method.setup(plan)

    def select(self, round: Round) -> Selection:
        return self.leading(round.number).select(round)

    def send(self, round: Round) -> Message:
        return self.leading(round.number).send(round)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return self.leading(round.number).expects(round)

    def receive(self, round: Round, replies: Replies) -> None:
        self.leading(round.number).receive(round, replies)

    def finish(self, round: Round) -> None:
        leading, following = self.leading(round.number), self.leading(round.number + 1)
        leading.finish(round)
        if following is not leading:
            following.setup(self.plan.starting_from(leading.model()))
        self.state["finished"].fill_(round.number)

    def model(self) -> Tensor:
        return self._present().model()

    def diagnose(self) -> dict[str, float]:
        return self._present().diagnose()

    def _present(self) -> Algorithm:
        return self.leading(int(self.state["finished"]) + 1)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return self.leading(cohort.round.number).train(cohort, inbox)

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        return self.leading(cohort.round.number).personalise(cohort, inbox)

    def travels(self, cohort: Cohort) -> Unit:
        return self.leading(cohort.round.number).travels(cohort)

    def complete(self, cohort: Cohort, model: Tensor) -> Tensor:
        return self.leading(cohort.round.number).complete(cohort, model)
