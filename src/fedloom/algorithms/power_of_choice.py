from collections.abc import Mapping
from typing import ClassVar

import torch

from fedloom.algorithm import Algorithm, Cohort, Message, Plan, Replies, Round, Selection, Wrapper, algorithms, uniform
from fedloom.algorithms.private import Accounted
from fedloom.algorithms.statistics import divided
from fedloom.config.fields import Count
from fedloom.errors import InvalidValue


@algorithms.register("power_of_choice")
class PowerOfChoice(Wrapper):
    """A method whose participants are the clients of highest loss among `candidates`, drawn by their numbers of samples.

    Before each round the candidates are sent the model that they would use, and answer its loss on their samples; who does not
    answer comes last. Replies weigh alike, since clients with more samples are drawn more often. Traffic: the models of those
    candidates that do not take part, down, and a number for each candidate, up; the simulated clock leaves out asking.
    Source: Cho et al. 2020, section 4.
    Use it when rounds are few and some clients lag behind; it biases the model towards them.

    Args:
        method: Method whose clients are chosen.
        candidates: Number of candidates d; none: twice as many as take part. As many as take part is sampling by size.
        ask: Ask the candidates (pow-d); false takes the mean loss over the steps of their last training, infinite before, 0
            without a step (rpow-d), so that nothing is asked.
        samples: Number of random samples on which a candidate takes its loss (cpow-d); none: all.
    """

    candidates: Count | None = None
    ask: bool = True
    samples: Count | None = None

    foreseeable: ClassVar[bool] = False

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        opening = plan.opening()
        for method in self.method.nested():
            if plan.poisson or method.select(opening) != Selection(uniform(opening)):
                raise InvalidValue(f"power_of_choice: {method} chooses its clients itself, or by chance")
            if isinstance(method, Accounted):
                raise InvalidValue(f"power_of_choice: losses of clients would pass by the privacy of {method}")
        if self.candidates is not None and self.candidates < plan.participants:
            least = f"{plan.participants}, the participants"
            raise InvalidValue(f"power_of_choice: candidates must be at least {least}, not {self.candidates}")
        if self.ask and plan.remote:
            raise InvalidValue("power_of_choice: sites are asked nothing before a round: give ask=false")
        self.state["losses"] = torch.full((plan.clients,), torch.inf, dtype=torch.float64)

    def drawn(self, round: Round) -> tuple[int, ...]:
        """Return the candidates of a round."""
        count = min(self.candidates or 2 * round.participants, round.clients)
        sizes = self.plan.sizes(torch.arange(round.clients)).double()
        # The largest of log(u) / n are a draw without replacement by n (Efraimidis and Spirakis 2006).
        keys = torch.rand(round.clients, generator=round.stream("candidates"), dtype=torch.float64).log() / sizes
        return tuple(keys.topk(count).indices.tolist())

    def question(self, round: Round) -> tuple[Algorithm, tuple[int, ...]] | None:
        question = LossQuestion(self.method, self.samples)
        question.plan, question.state = self.plan, {}
        return (question, self.drawn(round)) if self.ask else None

    def hear(self, replies: Replies) -> None:
        silent = torch.full_like(self.state["losses"], -torch.inf)
        self.state["losses"] = silent.index_copy(0, replies.clients, replies["loss"].to(silent))

    def select(self, round: Round) -> Selection:
        candidates = torch.tensor(self.drawn(round))
        order = self.state["losses"][candidates].argsort(descending=True, stable=True)
        clients = tuple(candidates[order[: round.participants]].tolist())
        return Selection(clients, weights=(1.0,) * len(clients))

    def receive(self, round: Round, replies: Replies) -> None:
        if not self.ask and "training_loss" in replies.metrics:
            losses = replies.metrics["training_loss"].nan_to_num(0)
            self.state["losses"] = self.state["losses"].index_copy(0, replies.clients, losses)
        super().receive(round, replies)


class LossQuestion(Wrapper):
    """What clients are asked: the loss of the model that each would use, on `samples` of its samples or on all."""

    samples: Count | None = None

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"loss": ()}

    def returns_whole(self, round: Round) -> bool:
        return False

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        asked, _ = divided(cohort, "asked", lambda count: self.samples or count, lasting=False)
        return {"loss": asked.loss(self.method.personalise(cohort, inbox))}
