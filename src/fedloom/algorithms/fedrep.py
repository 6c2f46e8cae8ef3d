"""FedRep: a shared representation under a head of each client's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedloom.algorithm import Message, algorithms
from fedloom.algorithms.sharing import PartlyShared
from fedloom.config.fields import NonNegativeInt
from fedloom.errors import InvalidValue
from fedloom.local.cohort import Cohort
from fedloom.models.structure import head_name, layer_finder


@algorithms.register("fedrep")
@dataclass
class FedRep(PartlyShared):
    """FedRep: each round a client trains its own head, then the shared base for the local epochs.

    The base is held fixed while the head trains (its statistics move, as in training mode) and the head while the base does.
    Only the base travels and is averaged; heads start equal and never leave their clients. A client scores the received base
    under its own head.
    Source: Collins et al. 2021, algorithm 1; FedALA, appendix G.
    Use it when a common representation serves all and each client's labels need a head of their own.

    Args:
        head_epochs: Epochs of the head (FedALA: 5, and 1 epoch of the base).
    """

    head_epochs: NonNegativeInt = 5

    fits_once: ClassVar[bool] = False

    def private(self, module: nn.Module) -> frozenset[str]:
        head = head_name(module)
        if not head:
            raise InvalidValue(
                f"fedrep needs a base under the classifier, and {type(module).__name__} is a single layer"
            )
        layers = map(layer_finder(module), (name for name, _ in module.named_parameters()))
        return frozenset(layer for layer in layers if layer == head or layer.startswith(f"{head}."))

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        layout, head = cohort.layout, self.private(cohort.module)
        if self.head_epochs:
            unit = layout.unit(lambda tensor: tensor.layer in head)
            head_cohort, loss_fn = cohort.for_classifier(start)
            start = head_cohort.fit(start, loss_fn=loss_fn, only=unit, purpose="head", epochs=self.head_epochs).model
        return cohort.fit(start, only=layout.unit(lambda tensor: tensor.layer not in head)).model
