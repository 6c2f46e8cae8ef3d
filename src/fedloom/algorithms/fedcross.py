from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedloom.algorithm import Facts, Round, algorithms
from fedloom.algorithm.records import Plan, Replies
from fedloom.algorithms.fedmr import Indep, Schedule, blend_at, require_schedule
from fedloom.algorithms.sharing import take
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count, NonNegativeInt
from fedloom.flat.layout import Unit


@algorithms.register("fedcross")
class FedCross(Indep):
    """Cross-aggregation: new pool[k] = alpha v_k + (1 - alpha) v_co(k) for the uploads v `[K, P]`.

    co(k) is another upload: the one with the smallest (`lowest`) or largest (`highest`) cosine with
    v_k over the trainable parameters, or (k + ((t - 1) mod (K - 1)) + 1) mod K in round t
    (`in_order`, which preserves the pool's mean). All models start equal; the global model is the
    unweighted mean of the pool. alpha = 1 is `indep`. Statistics mix like parameters.
    Source: Hu et al., ICDE 2024 (arXiv 2210.08285), algorithm 1; `propellers` and a growing alpha
    as its abstract describes them, in no public code.
    Use it like `fedmr`, where models should stay close to each other in every layer.

    Args:
        alpha: Share of a model's own upload (authors: 0.99), or pairs of a round and its share with
            linear steps between them.
        partner: How co(k) is chosen.
        similarity: The cosine of the `whole` models, or the sum of the cosines of `pairs` of
            tensors as in the authors' code: the first and the second, the third and the fourth,
            ..., including statistics and counters. With an even number of tensors the last pair
            counts twice.
        averaging_rounds: Rounds at the start in which every slot becomes the mean.
        propellers: Number of partners of a model in the first `propeller_rounds` rounds. The
            partner is then the mean of this number of uploads, chosen in order.
        propeller_rounds: Number of rounds with propellers.
    """

    alpha: Schedule = 0.99
    partner: Literal["lowest", "highest", "in_order"] = "lowest"
    similarity: Literal["whole", "pairs"] = "whole"
    averaging_rounds: NonNegativeInt = 0
    propellers: Count = 1
    propeller_rounds: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_schedule("alpha", self.alpha)

    @property
    def facts(self) -> Facts:
        return replace(super().facts, anonymous=self.partner != "in_order")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        needed = self.propellers if self.propeller_rounds else 1
        if plan.participants <= needed:
            raise InvalidValue(
                f"fedcross needs at least {needed + 1} participants, got {plan.participants}: "
                "raise participation"
            )

    def receive(self, round: Round, replies: Replies) -> None:
        pool = replies.by_slot("model")
        share = 1 - blend_at(self.alpha, round.number)
        if self.plan.passed(round.number) < self.averaging_rounds:
            self.state["pool"] = pool.mean(0).expand(len(pool), -1)
        else:
            partners = self._partners(pool, replies.integers, round.number) if share else pool
            self.state["pool"] = pool.lerp(partners, share) if share else pool

    def _partners(self, pool: Tensor, integers: Tensor | None, number: int) -> Tensor:
        """Return the model towards which each model of the pool moves, `[K, P]`."""
        if self.plan.passed(number) < self.propeller_rounds:
            return torch.stack(
                [pool[in_order(len(pool), number + k)] for k in range(self.propellers)]
            ).mean(0)
        if self.partner == "in_order":
            return pool[in_order(len(pool), number)]
        rows = pool
        if self.similarity == "pairs" and integers is not None:
            rows = torch.cat([pool, integers.to(pool)], 1)
        return pool[by_cosine(rows, self.blocks(rows.shape[1]), self.partner == "highest")]

    def blocks(self, length: int) -> list[Unit]:
        """Return the slices of a row for the sum of cosines.

        Args:
            length: Length of the row. If it exceeds a model's, the integer buffers follow the
                model.
        """
        layout = self.plan.layout
        if self.similarity == "whole":
            return [(slice(layout.trainable),)]
        slices = {tensor.name: tensor.slice for tensor in layout.slices}
        if length > layout.size:
            for tensor in layout.integer_slices:
                slices[tensor.name] = slice(layout.size + tensor.start, layout.size + tensor.stop)
        ordered = [slices[name] for name in self.plan.module.state_dict() if name in slices]
        pairs = [tuple(ordered[k : k + 2]) for k in range(0, len(ordered), 2)]
        return pairs if len(ordered) % 2 else [*pairs, pairs[-1]]


def in_order(count: int, number: int) -> Tensor:
    """Return the partner of each model in a round: a shift that changes with the round.

    Args:
        count: Number of models K, at least 2.
        number: Number of the round, from 1.

    Returns:
        Index of each model's partner, int64 `[K]`. No model is its own partner.
    """
    return (torch.arange(count) + (number - 1) % (count - 1) + 1) % count


def by_cosine(rows: Tensor, blocks: Sequence[Unit], largest: bool) -> Tensor:
    """Return the partner of each row by cosine.

    Args:
        rows: Models, `[K, P]`.
        blocks: Slices of a row. Their cosines are added.
        largest: Choose the row of largest cosine instead of smallest.

    Returns:
        Index of another row for each row, `[K]`; the first of equal ones.
    """
    directions = [torch.nn.functional.normalize(take(rows, block), dim=1) for block in blocks]
    cosine = torch.stack([unit @ unit.T for unit in directions]).sum(0)
    cosine.fill_diagonal_(-torch.inf if largest else torch.inf)
    return cosine.argmax(1) if largest else cosine.argmin(1)
