"""A shortcut proves itself: it is compared with plain PyTorch, on the run's model, data and
settings, before it is taken.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fedloom.config.rates import CONSTANT, rate_factor
from fedloom.data.dataset import Dataset, Samples
from fedloom.engines.fit import require_fit
from fedloom.errors import InvalidValue, error_text
from fedloom.flat.layout import Layout, require_copyable
from fedloom.flat.linear_chain import linear_layers
from fedloom.flat.module import (
    PLAIN,
    FlatModule,
    Shortcuts,
    generator_state,
    light_convolutions,
    no_loop_in_vmap,
)
from fedloom.flat.stacked_module import StackedModule
from fedloom.flat.vmap_modes import autocast
from fedloom.local.cohort import Cohort, Correction
from fedloom.models.structure import copied
from fedloom.randomness import global_stream, stream
from fedloom.round import Round
from fedloom.state.store import ClientStore, Memory
from fedloom.training import Training

SAMPLES, BATCH = (8, 5), 3
"""Samples of the two clients that train here, with batches of 3, 3, 2 and 3, 2: short ones come at
different steps.
"""

RATE, CLIP = 0.05, 0.1
"""Their learning rate, which moves weights visibly, and the largest norm to clip to, so that
clipping has an effect.
"""

WIDENED = 1 << 24
"""Most frozen numbers of a model that is copied to be tried in float64."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Largest difference due to rounding, as a share of the distance that the weights moved."""


@dataclass(frozen=True)
class Proof:
    """Shortcuts that a model and its settings allow."""

    shortcuts: Shortcuts = PLAIN
    unstackable: str | None = None  # the reason why models cannot train in lock step
    draws: bool = False  # layers draw random numbers, such as dropout
    notices: tuple[str, ...] = ()  # shortcuts that are left out, and why


@torch.enable_grad()
def prove(
    module: nn.Module, dataset: Dataset, samples: Samples, training: Training, *, stack: bool
) -> Proof:
    """Compare the shortcuts with plain steps; with `stack`, also those of several models in lock
    step.

    Numbers are float64, where rounding hides no difference that matters, or the model's own type if
    it cannot be converted or has much that is frozen. Raises `InvalidValue` if training changes a
    frozen buffer.
    """
    require_copyable(module)
    require_fit(module, dataset, samples)
    try:
        plain = _compared(module, dataset, samples, training)
    except Exception as error:
        return Proof(unstackable=error_text(error))
    if plain.changed:
        fault = (
            "which is not persistent and so neither sent nor kept: register it with persistent=True"
        )
        raise InvalidValue(f"training changes the buffer {plain.changed!r} of the model, {fault}")
    notices: list[str] = []

    def allowed(subject: str, difference: str | None) -> bool:
        if difference is not None:
            notices.append(f"{subject}, {difference}")
        return difference is None

    in_rows = plain.difference(PLAIN)
    if in_rows is not None:
        _require_plain_numbers(module, dataset, samples, training)
    allowed("training with all weights in one vector", in_rows)
    shortcuts = PLAIN
    if plain.suits_channels_last():
        drawing = ", layers draw other numbers" if plain.draws else ""
        subject = f"images keep their layout in memory: with the channels last{drawing}"
        channels_last = allowed(subject, plain.difference(Shortcuts(channels_last=True)))
        shortcuts = replace(shortcuts, channels_last=channels_last)
    if not stack:
        return Proof(shortcuts, draws=plain.draws, notices=tuple(notices))
    unstackable = plain.difference(PLAIN, stack=True)
    if unstackable is None and training.autocast != "none":
        short = _Comparison(module, dataset, samples, training, training.autocast_dtype)
        unstackable = short.difference(PLAIN, stack=True)
    linear = training.autocast == "none" and dataset.objective.plain_cross_entropy
    if unstackable is None and linear and linear_layers(plain.module, plain.layout):
        products = Shortcuts(linear=True)
        same: Correction = lambda weights, gradient, context: gradient  # noqa: E731
        difference = plain.difference(products, stack=True) or plain.difference(
            products, stack=True, correction=same
        )
        shortcuts = replace(
            shortcuts, linear=allowed("linear layers train by autograd: without it", difference)
        )
    if unstackable is None and training.optimizer != "sgd":
        # with it, these two clients' rates differ, so that nothing is joint
        if training.local_schedule != CONSTANT:
            plain = _compared(module, dataset, samples, replace(training, local_schedule=CONSTANT))
        difference = plain.difference(Shortcuts(joint_optimizer=True), stack=True)
        joint = allowed("each client has an optimizer of its own: with one", difference)
        shortcuts = replace(shortcuts, joint_optimizer=joint)
    return Proof(shortcuts, unstackable, plain.draws, tuple(notices))


