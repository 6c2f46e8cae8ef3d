"""Label noise: wrong labels among the clients' training labels, as sites label carelessly."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.common.errors import InvalidValue, quoted
from fedloom.common.expression import show
from fedloom.common.fields import require_fields
from fedloom.common.randomness import numpy_stream
from fedloom.common.registry import Registry
from fedloom.data.partition import Indices, Partition, draw_from_each, sample_keys


@dataclass(frozen=True)
class LabelNoise:
    """Replaces a share of each client's training labels by those of `replacements`.

    Of a client's n labels rate * n are replaced, rounded up or down at random in proportion to the
    fraction, so that the mean share is exact however small the clients are.

    Args:
        rate: The share, in [0, 1], or a range `[lowest, highest]` from which every client's own
            rate is drawn uniformly, so that some sites are worse than others.
    """

    rate: float | list[float]

    def __post_init__(self) -> None:
        require_fields(self)
        limits = self._limits
        if len(limits) != 2 or not 0 <= limits[0] <= limits[1] <= 1:
            raise InvalidValue(
                "rate must be between 0 and 1, or a range [lowest, highest], not "
                f"{quoted(self.rate, show)}"
            )

    @property
    def _limits(self) -> list[float]:
        return self.rate if isinstance(self.rate, list) else [self.rate, self.rate]

    def replacements(self, labels: Indices, classes: int, keys: npt.NDArray[np.uint64]) -> Indices:
        """Return the labels that replace others.

        Args:
            labels: True labels `[n]`.
            classes: Number of classes.
            keys: Independent random 64-bit numbers `[n]`.

        Returns:
            Labels `[n]`.
        """
        raise NotImplementedError

    def rates(self, clients: int, seed: int) -> npt.NDArray[np.float64]:
        """Return each client's rate, `[clients]`.

        Args:
            clients: Number of clients.
            seed: Seed of the draw.

        Returns:
            Share of the labels that are replaced, float64 `[clients]`, drawn uniformly from the
            range of `rate`.
        """
        low, high = self._limits
        return numpy_stream(seed, "label noise rates").uniform(low, high, clients)

    def apply(self, labels: Indices, partition: Partition, classes: int, seed: int) -> Indices:
        """Return labels with a share replaced. With one seed, a higher rate also replaces all
        labels that a lower one replaces.

        Args:
            labels: Labels `[n]`.
            partition: Samples of each client.
            classes: Number of classes.
            seed: Seed of the draw.

        Returns:
            Labels `[n]`.
        """
        expected = self.rates(len(partition), seed) * partition.sizes
        counts = np.floor(
            expected + numpy_stream(seed, "label noise rounding").random(len(partition))
        )
        drawn, _ = draw_from_each(
            partition, np.minimum(counts.astype(np.int64), partition.sizes), seed, "label noise"
        )
        noisy = labels.copy()
        keys = sample_keys(drawn.indices, seed, "label noise classes")
        noisy[drawn.indices] = self.replacements(labels[drawn.indices], classes, keys)
        return noisy


label_noises: Registry[type[LabelNoise]] = Registry("label noise", "fedloom.data")


@label_noises.register("symmetric")
class Symmetric(LabelNoise):
    """Replaced labels are drawn uniformly from all classes, the true one among them.

    So with C classes a share of rate (C - 1) / C of the labels is wrong: `symmetric(0.4)` on 10
    classes makes 36 % wrong.
    """

    def replacements(self, labels: Indices, classes: int, keys: npt.NDArray[np.uint64]) -> Indices:
        return (keys % np.uint64(classes)).astype(np.int64)


@label_noises.register("paired")
class Paired(LabelNoise):
    """Replaced labels of class c become c + 1, those of the last class 0, as neighbouring classes
    are confused.
    """

    def replacements(self, labels: Indices, classes: int, keys: npt.NDArray[np.uint64]) -> Indices:
        return (labels + 1) % classes
