import torch
from torch import Tensor

from fedloom.algorithm import Cohort, Facts, algorithms
from fedloom.algorithm.records import Message
from fedloom.algorithms.sharing import PartlyShared
from fedloom.algorithms.statistics import require_constant_rate
from fedloom.common.fields import Probability
from fedloom.flat.module import Batch


@algorithms.register("apfl")
class APFL(PartlyShared):
    """Adaptive personalised federated learning: a client deploys alpha v + (1 - alpha) w, with a
    local v and the global w.

    Per batch w <- w - eta grad l(w), then v <- v - eta alpha grad l(m) at the mixture m of v and
    the new w. If `adaptive`, the first batch of a round also moves alpha <- clip(alpha - eta <v -
    w, grad l(m)>, 0, 1). w travels; v, which starts as the initial model, and alpha stay with the
    client. Steps are plain: momentum, weight decay and clipping of local training do not apply. A
    client that has not trained yet deploys the download. alpha = 0 is FedAvg, alpha = 1 local
    training of v.
    Source: Deng et al. 2020, algorithm 1, which mixes weights; the authors' code mixes outputs.
    Use it when only some clients gain from the others; it costs a second gradient per batch.

    Args:
        alpha: Share of v; its initial value if `adaptive` (authors: 0.5).
        adaptive: Learn alpha (authors: off).
    """

    alpha: Probability = 0.5
    adaptive: bool = False

    needs = (require_constant_rate,)
    base_facts = Facts(fits_once=False, initial="all")

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        rate = cohort.round.learning_rate
        count = cohort.layout.trainable

        def step(state: dict[str, Tensor], batch: Batch) -> Tensor:
            model = state["global"]
            local = state["local"]
            alpha = state["alpha"]
            loss, gradient = cohort.gradient(model, batch)
            model[:, :count].sub_(gradient, alpha=rate)
            mixture = torch.lerp(model, local, alpha)
            _, gradient = cohort.gradient(mixture, batch)
            slope = ((local - model)[:, :count] * gradient).sum(1, keepdim=True)
            local[:, :count].sub_(alpha * gradient, alpha=rate)
            if self.adaptive and batch.step == 0:
                alpha.sub_(slope, alpha=rate).clamp_(0, 1)
            local[:, count:] = mixture[:, count:]
            return loss

        local = cohort.memory.get("apfl_local", cohort.initial).clone()
        state = {"global": start.clone(), "local": local, "alpha": self._share(cohort).clone()}
        cohort.metrics["training_loss"] = cohort.each_batch(step, state, pad=True)
        cohort.memory["apfl_local"], cohort.memory["apfl_alpha"] = local, state["alpha"]
        return state["global"]

    def _share(self, cohort: Cohort) -> Tensor:
        return cohort.memory.get("apfl_alpha", cohort.initial.new_full((1, 1), self.alpha))

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        return torch.lerp(model, cohort.memory.get("apfl_local", model), self._share(cohort))
