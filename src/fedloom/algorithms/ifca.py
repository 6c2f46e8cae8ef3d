from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Cohort, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan, Replies, TensorSpec
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count
from fedloom.common.randomness import global_stream
from fedloom.models.structure import drawn_again


@algorithms.register("ifca")
class IFCA(Algorithm):
    """Iterative federated clustering: a client takes the model of lowest loss on its training
    samples, trains and uploads it.

    Each of the k models becomes the unweighted mean of the models trained from it; a model without
    clients stays unchanged. The first starts as the initial model, the others from other random
    weights of its layers. A client deploys the model that fits its training samples best; the
    global model is the mean of the k by the number of clients that chose each in the last round.
    Traffic: k models down, one up. Source: Ghosh et al. 2020, algorithm 1.
    Use it when clients fall into a few groups with contradictory data.

    Args:
        k: Number of models; 1 is FedAvg with equal weights.
    """

    k: Count = 2

    sends: ClassVar[tuple[str, ...]] = ("models",)
    facts = Facts(one_download=False, fits_once=False, averages=False)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        if self.k > plan.clients:
            raise InvalidValue(f"ifca: k must be at most the {plan.clients} clients, not {self.k}")
        models = [plan.initial]
        for number in range(1, self.k):
            with global_stream(plan.seed, f"ifca {number}"):
                module = drawn_again(plan.module)
            models.append(plan.layout.flatten(module).to(plan.initial))
        self.state = {
            "models": torch.stack(models),
            "chosen": torch.ones(self.k, dtype=torch.int64),
        }

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        return self.send(round)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...] | TensorSpec]:
        return {"model": (self.plan.layout.size,), "choice": TensorSpec((), torch.int64)}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        choice = replies["choice"]
        members = torch.arange(self.k, device=choice.device).unsqueeze(1) == choice
        total = {
            "models": (members.to(replies["model"]) @ replies["model"]),
            "chosen": members.sum(1),
        }
        return replies.aggregate(
            mean={}, total={name: rows.unsqueeze(0) for name, rows in total.items()}
        )

    def update(self, round: Round, aggregate: Aggregate) -> None:
        models = aggregate.total["models"]
        chosen = aggregate.total["chosen"]
        counts = chosen.to(models).unsqueeze(1)
        models = torch.where(counts > 0, models / counts.clamp_min(1), self.state["models"])
        self.state = {"models": models, "chosen": chosen}

    def model(self) -> Tensor:
        models = self.state["models"]
        chosen = self.state["chosen"]
        return (chosen.to(models) / chosen.sum()) @ models

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        choice, start = _best(cohort, inbox["models"])
        return {"model": cohort.fit(start).model, "choice": choice}

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        return _best(cohort, inbox["models"])[1]


def _best(cohort: Cohort, models: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each client the model of lowest training loss of `[c, k, P]`: its index, `[c]`,
    and the model, `[c, P]`.
    """
    choice = torch.stack([cohort.loss(rows) for rows in models.unbind(1)], 1).argmin(1)
    return choice, models[torch.arange(len(choice)), choice]
