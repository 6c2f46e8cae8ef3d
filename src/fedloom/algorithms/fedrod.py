from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import grad

from fedloom.algorithm import Cohort, Facts, algorithms
from fedloom.algorithm.records import Message, Plan
from fedloom.algorithms.linear_head import NEVER, Head, LinearHead, two_heads
from fedloom.algorithms.sharing import PartlyShared
from fedloom.algorithms.statistics import require_constant_rate
from fedloom.common.fields import NonNegative
from fedloom.flat.module import Batch, Net


@algorithms.register("fedrod")
class FedRoD(PartlyShared):
    """FedRoD: FedAvg on a balanced loss. Each client adds a private head psi to the global head and
    deploys their sum.

    With z the features of a batch and n_c the client's samples of class c, the model trains on
    CE(head(z) + gamma ln n_c, y) and psi, by plain SGD at the same rate, on CE(head(z) + psi(z), y)
    with head and z held fixed. psi starts as the initial head, as in PFLlib, and never travels. The
    global model has no psi.
    Source: Chen and Chao 2022 (FedRoD), section 4, with the linear private head; steps as in
    PFLlib.
    Use it when you need the global model and personal models and clients' classes are unbalanced.

    Args:
        gamma: Strength of the balance; 0 is the plain loss.
    """

    gamma: NonNegative = 1.0

    needs = (require_constant_rate,)
    base_facts = Facts(fits_once=False, initial="all")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        LinearHead.of(plan, "fedrod")

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        counts = cohort.label_counts.to(start)
        prior = torch.where(counts > 0, counts.clamp_min(1).log(), NEVER)
        rate = cohort.round.learning_rate
        weight, bias = (values.clone() for values in self._private(cohort))

        def balanced(net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
            features, logits = net.both(batch.inputs)
            fixed = features.detach()
            outputs = logits.detach()

            def private_loss(head: Head) -> Tensor:
                return net.objective.loss(outputs + fixed @ head[0].mT + head[1], batch.labels)

            head = context["weight"], context["bias"]
            for values, slope in zip(head, grad(private_loss)(head), strict=True):
                values.sub_(slope, alpha=rate)
            return net.objective.loss(logits + self.gamma * context["prior"], batch.labels)

        state = {"weight": weight, "bias": bias}
        model = cohort.fit(start, loss_fn=balanced, context={"prior": prior}, state=state).model
        cohort.memory["fedrod_weight"], cohort.memory["fedrod_bias"] = weight, bias
        return model

    def _private(self, cohort: Cohort) -> Head:
        weight, bias = LinearHead.of(cohort, "fedrod").get(cohort.initial)
        return cohort.memory.get("fedrod_weight", weight), cohort.memory.get("fedrod_bias", bias)

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        head = LinearHead.of(cohort, "fedrod")
        return head.put(model, two_heads(head.get(model), self._private(cohort)))
