from collections.abc import Mapping

from torch import Tensor

from fedloom.algorithm import Algorithm, Cohort, Facts, Round, algorithms
from fedloom.algorithm.records import (
    NOTHING,
    Aggregate,
    Message,
    Replies,
    block_slots,
    server_model,
)
from fedloom.common.fields import NonNegative


class ReportsLoss(Algorithm):
    """Base of methods with clients that upload their model and the loss of the received model on
    all their samples.
    """

    facts = Facts(fits_once=False, averages=False)

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (self.plan.layout.size,), "loss": ()}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        loss = cohort.loss(server_model(inbox))
        return {"model": cohort.fit(inbox["model"]).model, "loss": loss}


@algorithms.register("qfedavg")
class QFedAvg(ReportsLoss):
    """q-FedAvg: w <- w_t - sum_i F_i^q g_i / sum_i h_i, with g_i = (w_t - w_i) / eta.

    h_i = q F_i^(q - 1) ||g_i||^2 + F_i^q / eta over the trainable parameters, F_i the loss of w_t
    on all of client i's samples + 1e-10, eta the round's learning rate. Statistics are averaged. q
    = 0 is FedAvg with equal weights.
    Traffic: one additional number up. Source: Li et al. 2020 (q-FFL), algorithm 2.
    Use it when the worst clients count as much as the mean; momentum makes g_i longer, so set it to
    0 or lower q.

    Args:
        q: Emphasis on clients with high loss.
    """

    q: NonNegative = 1.0

    def receive(self, round: Round, replies: Replies) -> None:
        # Numerator and denominator are divided by eta and by the largest F^q, since F^q can exceed
        # the largest float. So the largest loss must be known before the first block is folded.
        loss = replies["loss"].double() + 1e-10
        largest = loss.max()
        powers = (loss / largest) ** self.q
        slopes = self.q * (loss / largest) ** (self.q - 1) / largest
        size = block_slots(self.plan.layout.row_bytes)
        folded = NOTHING
        start = 0
        for block in replies.blocks(size):
            own = slice(start, start + len(block))
            folded = folded.joined(self._sums(round, block, powers[own], slopes[own]))
            start += len(block)
        self.update(round, folded)

    def _sums(self, round: Round, block: Replies, powers: Tensor, slopes: Tensor) -> Aggregate:
        """Return the sums over a block of F^q d and of q F^(q - 1) |d|^2 / eta + F^q, with d = w_t
        - w_i.
        """
        trainable = slice(self.plan.layout.trainable)
        moved = self.state["model"][trainable] - block["model"][:, trainable]
        squares = moved.double().square().sum(1)
        # With a rate of 0 in floating point no client has moved.
        steepness = squares / round.learning_rate if round.learning_rate else 0 * squares
        total = {
            "moved": (powers.to(moved) @ moved).unsqueeze(0),
            "bound": slopes * steepness + powers,
        }
        return block.aggregate(weighted=False, mean={"model": block["model"]}, total=total)

    def update(self, round: Round, aggregate: Aggregate) -> None:
        trainable = slice(self.plan.layout.trainable)
        model = aggregate.mean["model"].clone()
        step = aggregate.total["moved"] / aggregate.total["bound"]
        model[trainable] = self.state["model"][trainable] - step
        self.state["model"] = model
