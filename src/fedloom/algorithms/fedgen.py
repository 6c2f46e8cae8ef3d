from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fedloom.algorithm import Algorithm, Cohort, Facts, Round, algorithms
from fedloom.algorithm.records import Message, Plan, Replies, TensorSpec
from fedloom.algorithms.linear_head import LinearHead
from fedloom.common.fields import Count, NonNegative, Positive
from fedloom.common.randomness import global_stream
from fedloom.flat.layout import Layout, TensorSlice
from fedloom.flat.module import Batch, Net
from fedloom.flat.population import weighted_mean

Width = Annotated[int, Field(ge=1, le=1_000_000)]


class Generator(nn.Module):
    """Features `[b, features]` from the one-hot codes of labels `[b]` and noise `[b, noise]`, by
    one hidden layer.
    """

    def __init__(self, classes: int, noise: int, hidden: int, features: int) -> None:
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, features),
        )

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        # A comparison instead of one_hot, which reads the labels' values and therefore cannot run
        # under `vmap` over clients.
        codes = labels.unsqueeze(1) == torch.arange(self.classes, device=labels.device)
        features: Tensor = self.layers(torch.cat([noise, codes.to(noise.dtype)], dim=1))
        return features


@algorithms.register("fedgen")
class FedGen(Algorithm):
    """Data-free distillation: FedAvg, and a generator G(y, noise) of features that the server
    trains on the uploaded heads.

    Clients, once a generator is trained, minimise CE(x, y) + beta KL(softmax(head(G(y))) ||
    softmax(f(x))), the target held fixed, + alpha CE(head(G(y')), y') with `generator_batch` labels
    y' drawn uniformly, and upload their label counts q_i. Server: `generator_steps` of Adam on
    teacher sum_i mean_y rho_iy CE(head_i(G(y)), y) + diversity exp(-mean(|noise - noise'|^2 |z -
    z'|)), z the features of two samples, both distances means over coordinates, rho_iy = q_i[y] /
    sum_j q_j[y], y uniform over labels with more than one sample at some client; then the models
    are averaged by samples. Noise is uniform on [0, 1), as in the authors' code. Label counts
    reveal part of the data to the server.
    Source: Zhu et al. 2021, algorithm 1; FedMR's settings.
    Use it when clients hold few classes each and may reveal their label counts; it needs no public
    data.

    Args:
        alpha: Weight of the generated samples (FedMR: 0.2 for CIFAR-10, 10 for CIFAR-100 and
            FEMNIST).
        beta: Weight of the distillation (FedMR: 0.2 for CIFAR-10, 1 for CIFAR-100, 10 for FEMNIST).
        teacher: Weight of the heads' losses in the training of the generator.
        diversity: Weight of the diversity loss.
        generator_learning_rate: Learning rate of Adam (FedMR: 3e-4, for CIFAR-100 1e-4).
        generator_weight_decay: Weight decay of Adam.
        generator_steps: Steps of the server in each round (authors: 50).
        generator_batch: Number of generated samples of a step, at least 2 for batch norm.
        noise: Width of the noise.
        hidden: Width of the generator's hidden layer.
    """

    alpha: NonNegative = 0.2
    beta: NonNegative = 0.2
    teacher: NonNegative = 1.0
    diversity: NonNegative = 1.0
    generator_learning_rate: Positive = 3e-4
    generator_weight_decay: NonNegative = 1e-2
    generator_steps: Count = 50
    generator_batch: Annotated[int, Field(ge=2, le=1_000_000)] = 128
    noise: Width = 100
    hidden: Width = 512

    facts = Facts(averages=False)

    # --- the server half ---

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        weight = LinearHead.of(plan, "fedgen", bias=False).weight
        with global_stream(plan.seed, "generator"):
            generator = Generator(plan.classes, self.noise, self.hidden, weight.shape[1]).to(
                plan.initial
            )
        self.state["generator"] = Layout(generator).flatten(generator)
        self.state["generator_trained"] = torch.zeros(1, dtype=torch.bool)

    def send(self, round: Round) -> Message:
        generator = (
            {"generator": self.state["generator"].unsqueeze(0)}
            if self.state["generator_trained"]
            else {}
        )
        return {**super().send(round), **generator}

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...] | TensorSpec]:
        labels = TensorSpec((self.plan.classes,), torch.int32)
        return {"model": (self.plan.layout.size,), "labels": labels}

    def receive(self, round: Round, replies: Replies) -> None:
        self._train_generator(round, replies["model"], replies["labels"].to(replies["model"].dtype))
        self.state["model"] = weighted_mean(replies["model"], replies.weights)

    def _train_generator(self, round: Round, models: Tensor, counts: Tensor) -> None:
        """Train the generator by Adam. Its teachers are the heads of `models [r, P]`, with label
        counts `[r, classes]`.
        """
        qualified = (counts > 1).any(0).nonzero().squeeze(1)
        if not len(qualified):
            return
        head = LinearHead.of(self.plan, "fedgen", bias=False)
        weight = head.weight
        bias = head.bias
        heads = models[:, weight.slice].view(-1, *weight.shape)
        offsets = 0 if bias is None else models[:, bias.slice].unsqueeze(1)
        shares = counts / counts.sum(0).clamp_min(1)
        module = self._empty(weight).to_empty(device=models.device).train()
        layout = Layout(module)
        layout.load(module, self.state["generator"])
        for buffer in module.buffers():
            if not buffer.is_floating_point():
                buffer.zero_()  # the unused batch counter of batch norm
        optimizer = torch.optim.Adam(
            module.parameters(),
            lr=self.generator_learning_rate,
            weight_decay=self.generator_weight_decay,
        )
        stream = round.stream("generator")
        for _ in range(self.generator_steps):
            drawn = torch.randint(len(qualified), (self.generator_batch,), generator=stream)
            labels = qualified[drawn.to(models.device)]
            noise = torch.rand(self.generator_batch, self.noise, generator=stream).to(models)
            features = module(labels, noise)
            logits = torch.einsum("bd,rcd->rbc", features, heads) + offsets
            losses = F.cross_entropy(
                logits.flatten(0, 1), labels.repeat(len(heads)), reduction="none"
            )
            taught = (shares[:, labels] * losses.view(len(heads), -1)).mean(1).sum()
            loss = self.teacher * taught + self.diversity * sameness(features, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.state |= {
            "generator": layout.flatten(module),
            "generator_trained": torch.ones(1, dtype=torch.bool),
        }

    # --- the client half ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        model = (
            self._distilled(cohort, inbox)
            if "generator" in inbox
            else cohort.fit(inbox["model"]).model
        )
        return {"model": model, "labels": cohort.label_counts.to(torch.int32)}

    def _distilled(self, cohort: Cohort, inbox: Message) -> Tensor:
        """Train locally with the loss terms of the generator."""
        module = self._empty(LinearHead.of(cohort, "fedgen", bias=False).weight)
        layout = Layout(module)
        module.eval().requires_grad_(False)

        def loss_fn(net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
            weights = layout.tensors(context["generator"])
            count = len(batch.labels)
            labels = context["labels"][batch.step]
            features = functional_call(
                module, weights, (batch.labels, context["noise"][batch.step, :count])
            )
            target = net.head(features).softmax(1).detach()
            predicted = net(batch.inputs)
            imagined = functional_call(
                module, weights, (labels, context["imagined_noise"][batch.step])
            )
            # The formula of F.kl_div, which cannot run under `vmap` over clients.
            divergence = (
                torch.xlogy(target, target) - target * predicted.log_softmax(1)
            ).sum() / count
            distilled = F.cross_entropy(predicted, batch.labels) + self.beta * divergence
            return distilled + self.alpha * F.cross_entropy(net.head(imagined), labels)

        context = {"generator": inbox["generator"], **self._client_draws(cohort, inbox["model"])}
        return cohort.fit(inbox["model"], loss_fn=loss_fn, context=context).model

    def _client_draws(self, cohort: Cohort, like: Tensor) -> dict[str, Tensor]:
        """Random labels and noise of every step, `[k, steps, ...]`, padded to the largest number of
        steps and the largest batch.
        """
        batches = [min(cohort.training.batch_size or size, size) for size in cohort.sizes.tolist()]
        steps = cohort.training.local_steps(cohort.sizes).int().tolist()
        labels = []
        imagined = []
        noise = []
        for stream, count, batch in zip(cohort.stream("generator"), steps, batches, strict=True):
            labels.append(
                torch.randint(cohort.classes, (count, self.generator_batch), generator=stream)
            )
            imagined.append(torch.rand(count, self.generator_batch, self.noise, generator=stream))
            drawn = torch.rand(count, batch, self.noise, generator=stream)
            noise.append(F.pad(drawn, (0, 0, 0, max(batches) - batch)))
        noises = {
            "imagined_noise": pad_sequence(imagined, True).to(like),
            "noise": pad_sequence(noise, True).to(like),
        }
        return {"labels": pad_sequence(labels, True).to(like.device), **noises}

    def _empty(self, weight: TensorSlice) -> Generator:
        """Return the generator without weights; load them from a row."""
        with torch.device("meta"):
            return Generator(weight.shape[0], self.noise, self.hidden, weight.shape[1]).to(
                weight.dtype
            )


def sameness(features: Tensor, noise: Tensor) -> Tensor:
    """Return exp(-mean over pairs of |noise - noise'|^2 |z - z'|), with both distances as means
    over coordinates.

    Args:
        features: Generated features z, `[b, d]`.
        noise: Their noise, `[b, noise]`.

    Returns:
        A scalar in (0, 1]. It is smaller if different noise gives different features.
    """
    distance = torch.cdist(features, features, p=1) / features.shape[1]
    noise_distance = (
        torch.cdist(noise, noise, compute_mode="donot_use_mm_for_euclid_dist").square()
        / noise.shape[1]
    )
    return torch.exp(-(noise_distance * distance).mean())
