from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm import Cohort, Facts, Round, algorithms
from fedloom.algorithm.records import Message, Plan, Replies
from fedloom.algorithms.fedproto import pulled_loss, with_means
from fedloom.algorithms.kept_layers import FedRep
from fedloom.algorithms.linear_head import LinearHead
from fedloom.algorithms.sharing import put_, take
from fedloom.common.fields import NonNegative, NonNegativeInt


@algorithms.register("fedpac")
class FedPAC(FedRep):
    """FedPAC: a client trains a head, then the base towards class means p; the server mixes heads
    for each client.

    Before training, in evaluation mode, h_c = pi_c mean_c z and V = (mean |z|^2 - sum_c |h_c|^2) /
    n, with pi_c class c's share of the client's n samples. The head trains at `head_rate`, then the
    base on L_i + lambda mean (z - p_y)^2 (the client's own class mean where p_y is missing; without
    the term in round 1). The base is averaged by samples, p_c (class means after training) by
    samples of the class. Client i's head becomes sum_j a_j head_j over the clients with a reply, a
    minimising sum_j a_j^2 V_j + |h_i - sum_j a_j h_j|^2 on the simplex, without shares up to 1e-3.
    The server stores all heads; the global model has the mean of the uploaded heads. Traffic: one
    model and 2 Y d + Y + 1 numbers up, one and Y d + Y down.
    Source: Xu et al. 2023 (FedPAC), sections 4 and 5; steps of the authors' code.
    Use it when classes mean the same everywhere and clients have very different shares of them.

    Args:
        strength: lambda (authors: 1).
        head_epochs: Epochs of the head (authors: 1).
        head_rate: Learning rate of the head in every round (authors: 0.1).
    """

    strength: NonNegative = 1.0
    head_epochs: NonNegativeInt = 1
    head_rate: NonNegative = 0.1
    upload_head: bool = field(init=False, default=True)

    sends: ClassVar[tuple[str, ...]] = ("model", "prototypes", "present")
    base_facts = Facts(fits_once=False, averages=False, one_model_each=True)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        head = LinearHead.of(plan, "fedpac")
        zeros = plan.initial.new_zeros
        self.state |= {
            "prototypes": zeros(plan.classes, head.features),
            "present": zeros(plan.classes),
        }
        self.state["heads"] = take(plan.initial.unsqueeze(0), head.unit).expand(plan.clients, -1)
        self._columns = head.unit

    def send(self, round: Round) -> Message:
        return {**super().send(round), **self.deploy(round, round.selected)}

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        rows = self.state["model"].repeat(len(clients), 1)
        heads = torch.cat(
            [self.state["heads"], take(self.state["model"].unsqueeze(0), self._columns)]
        )
        # The last row is for clients that never train.
        heads = heads[[min(client, self.plan.clients) for client in clients]]
        return {"model": take(put_(rows, self._columns, heads), self._unit)}

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        means = tuple(self.state["prototypes"].shape)
        return {
            **super().expects(round),
            "means": means,
            "shares": means,
            "variance": (),
            "counts": means[:1],
        }

    def receive(self, round: Round, replies: Replies) -> None:
        counts = replies["counts"]
        totals = {"sums": counts.unsqueeze(2) * replies["means"], "weights": counts}
        aggregate = replies.aggregate(mean={"model": replies["model"]}, total=totals)
        self.update(round, aggregate)
        shares = head_shares(replies["shares"].flatten(1), replies["variance"]).to(counts)
        mixed = shares @ take(replies["model"], self._columns)
        heads = self.state["heads"].index_copy(0, replies.clients.to(mixed.device), mixed)
        self.state |= {"heads": heads, **with_means(self.state, aggregate)}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        start = self.complete(cohort, inbox["model"])
        base, head = self.split(cohort)
        features = cohort.features(start)
        counts = cohort.label_counts.to(start)
        means = cohort.class_means(features)
        sizes = counts.sum(1)
        shares = (counts / sizes.unsqueeze(1)).unsqueeze(2) * means
        squares = torch.stack([client.square().sum(1).mean() for client in features])
        variance = (squares - shares.square().sum((1, 2))) / sizes
        present = inbox["present"].unsqueeze(2) > 0
        prototypes = torch.where(present, inbox["prototypes"], means)
        context = {"prototypes": prototypes, "present": present.any(1).to(start).expand_as(counts)}
        rate = self.head_rate
        epochs = self.head_epochs
        fitted = cohort.fit(
            start, only=head, purpose="head", learning_rate=rate, epochs=epochs
        ).model
        model = cohort.fit(
            fitted, loss_fn=partial(pulled_loss, self.strength), context=context, only=base
        ).model
        means = cohort.class_means(cohort.features(model))
        return {
            **self.upload(cohort, model),
            "means": means,
            "shares": shares,
            "variance": variance,
            "counts": counts,
        }


def head_shares(means: Tensor, variances: Tensor) -> Tensor:
    """Return the shares of the clients' heads in each client's head.

    Row i minimises sum_j a_j^2 V_j + |h_i - sum_j a_j h_j|^2 on the simplex.

    Args:
        means: h of each client, `[r, m]`.
        variances: V of each client, `[r]`.

    Returns:
        Shares, one row for each client, `[r, r]` float64.
    """
    # Imported here, since it adds a fifth to the time to import PyTorch.
    from scipy.optimize import nnls

    means = means.double().cpu()
    deviations = variances.double().cpu().clamp_min(0).sqrt().diag()
    rows = []
    for mean in means:
        matrix = torch.cat([deviations, (means - mean).mT])
        # The sum is |A a|^2. The x >= 0 that minimises |A x|^2 + s^2 (sum x - 1)^2 is a multiple
        # of a for every s.
        scale = matrix.norm().clamp_min(1e-9).expand(1, len(means))
        target = torch.cat([torch.zeros(len(matrix)), scale[0, :1]])
        shares = torch.from_numpy(nnls(torch.cat([matrix, scale]).numpy(), target.numpy())[0])
        shares = torch.where(shares > 1e-3 * shares.sum(), shares, 0)
        rows.append(shares / shares.sum())
    return torch.stack(rows)
