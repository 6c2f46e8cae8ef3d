"""The base of methods whose clients keep part of the model to themselves: only the rest travels, and only that is counted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedloom.algorithm import AggregatedReplies, Algorithm, AnyClient, Message, Plan
from fedloom.errors import InvalidValue
from fedloom.flat.layout import Layout, Unit
from fedloom.local.cohort import Cohort
from fedloom.models.structure import block_parameters, layer_finder
from fedloom.round import Round


def take(rows: Tensor, unit: Unit) -> Tensor:
    """The slices of `rows [k, P]` side by side, `[k, m]`; the rows themselves where the unit is all of them."""
    if unit == (slice(0, rows.shape[1]),):
        return rows
    return torch.cat([rows[:, part] for part in unit], 1) if unit else rows[:, :0]


def put(rows: Tensor, unit: Unit, values: Tensor) -> Tensor:
    """A copy of `rows [k, P]` with `values [k, m]` in the slices of the unit: the inverse of `take`."""
    return values if unit == (slice(0, rows.shape[1]),) else put_(rows.clone(), unit, values)


def put_(rows: Tensor, unit: Unit, values: Tensor) -> Tensor:
    """`put` in place."""
    for part, piece in zip(unit, values.split([part.stop - part.start for part in unit], 1), strict=True):
        rows[:, part] = piece
    return rows


def length(unit: Unit) -> int:
    """Numbers in the slices of a unit."""
    return sum(part.stop - part.start for part in unit)


def block_layers(module: nn.Module, blocks: slice) -> frozenset[str]:
    """The layers in some of the module's blocks, which are ordered from bottom to top (`models.structure.blocks`)."""
    return frozenset(map(layer_finder(module), itertools.chain(*block_parameters(module)[blocks])))


def require_everybody(method: str, plan: Plan) -> None:
    """Raise `InvalidValue` unless all clients take part in every round."""
    if plan.participants < plan.clients:
        raise InvalidValue(
            f"{method} needs all clients in every round: participation must be 1, not {plan.participants} of {plan.clients}"
        )


@dataclass
class PartlyShared(Algorithm):
    """Federated averaging of the part of the model that travels; the base of the personalised methods.

    `private` names the layers that stay with each client. `buffers` says what happens to floating-point buffers (batch-norm
    statistics): `local` ones never leave the client, which is how FedALA's experiments were run, and the default here;
    `average` lets those of the travelling layers travel. `eval_point` is the moment at which a client's model is scored:
    `after_init`, as it stands before local training (FedALA's code), or `after_train`, as local training left it.
    What travels is averaged by samples. Until it has trained, a client holds the task's initial model.
    """

    buffers: Literal["local", "average"] = field(default="local", kw_only=True)
    eval_point: Literal["after_init", "after_train"] = field(default="after_init", kw_only=True)

    own_model: ClassVar[str] = ""  # under which name clients remember a model of their own, where they deploy that

    # --- what travels ---

    def private(self, module: nn.Module) -> frozenset[str]:
        """The layers that stay with the client; none by default."""
        return frozenset()

    def unit(self, module: nn.Module, layout: Layout) -> Unit:
        """The slices of a row that travel. Raises `InvalidValue` when none do."""
        private = self.private(module)
        end = layout.trainable if self.buffers == "local" else layout.size
        if private and all(part.layer not in private for part in layout.slices):
            raise InvalidValue(
                f"{type(self).__name__.lower()}: what would stay with the clients is frozen in this model"
            )
        unit = layout.unit(lambda part: part.layer not in private and part.stop <= end)
        if not length(unit):
            raise InvalidValue(
                f"{type(self).__name__.lower()}: all of {type(module).__name__} would stay with the clients"
            )
        return unit

    def travels(self, cohort: Cohort | AnyClient) -> Unit:
        return self.unit(cohort.module, cohort.layout)

    def complete(self, cohort: Cohort, model: Tensor) -> Tensor:
        unit = self.travels(cohort)
        if length(unit) == cohort.layout.size:
            return model
        stays = _others(unit, cohort.layout)
        kept = cohort.memory.get(_private(stays), take(cohort.initial, stays))
        whole = model.new_empty(len(model), cohort.layout.size)
        return put(put(whole, stays, kept), unit, model)

    # --- the server half ---

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self._unit = self.unit(plan.module, plan.layout)

    def send(self, round: Round) -> Message:
        return {"model": take(self.state["model"].unsqueeze(0), self._unit)}

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        return {"model": take(self.model().unsqueeze(0), self._unit)}

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (length(self._unit),)}

    def update(self, round: Round, aggregate: AggregatedReplies) -> None:
        mean = aggregate.mean["model"].unsqueeze(0)
        self.state["model"] = put(self.state["model"].unsqueeze(0), self._unit, mean)[0]

    # --- the client half ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return self.upload(cohort, self.work(cohort, self.complete(cohort, inbox["model"]), inbox))

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        """Local training from whole models `[k, P]` to whole models."""
        return cohort.fit(start).model

    def upload(self, cohort: Cohort, model: Tensor) -> Message:
        """The reply: what travels of `model [k, P]`; the rest is remembered."""
        unit = self.travels(cohort)
        if length(unit) < cohort.layout.size:
            stays = _others(unit, cohort.layout)
            cohort.memory[_private(stays)] = take(model, stays)
        if self.eval_point == "after_train":
            cohort.memory["trained"] = model
        return {"model": take(model, unit)}

    def personalise(self, cohort: Cohort, inbox: Message) -> Tensor:
        if self.own_model:
            return cohort.memory.get(self.own_model, self.complete(cohort, inbox["model"]))
        if self.eval_point == "after_train" and bool(cohort.memory.knows("trained").all()):
            return cohort.memory.get("trained", inbox["model"])
        initialised = self.initialise(cohort, self.complete(cohort, inbox["model"]), inbox)
        return cohort.memory.get("trained", initialised) if self.eval_point == "after_train" else initialised

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        """What a client makes of the whole model it received `[k, P]` before it scores it; by default nothing."""
        return model

    @property
    def scores_start(self) -> bool:
        return not self.own_model

    @property
    def personal(self) -> bool:
        names = ("personalise", "initialise", "complete")
        changed = any(getattr(type(self), name) is not getattr(PartlyShared, name) for name in names)
        kept = bool(self.own_model) or length(self._unit) < self.layout.size
        return changed or kept or self.eval_point == "after_train"


def _private(stays: Unit) -> str:
    """The name under which a client remembers what stays with it, with its size: under `stages` another part may stay."""
    return f"private_{length(stays)}"


def _others(unit: Unit, layout: Layout) -> Unit:
    """The slices of a row that are not in the unit."""
    ends = [0, *(end for part in unit for end in (part.start, part.stop)), layout.size]
    return tuple(slice(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop)
