"""Notices when the models of a pool have come apart, so that their mean, the global model, is no
good model any more.
"""

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

SIMILARITY = 0.8  # pools that do well stay above 0.82 on the digits
EVALUATIONS = 8  # it takes to judge a pool
PROGRESS = 0.8  # of the common progress over the pool's variance, measured at 15 % of the rounds
EARLY, LATE = 0.15, 0.25  # shares of the rounds, of which there must be
ROUNDS = 20

CAME_APART = (
    "the models of the pool have come apart: clients learn, but the global model, which is the mean of the pool, is at chance or "
    "has lost half of what it had learned. Remedies: blend=auto (or a blend of 0.1) in fedmr; a smaller learning rate or less "
    "momentum; averaging first, as in stages(fedavg:100, fedmr)"
)

SPREAD_EARLY = (
    "the models of the pool differ more than they have moved together: T / S = {progress:.2f} after {round} of {rounds} rounds. "
    "Where it was below 0.8, fedmr ended behind fedavg in 11 of 11 settings (docs/methods/recombination.md). Remedies: "
    "blend=auto in fedmr; averaging first, as in stages(fedavg:100, fedmr); more rounds"
)


class PoolWatch:
    """Reads the figures of one round after the other, and says once when a pool has come apart or
    will fall behind: `notices`.

    Long steps drive the models of a pool so far apart that their mean is no good model any more,
    though each of them may be one. Of all evaluations of a pool, take the later half, since pools
    may still come together in the first rounds, and in it the older and the newer half. A pool has
    come apart where

        similarity of the newest pool < 0.8
        mean accuracy of the newer ones <= max(c + (1 - c) / 10, (c + best) / 2), c that of guessing, best of all rounds so far
        mean loss of the newer ones >= mean loss of the older ones
        mean training loss of the newer ones <= 0.9 of their mean loss

    `labels` are those of the test set; guessing is naming its most frequent class.

    A pool that recombines from round 1 of `rounds` on is also judged at its first evaluation after
    15 % of the rounds, if that comes before 25 %: it is likely to end behind averaging where T / S,
    `pool_progress`, is below 0.8.
    """

    def __init__(self, labels: Tensor, rounds: int) -> None:
        self.notices: list[str] = []
        self._labels, self._rounds = labels, rounds
        # no evaluation after 15 % of the rounds yet, and each with a `pool_progress`
        self._early = rounds >= ROUNDS
        self._best = 0.0
        self._pool = array("d")  # accuracy, loss and training loss of each evaluation

    def see(self, record: Mapping[str, Any]) -> None:
        """Take the figures of the next round."""
        names = ("accuracy", "loss", "training_loss", "pool_cosine")
        accuracy, loss, training_loss, similarity = map(record.get, names)
        if CAME_APART in self.notices or accuracy is None:
            return
        self._best = max(self._best, accuracy)
        self._judge_early(record["round"], record.get("pool_progress"))
        if loss is None or training_loss is None or similarity is None:
            return
        self._pool.extend((accuracy, loss, training_loss))
        if (
            similarity < SIMILARITY
            and len(self._pool) >= 3 * EVALUATIONS
            and self._has_come_apart()
        ):
            self.notices.append(CAME_APART)

    def _judge_early(self, round: int, progress: float | None) -> None:
        if progress is None:
            self._early = False
        elif self._early and round >= EARLY * self._rounds:
            self._early = False
            if progress < PROGRESS and round <= LATE * self._rounds:
                self.notices.append(
                    SPREAD_EARLY.format(progress=progress, round=round, rounds=self._rounds)
                )

    def _has_come_apart(self) -> bool:
        figures = np.array(self._pool).reshape(-1, 3)
        quarter = len(figures) // 4
        older_loss = figures[-2 * quarter : -quarter, 1].mean()
        accuracy, loss, training_loss = figures[-quarter:].mean(0)
        guessing = float(self._labels.unique(return_counts=True)[1].max()) / self._labels.numel()
        low = max(guessing + 0.1 * (1 - guessing), (guessing + self._best) / 2)
        return bool(accuracy <= low and loss >= older_loss and training_loss <= 0.9 * loss)
