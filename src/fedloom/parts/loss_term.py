"""Base of parts that change the loss of local training, around any algorithm with clients that
train by gradients.
"""

from collections.abc import Mapping

from torch import Tensor

from fedloom.algorithm.records import Message
from fedloom.flat.module import Batch
from fedloom.local.changed_loss import Observed
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Inner, Part


class LossTerm(Part):
    """Clients train on `change(loss, ...)` instead of the loss."""

    def change(
        self, loss: Tensor, net: Observed, batch: Batch, context: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss to train on.

        Args:
            loss: A client's loss on a batch, a scalar.
            net: Its model, with `features` and `outputs` of the batch.
            batch: The batch.
            context: The client's rows of the tensors from `context`.

        Returns:
            A scalar with gradients.
        """
        raise NotImplementedError

    def context(self, cohort: Cohort, inbox: Message, inner: Inner) -> dict[str, Tensor]:
        """Return the tensors that `change` reads.

        Args:
            cohort: The clients.
            inbox: Decoded message.
            inner: The algorithm and the parts inside.

        Returns:
            Tensors by name, `[k, ...]`; by default none.
        """
        return {}

    def train(self, cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        changed = cohort.with_loss(self.change, self.context(cohort, inbox, inner))
        return inner.train(changed, inbox)
