from typing import Literal

from torch import Tensor

from fedloom.algorithm import Cohort, Facts, algorithms
from fedloom.algorithm.records import Message
from fedloom.algorithms.sharing import PartlyShared
from fedloom.common.fields import Count, NonNegative, Positive
from fedloom.flat.module import Batch, Context


@algorithms.register("per_fedavg")
class PerFedAvg(PartlyShared):
    """Per-FedAvg: clients minimise L_i(w - alpha grad L_i(w)), the loss after one personal step.

    Per step, with batches b1 and b2: w' = w - alpha grad l(w; b1), then a step of size beta along d
    = grad l(w'; b2) (`first_order`), or along d - alpha (grad l(w + delta d; b3) - grad l(w - delta
    d; b3)) / (2 delta), which adds the Hessian without forming it (`hessian_free`). Two (three)
    batches are drawn at once and an incomplete set is skipped; a client with less than one set
    divides its data. A client scores the model after one step of size alpha on one batch.
    Source: Fallah et al. 2020, algorithm 1 and section 5; FedALA, appendix G.
    Use it when new clients that never trained must adapt the model in a single step on their data.

    Args:
        alpha: Size of the inner step; none is the learning rate (FedALA).
        beta: Size of the outer step; none is the learning rate (FedALA).
        variant: `first_order` or `hessian_free`.
        delta: Finite difference of `hessian_free`.
        passes: Factor of the local epochs (PFLlib: 2).
    """

    alpha: NonNegative | None = None
    beta: Positive | None = None
    variant: Literal["first_order", "hessian_free"] = "first_order"
    delta: Positive = 1e-3
    passes: Count = 1

    base_facts = Facts(fits_once=False)

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        alpha = self._alpha(cohort)
        count = 2 if self.variant == "first_order" else 3

        def gradient_fn(weights: Tensor, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
            return self._gradient(
                cohort, weights, divided(batch, count, cohort.flat_module.needs_pairs), alpha
            )

        settings = cohort.training
        return cohort.fit(
            start,
            gradient_fn=gradient_fn,
            epochs=self.passes * settings.epochs,
            steps=None if settings.steps is None else self.passes * settings.steps,
            batch_size=None if settings.batch_size is None else count * settings.batch_size,
            drop_last=True,
            learning_rate=self.beta,
        ).model

    def _gradient(
        self, cohort: Cohort, weights: Tensor, batches: list[Batch], alpha: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss after the inner step, `[k]`, and the gradient of the outer step, `[k,
        T]`.
        """
        count = cohort.layout.trainable
        _, gradient = cohort.gradient(weights, batches[0])
        stepped = weights.clone()
        stepped[:, :count].sub_(gradient, alpha=alpha)
        loss, direction = cohort.gradient(stepped, batches[1])
        weights[:, count:] = stepped[:, count:]  # statistics that both batches have updated
        if self.variant == "first_order":
            return loss, direction
        direction = direction.clone()
        gradients = []
        for distance in (self.delta, -self.delta):
            moved = weights.clone()
            moved[:, :count].add_(direction, alpha=distance)
            gradients.append(cohort.gradient(moved, batches[2])[1].clone())
        return loss, direction.sub_(gradients[0] - gradients[1], alpha=alpha / (2 * self.delta))

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        alpha = self._alpha(cohort)
        return (
            cohort.fit(model, purpose="adapt", steps=1, learning_rate=alpha).model
            if alpha
            else model
        )

    def _alpha(self, cohort: Cohort) -> float:
        return cohort.round.learning_rate if self.alpha is None else self.alpha


def divided(batch: Batch, count: int, needs_pairs: bool) -> list[Batch]:
    """Divide a batch of `[k, b, ...]` into equal batches.

    Args:
        batch: The batch.
        count: Number of batches.
        needs_pairs: Every batch needs two samples, as for batch norm.

    Returns:
        The `count` batches in order. With too few samples, the whole batch `count` times.
    """
    size = batch.labels.shape[1] // count
    if size < (2 if needs_pairs else 1):
        return [batch] * count
    cuts = [slice(index * size, (index + 1) * size) for index in range(count)]
    return [
        batch._replace(inputs=batch.inputs[:, cut], labels=batch.labels[:, cut]) for cut in cuts
    ]
