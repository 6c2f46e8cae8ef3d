"""ALA: blend the download with the client's own model, weight by weight, instead of overwriting it; FedALA is ALA on FedAvg."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, Wrapper, algorithms, describe, server_model
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.sharing import put, put_, take
from fedloom.algorithms.silobn import SiloBN
from fedloom.config.fields import Count, NonNegative, Probability
from fedloom.data.dataset import Samples
from fedloom.errors import InvalidValue
from fedloom.flat.layout import Unit
from fedloom.flat.module import Batch, LossFn, data_loss
from fedloom.local.cohort import Cohort
from fedloom.models.structure import block_parameters, head_name


class Blend(NamedTuple):
    """The result of local initialisation: where the inner method `start`s, in the slices that travel `[k, m]`; the blending
    `weights [k, n]`; which clients have `learned` theirs `[k]`; and the `losses` of each epoch of learning, NaN for clients that
    had stopped."""

    start: Tensor
    weights: Tensor
    learned: Tensor
    losses: list[Tensor]


@algorithms.register("ala")
@dataclass
class Ala(Wrapper):
    """Adaptive local aggregation: the inner method starts from a learned blend of the download and the client's last model.

    In the `p` highest blocks of what travels, start = old + (download - old) * W, elementwise; the lower ones are the
    download. A client learns W on `percent` % of its samples, drawn afresh each round, with everything else held fixed: after
    every batch W <- clip(W - rate * grad l(start) * (download - old), 0, 1). W starts at `initial_weight` and persists. The
    first time, epochs are repeated until the standard deviation of the last `window` epoch losses falls below `threshold`
    (more than `window`, at most `max_epochs`); afterwards there are `epochs` of them, or none with `frozen`. A client that has
    never trained takes the download. Everything else is the inner method's: what it compares with stays the download.

    `sampling`: a `random` subset, or a contiguous `window` at a random place (the authors' code). `epoch_loss`: the `mean`
    over batches, or the `last` batch's (the code). Before `start_round` ALA is off. `eval_point`: score the blend
    (`after_init`) or the model that local training left (`after_train`); `evaluation=reuse` scores the blend with the weights
    as they are, without learning first. What idle clients of `umf` would learn is not kept.
    `observe`, where set, is called with round, clients and the loss `[k]` of each epoch of learning (figure 3).
    Refuses methods whose clients download several models. Source: Zhang et al. 2023 (FedALA), algorithm 1, equations 3 to 5.
    Use it when each client is served by a model of its own and the global model suits some clients badly; on top of any
    method that sends one model.
    """

    p: Count = 1
    percent: Annotated[float, Field(gt=0, le=100)] = 80.0
    rate: NonNegative = 1.0
    threshold: NonNegative = 0.01
    window: Annotated[int, Field(ge=2)] = 10
    max_epochs: Count = 200
    epochs: Count = 1
    frozen: bool = False
    initial_weight: Probability = 1.0
    sampling: Literal["random", "window"] = "random"
    epoch_loss: Literal["mean", "last"] = "mean"
    start_round: Count = 1
    eval_point: Literal["after_init", "after_train"] = "after_init"
    evaluation: Literal["learn", "reuse"] = "learn"
    observe: Callable[[int, tuple[int, ...], list[Tensor]], None] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    client_figures: ClassVar[tuple[str, ...]] = ("ala_epochs", "ala_loss")

    def __post_init__(self) -> None:
        super().__post_init__()
        for method in self.method.nested():
            if isinstance(method, Ala):
                raise InvalidValue(f"ala({describe(self.method)}): the start is blended once, not twice")
            if not method.single_download:
                raise InvalidValue(
                    f"ala: clients of {describe(method)} download several models, so there is no one download to blend with"
                )

    # --- the client half ---

    @property
    def anonymous_replies(self) -> bool:
        return self.method.anonymous_replies

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        top = self.top(cohort)
        blend = self.blend(cohort, inbox["model"], top)
        reply = self.method.train(cohort, self._handed(inbox, blend))
        memory, uploads = cohort.memory, cohort.uploads
        trained = self.method.complete(cohort, reply["model"])
        known = memory.knows(_name("model", top))  # the others had nothing to blend, so they learned nothing
        memory.write(_name("model", top), take(trained, top), uploads)
        if blend.losses:
            memory.write(_name("weights", top), blend.weights, uploads & known)
            memory.write(_name("learned", top), blend.learned, uploads & known)
        if self.eval_point == "after_train":
            memory.write("ala_trained", trained, uploads)
        self._report(cohort, blend)
        return reply

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        if self.eval_point == "after_train" and bool(cohort.memory.knows("ala_trained").all()):
            return cohort.memory.get("ala_trained", inbox["model"])
        if self.method.scores_start:
            learn = self.evaluation == "learn"
            inbox = self._handed(inbox, self.blend(cohort, inbox["model"], self.top(cohort), learn=learn))
        model = self.method.personalise(cohort, inbox)
        return cohort.memory.get("ala_trained", model) if self.eval_point == "after_train" else model

    @staticmethod
    def _handed(inbox: Message, blend: Blend) -> Message:
        return {**inbox, "model": blend.start, "server_model": server_model(inbox)}

    def top(self, cohort: Cohort) -> Unit:
        """The slices of a row that are blended: the parameters of the p highest blocks among those that travel.

        Raises `InvalidValue` when there are fewer blocks.
        """
        layout, travels = cohort.layout, self.method.travels(cohort)
        inside = {
            part.name
            for part in layout.slices
            if part.stop <= layout.trainable and any(u.start <= part.start and part.stop <= u.stop for u in travels)
        }
        groups = [inside.intersection(names) for names in block_parameters(cohort.module)]
        groups = [names for names in groups if names]
        if self.p > len(groups):
            raise InvalidValue(
                f"ala: p must be at most {len(groups)}, the number of blocks of this model that travel, not {self.p}"
            )
        chosen = set().union(*groups[-self.p :])
        return layout.unit(lambda part: part.name in chosen)

    def blend(self, cohort: Cohort, received: Tensor, top: Unit, *, learn: bool = True) -> Blend:
        """The start that stands for the download `received [k, m]`, its weights learned first where `learn` says so."""
        memory = cohort.memory
        whole = self.method.complete(cohort, received)
        download = take(whole, top)
        weights = memory.get(_name("weights", top), torch.full_like(download[:1], self.initial_weight))
        learned = memory.get(_name("learned", top), torch.zeros(1, dtype=torch.bool))
        known = memory.knows(_name("model", top))
        if cohort.round.number < self.start_round or not bool(known.any()):
            return Blend(received, weights, learned, [])
        # Without an old model of its own a client blends the download with itself, whatever the weights.
        old = memory.get(_name("model", top), download)
        update = download - old
        losses: list[Tensor] = []
        if learn and self.rate:
            weights, losses = self._learned(cohort, top, whole, old, update, weights, known, ~learned.cpu())
            learned = learned | known.to(learned.device)
        start = put(whole, top, old + update * weights)
        return Blend(take(start, self.method.travels(cohort)), weights, learned, losses)

    def _learned(
        self,
        cohort: Cohort,
        top: Unit,
        whole: Tensor,
        old: Tensor,
        update: Tensor,
        weights: Tensor,
        known: Tensor,
        first: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """The blending weights after learning, and the loss of each epoch. `first [k]`: whose initial stage this is."""
        loss_fn: LossFn = data_loss
        part = cohort.subset(self._choose, "ala")
        head = head_name(cohort.module)
        if top == cohort.layout.unit(lambda part: f"{part.layer}.".startswith(f"{head}.".lstrip("."))):
            part, loss_fn = part.for_classifier(whole)

        def step(state: dict[str, Tensor], batch: Batch) -> Tensor:
            loss, gradient = part.partial_gradient(state["model"], batch, loss_fn)
            state["weights"].addcmul_(gradient, state["update"], value=-self.rate).clamp_(0, 1)
            put_(state["model"], top, torch.addcmul(state["old"], state["update"], state["weights"]))
            state["last"].copy_(loss)
            return loss

        state = {"model": whole.clone(), "weights": weights.expand_as(update).clone(), "old": old, "update": update}
        state["last"] = update.new_zeros(len(update))
        losses: list[Tensor] = []
        active = known & first if self.frozen else known.clone()
        while bool(active.any()) and len(losses) < self.max_epochs:
            before = state["weights"].clone()
            put_(state["model"], top, torch.addcmul(old, update, before))
            mean = part.each_batch(step, state, only=top, purpose="ala", in_order=True, active=active)
            loss = state["last"] if self.epoch_loss == "last" else mean
            state["weights"] = torch.where(active.to(before.device).unsqueeze(1), state["weights"], before)
            losses.append(torch.where(active.to(loss.device), loss, torch.nan))
            enough = torch.tensor(len(losses) >= self.epochs)
            active = active & ~torch.where(first, self._converged(losses), enough)
        return state["weights"], losses

    def _converged(self, losses: list[Tensor]) -> Tensor:
        """Whose last epoch losses vary no more, `[k]` bool."""
        if len(losses) <= self.window:
            return torch.zeros(len(losses[0]), dtype=torch.bool)
        spread = torch.stack(losses[-self.window :]).double().std(0, correction=0)
        return (spread < self.threshold).cpu()

    def _choose(self, samples: Samples, generator: torch.Generator) -> Samples:
        """`percent` % of a client's samples, rounded down, but enough for one step."""
        count = len(samples)
        chosen = min(count, max(2, int(self.percent * count / 100 + 1e-9)))
        if self.sampling == "random":
            return samples[torch.randperm(count, generator=generator)[:chosen]]
        first = int(torch.randint(count - chosen + 1, (), generator=generator))
        return samples[first : first + chosen]

    def _report(self, cohort: Cohort, blend: Blend) -> None:
        if blend.losses:
            history = torch.stack(blend.losses)
            epochs = (~history.isnan()).sum(0)
            cohort.metrics["ala_epochs"] = torch.where(epochs > 0, epochs, torch.nan)
            cohort.metrics["ala_loss"] = history.gather(0, (epochs - 1).clamp_min(0).unsqueeze(0))[0]
            if self.observe is not None:
                self.observe(cohort.round.number, cohort.clients, blend.losses)


def _name(what: str, top: Unit) -> str:
    """The name in memory, with the part of the model it is for: under `stages` the inner method, and so the part, may change."""
    return f"ala_{what}_{top[0].start}_{top[-1].stop}"


@algorithms.register("fedala")
@dataclass
class FedALA(Ala):
    """FedALA: FedAvg whose clients start from a learned blend of the global and their own model (`ala(fedavg)`).

    All parameters are those of `ala`; `buffers` says whether batch-norm statistics stay with the clients (`local`, as in the
    authors' code) or are averaged. Source: Zhang et al. 2023 (FedALA), algorithm 1.
    Use it when every client wants the best model for its own data and traffic may not grow: it sends what FedAvg sends.
    """

    method: Algorithm = field(init=False)
    buffers: Literal["local", "average"] = "local"

    def __post_init__(self) -> None:
        self.method = SiloBN() if self.buffers == "local" else FedAvg()
        super().__post_init__()
