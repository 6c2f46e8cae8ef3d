from typing import ClassVar

import torch

from fedloom.algorithm.method import Facts, algorithms
from fedloom.algorithm.records import Message, Plan, Replies, Selection
from fedloom.algorithms.statistics import divided
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count
from fedloom.common.round import Round
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Inner, Part, Poll


@algorithms.register("power_of_choice")
class PowerOfChoice(Part):
    """Biased selection: clients with the highest loss among `candidates`, drawn by their numbers of
    samples.

    Before each round the candidates receive the model that they would use, and return its loss on
    their samples; a candidate without an answer ranks last. Replies have equal weights, since
    clients with more samples are drawn more often. Traffic: the models of the candidates that do
    not take part, down, and one number per candidate, up. The simulated clock does not count the
    time of the answers.
    Source: Cho et al. 2020, section 4.
    Use it when rounds are few and some clients have much larger losses; it biases the model towards
    them.

    Args:
        method: Method that trains the selected clients.
        candidates: Number of candidates d; none: twice the number of participants. With d equal to
            the number of participants, clients are sampled by size.
        ask: Ask the candidates (pow-d). `false` takes the mean loss over the steps of their last
            training, which is infinite before and 0 without a step (rpow-d), so that no messages
            are needed.
        samples: Number of random samples on which a candidate computes its loss (cpow-d); none:
            all.
    """

    candidates: Count | None = None
    ask: bool = True
    samples: Count | None = None

    once: ClassVar[bool] = True
    facts = Facts(independent=False, foreseeable=False)

    def hooks(self) -> frozenset[str]:
        return super().hooks() - ({"observe"} if self.ask else {"poll"})

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        if self.candidates is not None and self.candidates < plan.participants:
            least = f"{plan.participants}, the number of participants"
            raise InvalidValue(
                f"power_of_choice: candidates must be at least {least}, not {self.candidates}"
            )
        if self.ask and plan.remote:
            raise InvalidValue(
                "power_of_choice: real sites cannot answer before a round: set ask=false"
            )
        self.state["losses"] = torch.full((plan.clients,), torch.inf, dtype=torch.float64)

    def drawn(self, round: Round) -> tuple[int, ...]:
        """Return the candidates of a round.

        Args:
            round: The round, with its random streams.

        Returns:
            Client numbers, drawn by size without replacement.
        """
        count = min(self.candidates or 2 * round.participants, round.clients)
        sizes = self.plan.sizes(torch.arange(round.clients)).double()
        # Taking the largest log(u) / n draws without replacement by n (Efraimidis and Spirakis
        # 2006).
        keys = (
            torch.rand(
                round.clients, generator=round.stream("candidates"), dtype=torch.float64
            ).log()
            / sizes
        )
        return tuple(keys.topk(count).indices.tolist())

    def poll(self, round: Round) -> Poll:
        return Poll(self, self.drawn(round))

    def answer(self, cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        sampled, _ = divided(cohort, "asked", lambda count: self.samples or count, lasting=False)
        return {"loss": sampled.loss(inner.personalise(cohort, inbox))}

    def on_poll(self, replies: Replies) -> None:
        silent = torch.full_like(self.state["losses"], -torch.inf)
        self.state["losses"] = silent.index_copy(0, replies.clients, replies["loss"].to(silent))

    def select(self, round: Round, inner: Inner) -> Selection:
        candidates = torch.tensor(self.drawn(round))
        order = self.state["losses"][candidates].argsort(descending=True, stable=True)
        clients = tuple(candidates[order[: round.participants]].tolist())
        return Selection(clients, weights=(1.0,) * len(clients))

    def observe(self, round: Round, replies: Replies) -> None:
        if "training_loss" in replies.metrics:
            losses = replies.metrics["training_loss"].nan_to_num(0)
            self.state["losses"] = self.state["losses"].index_copy(0, replies.clients, losses)
