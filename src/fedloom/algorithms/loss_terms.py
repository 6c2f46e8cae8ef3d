"""Methods that change the loss of local training: FedNTD, FedLC and FedDecorr around others, and FedKDMR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.algorithm import Message, Plan, Wrapper, algorithms, server_model
from fedloom.algorithms.fedmr import FedMR
from fedloom.config.fields import NonNegative, NonNegativeInt, Positive, Probability
from fedloom.errors import InvalidValue
from fedloom.flat.module import Batch
from fedloom.local.changed_loss import Observed
from fedloom.local.cohort import Cohort
from fedloom.round import Round


@dataclass
class LossTerm(Wrapper):
    """A method whose clients train on `change(loss, ...)`; sending and averaging are the wrapped method's.

    Args:
        method: Method whose clients train.
    """

    def change(self, loss: Tensor, net: Observed, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
        """Return the loss to train on, from a client's loss on a batch and its `net.features` and `net.outputs`."""
        raise NotImplementedError

    def context(self, cohort: Cohort, inbox: Message) -> dict[str, Tensor]:
        """Return the tensors `[k, ...]` that `change` reads."""
        return {}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return self.method.train(cohort.with_loss(self.change, self.context(cohort, inbox)), inbox)


def require_classes(name: str, plan: Plan) -> None:
    """Raise `InvalidValue` unless the targets of the task are classes."""
    if not plan.classes:
        raise InvalidValue(f"{name} needs class labels: the targets of this task are none")


def label_counts(cohort: Cohort) -> Tensor:
    """Return the number of training samples of each class at each client, `[k, Y]`."""
    # bincount would wait for the device to know how many there are.
    classes = [torch.arange(cohort.classes, device=labels.device) for labels in cohort.labels]
    pairs = zip(classes, cohort.labels, strict=True)
    return torch.stack([(labels.flatten() == numbers.unsqueeze(1)).sum(1) for numbers, labels in pairs])


def divergence(teacher: Tensor, student: Tensor, temperature: float, excluded: Tensor | None = None) -> Tensor:
    """Return the mean over samples of KL(softmax(teacher / temperature) || softmax(student / temperature)).

    Args:
        teacher: Outputs `[..., Y]`.
        student: Outputs of the same shape.
        temperature: Divisor of both.
        excluded: Classes that both leave out, bool `[..., Y]`.
    """
    if excluded is not None:
        teacher, student = (outputs.masked_fill(excluded, -torch.inf) for outputs in (teacher, student))
    before, after = (F.log_softmax(outputs / temperature, -1) for outputs in (teacher, student))
    difference = before - after if excluded is None else (before - after).masked_fill(excluded, 0)
    return (before.exp() * difference).sum(-1).mean()


@torch.no_grad()
def teacher_outputs(net: Observed, row: Tensor, batch: Batch) -> Tensor:
    """Return the outputs of the model `row [P]` on the batch, in evaluation mode."""
    return net.at(row)(batch.inputs)


