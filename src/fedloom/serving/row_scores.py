"""Metrics of answers to rows whose true answers are known, by scikit-learn."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import require_one_of

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

BINS = 15
"""Bins of the calibration error."""

_SMALLEST = 1e-15  # a probability below it counts as this one in a loss


@dataclass(frozen=True)
class ClassAnswers:
    """Probabilities of the classes and the predicted classes of n rows.

    Attributes:
        labels: True classes `[n]`.
        probabilities: `[n, classes]`.
        predicted: Predicted classes `[n]`.
        positive: The class that `f1` and `auc` of two classes are about.
    """

    labels: Integers
    probabilities: Floats
    predicted: Integers
    positive: int

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.probabilities.shape[1])

    @property
    def losses(self) -> Floats:
        """The negative logarithm of the probability of each true class, `[n]`."""
        of_truth = self.probabilities[np.arange(len(self.labels)), self.labels]
        losses: Floats = -np.log(of_truth.clip(_SMALLEST))
        return losses

    def __getitem__(self, rows: npt.NDArray[np.bool_]) -> "ClassAnswers":
        return ClassAnswers(
            self.labels[rows], self.probabilities[rows], self.predicted[rows], self.positive
        )


@dataclass(frozen=True)
class NumberAnswers:
    """True and predicted numbers of n rows, `[n]`, in the units of the target."""

    labels: Floats
    predicted: Floats

    @property
    def losses(self) -> Floats:
        """The squared error of each row, `[n]`."""
        losses: Floats = (self.predicted - self.labels) ** 2
        return losses

    def __getitem__(self, rows: npt.NDArray[np.bool_]) -> "NumberAnswers":
        return NumberAnswers(self.labels[rows], self.predicted[rows])


def _accuracy(answers: ClassAnswers) -> float:
    return float((answers.labels == answers.predicted).mean())


def _balanced_accuracy(answers: ClassAnswers) -> float:
    from sklearn.metrics import balanced_accuracy_score

    return float(balanced_accuracy_score(answers.labels, answers.predicted))


def _auc(answers: ClassAnswers) -> float:
    """Return the area under the ROC curve; of several classes the mean of each against the rest.

    Classes that all rows or no row has are left out.
    """
    from sklearn.metrics import roc_auc_score

    classes = [answers.positive] if answers.classes == 2 else range(answers.classes)
    members = {k: answers.labels == k for k in classes}
    areas = [
        roc_auc_score(is_member, answers.probabilities[:, k])
        for k, is_member in members.items()
        if is_member.any() and not is_member.all()
    ]
    return float(np.mean(areas)) if areas else math.nan


def _f1(answers: ClassAnswers) -> float:
    """Return the F1 score of the positive class; of several classes the mean over those that
    occur.
    """
    from sklearn.metrics import f1_score

    if answers.classes == 2:
        labels, predicted = (
            values == answers.positive for values in (answers.labels, answers.predicted)
        )
        return float(f1_score(labels, predicted, zero_division=np.nan))
    return float(f1_score(answers.labels, answers.predicted, average="macro"))


def _log_loss(answers: ClassAnswers) -> float:
    return float(answers.losses.mean())


def _calibration_error(answers: ClassAnswers) -> float:
    """Return the expected calibration error over 15 equal bins of the highest probability.

    sum_b n_b / n |accuracy_b - confidence_b|

    Source: Guo et al., ICML 2017, equation 3.
    """
    confidence = answers.probabilities.max(1)
    correct = answers.probabilities.argmax(1) == answers.labels
    bins = np.ceil(confidence * BINS).astype(int) - 1
    gaps = np.bincount(bins.clip(0), weights=correct - confidence, minlength=BINS)
    return float(np.abs(gaps).sum() / len(correct))


def _rmse(answers: NumberAnswers) -> float:
    return float(np.sqrt(answers.losses.mean()))


def _mae(answers: NumberAnswers) -> float:
    return float(np.abs(answers.predicted - answers.labels).mean())


def _r2(answers: NumberAnswers) -> float:
    from sklearn.metrics import r2_score

    return float(r2_score(answers.labels, answers.predicted)) if len(answers.labels) > 1 else np.nan


CLASS_METRICS: dict[str, Callable[[ClassAnswers], float]] = {
    "accuracy": _accuracy,
    "balanced_accuracy": _balanced_accuracy,
    "auc": _auc,
    "f1": _f1,
    "log_loss": _log_loss,
    "calibration_error": _calibration_error,
}
"""Metrics of models that predict one class."""

NUMBER_METRICS: dict[str, Callable[[NumberAnswers], float]] = {
    "rmse": _rmse,
    "mae": _mae,
    "r2": _r2,
}
"""Metrics of models that predict a number."""


def scores(answers: ClassAnswers | NumberAnswers, metrics: Sequence[str] = ()) -> dict[str, float]:
    """Return metrics by name; NaN for one that these rows do not define.

    Args:
        answers: Answers to at least one row.
        metrics: Names of metrics; by default all that fit.

    Returns:
        Each metric over all the rows; shares and probabilities are in [0, 1].

    Raises:
        InvalidValue: A name is unknown or of another kind of model.
    """
    table: dict[str, Callable[..., float]] = (
        {**CLASS_METRICS} if isinstance(answers, ClassAnswers) else {**NUMBER_METRICS}
    )
    for name in metrics:
        require_one_of("metrics", name, tuple(table))
    with warnings.catch_warnings(action="ignore"):  # about classes without rows
        return {name: table[name](answers) for name in metrics or table}


def best_f1_threshold(answers: ClassAnswers) -> float:
    """Return the probability of the positive class from which on the F1 score of these rows is
    highest.

    Raises:
        InvalidValue: No row has the positive class.
    """
    from sklearn.metrics import precision_recall_curve

    is_positive = answers.labels == answers.positive
    if not is_positive.any():
        raise InvalidValue("threshold='best_f1': no row has the positive class")
    precision, recall, thresholds = precision_recall_curve(
        is_positive, answers.probabilities[:, answers.positive]
    )
    f1 = 2 * precision * recall / np.maximum(precision + recall, _SMALLEST)
    return float(thresholds[f1[:-1].argmax()])
