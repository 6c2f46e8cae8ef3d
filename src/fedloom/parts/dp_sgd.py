from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedloom.algorithm.method import Facts, algorithms
from fedloom.algorithm.records import Message, Plan, Selection
from fedloom.common.errors import InvalidValue
from fedloom.common.training import Passes, completed
from fedloom.flat.module import Batch, LossFn, data_loss
from fedloom.local.batches import LockStep, lock_steps
from fedloom.local.cohort import Cohort, Context, GradientFn, Trained
from fedloom.models.structure import has_batch_norm
from fedloom.parts.accounting import epsilon, noise_for
from fedloom.parts.gaussian_noise import clip_factors, normal, secret_uniforms
from fedloom.parts.hooks import Inner
from fedloom.parts.privacy import AccountedByClient

NUMBERS = 1 << 24
"""Largest number of floats of samples' gradients in memory: 64 MiB."""

COUNTED = {"correction", "context", "learning_rate"}
"""Options of `Cohort.fit` that do not change the sampling, for which epsilon is computed."""


@algorithms.register("dp_sgd")
class DPSGD(AccountedByClient):
    """Differential privacy of single samples: every client trains by DP-SGD, so that its uploads do
    not reveal any sample.

    In each local step each of the client's n samples enters the batch independently with
    probability q = B / n, B = `batch_size` (at most n). With g_i the gradient of only sample i, C =
    `clip`, z = `noise`, the step's gradient is

        (sum_i g_i min(1, C / |g_i|) + z C m) / (q n),    m standard normal

    A method's correction, weight decay, momentum and the optimizer follow as usual. Each step is
    one release of the sampled Gaussian mechanism, for adding or removing one sample of a client
    with known n. `epsilon` is the largest epsilon of any client, over all its steps in all rounds;
    over real sites it includes the noisy statistics that were released before, as recorded in the
    run's folder.

    Training losses are not recorded, and evaluations of clients' data are not private. Batches and
    noise come from the run's streams in a simulation, and from the system's cryptographic generator
    over real sites. Inner methods must train once per round by `cohort.fit` and upload only the
    model; other uses of clients' data are refused.
    Source: Abadi et al. 2016, "Deep learning with differential privacy", algorithm 1; Mironov et
    al. 2019 (accounting).
    Use it where clients are few and hold data of many people each, such as hospitals.
    """

    requires: ClassVar[tuple[str, ...]] = (
        "one fit", "only the model", "one update", "no integers", "no buffers",
    )  # fmt: skip

    @property
    def facts(self) -> Facts:
        return Facts(needs_total_rounds=self.noise is None, stackable=False)

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        if has_batch_norm(plan.module):
            raise InvalidValue(
                "dp_sgd: batch norm mixes the samples of a batch. Use group norm instead"
            )
        if plan.remote and self.noise is None:
            reason = "a site cannot compute it, since it depends on the samples of other sites"
            raise InvalidValue(f"dp_sgd: set noise over real sites: {reason}")

    def counted(self, selection: Selection) -> tuple[int, ...]:
        return (*selection.clients, *selection.idle)  # clients without an upload count too

    def cost(self, extra: int = 0) -> float:
        """Return the largest epsilon of a client: for each size, of the client that trained most
        often.
        """
        sizes, of = self.plan.sizes(torch.arange(self.plan.clients)).unique(return_inverse=True)
        most = torch.zeros_like(sizes).scatter_reduce(0, of, self.state["releases"], "amax") + extra
        noise = self.noise_multiplier()
        return max(
            epsilon(noise, share, steps, self.delta, self.earlier)
            for share, steps in self._kinds(sizes, most)
        )

    def solve(self, target: float, rounds: int) -> float:
        """Return the noise for the client with the fewest samples, since its sampling rate is
        largest. It is larger if another client has a larger epsilon.
        """
        sizes = self.plan.sizes(torch.arange(self.plan.clients)).unique()
        noise = 0.0
        spent = dict.fromkeys(self._kinds(sizes, torch.full_like(sizes, rounds)), 0.0)
        while noise == 0 or max(spent.values()) > target:
            share, steps = max(spent, key=lambda kind: (spent[kind], kind))
            noise = max(noise * 1.0001, noise_for(target, share, steps, self.delta))
            spent = {kind: epsilon(noise, *kind, self.delta) for kind in spent}
        return noise

    def _kinds(self, sizes: Tensor, rounds: Tensor) -> list[tuple[float, int]]:
        """Return (q, steps) for clients with `sizes [s]` samples after training in `rounds [s]`
        rounds.
        """
        steps = self.plan.training.local_steps(sizes) * rounds
        batch = (
            sizes
            if self.plan.training.batch_size is None
            else sizes.clamp(max=self.plan.training.batch_size)
        )
        return list(zip((batch / sizes.double()).tolist(), steps.long().tolist(), strict=True))

    def train(self, cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        private = PrivateCohort(
            cohort, self.bound(), self.noise_multiplier(), self.plan.remote, str(self.method)
        )
        reply = inner.train(private, inbox)
        cohort.metrics.clear()  # losses also depend on the client's data
        return reply


class PrivateCohort(Cohort):
    """One client with DP-SGD as its `fit`, once per round and with the run's settings. Any other
    access to its samples is refused.
    """

    def __init__(
        self, cohort: Cohort, clip: float, noise: float, remote: bool, method: str
    ) -> None:
        vars(self).update(vars(cohort))
        self.clip = clip
        self.noise = noise
        self.remote = remote
        self.method = method
        self.count = int(self.sizes)
        self.expected = min(self.count, self.training.batch_size or self.count)  # in a batch
        self._fits: list[Tensor] = []  # start of each fit, shared by all copies of this cohort
        self._fitting = False

    @property
    def _samples(self) -> Any:  # type: ignore[override]
        raise InvalidValue(_uncounted(self.method))

    def fit(
        self,
        start: Tensor,
        *,
        loss_fn: LossFn = data_loss,
        gradient_fn: GradientFn | None = None,
        **options: Any,
    ) -> Trained:
        self._fits.append(start)
        if len(self._fits) > 1 or gradient_fn is not None or not options.keys() <= COUNTED:
            _ = self._samples
        if getattr(self.flat_module.objective, "class_weights", ()):
            raise InvalidValue(
                "dp_sgd: class_weights are divided by their sum over the batch, which mixes "
                "samples. Remove class_weights"
            )
        stream = None if self.remote else self.round.stream("dp_sgd noise", self.clients[0])

        def noisy(rows: Tensor, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
            loss = rows.new_zeros(1)
            total = torch.zeros_like(rows[:, : self.layout.trainable])
            size = max(1, NUMBERS // total.shape[1])
            for offset in range(0, batch.labels.shape[1], size):
                columns = slice(offset, offset + size)
                chunk = Batch(batch.inputs[:, columns], batch.labels[:, columns], batch.step)
                losses, gradients = self.flat_module.sample_gradients(rows, chunk, loss_fn, context)
                shares, lengths = clip_factors(gradients, self.clip)
                # A NaN or infinite gradient counts as 0, since a refused reply would reveal it.
                finite = lengths.isfinite()
                shares = shares.where(finite, 0).to(gradients)
                gradients = gradients.where(finite.unsqueeze(1), 0)
                loss = loss + losses.where(finite, 0).sum()
                total = total + shares.unsqueeze(0) @ gradients
            if self.noise:
                total = total + (self.noise * self.clip * normal(total, stream)).to(total)
            return loss / self.expected, total / self.expected

        self._fitting = True
        try:
            return super().fit(start, gradient_fn=noisy, **options)
        finally:
            self._fitting = False

    def _lock_steps(self, passes: Passes, **options: Any) -> Iterator[LockStep]:
        """Return the batches of `fit`. Each sample enters a batch at random."""
        if not self._fitting:
            _ = self._samples
        generator = self.stream("dp_sgd batches")[0]
        share = self.expected / self.count

        def drawn() -> Tensor:
            plain = torch.rand(self.count, generator=generator, dtype=torch.float64)
            uniforms = torch.from_numpy(secret_uniforms(self.count)) if self.remote else plain
            return (uniforms < share).nonzero()[:, 0]

        steps = completed(int(self.training.local_steps(self.sizes)), float(self.work))
        batches = (drawn() for _ in range(steps))
        orders = ((batch, [len(batch)]) for batch in batches)
        augmented = self.training.augmentation == "flip_crop"
        noise = self.stream("dp_sgd augmentation")[0] if augmented else None
        return lock_steps(self._loaders, [orders], [noise])


def _uncounted(method: str) -> str:
    return (
        f"dp_sgd: clients of {method} use their samples for more than one local training, "
        "which epsilon does not count"
    )
