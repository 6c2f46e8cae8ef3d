"""Per-FedAvg, pFedMe, PartialFed: personalised methods whose local steps are their own."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithm import AggregatedReplies, Message, Plan, algorithms
from fedloom.algorithms.sharing import PartlyShared
from fedloom.algorithms.statistics import require_constant_rate
from fedloom.config.fields import Count, Finite, NonNegative, NonNegativeInt, Positive, Share
from fedloom.errors import InvalidValue
from fedloom.flat.layout import Layout
from fedloom.flat.module import Batch
from fedloom.local.cohort import Cohort, Context
from fedloom.round import Round


@algorithms.register("per_fedavg")
@dataclass
class PerFedAvg(PartlyShared):
    """Per-FedAvg: clients minimise L_i(w - alpha grad L_i(w)), the loss after one step of their own.

    Per step, with batches b1 and b2: w' = w - alpha grad l(w; b1), then a step of size beta along d = grad l(w'; b2)
    (`first_order`), or along d - alpha (grad l(w + delta d; b3) - grad l(w - delta d; b3)) / (2 delta), which adds the
    Hessian without forming it (`hessian_free`). Two (three) batches are drawn at once and an incomplete set is left out; a
    client with less than one set divides its data. A client scores the model after one step of size alpha on one batch.
    Source: Fallah et al. 2020, algorithm 1 and section 5; FedALA, appendix G.
    Use it when clients arrive that never trained and a single step on their data must do.

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

    fits_once: ClassVar[bool] = False

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        alpha = self._alpha(cohort)
        count = 2 if self.variant == "first_order" else 3

        def gradient_fn(weights: Tensor, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
            return self._gradient(cohort, weights, divided(batch, count, cohort.flat_module.needs_pairs), alpha)

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

    def _gradient(self, cohort: Cohort, weights: Tensor, batches: list[Batch], alpha: float) -> tuple[Tensor, Tensor]:
        """Return the loss `[k]` after the inner step and the gradient `[k, T]` of the outer step."""
        count = cohort.layout.trainable
        _, gradient = cohort.gradient(weights, batches[0])
        stepped = weights.clone()
        stepped[:, :count].sub_(gradient, alpha=alpha)
        loss, direction = cohort.gradient(stepped, batches[1])
        weights[:, count:] = stepped[:, count:]  # the statistics that both batches have moved
        if self.variant == "first_order":
            return loss, direction
        direction, gradients = direction.clone(), []
        for distance in (self.delta, -self.delta):
            moved = weights.clone()
            moved[:, :count].add_(direction, alpha=distance)
            gradients.append(cohort.gradient(moved, batches[2])[1].clone())
        return loss, direction.sub_(gradients[0] - gradients[1], alpha=alpha / (2 * self.delta))

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        alpha = self._alpha(cohort)
        return cohort.fit(model, purpose="adapt", steps=1, learning_rate=alpha).model if alpha else model

    def _alpha(self, cohort: Cohort) -> float:
        return cohort.round.learning_rate if self.alpha is None else self.alpha


def divided(batch: Batch, count: int, needs_pairs: bool) -> list[Batch]:
    """Divide a batch of `[k, b, ...]` into `count` equal ones, in order; with too few samples, return it `count` times."""
    size = batch.labels.shape[1] // count
    if size < (2 if needs_pairs else 1):
        return [batch] * count
    cuts = [slice(index * size, (index + 1) * size) for index in range(count)]
    return [batch._replace(inputs=batch.inputs[:, cut], labels=batch.labels[:, cut]) for cut in cuts]


@algorithms.register("pfedme")
@dataclass
class PFedMe(PartlyShared):
    """pFedMe: a personal model theta near the minimum of l(theta) + (lambda / 2) ||theta - w||^2 for each client.

    Both start from the download. Per batch, `inner_steps` times theta <- theta - personal_rate (grad l(theta; b) +
    lambda (theta - w)), then w <- w - eta lambda (w - theta), with eta the learning rate of the round. w travels, theta is
    scored. Server: w <- (1 - beta) w + beta * mean of the clients' w, by samples. Steps are plain: momentum, weight decay
    and clipping of local training do not apply. lambda eta above 1 overshoots, with a warning; from 2 on w diverges, which
    is refused. Source: T Dinh et al. 2020, algorithm 1; FedALA, appendix G.
    Use it when personal models should stay near a global one and clients can afford several gradients a batch.

    Args:
        regularisation: lambda (FedALA: 15).
        personal_rate: Learning rate of theta (FedALA: 0.01).
        inner_steps: Steps of theta for each batch (FedALA: 5).
        beta: Share of the clients' mean in the server's model (FedALA: 1).
        inner_weight_decay: Weight decay of theta (PFLlib: 0.001).
    """

    regularisation: NonNegative = 15.0
    personal_rate: Positive = 0.01
    inner_steps: Count = 5
    beta: Positive = 1.0
    inner_weight_decay: NonNegative = 0.0

    own_model: ClassVar[str] = "pfedme_personal"
    fits_once: ClassVar[bool] = False

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        require_constant_rate("pfedme", plan.training)
        self._share(plan.training.rate(1, 1))

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        previous = self.state["model"]
        super().update(round, aggregate)
        if self.beta != 1:
            self.state["model"] = previous.lerp(self.state["model"], self.beta)

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        share, count = self._share(cohort.round.learning_rate), cohort.layout.trainable
        if share > 1:
            reason = "above 1 the local model overshoots the personal one in every step"
            warnings.warn(f"pfedme: regularisation times learning rate is {share:g}: {reason}", stacklevel=2)

        def step(state: dict[str, Tensor], batch: Batch) -> Tensor:
            local, personal = state["local"][:, :count], state["personal"][:, :count]
            for _ in range(self.inner_steps):
                loss, gradient = cohort.gradient(state["personal"], batch)
                gradient.add_(personal - local, alpha=self.regularisation)
                if self.inner_weight_decay:
                    gradient.add_(personal, alpha=self.inner_weight_decay)
                personal.sub_(gradient, alpha=self.personal_rate)
            local.sub_(local - personal, alpha=share)
            return loss

        state = {"local": start.clone(), "personal": start.clone()}
        cohort.metrics["training_loss"] = cohort.each_batch(step, state, pad=True)
        # Only the personal model has seen data, so the statistics are its.
        state["local"][:, count:] = state["personal"][:, count:]
        cohort.memory[self.own_model] = state["personal"]
        return state["local"]

    def _share(self, rate: float) -> float:
        """Return lambda eta. Raise `InvalidValue` where the local model diverges."""
        share = self.regularisation * rate
        if share >= 2:
            raise InvalidValue(
                f"pfedme: regularisation {self.regularisation:g} times learning rate {rate:g} is {share:g}: "
                "from 2 on the local model diverges"
            )
        return share


TINY = 1e-20


@algorithms.register("partialfed")
@dataclass
class PartialFed(PartlyShared):
    """PartialFed-Adaptive: a learned strategy picks, layer by layer, the downloaded or the client's own weights.

    A client has its own model and for each layer two logits a. Per batch the working model takes each layer from the source
    that a hard Gumbel-softmax of a at temperature tau draws. Batches alternate: `model_batches` train the drawn weights where
    they were drawn from; then `strategy_batches` train a alone, at the learning rate, by the straight-through gradient
    <dl/dw_layer, downloaded - own> through the softmax. tau = temperature * cooling^(round - 1), at least `coldest`. The
    model of the likelier sources (ties go to the download) is uploaded, starts the client's next round, and is scored with
    the download in its layers. Steps are plain: momentum, weight decay and clipping of local training do not apply.
    Reconstructed from the paper's text. Source: Sun et al. 2021, section 3; FedALA, appendix G.
    Use it in cross-silo federations where nobody knows which layers are better shared and which kept.

    Args:
        model_batches: Batches of a turn on the weights (FedALA: 8).
        strategy_batches: Batches of a turn on the logits (FedALA: 2).
        temperature: tau in round 1 (FedALA: 5).
        cooling: Factor of tau from round to round (FedALA: 0.965).
        coldest: Least tau.
        bias: Start of the download's logits; the client's own start at 0.
    """

    model_batches: Count = 8
    strategy_batches: NonNegativeInt = 2
    temperature: Positive = 5.0
    cooling: Share = 0.965
    coldest: Positive = 0.05
    bias: Finite = 0.0

    fits_once: ClassVar[bool] = False

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        require_constant_rate("partialfed", plan.training)

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        layer, count = layer_of(cohort.layout).to(cohort.initial.device), cohort.layout.trainable
        temperature = max(self.temperature * self.cooling ** (cohort.round.number - 1), self.coldest)
        rate = cohort.round.learning_rate

        def step(state: dict[str, Tensor], batch: Batch) -> Tensor:
            server_model, local, logits = state["global"], state["local"], state["logits"]
            noisy = logits + state["noise"][:, batch.step]
            chosen = _favours_global(noisy)[:, layer]
            working = torch.where(chosen, server_model, local)
            loss, gradient = cohort.gradient(working, batch)
            if batch.step % (self.model_batches + self.strategy_batches) < self.model_batches:
                working[:, :count].sub_(gradient, alpha=rate)
                torch.where(chosen, working, server_model, out=server_model)
                torch.where(chosen, local, working, out=local)
                return loss
            product = torch.zeros_like(noisy[:, :, 0])
            product.index_add_(1, layer[:count], gradient * (server_model - local)[:, :count])
            soft = torch.softmax(noisy / temperature, 2)
            derivative = soft[:, :, 0] * soft[:, :, 1] * product / temperature
            logits.sub_(torch.stack([derivative, -derivative], 2), alpha=rate)
            return loss

        local = cohort.memory.get("partialfed_model", start).clone()
        state = {
            "global": start.clone(),
            "local": local,
            "logits": self._logits(cohort).clone(),
            "noise": gumbel(cohort),
        }
        cohort.metrics["training_loss"] = cohort.each_batch(step, state, pad=True)
        model = torch.where(_favours_global(state["logits"])[:, layer], state["global"], state["local"])
        cohort.memory["partialfed_strategy"], cohort.memory["partialfed_model"] = state["logits"], model
        return model

    def _logits(self, cohort: Cohort) -> Tensor:
        initial = cohort.initial.new_zeros(1, len(cohort.layout.layers), 2)
        initial[:, :, 0] = self.bias
        return cohort.memory.get("partialfed_strategy", initial)

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        chosen = _favours_global(self._logits(cohort))[:, layer_of(cohort.layout)]
        return torch.where(chosen, model, cohort.memory.get("partialfed_model", model))


def gumbel(cohort: Cohort) -> Tensor:
    """Return Gumbel noise for every batch of the round, `[k, steps, layers, 2]`, from each client's own stream."""
    shape = (int(cohort.training.local_steps(cohort.sizes).max()), len(cohort.layout.layers), 2)
    uniform = torch.stack([torch.rand(shape, generator=generator) for generator in cohort.stream("strategy")])
    return -torch.log(-torch.log(uniform.to(cohort.initial) + TINY) + TINY)


def _favours_global(logits: Tensor) -> Tensor:
    """Return `[k, L]` bool from `[k, L, 2]`: True where the download is at least as likely as the own weights."""
    return logits[:, :, 0] >= logits[:, :, 1]


def layer_of(layout: Layout) -> Tensor:
    """Return the index of the layer that each column of a row belongs to, `[P]` int64."""
    owner = torch.empty(layout.size, dtype=torch.int64)
    for number, unit in enumerate(layout.units("layer")):
        for columns in unit:
            owner[columns] = number
    return owner
