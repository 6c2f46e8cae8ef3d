"""The loss while a client learns ALA's weights (FedALA, figure 3)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.algorithm.method import Method, components
from fedloom.common.fields import NonNegativeInt
from fedloom.local.cohort import Cohort
from fedloom.parts.ala import Ala, Blend
from fedloom.recording.recorder import Recorder, RunContext, Series, Tensors, recorders
from fedloom.rounds.federation import Federation


@recorders.register("ala")
@dataclass(frozen=True)
class AlaLearning(Recorder):
    """The loss of each epoch in which `client` learns its blending weights.

    It is recorded in every round in which the client learns them. The loss of an epoch is ALA's own
    criterion.

    Source: Zhang et al. 2023 (FedALA), figure 3.
    """

    client: NonNegativeInt = 0

    @property
    def name(self) -> str:
        return f"ala of client {self.client}"

    def require(self, context: RunContext) -> None:
        context.client(self.client)

    def inapplicable(self, method: Method) -> str:
        return (
            ""
            if any(isinstance(inner, Ala) for inner in components(method))
            else "it does not learn with ala"
        )

    def hook(self, federation: Federation, context: RunContext) -> Callable[[int], Any] | None:
        client = context.client(self.client)
        learned: dict[int, list[float]] = {}

        def listening(report: Callable[[Cohort, Blend], None]) -> Callable[[Cohort, Blend], None]:
            def listen(cohort: Cohort, blend: Blend) -> None:
                report(cohort, blend)
                if client in cohort.clients and blend.losses:
                    losses = torch.stack(blend.losses)[:, cohort.clients.index(client)]
                    # NaN: finished in an earlier epoch, or without weights to learn
                    if curve := losses[~losses.isnan()].tolist():
                        learned[cohort.round.number] = curve

            return listen

        for inner in components(federation.algorithm):
            if isinstance(inner, Ala):
                setattr(inner, "record_learning", listening(inner.record_learning))  # noqa: B010
        return lambda number: learned.pop(number, None)

    def result(self, series: Series, tensors: Tensors, context: RunContext) -> dict[str, Any]:
        rounds, losses = map(list, zip(*series, strict=True))
        return {"client": self.client, "rounds": rounds, "losses": losses}
