from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.algorithm import Algorithm, Cohort, algorithms
from fedloom.algorithm.records import Message, server_model
from fedloom.common.fields import NonNegative, Positive
from fedloom.flat.module import Batch, Net


@algorithms.register("moon")
class Moon(Algorithm):
    """Model-contrastive learning: pull features towards the received model's and away from the
    client's last model's.

    With z, z_glob, z_prev the features of the trained, the received and the client's previous model
    (the last two frozen, in evaluation mode) and sim the cosine, clients minimise L_i + mu mean_x
    -log(e^{sim(z, z_glob)/T} / (e^{sim(z, z_glob)/T} + e^{sim(z, z_prev)/T})), T = `temperature`.
    The term is off until a client has a previous model. Models are averaged by samples. Features
    are the input of the classifier: for MOON's projection head choose a model such as
    `projected(model=cnn4)`. Source: Li et al. 2021, algorithm 1.
    Use it when clients hold few classes of images and the model gives good features; a step costs
    three forward passes.

    Args:
        mu: Weight of the contrast (authors: 0.1, 1, 5 or 10 by data set); 0 is FedAvg.
        temperature: T (authors: 0.5).
    """

    mu: NonNegative = 1.0
    temperature: Positive = 0.5

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        start = inbox["model"]
        sent = server_model(inbox)
        trained_before = cohort.memory.knows("moon_model")
        options: dict[str, Any] = {}
        if self.mu and bool(trained_before.any()):
            context = {"received": sent, "previous": cohort.memory.get("moon_model", sent)}
            options = {
                "loss_fn": self._loss,
                "context": context | {"trained_before": trained_before.to(sent)},
            }
        model = cohort.fit(start, **options).model
        cohort.memory["moon_model"] = model
        return {"model": model}

    def _loss(self, net: Net, batch: Batch, context: Mapping[str, Tensor]) -> Tensor:
        features, logits = net.both(batch.inputs)
        with torch.no_grad():
            towards, _ = net.at(context["received"]).both(batch.inputs)
            away, _ = net.at(context["previous"]).both(batch.inputs)
        near = _cosine(features, towards)
        far = _cosine(features, away)
        contrast = F.softplus((far - near) / self.temperature).mean()
        return (
            net.objective.loss(logits, batch.labels)
            + self.mu * context["trained_before"] * contrast
        )


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return F.cosine_similarity(a.flatten(1), b.flatten(1), dim=1)
