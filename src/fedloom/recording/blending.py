"""How the loss falls while a client learns ALA's weights (FedALA, figure 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.algorithms.ala import Ala
from fedloom.config.checks import require_at_least
from fedloom.recording.recorder import Recorder, RunContext, Series, recorders


@recorders.register("ala")
@dataclass(frozen=True)
class Blending(Recorder):
    """The loss of each epoch in which one client learns its blending weights, in every round in which it does.

    The loss of an epoch is the one that ALA itself judges by (`epoch_loss`). Source: Zhang et al. 2023 (FedALA), figure 3.
    """

    client: int = 0

    def __post_init__(self) -> None:
        require_at_least("client", self.client, 0)

    @property
    def name(self) -> str:
        return f"ala of client {self.client}"

    def unfit(self, method: Algorithm) -> str:
        return "" if any(isinstance(part, Ala) for part in method.nested()) else "it does not learn with ala"

    def require(self, scene: RunContext) -> None:
        scene.place(self.client)

    def attach(self, method: Algorithm, scene: RunContext) -> Callable[[int], Any] | None:
        client = scene.place(self.client)
        heard: dict[int, list[float]] = {}

        def listen(number: int, clients: tuple[int, ...], losses: list[Tensor]) -> None:
            if client in clients:
                own = [float(loss[clients.index(client)]) for loss in losses]
                known = [
                    loss for loss in own if not math.isnan(loss)
                ]  # NaN: done before the others, or nothing to learn
                if known:
                    heard[number] = known

        for part in method.nested():
            if isinstance(part, Ala):
                part.observe = _both(part.observe, listen)
        return lambda number: heard.pop(number, None)

    def result(self, series: Series, tensors: Mapping[int, Mapping[str, Tensor]], scene: RunContext) -> dict[str, Any]:
        return {
            "kind": "ala",
            "client": self.client,
            "rounds": [number for number, _ in series],
            "losses": [value for _, value in series],
        }


Listener = Callable[[int, tuple[int, ...], list[Tensor]], None]


def _both(first: Listener | None, second: Listener) -> Listener:
    """A listener beside one that is there already."""

    def listen(number: int, clients: tuple[int, ...], losses: list[Tensor]) -> None:
        if first is not None:
            first(number, clients, losses)
        second(number, clients, losses)

    return listen
