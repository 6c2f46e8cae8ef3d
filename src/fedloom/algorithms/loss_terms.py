"""Base of wrappers that change the loss of local training, under any method whose clients take gradients."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.algorithm import Cohort, Message, Plan, Wrapper
from fedloom.errors import InvalidValue
from fedloom.flat.module import Batch
from fedloom.local.changed_loss import Observed


class LossTerm(Wrapper):
    """A method whose clients train on `change(loss, ...)`; sending and averaging are the wrapped method's."""

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
    teacher, student = (F.log_softmax(outputs / temperature, -1) for outputs in (teacher, student))
    difference = teacher - student if excluded is None else (teacher - student).masked_fill(excluded, 0)
    return (teacher.exp() * difference).sum(-1).mean()


@torch.no_grad()
def teacher_outputs(net: Observed, row: Tensor, batch: Batch) -> Tensor:
    """Return the outputs of the model `row [P]` on the batch, in evaluation mode."""
    return net.at(row)(batch.inputs)
