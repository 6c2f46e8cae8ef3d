from typing import ClassVar

import torch

from fedloom.algorithm.method import algorithms
from fedloom.algorithm.records import Message, Plan
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Probability
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Inner, Part


@algorithms.register("partial_work")
class PartialWork(Part):
    """Slow clients in a simulation: a straggler uploads after a part of its local training.

    In each round each client is a straggler with probability `stragglers`. With E epochs a
    straggler trains for e of them, e uniform in 1, ..., E - 1; with `steps` likewise. If E is 1 it
    takes a uniform share of its steps, at least one. All other steps of the method are unchanged,
    so FedAvg and FedProx average partial models. To drop stragglers instead, set `dropout` of the
    run to the same probability. The simulated clock counts the whole work of a straggler: it is
    slow, and the server receives what it has finished by then.
    Source: Li et al. 2020 (FedProx), section 5.2, with a fixed number of stragglers in each round;
    Flower's baseline draws them independently, as here.
    Use it to measure how a method uses the partial work of slow devices.

    Args:
        method: Method that the clients train.
        stragglers: Probability that a client is a straggler; 0 is the inner method.
    """

    stragglers: Probability = 0.5

    once: ClassVar[bool] = True

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        if plan.remote:
            raise InvalidValue(
                "partial_work only simulates slow clients. Remove it over real sites"
            )

    def train(self, cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        training = cohort.training
        units = training.epochs if training.steps is None else training.steps
        shares = [self._share(generator, units) for generator in cohort.stream("stragglers")]
        return inner.train(cohort.with_work(torch.tensor(shares, dtype=torch.float64)), inbox)

    def _share(self, generator: torch.Generator, units: int) -> float:
        """Return the share of the local training that a client completes.

        Args:
            generator: Random stream of the client and the round.
            units: Number of epochs, or of steps.
        """
        if float(torch.rand((), generator=generator, dtype=torch.float64)) >= self.stragglers:
            return 1.0
        if units == 1:
            return float(torch.rand((), generator=generator, dtype=torch.float64))
        return int(torch.randint(1, units, (), generator=generator)) / units
