from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm.method import Facts, algorithms
from fedloom.algorithm.records import Message, Replies, Specs, TensorSpec
from fedloom.algorithms.statistics import require_classes
from fedloom.common.fields import NonNegative
from fedloom.common.round import Round
from fedloom.flat.module import Batch, data_loss
from fedloom.flat.population import weighted_mean
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Inner, Part

SAMPLES_AT_ONCE = 64
"""Number of samples whose gradients are in memory at the same time."""


@algorithms.register("fisher_merge")
class FisherMerge(Part):
    """Merges the models of the last round by their Fisher information: w = sum_i p_i F_i w_i /
    sum_i p_i F_i, element by element.

    F_i is the mean over client i's samples of sum_c P(c) (d log P(c) / dw)^2, in evaluation mode,
    divided by its norm, plus `floor`; p_i is proportional to the samples. All other rounds are the
    inner method's. In the last round, clients upload F_i `[T]` too, and every uploaded model is
    replaced by the merged one. Statistics are averaged. Equal F_i give the mean of the models (a
    uniform soup).
    Source: Matena and Raffel 2022, equation 3; the authors' code adds the floor to one model only.
    Private parts are refused, since F_i has no noise.
    Use it when the models of the last round differ much, as after `indep` or `fedmr`.

    Args:
        method: Method that trains the models.
        floor: Added to each F_i, so that an element without information has the mean.
    """

    floor: NonNegative = 1e-6

    once: ClassVar[bool] = True
    needs = (require_classes,)
    requires: ClassVar[tuple[str, ...]] = ("whole models",)
    reveals: ClassVar[str] = "their Fisher information"
    facts = Facts(needs_total_rounds=True, fits_once=False)

    def train(self, cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        reply = inner.train(cohort, inbox)
        if not _is_last(cohort.round):
            return reply
        return {**reply, "fisher": fisher_information(cohort, reply["model"])}

    def expects(self, round: Round, specs: Specs) -> Specs:
        if not _is_last(round):
            return specs
        layout = self.plan.layout
        return {**specs, "fisher": TensorSpec((layout.trainable,), layout.dtype)}

    def rewrite(self, round: Round, replies: Replies) -> Replies:
        if not _is_last(round):
            return replies
        rows = replies["model"]
        weights = replies.weights.to(rows)
        merged = weighted_mean(rows, replies.weights)
        importance = _normalised(replies["fisher"], self.floor) * weights.unsqueeze(1)
        trainable = slice(self.plan.layout.trainable)
        merged[trainable] = (importance * rows[:, trainable]).sum(0) / importance.sum(0)
        uploads = {name: rows for name, rows in replies.matrices.items() if name != "fisher"}
        return replies.with_matrices(uploads).with_rows("model", merged)


def fisher_information(cohort: Cohort, rows: Tensor) -> Tensor:
    """Return the diagonal of the Fisher information of each client's model.

    Args:
        cohort: The clients, with their samples.
        rows: One model for each client, `[k, P]`.

    Returns:
        Means over samples, `[k, T]`, of the expected squared gradient. The expectation is over
        labels with the model's probabilities, and is exact.
    """
    module = cohort.flat_module
    total = rows.new_zeros(len(rows), cohort.layout.trainable)
    module.module.eval()
    try:
        for k, batches in enumerate(cohort.in_order(size=SAMPLES_AT_ONCE)):
            row = rows[k : k + 1]
            for batch in batches:
                chances = module.outputs(rows[k], batch.inputs).detach().softmax(1)
                for label in range(chances.shape[1]):
                    labels = torch.full_like(batch.labels, label)
                    samples = Batch(
                        batch.inputs.unsqueeze(0), labels.unsqueeze(0), clients=slice(k, k + 1)
                    )
                    _, gradients = module.sample_gradients(row, samples, data_loss, {})
                    squares = gradients.squeeze(0).square()
                    total[k] += chances[:, label] @ squares
    finally:
        module.module.train()
    return total / cohort.sizes.to(total).unsqueeze(1)


def _normalised(fisher: Tensor, floor: float) -> Tensor:
    """Return Fisher information `[r, T]` divided by its norm, plus the floor."""
    norm = fisher.norm(dim=1, keepdim=True)
    return torch.where(norm > 0, fisher / norm, 0) + floor


def _is_last(round: Round) -> bool:
    return round.number == round.rounds