def _require_plain_numbers(
    module: nn.Module, dataset: Dataset, samples: Samples, training: Training
) -> None:
    """Raise `InvalidValue` if clients that train one after another differ from plain PyTorch by
    more than rounding. This way to train has no alternative.
    """
    # without optimizers such as Adam, which amplify rounding
    simple = replace(training, optimizer="sgd", optimizer_options={}, momentum=0.0)
    difference = _compared(module, dataset, samples, simple).difference(
        PLAIN, tolerance=TOLERANCE[torch.float32]
    )
    if difference is not None:
        reason = "two clients that train one after another differ from the same in plain PyTorch"
        remedy = "keep state in buffers (register_buffer), and draw with torch, not NumPy or random"
        raise InvalidValue(f"{type(module).__name__}: {reason}: {difference}: {remedy}")


def _compared(
    module: nn.Module, dataset: Dataset, samples: Samples, training: Training
) -> "_Comparison":
    frozen = Layout(module).frozen_tensors(module).values()
    try:
        if sum(tensor.numel() for tensor in frozen) > WIDENED:
            raise MemoryError
        comparison = _Comparison(copied(module).double(), dataset, samples, training)
    except Exception:
        comparison = _Comparison(module, dataset, samples, training)
    if not comparison.draws or comparison.start.device.type == "cpu":
        return comparison
    # An accelerator draws other masks for a stack than for one model, so they can be compared on
    # the CPU alone.
    return _compared(copied(module).cpu(), dataset, samples.to(torch.device("cpu")), training)


