from typing import Any, ClassVar

from torch import Tensor

from fedloom.algorithm import Facts, Round
from fedloom.algorithm.records import Plan, Replies
from fedloom.algorithms.sharing import PartlyShared, require_everybody, take


class EveryModel(PartlyShared):
    """Base of methods with a server that stores the last model of each client, `models [N, m]`. All
    clients take part in every round.
    """

    needs: ClassVar[Any] = (require_everybody,)
    base_facts = Facts(averages=False)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        initial = take(plan.initial.unsqueeze(0), self._unit)
        # A view, which needs no memory until the first models arrive.
        self.state = {"initial": plan.initial.clone(), "models": initial.expand(plan.clients, -1)}

    def receive(self, round: Round, replies: Replies) -> None:
        models = self.state["models"].clone()
        models[replies.clients] = replies["model"]
        self.state["models"] = models

    def model(self) -> Tensor:
        return self.whole(self.state["initial"], self.state["models"].mean(0))
