"""Base of parts with releases that cost privacy."""

from abc import abstractmethod
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from fedloom.algorithm.method import Facts, name_of
from fedloom.algorithm.records import Plan, Selection
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import NonNegative, Positive
from fedloom.common.round import Round
from fedloom.parts.hooks import Inner, Part

OpenShare = Annotated[float, Field(gt=0, lt=1)]


class Accounted(Part):
    """Counts the releases of a run. Each release is (epsilon, `delta`)-private.

    Epsilon grows with the releases, and every round records it. Checkpoints store the number of
    releases; over real sites a ledger beside them stores it too (`fedloom.state.released`).

    Args:
        clip: C, the largest length of an update.
        noise: Standard deviation of the noise as a multiple of C; none chooses it before round 1
            such that all rounds cost `target_epsilon`.
        delta: Probability of a larger loss, well below 1 over the number of clients.
        target_epsilon: Largest epsilon; with `noise` the run ends before the round that would
            exceed it.
    """

    clip: Positive = 1.0
    noise: NonNegative | None = None
    delta: OpenShare = 1e-5
    target_epsilon: Positive | None = None

    counts_privacy: ClassVar[bool] = True
    earlier = 0.0
    """Sum of 1 / noise^2 over the statistics of columns that were released before round 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._solved = self.noise
        if self.noise is None and self.target_epsilon is None:
            choices = (
                "set noise, such as 0.8 (a multiple of clip), or target_epsilon, to compute noise"
            )
            raise InvalidValue(f"{name_of(self)}: {choices}")

    @property
    def facts(self) -> Facts:
        return Facts(needs_total_rounds=self.noise is None)

    @abstractmethod
    def cost(self, extra: int = 0) -> float:
        """Return the present epsilon, or epsilon after `extra` more releases."""

    @abstractmethod
    def solve(self, target: float, rounds: int) -> float:
        """Return the noise for which `rounds` rounds cost the epsilon `target`.

        Args:
            target: Largest epsilon at the end.
            rounds: Number of rounds of the run.

        Returns:
            Standard deviation of the noise, as a multiple of the clip.
        """

    def bound(self) -> float:
        """Return the largest allowed length of an update."""
        return self.clip

    def noise_multiplier(self) -> float:
        """Return the noise as a multiple of the clip."""
        if self._solved is None:
            assert self.target_epsilon is not None, "`__post_init__` raises"
            self._solved = self.solve(self.target_epsilon, self.plan.rounds)
        return self._solved

    def counted(self, selection: Selection) -> tuple[int, ...] | None:
        """Return the clients with one more release after a round, or None if releases are counted
        for all clients together.

        Args:
            selection: The clients that took part in the round.

        Returns:
            Client numbers, or None.
        """
        return None

    def report(self) -> dict[str, float]:
        return {"epsilon": self.cost()}

    def require_resources(self) -> None:
        self.cost(extra=1)  # chooses the noise and needs the library

    @property
    def spent(self) -> bool:
        if self.target_epsilon is None:
            return False
        # Over real sites a repeated round costs epsilon again, so the chosen noise may not be
        # enough for all rounds.
        limited = self.noise is not None or self.plan.remote
        return limited and self.cost(extra=1) > self.target_epsilon

    @property
    def releases_once(self) -> bool:
        return self.plan.remote


class AccountedByClient(Accounted):
    """Counts the releases of each client, for parts with noise from the clients."""

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self.state["releases"] = torch.zeros(plan.clients, dtype=torch.int64)

    def counted(self, selection: Selection) -> tuple[int, ...]:
        return selection.clients

    def account(self, round: Round, selection: Selection) -> None:
        counts = self.state["releases"].clone()
        counts[list(self.counted(selection))] += 1
        self.state["releases"] = counts
