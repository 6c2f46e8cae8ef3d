"""Proofs of shortcuts: before use, each shortcut is compared with plain PyTorch.

The comparison uses the run's model, data and settings.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fedloom.common.errors import InvalidValue, error_text
from fedloom.common.randomness import global_stream, stream
from fedloom.common.rates import CONSTANT, rate_factor
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, Samples
from fedloom.engines.fit import require_fit
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
from fedloom.state.store import ClientStore, Memory

SAMPLES = (8, 5)
BATCH = 3
"""Sample counts of the two clients of the comparison, and their batch size.

The batches have 3, 3, 2 and 3, 2 samples: the clients have short batches at different steps.
"""

RATE = 0.05
CLIP = 0.1
"""Learning rate and largest clipping norm of the comparison.

The rate moves weights visibly, and the norm is small enough that clipping has an effect.
"""

WIDENED = 1 << 24
"""Largest number of frozen values for which the model is compared in float64."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Largest rounding difference, as a share of the distance that the weights have moved."""


@dataclass(frozen=True)
class Proof:
    """Shortcuts that a model and its settings allow.

    Attributes:
        shortcuts: The allowed shortcuts.
        unstackable: Reason why models cannot train in lock step, or None.
        draws: True if layers draw random numbers, such as dropout.
        notices: Shortcuts that are not used, with the reasons.
    """

    shortcuts: Shortcuts = PLAIN
    unstackable: str | None = None
    draws: bool = False
    notices: tuple[str, ...] = ()


@torch.enable_grad()
def prove(
    module: nn.Module, dataset: Dataset, samples: Samples, training: Training, *, stack: bool
) -> Proof:
    """Compare the shortcuts with plain PyTorch steps.

    The comparison runs in float64, in which rounding hides no relevant difference. It uses the
    model's type instead if the model cannot be converted or has many frozen values.

    Args:
        module: The model.
        dataset: The data set, with its objective.
        samples: Training samples.
        training: Settings of local training.
        stack: True to also compare models that train in lock step.

    Returns:
        The shortcuts that give the same results, and notices about the others.

    Raises:
        InvalidValue: If training changes a buffer that is not persistent, or if clients that train
            one after another differ from plain PyTorch.
    """
    require_copyable(module)
    require_fit(module, dataset, samples)
    try:
        plain = _compared(module, dataset, samples, training)
    except Exception as error:
        return Proof(unstackable=error_text(error))
    if plain.changed:
        fault = (
            "but the buffer is not persistent, so it is neither sent nor saved: "
            "register it with persistent=True"
        )
        raise InvalidValue(f"training changes the buffer {plain.changed!r} of the model, {fault}")
    notices: list[str] = []
    allowed = partial(_allowed, notices)
    row_difference = plain.difference(PLAIN)
    if row_difference is not None:
        _require_plain_results(module, dataset, samples, training)
    allowed("with all weights in one vector", row_difference)
    shortcuts = PLAIN
    if plain.suits_channels_last():
        drawing = ", layers draw different random numbers" if plain.draws else ""
        subject = f"images keep their layout in memory: with channels last{drawing}"
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
        unchanged: Correction = lambda weights, gradient, context: gradient  # noqa: E731
        difference = plain.difference(products, stack=True) or plain.difference(
            products, stack=True, correction=unchanged
        )
        shortcuts = replace(
            shortcuts, linear=allowed("linear layers train with autograd: without it", difference)
        )
    if unstackable is None and training.optimizer != "sgd":
        # A local schedule gives the two clients different rates, so that no step would be joint.
        if training.local_schedule != CONSTANT:
            plain = _compared(module, dataset, samples, replace(training, local_schedule=CONSTANT))
        difference = plain.difference(Shortcuts(joint_optimizer=True), stack=True)
        joint = allowed("each client has its own optimizer: with a joint one", difference)
        shortcuts = replace(shortcuts, joint_optimizer=joint)
    return Proof(shortcuts, unstackable, plain.draws, tuple(notices))


def _allowed(notices: list[str], subject: str, difference: str | None) -> bool:
    """Return True without a difference. Otherwise add a notice about the subject."""
    if difference is not None:
        notices.append(f"{subject}, {difference}")
    return difference is None


def _require_plain_results(
    module: nn.Module, dataset: Dataset, samples: Samples, training: Training
) -> None:
    """Raise `InvalidValue` if clients that train one after another differ from plain PyTorch.

    Rounding differences are allowed. This way of training has no fallback.
    """
    # Optimizers such as Adam amplify rounding: compare with SGD.
    simple = replace(training, optimizer="sgd", optimizer_options={}, momentum=0.0)
    difference = _compared(module, dataset, samples, simple).difference(
        PLAIN, tolerance=TOLERANCE[torch.float32]
    )
    if difference is not None:
        reason = "two clients that train one after another differ from plain PyTorch"
        remedy = (
            "store state in buffers (register_buffer), and draw random numbers with torch instead "
            "of NumPy or random"
        )
        raise InvalidValue(f"{type(module).__name__}: {reason}: {difference}: {remedy}")


def _compared(
    module: nn.Module, dataset: Dataset, samples: Samples, training: Training
) -> "_Comparison":
    """Return a comparison in float64 if possible, and on the CPU if layers draw random numbers."""
    frozen = Layout(module).frozen_tensors(module).values()
    try:
        if sum(tensor.numel() for tensor in frozen) > WIDENED:
            raise MemoryError
        comparison = _Comparison(copied(module).double(), dataset, samples, training)
    except Exception:
        comparison = _Comparison(module, dataset, samples, training)
    if not comparison.draws or comparison.start.device.type == "cpu":
        return comparison
    # An accelerator draws different masks for a stack than for single models: compare on the CPU.
    return _compared(copied(module).cpu(), dataset, samples.to(torch.device("cpu")), training)


