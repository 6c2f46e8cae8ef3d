from typing import Literal

from torch import Tensor

from fedloom.algorithm import Algorithm, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan, Replies, server_model
from fedloom.algorithms.sharpness import direction, gradient_ahead
from fedloom.common.fields import NonNegative
from fedloom.flat.module import Batch
from fedloom.local.cohort import Cohort, Context


@algorithms.register("fedlesam")
class FedLESAM(Algorithm):
    """FedLESAM: the gradient is taken at w + e with e = rho (v_i - w_t) / ||v_i - w_t||, the
    direction of the server's steps since v_i.

    v_i is the model that the client received when it last took part; the first time, e = 0. e stays
    the same in a round, so a step costs one pass. Models are averaged with equal weights. With rho
    0 this is FedAvg with equal weights. All public implementations, including the authors',
    compute another e (each tensor is shifted by one constant), so published figures do not show
    this method.
    Source: Fan et al. 2024, algorithm 1.
    Use it like `fedsam` where two passes for each step are too slow.

    Args:
        rho: Size of the perturbation (authors' code: 0.1).
        previous: v_i: the model of the client's last `participation`, which it stores, or of the
            last `round`, which the server sends (two vectors down).
    """

    rho: NonNegative = 0.1
    previous: Literal["participation", "round"] = "participation"

    facts = Facts(anonymous=True, fits_once=False)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        if self.previous == "round":
            self.state["previous"] = plan.initial[: plan.layout.trainable].clone()

    def send(self, round: Round) -> Message:
        names = ("model", "previous") if self.previous == "round" else ("model",)
        return {name: self.state[name].unsqueeze(0) for name in names}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        return replies.aggregate(weighted=False)

    def update(self, round: Round, aggregate: Aggregate) -> None:
        if self.previous == "round":
            self.state["previous"] = self.state["model"][: self.plan.layout.trainable].clone()
        super().update(round, aggregate)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        sent = server_model(inbox)[:, : cohort.layout.trainable]
        if self.previous == "round":
            earlier = inbox["previous"]
        else:
            earlier = cohort.memory.get("fedlesam_received", sent)
            cohort.memory.write("fedlesam_received", sent.clone(), cohort.uploads)

        def gradient_fn(rows: Tensor, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
            return gradient_ahead(cohort, rows, batch, context["offset"])

        context = {"offset": self.rho * direction(earlier - sent)}
        trained = cohort.fit(inbox["model"], gradient_fn=gradient_fn, context=context, pad=True)
        return {"model": trained.model}
