from typing import ClassVar

import torch

from fedloom.algorithm.method import algorithms
from fedloom.algorithm.records import Message
from fedloom.local.cohort import Cohort
from fedloom.parts.accounting import epsilon, noise_for
from fedloom.parts.gaussian_noise import clipped, normal
from fedloom.parts.hooks import Inner
from fedloom.parts.privacy import AccountedByClient


@algorithms.register("local_private")
class LocalPrivate(AccountedByClient):
    """Local differential privacy: every client clips its update and adds noise, so the server need
    not be trusted.

    With u the update, C = `clip` and z = `noise`, a client uploads w + u min(1, C / |u|) + z C n, n
    standard normal, and no figures of its training. One upload is private for any two data sets of
    a client: their updates differ by at most 2 C, so the epsilon is the one for noise z / 2.
    `epsilon` is computed for the client that was selected most often, over all its uploads.

    The inner method can be any method with clients that receive one model and return an update of
    it, including FedMR. The same z costs far more accuracy than in `private`: the mean of K models
    has noise z C / K^(1/2), while `private` adds z C / K.
    Source: Kasiviswanathan et al. 2011 (local privacy); Dwork and Roth 2014, appendix A (Gaussian
    mechanism).
    Use it when the server is not trusted, or when clients receive each other's models; it needs
    very many clients.
    """

    requires: ClassVar[tuple[str, ...]] = ("only the model", "one update", "no integers")

    def cost(self, extra: int = 0) -> float:
        releases = int(self.state["releases"].max()) + extra
        return epsilon(self.noise_multiplier() / 2, 1.0, releases, self.delta)

    def solve(self, target: float, rounds: int) -> float:
        return 2 * noise_for(target, 1.0, rounds, self.delta)

    def encode(self, cohort: Cohort, inbox: Message, reply: Message, inner: Inner) -> Message:
        updates, _ = clipped(reply["model"] - inbox["model"], self.bound())
        streams = [None] * len(updates) if self.plan.remote else cohort.stream("privacy noise")
        noise = torch.stack([normal(updates[0], stream) for stream in streams])
        cohort.metrics.clear()  # losses also depend on the client's data
        noisy = updates.double() + self.noise_multiplier() * self.bound() * noise
        return {"model": inbox["model"] + noisy.to(updates)}
