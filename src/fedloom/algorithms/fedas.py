from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from fedloom.algorithm import Cohort, Facts, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Replies
from fedloom.algorithms.kept_layers import KeepsHead
from fedloom.algorithms.statistics import require_classes
from fedloom.common.fields import NonNegative
from fedloom.flat.module import Batch, Net, data_loss


@algorithms.register("fedas")
class FedAS(KeepsHead):
    """FedAS: private heads over an averaged base. Each client first aligns the base with its own
    last model.

    With p_c the class means of features under the client's last model, the downloaded base trains
    for one epoch on the sum over the classes of a batch of mean (z - p_c)^2, at `align_rate`; then
    base and own head train as usual. Bases are averaged with weights F_i, the mean over the
    client's samples of |grad l|^2 after training, in evaluation mode. A client that has not trained
    yet aligns nothing; the other clients deploy their last model as it was before the download.
    Source: Yang et al. 2024 (FedAS); steps of the authors' code, except F, which there depends on
    the batches.
    Use it when clients take part rarely, so that their heads no longer fit the base that they
    receive.

    Args:
        align_rate: Learning rate of the alignment in every round; 0 skips it.
    """

    align_rate: NonNegative = 0.01

    needs = (require_classes,)
    own_model: ClassVar[str] = "fedas_model"
    base_facts = Facts(fits_once=False, averages=False)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {**super().expects(round), "fisher": ()}

    def fold(self, round: Round, replies: Replies) -> Aggregate:
        # If all gradients are 0, all clients have the same weight.
        return replace(
            replies, weights=replies["fisher"].cpu().double().clamp_min(1e-30)
        ).aggregate()

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        start = self.complete(cohort, inbox["model"])
        trained_before = cohort.memory.knows(self.own_model)
        if self.align_rate and bool(trained_before.any()):
            means = cohort.class_means(cohort.features(cohort.memory.get(self.own_model, start)))
            start = cohort.fit(
                start,
                loss_fn=misalignment,
                context={"means": means},
                only=self.split(cohort)[0],
                purpose="align",
                learning_rate=self.align_rate,
                active=trained_before,
                epochs=1,
            ).model
        model = cohort.fit(start).model
        cohort.memory[self.own_model] = model
        return {**self.upload(cohort, model), "fisher": fisher_traces(cohort, model)}


def misalignment(net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
    """Return the sum over a batch's classes of the mean over samples and dimensions of (z - p_c)^2.

    Args:
        net: The model. Its features are z.
        batch: The samples.
        context: `means [Y, d]`, the class means p_c.

    Returns:
        The loss of the batch, a scalar.
    """
    features = net.both(batch.inputs)[0].flatten(1)
    distance = (features - context["means"][batch.labels]).square().mean(1)
    return (distance / (batch.labels.unsqueeze(1) == batch.labels).sum(1)).sum()


def fisher_traces(cohort: Cohort, rows: Tensor) -> Tensor:
    """Return the mean over each client's samples of |grad l|^2, in evaluation mode.

    Args:
        cohort: The clients.
        rows: One model for each client, `[k, P]`.

    Returns:
        One number for each client, `[k]`.
    """
    module = cohort.flat_module
    traces = rows.new_zeros(len(rows))
    module.module.eval()
    try:
        for k, batches in enumerate(cohort.in_order(size=64)):
            for batch in batches:
                samples = Batch(
                    batch.inputs.unsqueeze(0), batch.labels.unsqueeze(0), clients=slice(k, k + 1)
                )
                _, gradients = module.sample_gradients(rows[k : k + 1], samples, data_loss, {})
                traces[k] += gradients.square().sum()
    finally:
        module.module.train()
    return traces / cohort.sizes.to(traces)
