"""Losses of local training that a wrapper changes: every gradient of a cohort goes through the
change.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedloom.flat.module import Batch, FlatModule, FoldedStep, LossFn, Net
from fedloom.objectives import prediction
from fedloom.training import Training


class Observed(Net):
    """`Net` that keeps the features and the prediction among the outputs of its first forward pass,
    which is on the batch.
    """

    def __init__(self, net: Net) -> None:
        vars(self).update(vars(net))
        self.net = net
        self.features: Tensor | None = None
        self.outputs: Any = None

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.both(inputs)[1]

    def both(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features, outputs = self.net.both(inputs)
        if self.features is None:
            self.features, self.outputs = features, prediction(outputs)
        return features, outputs

    def head(self, features: Tensor) -> Tensor:
        return self.net.head(features)


LossChange = Callable[[Tensor, Observed, Batch, Mapping[str, Tensor]], Tensor]
"""(a client's loss on a batch, its model with `features` and `outputs`, the batch, the client's
context) -> the loss to train.
"""


class ChangedLoss:
    """A `FlatModule` that trains on `change(loss, ...)`, with rows `[k, ...]` of `context`, instead
    of each loss it is given.
    """

    def __init__(
        self, flat_module: FlatModule, change: LossChange, context: Mapping[str, Tensor]
    ) -> None:
        self.flat_module, self.change = flat_module, change
        self.depth: int = 1 + getattr(flat_module, "depth", 0)
        self.context = {f"{'@' * self.depth}{name}": rows for name, rows in context.items()}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.flat_module, name)
        if not name.endswith(("gradient", "gradients")):
            return attribute

        def of_changed(
            rows: Tensor, batch: Batch, loss_fn: LossFn, context: Mapping[str, Tensor]
        ) -> Any:
            own = (
                self.context
                if batch.clients is None
                else {n: t[batch.clients] for n, t in self.context.items()}
            )
            return attribute(rows, batch, self._changed(loss_fn), {**context, **own})

        return of_changed

    def folded(self, settings: Training, rate: float) -> FoldedStep | None:
        return None

    def heeds_share(self, loss_fn: LossFn) -> bool:
        return False

    def features(self, rows: Tensor, inputs: Tensor) -> None:
        """Return None: the change may need the inputs, so that a classifier alone cannot be trained
        on features.
        """

    def _changed(self, loss_fn: LossFn) -> LossFn:
        def changed(net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
            observed = Observed(net)
            loss = loss_fn(observed, batch, context)
            return self.change(
                loss, observed, batch, {name.lstrip("@"): context[name] for name in self.context}
            )

        return changed
