from collections.abc import Mapping

from torch import Tensor

from fedloom.algorithm.method import Facts, algorithms
from fedloom.common.fields import NonNegative
from fedloom.flat.module import Batch
from fedloom.local.changed_loss import Observed
from fedloom.parts.loss_term import LossTerm


@algorithms.register("feddecorr")
class FedDecorr(LossTerm):
    """Decorrelation: adds beta (mean over i != j of (Z^T Z)_ij^2) / b to the loss of a batch of b
    samples.

    Z `[b, d]` are the features that enter the classifier, each dimension standardised over the
    batch (unbiased variance + 1e-8). A batch of one sample adds 0. Source: Shi et al. 2023
    (FedDecorr), section 4, scaled as in the authors' code.
    Use it when clients' labels are skewed and features are wide; it composes with any method and
    costs little.

    Args:
        method: Inner method, such as fedavg or fedmr.
        beta: Weight of the term (authors: 0.1); 0 is the inner method.
    """

    beta: NonNegative = 0.1

    facts = Facts(fits_once=False)

    def change(
        self, loss: Tensor, net: Observed, batch: Batch, context: Mapping[str, Tensor]
    ) -> Tensor:
        assert net.features is not None
        features = net.features.flatten(1)
        count, width = features.shape
        if count < 2 or width < 2:
            return loss
        scale = (features.var(0, keepdim=True) + 1e-8).sqrt()
        standard = (features - features.mean(0, keepdim=True)) / scale
        # ||Z^T Z||_F = ||Z Z^T||_F, and Z Z^T is smaller, since batches are smaller than features.
        squares = (standard @ standard.mT).square().sum() - standard.square().sum(0).square().sum()
        return loss + self.beta * squares / (width * (width - 1)) / count
