"""Distillation: outputs of a teacher, and their divergence from the outputs of the student."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.flat.module import Batch
from fedloom.local.changed_loss import Observed
from fedloom.objectives import prediction


def divergence(
    teacher: Tensor, student: Tensor, temperature: float, excluded: Tensor | None = None
) -> Tensor:
    """Return the mean over samples of KL(softmax(teacher / temperature) || softmax(student /
    temperature)).

    Args:
        teacher: Outputs of the teacher, `[..., Y]`.
        student: Outputs of the student, `[..., Y]`.
        temperature: Divisor of all outputs.
        excluded: True for classes that are excluded from both distributions, bool `[..., Y]`.

    Returns:
        A scalar, at least 0. It is not multiplied by temperature^2.

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015, section 2.
    """
    if excluded is not None:
        teacher, student = (
            outputs.masked_fill(excluded, -torch.inf) for outputs in (teacher, student)
        )
    teacher, student = (F.log_softmax(outputs / temperature, -1) for outputs in (teacher, student))
    difference = (
        teacher - student if excluded is None else (teacher - student).masked_fill(excluded, 0)
    )
    return (teacher.exp() * difference).sum(-1).mean()


@torch.no_grad()
def teacher_outputs(net: Observed, row: Tensor, batch: Batch) -> Tensor:
    """Return the teacher's prediction on a batch, in evaluation mode.

    Args:
        net: The student. The teacher has the same architecture.
        row: Weights of the teacher, `[P]`.
        batch: Samples, `[b, ...]`.

    Returns:
        Outputs of the classifier, `[b, Y]`, without gradients.
    """
    return prediction(net.at(row)(batch.inputs))
