from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Cohort, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan, Replies
from fedloom.algorithms.linear_head import LinearHead, nearest_prototype
from fedloom.common.fields import NonNegative
from fedloom.flat.module import Batch, Net


@algorithms.register("fedproto")
class FedProto(Algorithm):
    """FedProto: private models, pulled towards prototypes: the mean features of each class over
    clients.

    Clients minimise L_i + lambda mean over batch and dimensions of (z - p_y)^2, upload the mean
    features of their classes after training (one additional pass, in evaluation mode) and their
    counts. p_c becomes the mean over the clients that have class c; it stays unchanged if no client
    has. A client deploys its own base with the nearest prototype, or its own head. Only prototypes
    and counts travel, so the global model is the untrained initial model with the nearest
    prototype.
    Source: Tan et al. 2022 (FedProto), algorithm 1.
    Use it when weights must not travel, or traffic must be small.

    Args:
        strength: lambda (authors: 1); 0 with `by = "head"` is local training.
        weighted: Weight clients by their samples of the class (paper), not equally (authors' code).
        by: The classifier: the nearest `prototype`, or the client's own `head`.
    """

    strength: NonNegative = 1.0
    weighted: bool = False
    by: Literal["prototype", "head"] = "prototype"

    sends: ClassVar[tuple[str, ...]] = ("prototypes", "present")
    facts = Facts(
        one_download=False, fits_once=False, averages=False, deploys="memory", initial="all"
    )

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.head = LinearHead.of(plan, "fedproto")
        zeros = plan.initial.new_zeros
        self.state |= {
            "prototypes": zeros(plan.classes, self.head.features),
            "present": zeros(plan.classes),
        }

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        return self.send(round)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"means": (self.plan.classes, self.head.features), "counts": (self.plan.classes,)}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        weights = (
            replies["counts"] if self.weighted else (replies["counts"] > 0).to(replies["counts"])
        )
        return replies.aggregate(
            mean={}, total={"sums": weights.unsqueeze(2) * replies["means"], "weights": weights}
        )

    def update(self, round: Round, aggregate: Aggregate) -> None:
        self.state |= with_means(self.state, aggregate)

    def model(self) -> Tensor:
        return self._classifying(
            self.head, self.state["model"].unsqueeze(0), self.send(self.plan.opening())
        )[0]

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        start = cohort.memory.get("fedproto_model", cohort.initial)
        model = cohort.fit(start, loss_fn=partial(pulled_loss, self.strength), context=inbox).model
        cohort.memory["fedproto_model"] = model
        return {
            "means": cohort.class_means(cohort.features(model)),
            "counts": cohort.label_counts.to(model),
        }

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        model = cohort.memory.get("fedproto_model", cohort.initial)
        head = LinearHead.of(cohort, "fedproto")
        return model if self.by == "head" else self._classifying(head, model, inbox)

    @staticmethod
    def _classifying(head: LinearHead, rows: Tensor, inbox: Message) -> Tensor:
        """Return `rows [k, P]` with the nearest prototypes as the head; rows without prototypes
        stay unchanged.
        """
        present = inbox["present"] > 0
        folded = head.put(rows, nearest_prototype(inbox["prototypes"], present))
        return torch.where(present.any(1, keepdim=True), folded, rows)


def with_means(state: Message, aggregate: Aggregate) -> Message:
    """Return the prototypes after a round.

    Args:
        state: The prototypes before it: `prototypes [Y, d]` and `present [Y]`.
        aggregate: Totals `sums [Y, d]` and `weights [Y]`. A class of weight 0 stays unchanged.

    Returns:
        New `prototypes [Y, d]`, and `present [Y]`: 1 for classes that had a prototype or have one
        now.
    """
    weights = aggregate.total["weights"].unsqueeze(1)
    prototypes = torch.where(
        weights > 0, aggregate.total["sums"] / weights.clamp_min(1), state["prototypes"]
    )
    return {
        "prototypes": prototypes,
        "present": torch.maximum(state["present"], (weights[:, 0] > 0).to(prototypes)),
    }


def pulled_loss(strength: float, net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
    """Return the data loss plus strength times the mean over the batch and over dimensions of (z -
    p_y)^2.

    Args:
        strength: Weight of the term.
        net: The model. Its features are z.
        batch: The samples.
        context: `prototypes [Y, d]` and `present [Y]`, 0 for a class without a prototype. Samples
            of such a class add 0.

    Returns:
        The loss of the batch, a scalar.
    """
    features, logits = net.both(batch.inputs)
    distance = (features - context["prototypes"][batch.labels]).square()
    pull = (distance * context["present"][batch.labels].unsqueeze(-1)).mean()
    return net.objective.loss(logits, batch.labels) + strength * pull
