import warnings
from typing import ClassVar

from torch import Tensor

from fedloom.algorithm import Cohort, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan
from fedloom.algorithms.sharing import PartlyShared
from fedloom.algorithms.statistics import require_constant_rate
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count, NonNegative, Positive
from fedloom.flat.module import Batch


@algorithms.register("pfedme")
class PFedMe(PartlyShared):
    """pFedMe: each client has a personal model theta near the minimum of l(theta) + (lambda / 2)
    ||theta - w||^2.

    Both start from the download. Per batch, `inner_steps` times theta <- theta - personal_rate
    (grad l(theta; b) + lambda (theta - w)), then w <- w - eta lambda (w - theta), with eta the
    learning rate of the round. w travels, theta is scored. Server: w <- (1 - beta) w + beta * mean
    of the clients' w, by samples. Steps are plain: momentum, weight decay and clipping of local
    training do not apply. If lambda eta is above 1, w overshoots and fedloom warns; at 2 or more w
    diverges and fedloom refuses the run.
    Source: T Dinh et al. 2020, algorithm 1; FedALA, appendix G.
    Use it when personal models should stay near a global one and clients can afford several
    gradients per batch.

    Args:
        regularisation: lambda (FedALA: 15).
        personal_rate: Learning rate of theta (FedALA: 0.01).
        inner_steps: Steps of theta for each batch (FedALA: 5).
        beta: Share of the clients' mean in the server's model (FedALA: 1).
        inner_weight_decay: Weight decay of theta (PFLlib: 0.001).
    """

    regularisation: NonNegative = 15.0
    personal_rate: Positive = 0.01
    inner_steps: Count = 5
    beta: Positive = 1.0
    inner_weight_decay: NonNegative = 0.0

    needs = (require_constant_rate,)
    own_model: ClassVar[str] = "pfedme_personal"
    base_facts = Facts(fits_once=False)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        share = self.regularisation * plan.training.rate(1, 1)
        product = f"pfedme: regularisation times learning rate is {share:g}"
        if share >= 2:
            raise InvalidValue(
                f"{product}: at 2 or more the local model diverges. Lower one of them"
            )
        if share > 1:
            warnings.warn(
                f"{product}: above 1 the local model overshoots in every step", stacklevel=2
            )

    def update(self, round: Round, aggregate: Aggregate) -> None:
        previous = self.state["model"]
        super().update(round, aggregate)
        if self.beta != 1:
            self.state["model"] = previous.lerp(self.state["model"], self.beta)

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        share = self.regularisation * cohort.round.learning_rate
        count = cohort.layout.trainable

        def step(state: dict[str, Tensor], batch: Batch) -> Tensor:
            local = state["local"][:, :count]
            personal = state["personal"][:, :count]
            for _ in range(self.inner_steps):
                loss, gradient = cohort.gradient(state["personal"], batch)
                gradient.add_(personal - local, alpha=self.regularisation)
                if self.inner_weight_decay:
                    gradient.add_(personal, alpha=self.inner_weight_decay)
                personal.sub_(gradient, alpha=self.personal_rate)
            local.sub_(local - personal, alpha=share)
            return loss

        state = {"local": start.clone(), "personal": start.clone()}
        cohort.metrics["training_loss"] = cohort.each_batch(step, state, pad=True)
        # Only the personal model has processed data, so the statistics are taken from it.
        state["local"][:, count:] = state["personal"][:, count:]
        cohort.memory[self.own_model] = state["personal"]
        return state["local"]
