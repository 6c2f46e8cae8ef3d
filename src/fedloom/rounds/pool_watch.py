"""Notices when the models of a pool have come apart, so that their mean, the global model, is no good model any more."""

from array import array
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

SIMILARITY = 0.8
"""Mean cosine similarity below which a pool may have come apart; pools that do well stay above 0.82 on the digits."""

AT_CHANCE = 0.1
"""Share of the way from the accuracy of guessing to 1 below which a model is said to guess."""

LEARNING = 0.9
"""Clients learn where their training loss is at most this share of the global model's loss."""

EVALUATIONS = 8
"""How many evaluations it takes to judge a pool."""

CAME_APART = (
    "the models of the pool have come apart: clients learn, but the global model, which is the mean of the pool, is at chance or "
    "has lost half of what it had learned. Remedies: blend=auto (or a blend of 0.1) in fedmr; a smaller learning rate or less "
    "momentum; averaging first, as in stages(fedavg:100, fedmr)"
)


class PoolWatch:
    """Reads the figures of one round after the other, and says once when a pool has come apart: `notices`.

    Long steps drive the models of a pool apart (FedMR, Indep and whatever holds these): each may be a good model, but they no
    longer lie so near each other that their mean is one. Of all evaluations of a pool, take the later half, and in it the older
    and the newer half. A pool has come apart where

        similarity of the newest pool < 0.8
        mean accuracy of the newer ones <= max(c + (1 - c) / 10, (c + best) / 2), c that of guessing, best of all rounds so far
        mean loss of the newer ones >= mean loss of the older ones
        mean training loss of the newer ones <= 0.9 of their mean loss

    Half of the run is looked at since pools of models that are far apart in the first rounds may still come together. `labels`
    are those of the test set; guessing is naming its most frequent class.
    """

    def __init__(self, labels: Tensor) -> None:
        self.notices: list[str] = []
        self._labels = labels
        self._best = 0.0
        self._pool = array("d")  # accuracy, loss and training loss of each evaluation

    @cached_property
    def _guessing(self) -> float:
        return float(self._labels.unique(return_counts=True)[1].max()) / self._labels.numel()

    def see(self, record: Mapping[str, Any]) -> None:
        """Take the figures of the next round."""
        figures = [record.get(name) for name in ("accuracy", "loss", "training_loss", "pool_cosine")]
        if self.notices or figures[0] is None:
            return
        self._best = max(self._best, figures[0])
        if None in figures:
            return
        accuracy, loss, training_loss, similarity = (float(figure) for figure in figures if figure is not None)
        self._pool.extend((accuracy, loss, training_loss))
        if similarity < SIMILARITY and len(self._pool) >= 3 * EVALUATIONS and self._has_come_apart():
            self.notices.append(CAME_APART)

    def _has_come_apart(self) -> bool:
        figures = np.array(self._pool).reshape(-1, 3)
        quarter = len(figures) // 4
        older = figures[-2 * quarter : -quarter].mean(0)
        accuracy, loss, training_loss = figures[-quarter:].mean(0)
        guessing = self._guessing
        low = max(guessing + AT_CHANCE * (1 - guessing), (guessing + self._best) / 2)
        return bool(accuracy <= low and loss >= older[1] and training_loss <= LEARNING * loss)
