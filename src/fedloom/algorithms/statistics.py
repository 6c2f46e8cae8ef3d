"""Quantities of a client's local training: its relative size, and the gradients that its
displacement implies.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedloom.algorithm import Cohort
from fedloom.algorithm.records import Message, Plan
from fedloom.common.errors import InvalidValue, quoted
from fedloom.common.rates import CONSTANT
from fedloom.common.training import Training
from fedloom.data.dataset import Samples


def mean_size(plan: Plan) -> Tensor:
    """Return the mean number of training samples of all clients, `[1]`. The server sends it as
    `mean_size`.
    """
    return plan.sizes(torch.arange(plan.clients)).to(plan.initial).mean().reshape(1)


def relative_sizes(cohort: Cohort, inbox: Message) -> Tensor:
    """Return a_i = n_i / mean_j n_j, the size of each client relative to the mean of all clients.

    Args:
        cohort: The clients, with their numbers of training samples n_i.
        inbox: The server's message, with `mean_size [k, 1]`.

    Returns:
        Relative sizes, `[k, 1]`.
    """
    mean = inbox["mean_size"]
    return cohort.sizes.to(mean).unsqueeze(1) / mean


def divided(
    cohort: Cohort, purpose: str, count: Callable[[int], int], lasting: bool = True
) -> list[Cohort]:
    """Divide the samples of each client at random into two groups.

    Args:
        cohort: The clients.
        purpose: Name of the random stream.
        count: Maps the number of samples of a client to the size of the first group.
        lasting: Use the same division in all rounds.

    Returns:
        Two cohorts. If the second group of a client is empty, it gets the first.
    """

    def pick(samples: Samples, generator: torch.Generator, *, complement: bool) -> Samples:
        order = torch.randperm(len(samples), generator=generator).to(samples.labels.device)
        chosen, remaining = order.tensor_split([count(len(order))])
        return samples[remaining if complement and len(remaining) else chosen]

    halves = (partial(pick, complement=complement) for complement in (False, True))
    return [cohort.subset(half, purpose, lasting=lasting) for half in halves]


def mean_gradient(start: Tensor, end: Tensor, steps: Tensor, rate: float) -> Tensor:
    """Return (start - end) / (steps rate), the mean gradient of the local steps.

    Args:
        start: Models before training, `[k, T]`.
        end: Models after training, `[k, T]`.
        steps: Number of steps, `[k]`.
        rate: Learning rate.

    Returns:
        Gradients, `[k, T]`; 0 for a client without steps, and for a rate of 0 in floating point.
    """
    if rate == 0:
        return torch.zeros_like(start)
    counts = steps.to(start).clamp_min(1)
    # A rate that has decayed for many rounds can be 0 in single precision.
    lengths = (counts if rate > torch.finfo(start.dtype).tiny else counts.double()) * rate
    return ((start - end) / lengths.unsqueeze(1)).to(start)


def require_sgd(method: str, plan: Plan) -> None:
    """Raise `InvalidValue` unless clients train by SGD at a constant rate, so that displacements
    give gradients.

    Args:
        method: Name of the method, with which errors begin.
        plan: The plan, with the settings of local training.
    """
    require_constant_rate(method, plan)
    training = plan.training
    if training.optimizer != "sgd":
        raise InvalidValue(
            f"{method} computes gradients from the steps: optimizer must be sgd, "
            f"not {training.optimizer}"
        )


def require_constant_rate(method: str, plan: Plan) -> None:
    """Raise `InvalidValue` if the learning rate changes from one local step to the next.

    Args:
        method: Name of the method, with which errors begin.
        plan: The plan, with the settings of local training.
    """
    if plan.training.local_schedule != CONSTANT:
        needed = (
            f"local_schedule must be {CONSTANT}, not {quoted(plan.training.local_schedule, str)}"
        )
        raise InvalidValue(f"{method} needs one learning rate in a round: {needed}")


def require_classes(name: str, plan: Plan) -> None:
    """Raise `InvalidValue` unless the targets of the task are classes.

    Args:
        name: Name of the method or part, with which errors begin.
        plan: The plan, with the number of classes (0 if the targets are not classes).
    """
    if not plan.classes:
        raise InvalidValue(
            f"{name} needs class labels, but the targets of this task are not classes"
        )


def momentum_gain(training: Training) -> float:
    """Return the factor by which momentum lengthens steps in the long run: (1 - dampening) / (1 -
    momentum).
    """
    if not training.momentum:
        return 1.0
    return (1 - float(training.optimizer_options.get("dampening", 0.0))) / (1 - training.momentum)


def accumulated_weights(training: Training, steps: Tensor) -> Tensor:
    """Return ||a_i||_1, the total weight of a client's gradients in its displacement, in units of
    the rate.

    Plain SGD gives the number of steps tau; momentum m gives (tau - m (1 - m^tau) / (1 - m)) / (1 -
    m). Computed by running the optimizer on gradients of 1, which covers dampening and Nesterov.

    Args:
        training: Settings of the optimizer.
        steps: Number of steps of each client, `[k]` int64.

    Returns:
        Weights, `[k]` float64.

    Source: Wang et al. 2020 (FedNova), section 4.
    """
    momentum = training.momentum
    dampening = float(training.optimizer_options.get("dampening", 0.0))
    nesterov = bool(training.optimizer_options.get("nesterov", False))
    velocity = 0.0
    totals = [0.0]
    for step in range(int(steps.max())):
        velocity = momentum * velocity + (1 - dampening if step and momentum else 1.0)
        moved = 1 + momentum * velocity if nesterov else velocity
        totals.append(totals[-1] + (moved if momentum else 1.0))
    return torch.tensor(totals, dtype=torch.float64)[steps]
