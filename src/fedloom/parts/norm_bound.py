from typing import Annotated, ClassVar

import torch
from pydantic import Field

from fedloom.algorithm.method import algorithms
from fedloom.algorithm.records import Plan, Replies
from fedloom.common.round import Round
from fedloom.parts.gaussian_noise import clip_factors
from fedloom.parts.hooks import Inner, Part

Radius = Annotated[float, Field(gt=0, le=3.4e38)]


@algorithms.register("norm_bound")
class NormBound(Part):
    """Bound the length of every update: w + d_i min(1, `radius` / |d_i|) replaces the model w + d_i
    of client i.

    w is the model that the client received. The length is over all numbers that travel. Shorter
    updates stay unchanged, bit for bit. Source: Sun et al. 2019, "Can you really backdoor federated
    learning?", norm bounding.
    Use it against few clients with much longer updates than the others; it also bounds the
    influence of each client.

    Args:
        radius: Largest length of an update.
    """

    radius: Radius

    requires: ClassVar[tuple[str, ...]] = ("one update",)

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self.state["bounded"] = torch.zeros(1, dtype=torch.float64)

    def rewrite(self, round: Round, replies: Replies) -> Replies:
        rows = replies["model"]
        sent = replies.sent("model")
        updates = rows - sent
        factors, lengths = clip_factors(updates, self.radius)
        longer = lengths > self.radius
        share = factors.to(rows).unsqueeze(1)
        rows = torch.where(longer.unsqueeze(1), sent + updates * share, rows)
        self.state["bounded"] = longer.double().mean().reshape(1).cpu()
        return replies.with_rows("model", rows)

    def diagnose(self) -> dict[str, float]:
        return {"share_bounded": float(self.state["bounded"])}
