"""Changes of the loss of local training by a wrapper, for all gradients of a cohort."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedloom.common.training import Training
from fedloom.flat.module import Batch, FlatModule, FoldedStep, LossFn, Net
from fedloom.objectives import prediction


class Observed(Net):
    """`Net` that stores the features and the prediction of its first forward pass, on the batch."""

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
            self.features = features
            self.outputs = prediction(outputs)
        return features, outputs

    def head(self, features: Tensor) -> Tensor:
        return self.net.head(features)


LossChange = Callable[[Tensor, Observed, Batch, Mapping[str, Tensor]], Tensor]
"""(loss on a batch, model with `features` and `outputs`, batch, client's context) -> new loss."""


class ChangedLoss:
    """A `FlatModule` that replaces each loss by `change(loss, ...)`.

    Args:
        flat_module: The module.
        change: Returns the new loss.
        context: Tensors for `change`, `[k, ...]` by name.
    """

    def __init__(
        self, flat_module: FlatModule, change: LossChange, context: Mapping[str, Tensor]
    ) -> None:
        self.flat_module = flat_module
        self.change = change
        self.depth: int = 1 + getattr(flat_module, "depth", 0)
        self.context = {f"{'@' * self.depth}{name}": rows for name, rows in context.items()}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.flat_module, name)
        if not name.endswith(("gradient", "gradients")):
            return attribute

        def changed_gradient(
            rows: Tensor, batch: Batch, loss_fn: LossFn, context: Mapping[str, Tensor]
        ) -> Any:
            change_context = self.context
            if batch.clients is not None:
                change_context = {name: t[batch.clients] for name, t in self.context.items()}
            return attribute(rows, batch, self._changed(loss_fn), {**context, **change_context})

        return changed_gradient

    def folded(self, settings: Training, rate: float) -> FoldedStep | None:
        return None

    def uses_share(self, loss_fn: LossFn) -> bool:
        return False

    def features(self, rows: Tensor, inputs: Tensor) -> None:
        """Return None: the change may need the inputs, so features are not enough for training.

        Args:
            rows: Model, `[1, P]`. Not used.
            inputs: Samples, `[1, b, ...]`. Not used.
        """

    def _changed(self, loss_fn: LossFn) -> LossFn:
        def changed(net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
            observed = Observed(net)
            loss = loss_fn(observed, batch, context)
            return self.change(
                loss, observed, batch, {name.lstrip("@"): context[name] for name in self.context}
            )

        return changed
