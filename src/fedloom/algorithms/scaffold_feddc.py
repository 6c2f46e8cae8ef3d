from typing import ClassVar

from fedloom.algorithm import Round, algorithms
from fedloom.algorithm.records import Message, Plan
from fedloom.algorithms.scaffold import Scaffold
from fedloom.algorithms.statistics import mean_size, relative_sizes
from fedloom.local.cohort import Cohort


@algorithms.register("scaffold_feddc")
class ScaffoldFedDC(Scaffold):
    """SCAFFOLD as FedDC's code computes it, for tables from that code.

    Clients are weighted by a_i = n_i / mean n: they receive c / a_i, and the server adds a_i (c_i+
    - c_i) / N. eta is the learning rate of round 1 in all rounds. Source: the code of FedDC (Gao et
    al. 2022).
    Use it only to reproduce these tables, otherwise `scaffold`.
    """

    sends: ClassVar[tuple[str, ...]] = ("model", "variate", "mean_size")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state["mean_size"] = mean_size(plan)

    def rate(self, round: Round) -> float:
        return round.initial_learning_rate

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        size = relative_sizes(cohort, inbox)
        reply = super().train(cohort, {**inbox, "variate": inbox["variate"] / size})
        return {**reply, "variate": reply["variate"].mul_(size)}
