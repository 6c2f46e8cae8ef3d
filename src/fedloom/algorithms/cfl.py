import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Facts, Round, algorithms
from fedloom.algorithm.records import Message, Plan, Replies
from fedloom.algorithms.sharing import require_everybody
from fedloom.common.fields import NonNegative, NonNegativeInt


@algorithms.register("cfl")
class CFL(Algorithm):
    """Clustered federated learning: each cluster's model moves by the unweighted mean of its
    clients' updates D_i.

    After `first_round` a cluster of more than two clients with ||mean D|| < mean_norm and max
    ||D_i|| > client_norm splits in two by complete linkage on -cos(D_i, D_j), over the trainable
    parameters; each half moves by its own mean. A client deploys its cluster's model; the global
    model is the mean over clients. Needs all clients in every round; a client without a reply stays
    in its cluster.
    Source: Sattler et al. 2020, algorithm 2; thresholds of the authors' code.
    Use it when clients' data contradict each other and the number of groups is unknown.

    Args:
        mean_norm: epsilon_1: a cluster with a smaller mean update is stationary; 0 never splits and
            is FedAvg with equal weights.
        client_norm: epsilon_2: a client with a larger update still moves.
        first_round: Number of rounds before the first split.
    """

    mean_norm: NonNegative = 0.4
    client_norm: NonNegative = 1.6
    first_round: NonNegativeInt = 20

    needs = (require_everybody,)
    facts = Facts(one_model_each=True, averages=False)

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.state = {
            "models": plan.initial.unsqueeze(0).clone(),  # [C, P]
            "cluster": torch.zeros(plan.clients, dtype=torch.int64),
        }

    def send(self, round: Round) -> Message:
        return self.deploy(round, round.selected)

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        rows = [
            int(self.state["cluster"][client]) if client < self.plan.clients else 0
            for client in clients
        ]
        return {"model": self.state["models"][rows]}

    def receive(self, round: Round, replies: Replies) -> None:
        updates = replies["model"] - replies.sent("model")
        moved = updates[:, : self.plan.layout.trainable].double()
        models = list(self.state["models"])
        cluster = self.state["cluster"].clone()
        for number in range(len(models)):
            # Order by client, so that the numbers of clusters do not depend on the slots.
            order = replies.clients.argsort()
            members = order[cluster[replies.clients][order] == number]
            if not len(members):
                continue
            clusters = [members]
            mean = moved[members].mean(0).norm()
            longest = moved[members].norm(dim=1).max()
            stands_still = len(members) > 2 and mean < self.mean_norm and longest > self.client_norm
            if self.plan.passed(round.number) >= self.first_round and stands_still:
                clusters = [members[half] for half in bipartition(moved[members])]
                cluster[replies.clients[clusters[1]]] = len(models)
                models.append(models[number])
            for row, slots in zip((number, len(models) - 1), clusters, strict=False):
                models[row] = models[row] + updates[slots].mean(0)
        self.state |= {"models": torch.stack(models), "cluster": cluster}

    def model(self) -> Tensor:
        shares = (
            self.state["cluster"]
            .bincount(minlength=len(self.state["models"]))
            .to(self.state["models"])
        )
        return (shares / shares.sum()) @ self.state["models"]

    def diagnose(self) -> dict[str, float]:
        return {"clusters": float(len(self.state["models"]))}


def bipartition(updates: Tensor) -> tuple[Tensor, Tensor]:
    """Divide a cluster in two by complete linkage on -cos.

    Args:
        updates: Updates of the clients, `[k, T]`.

    Returns:
        Indices of the rows of each half. The first half contains row 0.
    """
    # Imported here, since it adds a fifth to the time to import PyTorch.
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    directions = torch.nn.functional.normalize(updates, dim=1)
    distance = (1 - directions @ directions.T).clamp_min(0).fill_diagonal_(0)
    label = torch.from_numpy(
        fcluster(linkage(squareform(distance.numpy(), checks=False), "complete"), 2, "maxclust")
    )
    return (label == label[0]).nonzero()[:, 0], (label != label[0]).nonzero()[:, 0]
