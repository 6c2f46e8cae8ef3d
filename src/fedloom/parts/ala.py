"""ALA: a learned blend of the download and the client's model, weight by weight; FedALA: ALA on
FedAvg; FedAH: ALA on FedRep.
"""

from dataclasses import field
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithm.method import Facts, Method, algorithms
from fedloom.algorithm.records import Message, started_from
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.kept_layers import FedRep, SiloBN
from fedloom.algorithms.sharing import put, put_, take
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count, NonNegative, Probability
from fedloom.data.dataset import Samples
from fedloom.flat.layout import Unit
from fedloom.flat.module import Batch, LossFn, data_loss
from fedloom.local.cohort import Cohort
from fedloom.models.structure import block_parameters, head_name
from fedloom.parts.hooks import Inner, Part


class Blend(NamedTuple):
    """The result of local initialisation for k clients."""

    start: Tensor  # start of the inner method, the columns that travel, [k, m]
    weights: Tensor  # weights of the blend, [k, n]
    learned: Tensor  # True for clients with learned weights, [k]
    losses: list[Tensor]  # of each epoch of learning, [k]; NaN for clients that had stopped


@algorithms.register("ala")
class Ala(Part):
    """Adaptive local aggregation: the inner method starts from a learned blend of the download and
    the client's last model.

    In the `p` highest blocks of the travelling layers, start = old + (download - old) * W,
    elementwise; lower blocks are the download. A client learns W with all other weights held fixed:
    after every batch W <- clip(W - rate * grad l(start) * (download - old), 0, 1). W persists. The
    first time, epochs are repeated until the standard deviation of the last `window` epoch losses
    is below `threshold` (more than `window`, at most `max_epochs`). A client that has not trained
    yet starts from the download. Proximal terms and similar terms of the inner method remain
    centred at the download. Methods with clients that download several models are refused; idle
    clients of `umf` do not store their learned weights.
    Source: Zhang et al. 2023 (FedALA), algorithm 1, equations 3 to 5.
    Use it when each client needs a personal model and the global model fits some clients badly.

    Args:
        p: Number of blended blocks, from the top (paper: 1).
        percent: Share of a client's samples to learn W on, drawn anew each round, in % (paper: 80).
        rate: Learning rate of W (paper: 1).
        threshold: The first learning ends when the standard deviation of the losses is below this
            (authors: 0.01).
        window: Number of epochs in this standard deviation (authors: 10).
        max_epochs: Largest number of epochs of the first learning.
        epochs: Epochs of W in later rounds.
        initial_weight: W before learning.
        start_round: First round with ALA.
    """

    p: Count = 1
    percent: Annotated[float, Field(gt=0, le=100)] = 80.0
    rate: NonNegative = 1.0
    threshold: NonNegative = 0.01
    window: Annotated[int, Field(ge=2)] = 10
    max_epochs: Count = 200
    epochs: Count = 1
    initial_weight: Probability = 1.0
    start_round: Count = 1

    client_figures: ClassVar[tuple[str, ...]] = ("ala_epochs", "ala_loss")
    once: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ("one download",)
    facts = Facts(fits_once=False)

    def train(self, cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        top = self.top(cohort, inner)
        blend = self.blend(cohort, inbox["model"], top, inner)
        reply = inner.train(cohort, started_from(blend.start, inbox))
        memory = cohort.memory
        uploads = cohort.uploads
        # Clients without an earlier model had nothing to blend or to learn.
        trained_before = memory.knows(_name("model", top))
        memory.write(
            _name("model", top),
            take(inner.algorithm.complete(cohort, reply["model"]), top),
            uploads,
        )
        if blend.losses:
            memory.write(_name("weights", top), blend.weights, uploads & trained_before)
            memory.write(_name("learned", top), blend.learned, uploads & trained_before)
        self.record_learning(cohort, blend)
        return reply

    def personalise(self, cohort: Cohort, inbox: Message, inner: Inner) -> Tensor:
        if inner.algorithm.facts.deploys != "memory":
            blend = self.blend(cohort, inbox["model"], self.top(cohort, inner), inner)
            inbox = started_from(blend.start, inbox)
        return inner.personalise(cohort, inbox)

    def top(self, cohort: Cohort, inner: Inner) -> Unit:
        """Return the blended columns: the parameters of the `p` highest blocks that travel.

        Args:
            cohort: The clients, with the architecture and its blocks.
            inner: The inner method, which decides the columns that travel.

        Returns:
            Slices of a row `[P]`.

        Raises:
            InvalidValue: Fewer than `p` blocks travel.
        """
        layout = cohort.layout
        travels = inner.algorithm.shared(cohort.module, cohort.layout)
        parameters = [tensor for tensor in layout.slices if tensor.stop <= layout.trainable]
        inside = {
            t.name
            for t in parameters
            if any(u.start <= t.start and t.stop <= u.stop for u in travels)
        }
        groups = [
            block
            for names in block_parameters(cohort.module)
            if (block := inside.intersection(names))
        ]
        if self.p > len(groups):
            raise InvalidValue(
                f"ala: p must be at most {len(groups)}, the number of blocks that travel, "
                f"not {self.p}"
            )
        chosen = set().union(*groups[-self.p :])
        return layout.unit(lambda tensor: tensor.name in chosen)

    def blend(self, cohort: Cohort, received: Tensor, top: Unit, inner: Inner) -> Blend:
        """Learn the weights of the blend, and return the start that replaces the download.

        Args:
            cohort: The clients.
            received: The download, `[k, m]`.
            top: The blended columns.
            inner: The inner method.

        Returns:
            The start of the inner method, with the learned weights. In the first rounds, and for
            clients without an old model, the start is the download.
        """
        memory = cohort.memory
        rows = inner.algorithm.complete(cohort, received)
        download = take(rows, top)
        weights = memory.get(
            _name("weights", top), torch.full_like(download[:1], self.initial_weight)
        )
        learned = memory.get(_name("learned", top), torch.zeros(1, dtype=torch.bool))
        trained_before = memory.knows(_name("model", top))
        if cohort.round.number < self.start_round or not bool(trained_before.any()):
            return Blend(received, weights, learned, [])
        # A client without an old model blends the download with itself, for any weights.
        previous = memory.get(_name("model", top), download)
        update = download - previous
        losses: list[Tensor] = []
        if self.rate:
            state = {
                "model": rows.clone(),
                "weights": weights.expand_as(update).clone(),
                "old": previous,
            }
            weights, losses = self._learned(
                cohort, top, state | {"update": update}, trained_before, ~learned.cpu()
            )
            learned = learned | trained_before.to(learned.device)
        start = put(rows, top, previous + update * weights)
        shared = inner.algorithm.shared(cohort.module, cohort.layout)
        return Blend(take(start, shared), weights, learned, losses)

    def _learned(
        self,
        cohort: Cohort,
        top: Unit,
        state: dict[str, Tensor],
        active: Tensor,
        initial_stage: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the learned weights of the blend and the loss of each epoch. `initial_stage [k]`
        is True for clients that learn for the first time.
        """
        loss_fn: LossFn = data_loss
        learners = cohort.subset(self._choose, "ala")
        head = head_name(cohort.module)
        if top == cohort.layout.unit(
            lambda tensor: f"{tensor.layer}.".startswith(f"{head}.".lstrip("."))
        ):
            learners, loss_fn = learners.for_classifier(state["model"].clone())

        def step(state: dict[str, Tensor], batch: Batch) -> Tensor:
            loss, gradient = learners.partial_gradient(state["model"], batch, loss_fn)
            state["weights"].addcmul_(gradient, state["update"], value=-self.rate).clamp_(0, 1)
            put_(
                state["model"], top, torch.addcmul(state["old"], state["update"], state["weights"])
            )
            state["last"].copy_(loss)
            return loss

        state["last"] = state["update"].new_zeros(len(active))
        losses: list[Tensor] = []
        while bool(active.any()) and len(losses) < self.max_epochs:
            unlearned = state["weights"].clone()
            put_(state["model"], top, torch.addcmul(state["old"], state["update"], unlearned))
            mean = learners.each_batch(
                step, state, only=top, purpose="ala", in_order=True, active=active
            )
            loss = self.epoch_loss(mean, state["last"])
            state["weights"] = torch.where(
                active.to(unlearned.device).unsqueeze(1), state["weights"], unlearned
            )
            losses.append(torch.where(active.to(loss.device), loss, torch.nan))
            enough = torch.tensor(len(losses) >= self.epochs)
            active = active & ~torch.where(initial_stage, self._converged(losses), enough)
        return state["weights"], losses

    def _converged(self, losses: list[Tensor]) -> Tensor:
        """Return `[k]` bool: True if the last epoch losses have converged."""
        if len(losses) <= self.window:
            return torch.zeros(len(losses[0]), dtype=torch.bool)
        spread = torch.stack(losses[-self.window :]).double().std(0, correction=0)
        return (spread < self.threshold).cpu()

    def _choose(self, samples: Samples, generator: torch.Generator) -> Samples:
        """Return `percent` % of a client's samples, rounded down, but enough for one step."""
        count = len(samples)
        return self.chosen(
            samples, min(count, max(2, int(self.percent * count / 100 + 1e-9))), generator
        )

    def chosen(self, samples: Samples, count: int, generator: torch.Generator) -> Samples:
        """Return `count` of a client's samples: here a random subset.

        Args:
            samples: All training samples of the client.
            count: Number of samples to choose, at most all.
            generator: Random stream of the client and the round.

        Returns:
            The chosen samples.
        """
        return samples[torch.randperm(len(samples), generator=generator)[:count]]

    def epoch_loss(self, mean: Tensor, last: Tensor) -> Tensor:
        """Return the loss of an epoch: here the mean over its batches.

        Args:
            mean: Mean loss of the batches, `[k]`.
            last: Loss of the last batch, `[k]`.

        Returns:
            Losses, `[k]`. Learning stops when they vary little.
        """
        return mean

    def record_learning(self, cohort: Cohort, blend: Blend) -> None:
        """Record the number of epochs of learning and the loss of the last epoch in the clients'
        figures.

        Args:
            cohort: The clients. Their figures are changed.
            blend: The result of `blend`, with the losses of all epochs.
        """
        if blend.losses:
            history = torch.stack(blend.losses)
            epochs = (~history.isnan()).sum(0)
            cohort.metrics["ala_epochs"] = torch.where(epochs > 0, epochs, torch.nan)
            cohort.metrics["ala_loss"] = history.gather(0, (epochs - 1).clamp_min(0).unsqueeze(0))[
                0
            ]


def _name(kind: str, top: Unit) -> str:
    """Return a name in memory with the blended columns, which can differ between `stages`."""
    return f"ala_{kind}_{top[0].start}_{top[-1].stop}"


@algorithms.register("fedala")
class FedALA(Ala):
    """FedALA: FedAvg with clients that start from a learned blend of the global model and their own
    (`ala(fedavg)`).

    Source: Zhang et al. 2023 (FedALA), algorithm 1.
    Use it when every client wants the best model for its own data and traffic must not grow: it
    sends the same as FedAvg.

    Args:
        buffers: Batch-norm statistics stay with the clients (`local`, the authors' code) or are
            averaged (`average`).
    """

    method: Method = field(init=False)
    buffers: Literal["local", "average"] = "local"

    def __post_init__(self) -> None:
        self.method = SiloBN() if self.buffers == "local" else FedAvg()
        super().__post_init__()


class AuthorsCode:
    """Two details of the code of FedALA's authors that the paper leaves open.

    Clients learn W on a contiguous window of their samples at a random offset, and the loss of an
    epoch is the loss of its last batch.
    """

    def chosen(self, samples: Samples, count: int, generator: torch.Generator) -> Samples:
        start = int(torch.randint(len(samples) - count + 1, (), generator=generator))
        return samples[start : start + count]

    def epoch_loss(self, mean: Tensor, last: Tensor) -> Tensor:
        return last


@algorithms.register("ala_code")
class AlaCode(AuthorsCode, Ala):
    """ALA as the authors' code computes it, for tables from that code.

    Clients learn W on a contiguous window of their samples at a random offset, and the loss of an
    epoch is the loss of its last batch.
    Source: the code of Zhang et al. 2023 (FedALA).
    Use it only to reproduce these tables, otherwise `ala`.
    """


@algorithms.register("fedala_code")
class FedALACode(AuthorsCode, FedALA):
    """FedALA as the authors' code computes it, for tables from that code.

    This is `ala_code` around FedAvg, with batch-norm statistics that stay with the clients.
    Source: the code of Zhang et al. 2023 (FedALA).
    Use it only to reproduce these tables, otherwise `fedala`.
    """


@algorithms.register("fedah")
class FedAH(Ala):
    """FedAH: clients blend the received head with their own, train the head for an epoch, then the
    base; both are averaged.

    This is `ala(fedrep(head_epochs=1, upload_head=true), percent=100, max_epochs=1)`: each round
    learns the blend in one epoch over all samples. A client deploys the blend.
    Source: the authors' code of FedAH.
    Use it like `fedrep`, where heads can learn from each other.

    Args:
        buffers: Batch-norm statistics stay with the clients (`local`) or are averaged (`average`).
    """

    method: Method = field(init=False)
    percent: Annotated[float, Field(gt=0, le=100)] = 100.0
    max_epochs: Count = 1
    buffers: Literal["local", "average"] = "local"

    def __post_init__(self) -> None:
        self.method = FedRep(head_epochs=1, upload_head=True, buffers=self.buffers)
        super().__post_init__()
