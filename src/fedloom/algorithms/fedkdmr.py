from collections.abc import Mapping

from torch import Tensor

from fedloom.algorithm import Cohort, Round, algorithms
from fedloom.algorithm.records import Message
from fedloom.algorithms.fedmr import FedMR
from fedloom.algorithms.statistics import require_classes
from fedloom.common.fields import NonNegativeInt, Positive, Probability
from fedloom.flat.module import Batch
from fedloom.local.changed_loss import Observed
from fedloom.local.distillation import divergence, teacher_outputs


@algorithms.register("fedkdmr")
class FedKDMR(FedMR):
    """FedMR with a teacher: clients minimise (1 - a_t) L_i(w) + a_t temperature^2 KL(q_T || q).

    q_T and q are the softmaxes at `temperature` of two models: the mean of the pool that the server
    sent (in evaluation mode) and the trained model. a_t = distillation min((t - 1) / ramp, 1)^power
    in round t, counted from its first round within `stages`. Traffic: 2 models down, 1 up.
    Source: Li et al., KDD 2026, with their code's defaults except for the ramp, which there starts
    after a phase of averaging: `stages(fedavg:100, fedkdmr)`.
    Use it where `fedmr` is best but its models drift apart, as under wrong labels; a step costs an
    additional forward pass.

    Args:
        distillation: Largest weight of the term (authors: 0.5); 0 is FedMR.
        temperature: Temperature of both softmaxes (authors: 0.5, which sharpens the teacher).
        ramp: Rounds over which the weight grows (authors: 50); 0 for the full weight from round 1.
        power: Exponent of the growth.
    """

    distillation: Probability = 0.5
    temperature: Positive = 0.5
    ramp: NonNegativeInt = 50
    power: Positive = 1.0

    needs = (require_classes,)

    def weight(self, number: int) -> float:
        """Return a_t of round `number` of the run."""
        grown = min(self.plan.passed(number) / self.ramp, 1.0) if self.ramp else 1.0
        return float(self.distillation * grown**self.power)

    def send(self, round: Round) -> Message:
        teacher = {"teacher": self.model().unsqueeze(0)} if self.weight(round.number) else {}
        return {**super().send(round), **teacher}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        weight = self.weight(cohort.round.number)
        if not weight:
            return super().train(cohort, inbox)

        def distil(
            loss: Tensor, net: Observed, batch: Batch, context: Mapping[str, Tensor]
        ) -> Tensor:
            teacher = teacher_outputs(net, context["teacher"], batch)
            term = divergence(teacher, net.outputs, self.temperature)
            return (1 - weight) * loss + weight * self.temperature**2 * term

        return super().train(cohort.with_loss(distil, {"teacher": inbox["teacher"]}), inbox)
