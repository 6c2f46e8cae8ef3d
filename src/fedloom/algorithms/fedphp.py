from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm import Cohort, Facts, algorithms
from fedloom.algorithm.records import Message
from fedloom.algorithms.sharing import PartlyShared
from fedloom.common.fields import Probability
from fedloom.flat.module import Batch, Net

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)


@algorithms.register("fedphp")
class FedPHP(PartlyShared):
    """FedPHP: features are pulled towards the client's inherited model h, a moving average of its
    models.

    Clients minimise (1 - lambda) L_i(w) + lambda MMD^2(features of w, features of h), h frozen in
    evaluation mode, with MMD^2 = mean [k(x, x) + k(y, y) - 2 k(x, y)] and k = sum over a in {10,
    15, 20, 50} of exp(-d^2 / (2 a)). Afterwards h <- (1 - m) w + m h, statistics included, so that
    the first h is the first trained model; m = mu t / (participation * rounds), at most mu, with t
    the client's earlier rounds. Reconstructed from the description in FedALA and from PFLlib.
    Source: Li et al. 2021 (FedPHP); FedALA, appendix G.
    Use it when clients take part often enough to profit from a slowly moving personal model.

    Args:
        mu: Largest weight of the old h (FedALA: 0.9).
        transfer: lambda (FedALA: 0.01).
        deployed: The scored model: h (`history`) or the trained model (`local`, PFLlib).
    """

    mu: Probability = 0.9
    transfer: Probability = 0.01
    deployed: Literal["history", "local"] = "history"

    own_model: ClassVar[str] = "fedphp_history"
    base_facts = Facts(needs_total_rounds=True, initial="all")

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        history = cohort.memory.get(self.own_model, cohort.initial)
        options: dict[str, Any] = (
            {"loss_fn": self._loss, "context": {"history": history}} if self.transfer else {}
        )
        model = cohort.fit(start, **options).model
        cohort.memory[self.own_model] = torch.lerp(
            model, history, self._inherited(cohort).to(model).unsqueeze(1)
        )
        if self.deployed == "local":
            cohort.memory["fedphp_model"] = model
        return model

    def _inherited(self, cohort: Cohort) -> Tensor:
        """Return m, the weight of the old h in the new one, `[k]`, and count the participation."""
        round = cohort.round
        earlier = cohort.memory.get("fedphp_participations", torch.zeros(1, dtype=torch.int64))
        cohort.memory["fedphp_participations"] = earlier + 1
        expected = round.rounds * round.participants / round.clients
        return (self.mu * earlier.double() / expected).clamp(max=self.mu)

    def _loss(self, net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
        features, logits = net.both(batch.inputs)
        with torch.no_grad():
            inherited, _ = net.at(context["history"]).both(batch.inputs)
        distance = squared_mmd(features.flatten(1), inherited.flatten(1))
        return (1 - self.transfer) * net.objective.loss(
            logits, batch.labels
        ) + self.transfer * distance

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        name = self.own_model if self.deployed == "history" else "fedphp_model"
        return cohort.memory.get(name, self.complete(cohort, inbox["model"]))


def squared_mmd(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two samples, with Gaussian kernels of
    `BANDWIDTHS`.

    Args:
        x: First sample, `[n, d]`.
        y: Second sample, `[n, d]`.

    Returns:
        A scalar: the mean over all pairs, each point with itself included (the biased estimate).
    """

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        squared = (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(2)
        return sum(
            (torch.exp(-squared / (2 * bandwidth)) for bandwidth in BANDWIDTHS),
            torch.zeros_like(squared),
        )

    return (kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)).mean()
