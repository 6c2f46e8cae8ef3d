from typing import ClassVar

import torch

from fedloom.algorithm import Plan, Replies, Selection, Wrapper, algorithms, uniform
from fedloom.algorithms.private import Accounted
from fedloom.config.fields import Count
from fedloom.errors import InvalidValue
from fedloom.round import Round


@algorithms.register("power_of_choice")
class PowerOfChoice(Wrapper):
    """A method whose participants are the clients of highest loss among `candidates`, drawn by their numbers of samples.

    The loss of a client is the mean over the steps of its last local training (infinite before, 0 without a step), so that
    nothing is asked of the candidates; asking them anew would take a message before the selection. Replies weigh alike, since
    clients with more samples are drawn more often.
    Source: Cho et al. 2020, section 4 (rpow-d, whose losses are stale too).
    Use it when rounds are few and some clients lag behind; it biases the model towards them.

    Args:
        method: Method whose clients are chosen.
        candidates: Number of candidates d; none: twice as many as take part. As many as take part is sampling by size.
    """

    candidates: Count | None = None

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
        self.state["losses"] = torch.full((plan.clients,), torch.inf, dtype=torch.float64)

    def select(self, round: Round) -> Selection:
        count = min(self.candidates or 2 * round.participants, round.clients)
        sizes = self.plan.sizes(torch.arange(round.clients)).double()
        # The largest of log(u) / n are a draw without replacement by n (Efraimidis and Spirakis 2006).
        keys = torch.rand(round.clients, generator=round.stream("candidates"), dtype=torch.float64).log() / sizes
        candidates = keys.topk(count).indices
        order = self.state["losses"][candidates].argsort(descending=True, stable=True)
        clients = tuple(candidates[order[: round.participants]].tolist())
        return Selection(clients, weights=(1.0,) * len(clients))

    def receive(self, round: Round, replies: Replies) -> None:
        if "training_loss" in replies.metrics:
            losses = replies.metrics["training_loss"].nan_to_num(0)
            self.state["losses"] = self.state["losses"].index_copy(0, replies.clients, losses)
        super().receive(round, replies)