@algorithms.register("fedntd")
@dataclass
class FedNTD(LossTerm):
    """Not-true distillation: clients minimise L_i(w) + beta temperature^2 KL(q_t || q).

    q and q_t are the softmaxes, at `temperature` and over the classes other than the label, of the trained and the received
    model (in evaluation mode). With two classes the term is 0. Source: Lee et al. 2022 (FedNTD), equations 3 and 4.
    Use it when clients hold few classes and local training forgets the others; a step costs one more forward pass.

    Args:
        method: Method whose clients train, such as fedavg or fedmr.
        beta: Weight of the term (authors: 1); 0 is the method itself.
        temperature: Temperature of both softmaxes (authors: 1).
    """

    beta: NonNegative = 1.0
    temperature: Positive = 1.0

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        require_classes("fedntd", plan)
        if not self.single_download or "model" not in self.send(plan.opening()):
            raise InvalidValue(f"fedntd: clients of {self.method} are not sent one model, which is the teacher")

    def context(self, cohort: Cohort, inbox: Message) -> dict[str, Tensor]:
        return {"teacher": self.complete(cohort, server_model(inbox))}

    def change(self, loss: Tensor, net: Observed, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
        true = torch.arange(net.outputs.shape[-1], device=batch.labels.device) == batch.labels.unsqueeze(-1)
        teacher = teacher_outputs(net, context["teacher"], batch)
        return loss + self.beta * self.temperature**2 * divergence(teacher, net.outputs, self.temperature, true)


@algorithms.register("fedlc")
@dataclass
class FedLC(LossTerm):
    """Logit calibration: clients train on the logits s_c - tau n_c^(-1/4), with n_c the client's samples of class c.

    A class that a client lacks is left out of the softmax. Models are scored by their own logits.
    Source: Zhang et al. 2022 (FedLC), equation 8, over all classes as every public code has it.
    Use it when the numbers of samples by class differ much within clients; it costs nothing.

    Args:
        method: Method whose clients train, such as fedavg or fedmr.
        tau: Strength of the calibration; 0 is the method itself.
    """

    tau: NonNegative = 1.0

    fits_once: ClassVar[bool] = False

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        require_classes("fedlc", plan)

    def context(self, cohort: Cohort, inbox: Message) -> dict[str, Tensor]:
        counts = label_counts(cohort).to(cohort.initial)
        shift = counts.clamp_min(1) ** -0.25
        return {"shift": self.tau * torch.where(counts > 0, shift, 1e9)}

    def change(self, loss: Tensor, net: Observed, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
        calibrated = net.objective.loss(net.outputs - context["shift"], batch.labels)
        return loss + calibrated - net.objective.loss(net.outputs, batch.labels)


@algorithms.register("feddecorr")
@dataclass
class FedDecorr(LossTerm):
    """Decorrelation: adds beta (mean over i != j of (Z^T Z)_ij^2) / b to the loss of a batch of b samples.

    Z `[b, d]` are the features that enter the classifier, each dimension standardised over the batch (unbiased variance
    + 1e-8). A batch of one sample adds 0. Source: Shi et al. 2023 (FedDecorr), section 4, scaled as in the authors' code.
    Use it when clients' labels are skewed and features are wide; it composes with any method and costs little.

    Args:
        method: Method whose clients train, such as fedavg or fedmr.
        beta: Weight of the term (authors: 0.1); 0 is the method itself.
    """

    beta: NonNegative = 0.1

    fits_once: ClassVar[bool] = False

    def change(self, loss: Tensor, net: Observed, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
        assert net.features is not None
        features = net.features.flatten(1)
        count, width = features.shape
        if count < 2 or width < 2:
            return loss
        scale = (features.var(0, keepdim=True) + 1e-8).sqrt()
        standard = (features - features.mean(0, keepdim=True)) / scale
        # ||Z^T Z||_F = ||Z Z^T||_F, and batches are smaller than features.
        squares = (standard @ standard.mT).square().sum() - standard.square().sum(0).square().sum()
        return loss + self.beta * squares / (width * (width - 1)) / count


@algorithms.register("fedkdmr")
@dataclass
class FedKDMR(FedMR):
    """FedMR with a teacher: clients minimise (1 - a_t) L_i(w) + a_t temperature^2 KL(q_T || q).

    q_T and q are the softmaxes at `temperature` of the mean of the pool that was sent (in evaluation mode) and of the trained
    model; a_t = distillation min((t - 1) / ramp, 1)^power in round t. Traffic: 2 models down, 1 up.
    Source: Li et al., KDD 2026, with their code's defaults but for the ramp, which there begins after a phase of averaging:
    `stages(fedavg:100, fedkdmr)`.
    Use it where `fedmr` wins but its models drift apart, as under wrong labels; a step costs one more forward pass.

    Args:
        distillation: Largest weight of the term (authors: 0.5); 0 is FedMR.
        temperature: Temperature of both softmaxes (authors: 0.5, which sharpens the teacher).
        ramp: Rounds over which the weight grows (authors: 50); 0 for the whole weight from round 1 on.
        power: Exponent of the growth.
    """

    distillation: Probability = 0.5
    temperature: Positive = 0.5
    ramp: NonNegativeInt = 50
    power: Positive = 1.0

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        require_classes("fedkdmr", plan)

    def weight(self, number: int) -> float:
        """Return a_t of round `number`."""
        grown = min((number - 1) / self.ramp, 1.0) if self.ramp else 1.0
        return float(self.distillation * grown**self.power)

    def send(self, round: Round) -> Message:
        teacher = {"teacher": self.model().unsqueeze(0)} if self.weight(round.number) else {}
        return {**super().send(round), **teacher}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        weight = self.weight(cohort.round.number)
        if not weight:
            return super().train(cohort, inbox)

        def distil(loss: Tensor, net: Observed, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
            teacher = teacher_outputs(net, context["teacher"], batch)
            term = divergence(teacher, net.outputs, self.temperature)
            return (1 - weight) * loss + weight * self.temperature**2 * term

        return super().train(cohort.with_loss(distil, {"teacher": inbox["teacher"]}), inbox)
