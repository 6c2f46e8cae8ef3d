from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.algorithm import Cohort, Round, algorithms
from fedloom.algorithm.records import Aggregate, Message, Plan
from fedloom.algorithms.kept_layers import KeepsHead
from fedloom.algorithms.linear_head import Head, LinearHead, discriminant
from fedloom.common.fields import Positive
from fedloom.common.randomness import stream


@algorithms.register("pfedfda")
class PFedFDA(KeepsHead):
    """pFedFDA: a base trained under a head of linear discriminant analysis; each client adapts the
    Gaussians of the head.

    A client's head is computed from the server's Gaussians (class means and a common covariance,
    `[Y + d, d]`) and its own class shares; the base trains under it. Then, on the features of its
    samples, the client chooses the shares b in [0, 1] of its own means and of its own covariance by
    two-fold cross-validation (ten steps of L-BFGS from 1/2 on the cross-entropy), and uploads the
    base and b local + (1 - b) global; all are averaged by samples. To deploy, it chooses b for the
    received base. A class with fewer than two samples has the server's mean; if no class has two
    samples, b is 0. The global model has equal class shares.
    Source: McLaughlin and Su 2024 (pFedFDA), algorithm 1; their code takes features during
    training.
    Use it when clients have few samples and their inputs are shifted, and the model has few
    features, since d^2 numbers travel.

    Args:
        ridge: Multiple of the unit matrix in clients' covariances (authors' code: 1, and 1e-4 in
            every entry). If features vary little compared with it, class shares decide. A small
            ridge gives large heads and large steps.
    """

    ridge: Positive = 1.0

    sends: ClassVar[tuple[str, ...]] = ("model", "gaussians")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        width = LinearHead.of(plan, "pfedfda").features
        generator = stream(plan.seed, "pfedfda")
        means = torch.rand(plan.classes, width, generator=generator, dtype=torch.float64)
        self.state["gaussians"] = torch.cat([means, torch.eye(width)]).to(plan.initial)

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        return self.send(round)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {**super().expects(round), "gaussians": tuple(self.state["gaussians"].shape)}

    def update(self, round: Round, aggregate: Aggregate) -> None:
        super().update(round, aggregate)
        self.state["gaussians"] = aggregate.mean["gaussians"]

    def model(self) -> Tensor:
        gaussians = self.state["gaussians"].double()
        classes = self.plan.classes
        head = classifier(gaussians, gaussians.new_full((classes,), 1 / classes))
        return LinearHead.of(self.plan, "pfedfda").put(self.state["model"], head)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        received = self.complete(cohort, inbox["model"])
        start = self.classifying(cohort, received, inbox["gaussians"].double())
        base, _ = self.split(cohort)
        model = cohort.fit(start, only=base).model
        gaussians = adapted(cohort, model, inbox, self.ridge).to(model)
        return {**self.upload(cohort, model), "gaussians": gaussians}

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        return self.classifying(cohort, model, adapted(cohort, model, inbox, self.ridge))

    def classifying(self, cohort: Cohort, rows: Tensor, gaussians: Tensor) -> Tensor:
        """Return models with each client's head.

        Args:
            cohort: The clients.
            rows: Models, `[k, P]`.
            gaussians: Class means and covariance, `[k, Y + d, d]`.

        Returns:
            Models, `[k, P]`, with the base of `rows`.
        """
        head = classifier(gaussians, class_shares(cohort))
        return LinearHead.of(cohort, "pfedfda").put(rows, head)


def class_shares(cohort: Cohort) -> Tensor:
    """Return the share of each class among each client's samples, plus 1e-4 and normalised again,
    `[k, Y]` float64.
    """
    shares = F.normalize(cohort.label_counts.double(), p=1)
    return F.normalize(shares + 1e-4, p=1)


def classifier(gaussians: Tensor, prior: Tensor) -> Head:
    """Return the head of `discriminant`, with the covariance moved by 1e-4 of the distance towards
    a multiple of the unit matrix.

    Args:
        gaussians: Class means and covariance, `[..., Y + d, d]`.
        prior: Probability of each class, `[..., Y]`.

    Returns:
        Weight `[..., Y, d]` and bias `[..., Y]`.
    """
    means, covariance = gaussians.split([prior.shape[-1], gaussians.shape[-1]], -2)
    scale = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    unit = torch.eye(covariance.shape[-1]).to(covariance)
    return discriminant(means, torch.lerp(covariance, scale * unit, 1e-4), prior)


