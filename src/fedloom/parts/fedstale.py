import torch
from torch import Tensor

from fedloom.algorithm.method import Facts, algorithms
from fedloom.algorithm.records import Message, Plan, Replies, Specs, TensorSpec
from fedloom.common.fields import Probability
from fedloom.common.round import Round
from fedloom.parts.hooks import Inner
from fedloom.parts.stale_updates import StaleUpdates

CHANGE = "stale_change"
"""Name of D_i - y_i in a reply, if the model does not contain it."""


@algorithms.register("fedstale")
class FedStale(StaleUpdates):
    """FedStale: w <- w_t + beta y + (N/K) sum_i a_i (D_i - beta y_i), with y = sum_j a_j y_j over
    all N clients.

    D_i = w_i - w_t is the update of a client of the round, y_i its last one, a_i = n_i / sum_j n_j,
    and K/N is the probability of taking part. Equal a_i give FedAvg for beta 0, and FedVARP for
    beta 1. Between 0 and 1, clients upload D_i - y_i too, which doubles the traffic up.
    Source: Rodio and Neglia 2024, algorithm 1.
    Use it when some clients take part rarely, so that their last updates are partly out of date.

    Args:
        beta: Weight of the last updates (authors' code: 1, scripts: 0.5).
    """

    beta: Probability = 0.5

    facts = Facts(anonymous=False)

    @property
    def _sends_change(self) -> bool:
        return 0 < self.beta < 1

    def setup(self, plan: Plan, inner: Inner) -> None:
        super().setup(plan, inner)
        self._mean_size = float(plan.sizes(torch.arange(plan.clients)).double().mean())

    def upload(self, reply: Message, update: Tensor, stale: Tensor) -> Message:
        message = super().upload(reply, update, self.beta * stale)
        return {**message, CHANGE: update - stale} if self._sends_change else message

    def expects(self, round: Round, specs: Specs) -> Specs:
        if not self._sends_change:
            return specs
        layout = self.plan.layout
        return {**specs, CHANGE: TensorSpec((layout.trainable,), layout.dtype)}

    def changes(self, replies: Replies, change: Tensor) -> Tensor:
        uploaded = replies[CHANGE] if self._sends_change else change
        return self._sizes(replies, change) * uploaded

    def step(self, round: Round, replies: Replies, change: Tensor) -> Tensor:
        return self.beta * self.mean_update(round) + self._sizes(replies, change) * change

    def _sizes(self, replies: Replies, like: Tensor) -> Tensor:
        """Return N a_i, `[r, 1]`."""
        sizes = self.plan.sizes(replies.clients).to(like) / self._mean_size
        return sizes.unsqueeze(1)
