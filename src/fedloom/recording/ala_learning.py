"""How the loss falls while a client learns ALA's weights (FedALA, figure 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.algorithms.ala import Ala
from fedloom.config.fields import NonNegativeInt
from fedloom.recording.recorder import Kept, Recorder, RunContext, Series, recorders, rounds_of


@recorders.register("ala")
@dataclass(frozen=True)
class AlaLearning(Recorder):
    """The loss of each epoch in which one client learns its blending weights, in every round in which it does.

    The loss of an epoch is the one that ALA itself judges by (`epoch_loss`). Source: Zhang et al. 2023 (FedALA), figure 3.
    """

    client: NonNegativeInt = 0

    @property
    def name(self) -> str:
        return f"ala of client {self.client}"

    def inapplicable(self, method: Algorithm) -> str:
        return "" if any(isinstance(part, Ala) for part in method.nested()) else "it does not learn with ala"

    def require(self, context: RunContext) -> None:
        context.client(self.client)

    def hook(self, method: Algorithm, context: RunContext) -> Callable[[int], Any] | None:
        client = context.client(self.client)
        reported: dict[int, list[float]] = {}

        def listen(number: int, clients: tuple[int, ...], losses: list[Tensor]) -> None:
            if client in clients:
                own = [float(loss[clients.index(client)]) for loss in losses]
                # NaN: finished before others, or nothing to learn
                if known := [loss for loss in own if not math.isnan(loss)]:
                    reported[number] = known

        for part in method.nested():
            if isinstance(part, Ala):
                part.observe = _both(part.observe, listen)
        return lambda number: reported.pop(number, None)

    def result(self, series: Series, kept: Kept, context: RunContext) -> dict[str, Any]:
        return {"client": self.client, "rounds": rounds_of(series), "losses": [value for _, value in series]}


Listener = Callable[[int, tuple[int, ...], list[Tensor]], None]


def _both(first: Listener | None, second: Listener) -> Listener:
    """A listener beside one that is there already."""

    def listen(number: int, clients: tuple[int, ...], losses: list[Tensor]) -> None:
        for one in (first, second):
            if one is not None:
                one(number, clients, losses)

    return listen
