from torch import Tensor

from fedloom.algorithm import algorithms
from fedloom.algorithm.records import Message
from fedloom.algorithms.feddc import FedDC
from fedloom.local.cohort import Cohort, Trained


@algorithms.register("feddc_code")
class FedDCCode(FedDC):
    """FedDC as the authors' code computes it, for tables from that code.

    tau is a mean client's E ceil(mean_j n_j / B) steps for every client, and eta the learning rate
    of round 1 in all rounds. Source: the authors' code of Gao et al. 2022.
    Use it only to reproduce these tables, otherwise `feddc`.
    """

    def divisors(self, cohort: Cohort, inbox: Message, trained: Trained) -> tuple[Tensor, float]:
        steps = cohort.training.local_steps(inbox["mean_size"][:, 0])
        return steps, cohort.round.initial_learning_rate
