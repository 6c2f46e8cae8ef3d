"""Any model with MOON's projection head below its classifier."""

from torch import Tensor, nn

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count
from fedloom.data import DataSpec
from fedloom.models import models
from fedloom.models.structure import head_name


class Projected(nn.Module):
    """`[n, ...] -> [n, classes]`: the features of `body`, two linear layers with a ReLU between
    them, then `head`.
    """

    def __init__(self, body: nn.Module, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.projection = nn.Sequential(
            nn.Linear(features, features), nn.ReLU(), nn.Linear(features, width)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.projection(self.body(x)))
        return logits


@models.register("projected")
def projected(spec: DataSpec, *, model: str = "mlp", width: Count = 256) -> nn.Module:
    """Another model with MOON's projection head in place of its classifier: features d -> d ->
    `width` -> classes.

    Args:
        model: Name of a registered model with a linear classifier. It gets its default options.
        width: Width of the projection.

    Returns:
        A module with the inputs of `model` and logits `[b, Y]`.

    Raises:
        InvalidValue: The classifier of the model is not linear, or has no layer below it.

    Source: Li et al. 2021 (MOON), section 3.2.
    """
    body = models[model].make(spec)
    name = head_name(body)
    classifier = body.get_submodule(name)
    if not name or not isinstance(classifier, nn.Linear):
        raise InvalidValue(
            f"projected needs a model with a linear classifier above other layers, not {model}"
        )
    body.set_submodule(name, nn.Identity())
    return Projected(body, classifier.in_features, width, spec.outputs)
