"""SiloBN, FedBN, FedPer, LG-FedAvg and FedRep: FedAvg with some layers or statistics that stay with
each client.
"""

from torch import Tensor, nn

from fedloom.algorithm import Cohort, Facts, algorithms, name_of
from fedloom.algorithm.records import Message, Plan
from fedloom.algorithms.sharing import PartlyShared, block_layers
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count, NonNegativeInt
from fedloom.flat.layout import Unit
from fedloom.models.structure import head_name, layer_finder, require_untied_layers


@algorithms.register("silobn")
class SiloBN(PartlyShared):
    """FedAvg with local batch-norm statistics for each client, while scale and shift are averaged.

    For a model without floating-point buffers this is FedAvg; FedALA's code trains its FedAvg this
    way. `buffers=average` is FedAvg for every model. Source: Andreux et al. 2020, section 3.
    Use it when sites measure on different devices and the model has batch norm, but all clients
    should have the same scale and shift.
    """


@algorithms.register("fedbn")
class FedBN(PartlyShared):
    """FedAvg over all layers except batch norm. Parameters and statistics of batch norm stay with
    each client.

    A model without batch-norm layers is refused, since there it is FedAvg.
    Source: Li et al. 2021 (FedBN), algorithm 1.
    Use it when clients' inputs look different (other devices, other sites) and the model has batch
    norm.
    """

    def private(self, module: nn.Module) -> frozenset[str]:
        layers = frozenset(
            n for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
        )
        if not layers:
            raise InvalidValue(
                f"fedbn needs batch-norm layers, but {type(module).__name__} has none: use fedavg"
            )
        return layers


@algorithms.register("fedper")
class FedPer(PartlyShared):
    """FedAvg over the base of the model; the highest blocks stay with each client and train with
    it.

    Source: Arivazhagan et al. 2019, algorithm 1.
    Use it when clients agree on features and differ in labels or in their meaning; it sends less
    than FedAvg.

    Args:
        personal_blocks: Number of blocks that stay with the client. The model declares its blocks;
            without a declaration each layer is a block.
    """

    personal_blocks: Count = 1

    def private(self, module: nn.Module) -> frozenset[str]:
        return block_layers(module, slice(-self.personal_blocks, None))


@algorithms.register("lg_fedavg")
class LgFedAvg(PartlyShared):
    """FedAvg over the highest blocks of the model. Each client has its own representation below;
    both train together.

    Source: Liang et al. 2020 (Think locally, act globally), algorithm 1.
    Use it when clients' inputs differ and labels mean the same everywhere: each client learns its
    own features.

    Args:
        global_blocks: Number of blocks that travel. The model declares its blocks; without a
            declaration each layer is a block.
    """

    global_blocks: Count = 1

    def private(self, module: nn.Module) -> frozenset[str]:
        return block_layers(module, slice(None, -self.global_blocks))


class KeepsHead(PartlyShared):
    """Base of methods that separate the classifier from the base under it. The classifier stays
    with the clients.
    """

    base_facts = Facts(fits_once=False)

    def setup(self, plan: Plan) -> None:
        require_untied_layers(plan.module)
        super().setup(plan)

    def private(self, module: nn.Module) -> frozenset[str]:
        return self.head_layers(module)

    def head_layers(self, module: nn.Module) -> frozenset[str]:
        """Return the layers of the classifier.

        Raises:
            InvalidValue: The model has no layers below its classifier.
        """
        name = head_name(module)
        layer = layer_finder(module)
        layers = {layer(parameter) for parameter, _ in module.named_parameters()}
        head = frozenset(layer for layer in layers if layer == name or layer.startswith(f"{name}."))
        if not name or head == layers:
            model = type(module).__name__
            raise InvalidValue(
                f"{name_of(self)} needs layers under the classifier, but {model} is a single layer"
            )
        return head

    def split(self, cohort: Cohort) -> tuple[Unit, Unit]:
        """Divide the columns of a row.

        Args:
            cohort: The clients, with the architecture and its layout.

        Returns:
            The slices of the base, and the slices of the classifier.
        """
        layout = cohort.layout
        head = self.head_layers(cohort.module)
        return layout.unit(lambda tensor: tensor.layer not in head), layout.unit(
            lambda tensor: tensor.layer in head
        )


@algorithms.register("fedrep")
class FedRep(KeepsHead):
    """FedRep: each round a client trains its own head, then the shared base for the local epochs.

    The base is held fixed while the head trains (its statistics move, as in training mode), and the
    head while the base trains. Only the base travels and is averaged; heads start equal and never
    leave their clients. A client scores the received base under its own head.
    Source: Collins et al. 2021, algorithm 1; FedALA, appendix G.
    Use it when one representation fits all clients and the labels of each client need a separate
    head.

    Args:
        head_epochs: Epochs of the head (FedALA: 5, and 1 epoch of the base).
        upload_head: Let the heads travel and be averaged too, which gives a global model (FedAH's
            inner method).
    """

    head_epochs: NonNegativeInt = 5
    upload_head: bool = False

    def private(self, module: nn.Module) -> frozenset[str]:
        head = self.head_layers(module)
        return frozenset() if self.upload_head else head

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        base, head = self.split(cohort)
        if self.head_epochs:
            head_cohort, loss_fn = cohort.for_classifier(start)
            start = head_cohort.fit(
                start, loss_fn=loss_fn, only=head, purpose="head", epochs=self.head_epochs
            ).model
        return cohort.fit(start, only=base).model
