"""The loss around the final global model, in two filter-normalised directions (FedMR, figure 6)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count, NonNegativeInt, Positive, require_at_least
from fedloom.common.randomness import stream
from fedloom.data.dataset import Samples
from fedloom.flat.layout import Layout
from fedloom.recording.recorder import (
    ClientExchange,
    Measurement,
    Recorder,
    RunContext,
    Series,
    Tensors,
    recorders,
)
from fedloom.rounds.federation import Federation
from fedloom.rounds.scoring import Evaluator
from fedloom.task import Task


@recorders.register("landscape")
@dataclass(frozen=True)
class Landscape(Recorder):
    """The loss around the final model w: L(w + a d1 + b d2), a and b from -`radius` to `radius`.

    d1 and d2 are Gaussian, then scaled filter by filter to the norms of the model. Only
    `directions` draws them, so that runs of one architecture use the same directions. L is the mean
    cross entropy in evaluation mode, at `grid` x `grid` points. It is computed on `samples` evenly
    spaced samples of the clients' training data (`data=train`) or of the test set (`data=test`).
    Costs grid^2 * samples forward passes, once, after the last round.

    Source: Li et al. 2018, arXiv 1712.09913, section 4; Hu et al. 2022 (FedMR), figure 6 (figure 7
    in the KDD 2024 version).
    """

    grid: int = 21
    radius: Positive = 1.0
    samples: Count = 1000
    data: Literal["train", "test"] = "train"
    directions: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("grid", self.grid, 3)
        if self.grid % 2 == 0:
            raise InvalidValue(
                f"grid must be odd, so that the model is a point of it, not {self.grid}"
            )

    def require(self, context: RunContext) -> None:
        if self.data == "test":
            context.require_test_samples()

    def measure(
        self, number: int, exchanges: Sequence[ClientExchange], context: RunContext
    ) -> Measurement | None:
        return Measurement({}) if number == context.rounds else None

    def complete(self, value: Any, federation: Federation, context: RunContext) -> Any:
        return self.around(federation.model(), context.task, federation.integers, context.evaluator)

    def result(self, series: Series, tensors: Tensors, context: RunContext) -> dict[str, Any]:
        return dict(series[-1][1])

    def around(
        self,
        model: Tensor,
        task: Task,
        integers: Tensor | None = None,
        evaluator: Evaluator | None = None,
    ) -> dict[str, Any]:
        """Return the landscape around a model, in the form for reports.

        Args:
            model: The model `[P]`.
            task: The task with the samples.
            integers: Integer buffers of the model.
            evaluator: Computes the losses; by default a new one.

        Returns:
            `surface[i][j]` is the loss at b = `y[i]`, a = `x[j]`, None if it is not finite. `loss`
                and `accuracy` belong to the model.
        """
        judge = evaluator or Evaluator(task.model, task.layout, task.dataset)
        samples = self._samples(task)
        across, up = (
            filter_normalised(
                gaussian(task.layout, self.directions, axis).to(model), model, task.layout
            )
            for axis in ("first", "second")
        )
        ticks = np.linspace(-self.radius, self.radius, self.grid).tolist()
        surface = [
            [judge.score(model + a * across + b * up, samples, integers)["loss"] for a in ticks]
            for b in ticks
        ]  # fmt: skip
        score = judge.score(model, samples, integers)
        return {
            "kind": "landscape",
            "x": ticks,
            "y": ticks,
            "surface": [
                [value if np.isfinite(value) else None for value in line] for line in surface
            ],
            "loss": score["loss"],
            task.objective.metric.name: score[task.objective.metric.name],
            "data": self.data,
            "samples": len(samples),
            "directions": self.directions,
        }

    def _samples(self, task: Task) -> Samples:
        pool = np.arange(len(task.test)) if self.data == "test" else np.sort(task.partition.indices)
        positions = (
            np.linspace(0, len(pool) - 1, min(self.samples, len(pool))).round().astype(np.int64)
        )
        source = task.test if self.data == "test" else task.train
        return source[torch.from_numpy(pool[positions]).to(source.labels.device)]


def gaussian(layout: Layout, directions: int, axis: str) -> Tensor:
    """Draw a standard normal row by its name.

    It is the same for all models of one architecture.

    Args:
        layout: Layout of the model.
        directions: Seed.
        axis: Name of the direction.

    Returns:
        The direction, `[P]`, in the type of the model.
    """
    return torch.randn(
        layout.size, generator=stream(directions, f"landscape {axis}"), dtype=layout.dtype
    )


def filter_normalised(direction: Tensor, model: Tensor, layout: Layout) -> Tensor:
    """Return the direction scaled filter by filter: d_f <- d_f |w_f| / |d_f|.

    A filter is one row of a weight along its first dimension: a convolution's output channel, a
    linear layer's neuron. Biases, the parameters of batch norm and all buffers get 0.

    Args:
        direction: The direction, `[P]`.
        model: The model w, `[P]`.
        layout: Layout of the model.

    Returns:
        The direction, `[P]`.

    Source: Li et al. 2018, section 4, and their code's `biasbn`.
    """
    result = torch.zeros_like(direction)
    for tensor in layout.slices:
        if tensor.stop <= layout.trainable and len(tensor.shape) >= 2:
            filters = direction[tensor.slice].view(tensor.shape[0], -1)
            norms = model[tensor.slice].view(tensor.shape[0], -1).norm(dim=1, keepdim=True)
            lengths = filters.norm(dim=1, keepdim=True).clamp_min(torch.finfo(direction.dtype).tiny)
            result[tensor.slice] = (filters * norms / lengths).reshape(-1)
    return result
