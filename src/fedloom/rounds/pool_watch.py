"""Warnings about diverging models of a pool.

When the models differ too much, their mean (the global model) is no good model any more.
"""

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

SIMILARITY = 0.8  # good pools stay above 0.82 on the digits
EVALUATIONS = 8  # smallest number of evaluations to judge a pool
PROGRESS = 0.8  # smallest ratio T / S of common progress and variance, at 15 % of the rounds
EARLY, LATE = 0.15, 0.25  # shares of the rounds between which T / S is judged
ROUNDS = 20  # smallest number of rounds for this judgement

CAME_APART = (
    "the models of the pool have come apart: clients learn, but the global model (the mean of the "
    "pool) is at chance, or has lost half of its accuracy above chance. Remedies: blend=auto (or "
    "a blend of 0.1) in fedmr; a smaller learning rate or less momentum; averaging first, such as "
    "stages(fedavg:100, fedmr)"
)

SPREAD_EARLY = (
    "the models of the pool differ more than their common progress: T / S = {progress:.2f} after "
    "{round} of {rounds} rounds. With T / S below 0.8, fedmr ended behind fedavg in 11 of 11 "
    "settings (docs/methods/recombination.md). Remedies: blend=auto in fedmr; averaging first, "
    "such as stages(fedavg:100, fedmr); more rounds"
)


class PoolWatch:
    """Reads the figures of each round, and adds at most one notice of each kind to `notices`.

    Long steps can move the models of a pool so far from each other that their mean is no good
    model, although each single model is. The first half of all evaluations is ignored, because
    models may still approach each other in the first rounds. The second half is divided into
    older and newer evaluations. A pool has come apart if

        similarity of the newest pool < 0.8
        mean newer accuracy <= max(c + (1 - c) / 10, (c + best) / 2)
        mean newer loss >= mean older loss
        mean newer training loss <= 0.9 mean newer loss

    with c the accuracy of guessing the most frequent class, and best the best accuracy of all
    rounds so far.

    A pool that recombines from round 1 is also judged at its first evaluation after 15 % of the
    rounds, if this is before 25 %. If T / S (`pool_progress`) is below 0.8, the run will probably
    end behind averaging.

    Args:
        labels: Labels of the test set, `[n]`.
        rounds: Number of rounds of the run.
    """

    def __init__(self, labels: Tensor, rounds: int) -> None:
        self.notices: list[str] = []
        self._labels = labels
        self._rounds = rounds
        # True while T / S is still to be judged: each evaluation so far had a `pool_progress`.
        self._judge_progress = rounds >= ROUNDS
        self._best = 0.0
        self._pool = array("d")  # accuracy, loss and training loss of each evaluation

    def update(self, record: Mapping[str, Any]) -> None:
        """Judge the pool by the figures of the next round."""
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
            self._judge_progress = False
        elif self._judge_progress and round >= EARLY * self._rounds:
            self._judge_progress = False
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
        limit = max(guessing + 0.1 * (1 - guessing), (guessing + self._best) / 2)
        return bool(accuracy <= limit and loss >= older_loss and training_loss <= 0.9 * loss)