class _Comparison:
    """Results of two small clients in plain PyTorch, with which other results are compared.

    Args:
        module: The model.
        dataset: The data set, with its objective.
        samples: Training samples.
        training: Settings of local training.
        kind: Type of autocast, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        dataset: Dataset,
        samples: Samples,
        training: Training,
        kind: torch.dtype | None = None,
    ) -> None:
        self.module = module
        self.layout = Layout(module)
        self.kind = kind
        self.objective = dataset.objective
        index = torch.arange(sum(SAMPLES), device=samples.labels.device) % len(samples)
        inputs = dataset.prepare(samples.inputs[index])
        inputs = inputs.to(self.layout.dtype) if inputs.is_floating_point() else inputs
        few = Samples(inputs, samples.labels[index])
        self.samples = [few[: SAMPLES[0]], few[SAMPLES[0] :]]
        self.dataset = Dataset("samples", few, few, dataset.classes, objective=dataset.objective)
        self.settings = replace(
            training,
            learning_rate=RATE,
            epochs=1,
            steps=None,
            batch_size=BATCH,
            drop_last=False,
            augmentation="none",
            clip=None if training.clip is None else min(training.clip, CLIP),
        )
        self.round = Round(1, 1, 0, 2, 2, RATE, RATE)
        initial = self.layout.flatten(module)
        self.start = torch.stack([initial, 0.9 * initial])
        self.integers = self.layout.flatten_integers(module).repeat(2, 1)
        self.draws = False
        self.changed: str | None = None  # name of a frozen buffer that training has changed
        self.expected = self._plain()

    def difference(
        self,
        shortcuts: Shortcuts,
        *,
        stack: bool = False,
        correction: Correction | None = None,
        tolerance: float = 0.0,
    ) -> str | None:
        """Train with the shortcuts, and return the difference from plain PyTorch.

        Args:
            shortcuts: The shortcuts.
            stack: True to train in lock step.
            correction: Correction of gradients. With one, linear layers use other code.
            tolerance: Additional tolerance, as a share of the distance that the weights moved.

        Returns:
            The difference or the error in one line, or None if the results are equal.
        """
        try:
            model, steps, loss, integers = self._trained(shortcuts, stack, correction)
        except Exception as error:
            return error_text(error)
        weights, plain_steps, plain_loss, plain_integers = self.expected
        if not torch.equal(steps, plain_steps) or not torch.equal(integers, plain_integers):
            return "steps or integer buffers differ from plain PyTorch"
        moved = float((weights - self.start).abs().nan_to_num().max().clamp_min(1e-6))
        frozen = self.layout.frozen_tensors(self.module).values()
        types = {self.layout.dtype, self.kind, *(tensor.dtype for tensor in frozen)}
        share = tolerance + max(share for kind, share in TOLERANCE.items() if kind in types)
        for result, plain in ((model, weights), (loss, plain_loss)):
            if not torch.allclose(result, plain, rtol=0, atol=share * moved, equal_nan=True):
                distance = float((result - plain).abs().max())
                return (
                    f"results after {int(steps.max())} steps differ by {distance:.2g} from plain "
                    "PyTorch"
                )
        return None

    def _trained(
        self, shortcuts: Shortcuts, stack: bool, correction: Correction | None
    ) -> list[Tensor]:
        """Return the same values as `_plain`, trained with the shortcuts."""
        settings = self.module, self.layout, shortcuts, self.kind, self.objective
        if stack:
            module = StackedModule(*settings)
            module.begin(2, [stream(0, "layers", client=k) for k in range(2)] if self.draws else [])
            module.load_integers(self.integers)
            with no_loop_in_vmap():
                trained = self._cohort([0, 1], module).fit(self.start, correction=correction)
                return [*trained, module.integers()]
        flat = FlatModule(*settings)
        results = []
        for k in range(2):
            flat.load_integers(self.integers[k : k + 1])
            with self._stream(k):
                trained = self._cohort([k], flat).fit(self.start[k : k + 1])
            results.append([*trained, flat.integers()])
        return [torch.cat(rows) for rows in zip(*results, strict=True)]

    def suits_channels_last(self) -> bool:
        """Return True if channels last makes the model's convolutions faster on these samples.

        This is only possible for images on a CPU.
        """
        image = self.samples[0].inputs[:1]
        if image.dim() != 4 or image.is_cuda or not image.is_floating_point():
            return False
        return light_convolutions(self.layout.copy(self.module).eval(), image)

    def _plain(self) -> list[Tensor]:
        """Train the two clients with PyTorch's modules and optimizers, without shortcuts.

        Returns:
            Models `[2, P]`, steps `[2]`, mean losses `[2]` and integer buffers `[2, Z]`.
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
                    # Zero instead of None: unused parameters must also decay.
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
        for name, tensor in self.layout.frozen_tensors(module).items():
            if not isinstance(tensor, nn.Parameter):
                yield name, tensor

    def _stream(self, client: int) -> AbstractContextManager[None]:
        return global_stream(0, "layers", client=client, device=self.start.device)

    def _cohort(self, clients: Sequence[int], flat_module: FlatModule) -> Cohort:
        samples = [self.samples[client] for client in clients]
        memory = Memory(ClientStore(), clients)
        return Cohort(
            clients, samples, self.dataset, flat_module, self.settings, self.round, memory
        )


def _optimizer(settings: Training, parameters: list[Tensor]) -> Callable[[float], object]:
    """Return a function that makes one optimizer step at a learning rate."""
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
        gradients = [p.grad for p in parameters if p.grad is not None]
        decay = settings.weight_decay
        # The class `torch.optim.SGD` would import PyTorch's compiler.
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