def adapted(cohort: Cohort, rows: Tensor, inbox: Message, ridge: float) -> Tensor:
    """Return each client's mixture of the received Gaussians with its own.

    Args:
        cohort: The clients.
        rows: Models, `[k, P]`. Their bases give the features.
        inbox: The server's message, with `gaussians`.
        ridge: Multiple of the unit matrix in the clients' covariances.

    Returns:
        Mixtures, `[k, Y + d, d]` float64.
    """
    mixtures = []
    clients = zip(
        cohort.features(rows),
        cohort.labels,
        inbox["gaussians"].double(),
        class_shares(cohort),
        strict=True,
    )
    for features, labels, received, prior in clients:
        samples = features.double(), labels, received, ridge
        local = estimated(*samples)
        shares = validated_shares(*samples, prior)
        mixtures.append(mixed(received, local, shares))
    return torch.stack(mixtures)


def estimated(features: Tensor, labels: Tensor, received: Tensor, ridge: float) -> Tensor:
    """Estimate the Gaussians of a client.

    Args:
        features: Features of its samples, `[n, d]`.
        labels: Labels, `[n]`.
        received: The server's Gaussians, `[Y + d, d]`. Classes with fewer than two samples take
            their means.
        ridge: Multiple of the unit matrix in the covariance.

    Returns:
        Class means and covariance, `[Y + d, d]`.
    """
    means = received[: -features.shape[1]]
    unit = torch.eye(features.shape[1]).to(features)
    members = F.one_hot(labels, len(means)).to(features)
    counts = members.sum(0).unsqueeze(1)
    means = torch.where(counts > 1, members.mT @ features / counts.clamp_min(1), means)
    centred = features - means[labels]
    covariance = centred.mT @ centred / max(len(features) - 1, 1)
    return torch.cat([means, covariance + ridge * unit])


def mixed(received: Tensor, local: Tensor, shares: Tensor) -> Tensor:
    """Return the mixture of two Gaussians `[Y + d, d]`.

    Args:
        received: The server's Gaussians.
        local: The client's Gaussians.
        shares: Share of the local means and of the local covariance, `[2]`.

    Returns:
        Class means and covariance, `[Y + d, d]`.
    """
    classes = len(received) - received.shape[1]
    of_covariance = torch.arange(len(received), device=shares.device) >= classes
    share = torch.where(of_covariance, shares[1], shares[0])
    return torch.lerp(received, local, share.unsqueeze(1))


def validated_shares(
    features: Tensor, labels: Tensor, received: Tensor, ridge: float, prior: Tensor
) -> Tensor:
    """Return the shares of a client's own means and covariance by two-fold cross-validation within
    classes.

    Args:
        features: Features of its samples, `[n, d]`.
        labels: Labels, `[n]`.
        received: The server's Gaussians, `[Y + d, d]`.
        ridge: Multiple of the unit matrix in the covariance.
        prior: Probability of each class, `[Y]`.

    Returns:
        The two shares, `[2]`; 0 if no class has two samples.
    """
    # Number of each sample within its class, from 1.
    rank = F.one_hot(labels, len(prior)).cumsum(0).gather(1, labels.unsqueeze(1))[:, 0]
    folds = [rank % 2 == 1, rank % 2 == 0]
    if not bool(folds[1].any()):
        return features.new_zeros(2)
    estimates = [estimated(features[fold], labels[fold], received, ridge) for fold in folds]
    shares = features.new_full((2,), 0.5).requires_grad_()
    optimizer = torch.optim.LBFGS([shares], max_iter=10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = features.new_zeros(())
        for estimate, fold in zip(estimates, reversed(folds), strict=True):
            weight, bias = classifier(mixed(received, estimate, shares.clamp(0, 1)), prior)
            total = total + F.cross_entropy(features[fold] @ weight.mT + bias, labels[fold])
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    return shares.detach().nan_to_num(0.0).clamp(0, 1)
