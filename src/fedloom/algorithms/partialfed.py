import torch
from torch import Tensor

from fedloom.algorithm import Cohort, Facts, algorithms
from fedloom.algorithm.records import Message
from fedloom.algorithms.sharing import PartlyShared
from fedloom.algorithms.statistics import require_constant_rate
from fedloom.common.fields import Count, NonNegativeInt, Positive, Share
from fedloom.flat.layout import Layout
from fedloom.flat.module import Batch

TINY = 1e-20
COLDEST = 0.05


@algorithms.register("partialfed")
class PartialFed(PartlyShared):
    """PartialFed-Adaptive: a learned strategy picks, layer by layer, the downloaded or the client's
    own weights.

    A client has its own model and for each layer two logits a. Per batch the working model takes
    each layer from the source that a hard Gumbel-softmax of a at temperature tau draws. Batches
    alternate: `model_batches` train the drawn weights in their source; then `strategy_batches`
    train only a, at the learning rate, by the straight-through gradient <dl/dw_layer, downloaded -
    own> through the softmax. tau = temperature * cooling^(round - 1), at least 0.05. The model of
    the likelier sources (ties take the download) is uploaded, starts the client's next round, and
    is scored with the new download in the layers that prefer it. Steps are plain: momentum, weight
    decay and clipping of local training do not apply. Reconstructed from the paper's text.
    Source: Sun et al. 2021, section 3; FedALA, appendix G.
    Use it in cross-silo federations if you do not know which layers the clients should share.

    Args:
        model_batches: Consecutive batches that train the weights (FedALA: 8).
        strategy_batches: Consecutive batches that train the logits (FedALA: 2).
        temperature: tau in round 1 (FedALA: 5).
        cooling: Factor of tau from round to round (FedALA: 0.965).
    """

    model_batches: Count = 8
    strategy_batches: NonNegativeInt = 2
    temperature: Positive = 5.0
    cooling: Share = 0.965

    needs = (require_constant_rate,)
    base_facts = Facts(fits_once=False)

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        layer = layer_of(cohort.layout).to(cohort.initial.device)
        count = cohort.layout.trainable
        passed = self.plan.passed(cohort.round.number)
        temperature = max(self.temperature * self.cooling**passed, COLDEST)
        rate = cohort.round.learning_rate

        def step(state: dict[str, Tensor], batch: Batch) -> Tensor:
            server_model = state["global"]
            local = state["local"]
            logits = state["logits"]
            noisy = logits + state["noise"][:, batch.step]
            chosen = _favours_global(noisy)[:, layer]
            working = torch.where(chosen, server_model, local)
            loss, gradient = cohort.gradient(working, batch)
            if batch.step % (self.model_batches + self.strategy_batches) < self.model_batches:
                working[:, :count].sub_(gradient, alpha=rate)
                torch.where(chosen, working, server_model, out=server_model)
                torch.where(chosen, local, working, out=local)
                return loss
            product = torch.zeros_like(noisy[:, :, 0])
            product.index_add_(1, layer[:count], gradient * (server_model - local)[:, :count])
            soft = torch.softmax(noisy / temperature, 2)
            derivative = soft[:, :, 0] * soft[:, :, 1] * product / temperature
            logits.sub_(torch.stack([derivative, -derivative], 2), alpha=rate)
            return loss

        local = cohort.memory.get("partialfed_model", start).clone()
        logits = self._logits(cohort).clone()
        noise = gumbel(cohort)
        state = {"global": start.clone(), "local": local, "logits": logits, "noise": noise}
        cohort.metrics["training_loss"] = cohort.each_batch(step, state, pad=True)
        model = torch.where(
            _favours_global(state["logits"])[:, layer], state["global"], state["local"]
        )
        cohort.memory["partialfed_strategy"], cohort.memory["partialfed_model"] = (
            state["logits"],
            model,
        )
        return model

    def _logits(self, cohort: Cohort) -> Tensor:
        return cohort.memory.get(
            "partialfed_strategy", cohort.initial.new_zeros(1, len(cohort.layout.layers), 2)
        )

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        chosen = _favours_global(self._logits(cohort))[:, layer_of(cohort.layout)]
        return torch.where(chosen, model, cohort.memory.get("partialfed_model", model))


def gumbel(cohort: Cohort) -> Tensor:
    """Return Gumbel noise for every batch of the round, `[k, steps, layers, 2]`, from each client's
    own stream.
    """
    shape = (int(cohort.training.local_steps(cohort.sizes).max()), len(cohort.layout.layers), 2)
    uniform = torch.stack(
        [torch.rand(shape, generator=generator) for generator in cohort.stream("strategy")]
    )
    return -torch.log(-torch.log(uniform.to(cohort.initial) + TINY) + TINY)


def _favours_global(logits: Tensor) -> Tensor:
    """Return `[k, L]` bool from `[k, L, 2]`: True where the download is at least as likely as the
    own weights.
    """
    return logits[:, :, 0] >= logits[:, :, 1]


def layer_of(layout: Layout) -> Tensor:
    """Return the index of the layer of each column of a row, `[P]` int64."""
    owner = torch.empty(layout.size, dtype=torch.int64)
    for number, unit in enumerate(layout.units("layer")):
        for columns in unit:
            owner[columns] = number
    return owner
