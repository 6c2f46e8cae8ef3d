from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Cohort, Facts, Round, algorithms
from fedloom.algorithm.records import Message, Plan, Replies
from fedloom.algorithms.sharing import PartlyShared, length, take
from fedloom.algorithms.statistics import divided
from fedloom.common.fields import Count, Probability, Share
from fedloom.flat.population import weighted_mean


@algorithms.register("fedfomo")
class FedFomo(PartlyShared):
    """FedFomo: first-order model optimisation. A client weights downloaded models by their gain on
    its data per distance.

    With w_n the M downloaded models and w the client's model after its last mixing, on the client's
    validation samples o_n = (L(w) - L(w_n)) / (||w_n - w|| + 1e-5). The client starts from sum_n
    o_n^+ w_n / sum_n o_n^+, or from its own last model if no o_n is positive; it trains and
    uploads. The server stores every client's last model and the sums of o_n (initially 1 for a
    client and itself), and sends each client the M models with its largest sums. In its first round
    a client can receive no models; it trains from the common start. The last trained model is
    scored; the global model is the clients' mean. Traffic: 1 + M models.
    Source: Zhang et al. 2021 (FedFomo), section 4; FedALA, appendix G.
    Use it when a client gains from some of the other clients and loses from the rest, and can
    download several models per round.

    Args:
        models: M, the number of models that a client downloads (none: all models; FedALA: all).
        train_share: Share of a client's samples to train on, the same samples in every round; the
            rest validate (FedALA: 0.8).
        exploration: Probability of M random downloads.
    """

    models: Count | None = None
    train_share: Share = 0.8
    exploration: Probability = 0.0

    own_model: ClassVar[str] = "fedfomo_model"
    base_facts = Facts(one_download=False, fits_once=False, averages=False, initial="all")

    @property
    def facts(self) -> Facts:
        known = len(self.state["known"]) if hasattr(self, "state") and "known" in self.state else 0
        return replace(super().facts, one_model_each=bool(known) and self._sent() < known)

    # --- the server half: only the S clients with an upload have rows ---

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state = {
            "initial": plan.initial.clone(),
            "known": torch.zeros(0, dtype=torch.int64),  # [S] clients' numbers
            "models": plan.initial.new_zeros(0, length(self._unit)),  # [S, m]
            "relation": torch.zeros(0, 0, dtype=torch.float64),  # [S, S]
        }

    def send(self, round: Round) -> Message:
        if not len(self.state["known"]):
            return {"models": take(self.state["initial"].unsqueeze(0), self._unit).unsqueeze(1)}
        if self._sent() == len(self.state["known"]):
            return {"models": self.state["models"].unsqueeze(0)}
        return {"models": self.state["models"][self._chosen(round)]}

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (length(self._unit),), "values": (max(1, self._sent()),)}

    def receive(self, round: Round, replies: Replies) -> None:
        chosen = self._chosen(round) if len(self.state["known"]) else None
        clients = self.state["known"]
        relation = self.state["relation"]
        uploads = replies["model"]
        newcomers = replies.clients[~torch.isin(replies.clients, clients)]
        unit = torch.eye(len(newcomers), dtype=relation.dtype)
        grown = torch.block_diag(relation, unit)
        new_models = uploads.new_empty(len(newcomers), uploads.shape[1])
        models = torch.cat([self.state["models"], new_models])
        self.state |= {
            "known": torch.cat([clients, newcomers]),
            "models": models,
            "relation": grown,
        }
        rows = torch.tensor([self._row(int(client)) for client in replies.clients])
        models[rows] = uploads
        if chosen is not None:
            grown[rows.unsqueeze(1), chosen[replies.slots]] += replies["values"].to(grown)

    def model(self) -> Tensor:
        if not len(self.state["known"]):
            return self.state["initial"]
        mean = weighted_mean(self.state["models"], self.plan.sizes(self.state["known"]))
        return self.whole(self.state["initial"], mean)

    def _sent(self) -> int:
        """Number of models that each client receives."""
        count = len(self.state["known"])
        return count if self.models is None else min(self.models, count)

    def _row(self, client: int) -> int | None:
        rows = (self.state["known"] == client).nonzero()
        return int(rows) if len(rows) else None

    def _chosen(self, round: Round) -> Tensor:
        """Rows of the models that each selected client receives, `[K, M]`."""
        count = len(self.state["known"])
        sent = self._sent()
        rows = []
        for client in round.selected:
            row = self._row(client)
            generator = round.stream("explore", client)
            if self.exploration and float(torch.rand((), generator=generator)) < self.exploration:
                order = torch.randperm(count, generator=generator)
            else:
                valued = torch.zeros(count) if row is None else self.state["relation"][row]
                order = valued.argsort(descending=True, stable=True)
            # If all models are sent, their order is fixed, so that all clients get one message.
            if sent == count:
                order = torch.arange(count)
            rows.append(order[:sent])
        return torch.stack(rows)

    # --- the client half ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        previous = cohort.memory.get(self.own_model, cohort.initial)
        downloads = [self.complete(cohort, model) for model in inbox["models"].unbind(1)]
        training, validation = divided(
            cohort, "fedfomo", lambda count: max(1, int(self.train_share * count + 1e-9))
        )
        reference = cohort.memory.get("fedfomo_mixed", cohort.initial)
        values = self._values(validation, reference, downloads)
        weights = values.clamp_min(0)
        total = weights.sum(1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1)
        mixed = torch.zeros_like(downloads[0])
        for weight, model in zip(weights.unbind(1), downloads, strict=True):
            mixed.addcmul_(weight.unsqueeze(1), model)
        mixed = torch.where(total > 0, mixed, previous)
        cohort.memory["fedfomo_mixed"] = mixed
        model = training.fit(mixed).model
        cohort.memory[self.own_model] = model
        return {**self.upload(cohort, model), "values": values}

    def _values(self, validation: Cohort, reference: Tensor, downloads: list[Tensor]) -> Tensor:
        """Return o_n for each download, `[k, M]`."""
        loss = validation.loss(reference)
        trainable = slice(validation.layout.trainable)
        distances = [(model - reference)[:, trainable].norm(dim=1) + 1e-5 for model in downloads]
        gains = [loss - validation.loss(model) for model in downloads]
        return torch.stack(
            [gain / distance for gain, distance in zip(gains, distances, strict=True)], 1
        ).to(reference)
