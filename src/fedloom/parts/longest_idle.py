from dataclasses import field
from typing import ClassVar, cast

import torch

from fedloom.algorithm.method import Facts, Method, algorithms
from fedloom.algorithm.records import Plan, Selection
from fedloom.common.round import Round
from fedloom.parts.hooks import Inner, Part


@algorithms.register("longest_idle")
class LongestIdle(Part):
    """Selection of the K clients that have been idle for the longest time.

    Clients that were last selected in the same round, or never, are drawn at random among each
    other. So no client waits for more than N/K rounds, rounded up.
    Source: Yan et al. 2020 (FedLaAvg), algorithm 1, when all clients are available.
    Use it when every client must take part equally often; `fedlaavg` is `longest_idle(mifa)`.

    Args:
        method: Method that trains the selected clients.
    """

    once: ClassVar[bool] = True
    facts = Facts(independent=False, foreseeable=False)

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self.state["last_round"] = torch.zeros(plan.clients, dtype=torch.int64)

    def select(self, round: Round, inner: Inner) -> Selection:
        order = torch.randperm(round.clients, generator=round.stream("longest idle"))
        last = self.state["last_round"][order]
        longest = order[last.argsort(stable=True)[: round.participants]]
        return Selection(tuple(longest.tolist()))

    def account(self, round: Round, selection: Selection) -> None:
        last = self.state["last_round"].clone()
        last[list(selection.clients)] = round.number
        self.state["last_round"] = last


def _mifa() -> Method:
    return cast(Method, algorithms.build("mifa"))


@algorithms.register("fedlaavg")
class FedLaAvg(LongestIdle):
    """FedLaAvg: MIFA, with the clients of a round that have been idle for the longest time.

    This is `longest_idle(mifa)`.
    Source: Yan et al. 2020, algorithm 1.
    Use it when every client must count equally often in the model.
    """

    method: Method = field(init=False, default_factory=_mifa)
