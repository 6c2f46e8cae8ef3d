"""Notices when the models of a pool have come apart, so that their mean, the global model, is no good model any more."""

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

SIMILARITY = 0.8  # pools that do well stay above 0.82 on the digits
EVALUATIONS = 8  # it takes to judge a pool

CAME_APART = (
    "the models of the pool have come apart: clients learn, but the global model, which is the mean of the pool, is at chance or "
    "has lost half of what it had learned. Remedies: blend=auto (or a blend of 0.1) in fedmr; a smaller learning rate or less "
    "momentum; averaging first, as in stages(fedavg:100, fedmr)"
)


class PoolWatch:
    """Reads the figures of one round after the other, and says once when a pool has come apart: `notices`.

    Long steps drive the models of a pool so far apart that their mean is no good model any more, though each of them may be one.
    Of all evaluations of a pool, take the later half, since pools may still come together in the first rounds, and in it the
    older and the newer half. A pool has come apart where

        similarity of the newest pool < 0.8
        mean accuracy of the newer ones <= max(c + (1 - c) / 10, (c + best) / 2), c that of guessing, best of all rounds so far
        mean loss of the newer ones >= mean loss of the older ones
        mean training loss of the newer ones <= 0.9 of their mean loss

    `labels` are those of the test set; guessing is naming its most frequent class.
    """

    def __init__(self, labels: Tensor) -> None:
        self.notices: list[str] = []
        self._labels = labels
        self._best = 0.0
        self._pool = array("d")  # accuracy, loss and training loss of each evaluation

    def see(self, record: Mapping[str, Any]) -> None:
        """Take the figures of the next round."""
        names = ("accuracy", "loss", "training_loss", "pool_cosine")
        accuracy, loss, training_loss, similarity = map(record.get, names)
        if self.notices or accuracy is None:
            return
        self._best = max(self._best, accuracy)
        if loss is None or training_loss is None or similarity is None:
            return
        self._pool.extend((accuracy, loss, training_loss))
        if similarity < SIMILARITY and len(self._pool) >= 3 * EVALUATIONS and self._has_come_apart():
            self.notices.append(CAME_APART)

    def _has_come_apart(self) -> bool:
        figures = np.array(self._pool).reshape(-1, 3)
        quarter = len(figures) // 4
        older_loss = figures[-2 * quarter : -quarter, 1].mean()
        accuracy, loss, training_loss = figures[-quarter:].mean(0)
        guessing = float(self._labels.unique(return_counts=True)[1].max()) / self._labels.numel()
        low = max(guessing + 0.1 * (1 - guessing), (guessing + self._best) / 2)
        return bool(accuracy <= low and loss >= older_loss and training_loss <= 0.9 * loss)
