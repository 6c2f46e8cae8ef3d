from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.algorithm import Cohort, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan
from fedloom.algorithms.linear_head import LinearHead, shifted
from fedloom.algorithms.sharing import PartlyShared
from fedloom.algorithms.statistics import require_constant_rate
from fedloom.common.fields import NonNegative, Share
from fedloom.flat.module import Batch, Context, Net


@algorithms.register("feddbe")
class FedDBE(PartlyShared):
    """Domain bias elimination: FedAvg of models, with a trained shift m of the features z under the
    head of each client.

    Clients minimise CE(head(z + m), y) + (kappa / 2) mean over dimensions of (mu - consensus)^2,
    with the running mean of features mu <- (1 - beta) mu + beta mean_batch z. mu is 0 at the start
    of a round, and only the batch's part of it has a gradient. m moves by plain SGD at the round's
    rate, starts at 0 and never travels. In the first round with a reply clients train without both,
    and their models are discarded: the consensus is the mean of their mu, by samples. A client
    deploys head(z + m). Traffic: one additional number per feature, down in each round and up once.
    Source: Zhang et al. 2023 (DBE), algorithm 1.
    Use it when clients' inputs are shifted against each other; kappa depends on the scale of the
    features.

    Args:
        pull: kappa (authors' run for a CNN: 50; default of their code: 0).
        beta: Weight of the batch in the running mean (authors' run: 1; default of their code: 0.1).
    """

    pull: NonNegative = 50.0
    beta: Share = 1.0

    needs = (require_constant_rate,)
    base_facts = Facts(fits_once=False)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self._width = LinearHead.of(plan, "feddbe").features
        self.state["consensus"] = plan.initial.new_empty(0)

    def send(self, round: Round) -> Message:
        consensus = self.state["consensus"]
        return {
            **super().send(round),
            **({"consensus": consensus.unsqueeze(0)} if len(consensus) else {}),
        }

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        means = {} if len(self.state["consensus"]) else {"mean": (self._width,)}
        return {**super().expects(round), **means}

    def update(self, round: Round, aggregate: Aggregate) -> None:
        if "mean" in aggregate.mean:
            self.state["consensus"] = aggregate.mean["mean"]
        else:
            super().update(round, aggregate)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        start = self.complete(cohort, inbox["model"])
        head = LinearHead.of(cohort, "feddbe")
        count = cohort.layout.trainable
        settled = "consensus" in inbox
        rate = cohort.round.learning_rate
        mean = start.new_zeros(len(start), head.features)
        shift = cohort.memory.get("feddbe_shift", torch.zeros_like(mean[:1])).clone()

        def loss_fn(net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
            features, logits = net.both(batch.inputs)
            moved = torch.lerp(context["mean"], features.mean(0), self.beta)
            context["mean"].copy_(moved.detach())
            loss = net.objective.loss(logits, batch.labels)
            return (
                loss + self.pull / 2 * (moved - context["consensus"]).square().mean()
                if settled
                else loss
            )

        def gradient_fn(weights: Tensor, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
            """Take the gradient at the folded row; derive the gradients of head and shift."""
            rows = head.put(weights, shifted(head.get(weights), context["shift"]))
            loss, gradient = cohort.gradient(rows, batch, loss_fn, context)
            weights[:, count:] = rows[:, count:]
            of_weight, of_bias = head.get(gradient)
            of_shift = (head.get(weights)[0].mT @ of_bias.unsqueeze(2)).squeeze(2)
            of_weight.add_(of_bias.unsqueeze(2) * context["shift"].unsqueeze(1))
            context["shift"].sub_(of_shift, alpha=rate)
            return loss, gradient

        state = {"mean": mean, "shift": shift}
        context = {"consensus": inbox.get("consensus", mean)}
        if settled:
            model = cohort.fit(start, gradient_fn=gradient_fn, context=context, state=state).model
            cohort.memory["feddbe_shift"] = shift
            return self.upload(cohort, model)
        model = cohort.fit(start, loss_fn=loss_fn, context=context, state=state).model
        return {**self.upload(cohort, model), "mean": mean}

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        head = LinearHead.of(cohort, "feddbe")
        shift = cohort.memory.get("feddbe_shift", model.new_zeros(1, head.features))
        return head.put(model, shifted(head.get(model), shift))
