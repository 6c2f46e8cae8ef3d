import torch
from torch import Tensor

from fedloom.algorithm import Facts, algorithms
from fedloom.algorithm.records import Aggregate, Message
from fedloom.algorithms.server_step import VariateStep
from fedloom.algorithms.sharpness import direction
from fedloom.algorithms.statistics import require_sgd
from fedloom.common.fields import Share
from fedloom.flat.layout import Layout
from fedloom.flat.module import Batch
from fedloom.local.cohort import Cohort, Context

ROUNDING = 1000
"""Multiple of the precision of numbers below which a direction is a rounding error."""


@algorithms.register("fedmuon")
class FedMuon(VariateStep):
    """FedMuon: local steps of length eta along the orthogonalised momentum of each tensor, with
    control variates.

    M_i <- (1 - alpha) M_i + alpha g; w <- w - eta O(M_i - C_i + C). O(G) = U V^T for a matrix G = U
    S V^T (a convolution's kernel is the matrix [out, -1]), and G / ||G|| for a vector. M_i persists
    from round to round; C_i is M_i at the start of the round. Server: C <- C + (1/N) sum_i (M_i -
    C_i), w <- (1 - K/N) w + (1/N) sum_i w_i over the K clients of the round. Both start at 0,
    `[T]`; statistics are averaged. Traffic: two vectors down, two up.
    Source: Takezawa et al. 2025, algorithm 1.
    Use it with a learning rate near 0.01 for models whose tensors differ much in scale, such as
    transformers.

    Args:
        alpha: Weight of the newest gradient (paper: 0.9).
    """

    alpha: Share = 0.9

    needs = (require_sgd,)
    facts = Facts(anonymous=True, fits_once=False)

    def step_length(self, aggregate: Aggregate) -> float:
        return aggregate.count / self.plan.clients

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        general = inbox["variate"]
        variate = cohort.memory.get("fedmuon_momentum", torch.zeros_like(general))
        offset = general - variate

        def gradient_fn(rows: Tensor, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
            loss, gradient = cohort.gradient(rows, batch)
            context["momentum"].lerp_(gradient, self.alpha)
            steepest = context["momentum"] + context["offset"]
            return loss, orthogonalised(steepest, cohort.layout)

        state = {"momentum": variate.clone()}
        trained = cohort.fit(
            inbox["model"],
            gradient_fn=gradient_fn,
            context={"offset": offset},
            state=state,
            pad=True,
        )
        cohort.memory.write("fedmuon_momentum", state["momentum"], cohort.uploads)
        return {"model": trained.model, "variate": state["momentum"] - variate}


def orthogonalised(vectors: Tensor, layout: Layout) -> Tensor:
    """Return O(G) for each trainable tensor G of the models.

    Args:
        vectors: Trainable parameters, `[k, T]`.
        layout: Positions of the tensors.

    Returns:
        `[k, T]`. Directions whose size is a rounding error of the whole vector are left out. The
        bias of a layer before batch norm, for example, has such a gradient.
    """
    result = torch.zeros_like(vectors)
    least = ROUNDING * torch.finfo(vectors.dtype).eps * vectors.norm(dim=1, keepdim=True)
    for entry in layout.slices:
        if entry.start >= layout.trainable:
            continue
        columns = slice(entry.start, entry.stop)
        tensors = vectors[:, columns]
        if len(entry.shape) < 2:
            large = tensors.norm(dim=1, keepdim=True) > least
            result[:, columns] = torch.where(large, direction(tensors), 0)
            continue
        matrices = tensors.reshape(len(tensors), entry.shape[0], -1)
        left, values, right = torch.linalg.svd(matrices, full_matrices=False)
        large = values > least
        kept = left * large.to(left).unsqueeze(1)
        result[:, columns] = (kept @ right).reshape(len(tensors), -1)
    return result