class _Comparison:
    """Two small clients trained by PyTorch's own modules and optimizers, with which other results
    are compared.
    """

    def __init__(
        self,
        module: nn.Module,
        dataset: Dataset,
        samples: Samples,
        training: Training,
        kind: torch.dtype | None = None,
    ) -> None:
        self.module, self.layout, self.kind, self.objective = (
            module,
            Layout(module),
            kind,
            dataset.objective,
        )
        index = torch.arange(sum(SAMPLES), device=samples.labels.device) % len(samples)
        inputs = dataset.prepare(samples.inputs[index])
        inputs = inputs.to(self.layout.dtype) if inputs.is_floating_point() else inputs
        few = Samples(inputs, samples.labels[index])
        self.samples = [few[: SAMPLES[0]], few[SAMPLES[0] :]]
        self.dataset = Dataset("samples", few, few, dataset.classes, objective=dataset.objective)
        self.settings = replace(
            training, learning_rate=RATE, epochs=1, steps=None, batch_size=BATCH, drop_last=False, augmentation="none",
            clip=None if training.clip is None else min(training.clip, CLIP),
        )  # fmt: skip
        self.round = Round(1, 1, 0, 2, 2, RATE, RATE)
        initial = self.layout.flatten(module)
        self.start = torch.stack([initial, 0.9 * initial])
        self.integers = self.layout.flatten_integers(module).repeat(2, 1)
        self.draws = False
        self.changed: str | None = None  # a frozen buffer that training has changed
        self.expected = self._plain()

    def difference(
        self,
        shortcuts: Shortcuts,
        *,
        stack: bool = False,
        correction: Correction | None = None,
        tolerance: float = 0.0,
    ) -> str | None:
        """Return the difference of clients that train so, stacked or not, or None. With a
        correction steps are not folded. `tolerance` is added to that of the types.
        """
        try:
            results = self._trained(shortcuts, stack, correction)
        except Exception as error:
            return error_text(error)
        (model, steps, loss, integers), (weights, plain_steps, mean, counts) = (
            results,
            self.expected,
        )
        if not torch.equal(steps, plain_steps) or not torch.equal(integers, counts):
            return "steps or integer buffers are not those of plain PyTorch"
        moved = float((weights - self.start).abs().nan_to_num().max().clamp_min(1e-6))
        frozen = self.layout.frozen_tensors(self.module).values()
        types = {self.layout.dtype, self.kind, *(tensor.dtype for tensor in frozen)}
        share = tolerance + max(share for kind, share in TOLERANCE.items() if kind in types)
        for result, plain in ((model, weights), (loss, mean)):
            if not torch.allclose(result, plain, rtol=0, atol=share * moved, equal_nan=True):
                distance = float((result - plain).abs().max())
                return f"after {int(steps.max())} steps the numbers are {distance:.2g} off those of plain PyTorch"
        return None

    def _trained(
        self, shortcuts: Shortcuts, stack: bool, correction: Correction | None
    ) -> list[Tensor]:
        """Return what `_plain` does, with the shortcuts."""
        settings = self.module, self.layout, shortcuts, self.kind, self.objective
        if stack:
            many = StackedModule(*settings)
            many.begin(2, [stream(0, "layers", client=k) for k in range(2)] if self.draws else [])
            many.load_integers(self.integers)
            with no_loop_in_vmap():
                return [
                    *self._cohort([0, 1], many).fit(self.start, correction=correction),
                    many.integers(),
                ]
        flat, results = FlatModule(*settings), []
        for k in range(2):
            flat.load_integers(self.integers[k : k + 1])
            with self._stream(k):
                trained = self._cohort([k], flat).fit(self.start[k : k + 1])
            results.append([*trained, flat.integers()])
        return [torch.cat(rows) for rows in zip(*results, strict=True)]

    def suits_channels_last(self) -> bool:
        """Return True if the samples are images, on a CPU, that the model's convolutions take
        faster with the channels last.
        """
        image = self.samples[0].inputs[:1]
        if image.dim() != 4 or image.is_cuda or not image.is_floating_point():
            return False
        return light_convolutions(self.layout.copy(self.module).eval(), image)

    def _plain(self) -> list[Tensor]:
        """Return models `[2, P]`, steps `[2]`, mean losses `[2]` and integer buffers `[2, Z]`, by
        plain PyTorch.
        """
        results = []
        for k in range(2):
            module = self.layout.copy(self.module).train()
            self.layout.load(module, self.start[k], self.integers[k])
            frozen = {name: tensor.clone() for name, tensor in self._frozen_buffers(module)}
            trained: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
            optimizer = _optimizer(self.settings, trained)
            losses: list[Tensor] = []
            steps = int(self.settings.local_steps(torch.tensor(SAMPLES[k])))
            with self._stream(k):
                state = generator_state(self.start)
                for batch in self._cohort([k], FlatModule(self.module, self.layout)).batches():
                    # not to None, so that a parameter that the loss does not use decays too
                    for parameter in trained:
                        parameter.grad = torch.zeros_like(parameter)
                    with autocast(self.kind, self.start.device):
                        loss = self.objective.loss(module(batch.inputs[0]), batch.labels[0])
                    loss.backward()
                    if self.settings.clip is not None:
                        nn.utils.clip_grad_norm_(trained, self.settings.clip)
                    optimizer(RATE * rate_factor(self.settings.local_schedule, len(losses), steps))
                    losses.append(loss.detach().to(self.start))
                self.draws |= not torch.equal(state, generator_state(self.start))
            changed = (
                name
                for name, tensor in self._frozen_buffers(module)
                if not torch.equal(tensor, frozen[name])
            )
            self.changed = next(changed, self.changed)
            mean = torch.stack(losses).mean()
            counts = self.layout.flatten_integers(module)
            results.append((self.layout.flatten(module), torch.tensor(len(losses)), mean, counts))
        return [torch.stack(rows) for rows in zip(*results, strict=True)]

    def _frozen_buffers(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        return (
            (n, t)
            for n, t in self.layout.frozen_tensors(module).items()
            if not isinstance(t, nn.Parameter)
        )

    def _stream(self, client: int) -> AbstractContextManager[None]:
        return global_stream(0, "layers", client=client, device=self.start.device)

    def _cohort(self, clients: Sequence[int], flat_module: FlatModule) -> Cohort:
        samples = [self.samples[client] for client in clients]
        memory = Memory(ClientStore(), clients)
        return Cohort(
            clients, samples, self.dataset, flat_module, self.settings, self.round, memory
        )


def _optimizer(settings: Training, parameters: list[Tensor]) -> Callable[[float], object]:
    """Return a step of the optimizer at a learning rate."""
    velocities: list[Tensor | None] = [None] * len(parameters)
    options = {
        "nesterov": False,
        "dampening": 0.0,
        **settings.optimizer_options,
        "momentum": settings.momentum,
    }
    optimizer = None if settings.optimizer == "sgd" else settings.torch_optimizer(parameters, RATE)

    initial = [] if optimizer is None else [group["lr"] for group in optimizer.param_groups]

    def step(rate: float) -> None:
        if optimizer is not None:
            for group, group_rate in zip(optimizer.param_groups, initial, strict=True):
                group["lr"] = group_rate if rate == RATE else group_rate * rate / RATE
            optimizer.step()
            return
        gradients, decay = [p.grad for p in parameters if p.grad is not None], settings.weight_decay
        # a function, since the class `torch.optim.SGD` imports PyTorch's compiler
        with torch.no_grad():
            sgd(
                parameters,
                gradients,
                velocities,
                lr=rate,
                weight_decay=decay,
                maximize=False,
                **options,
            )

    return step
