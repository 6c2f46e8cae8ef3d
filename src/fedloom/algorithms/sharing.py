"""Base of methods with private layers: only the remaining layers travel and count as traffic."""

import itertools
from collections.abc import Mapping
from dataclasses import field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedloom.algorithm import (
    DEPLOYMENT,
    Algorithm,
    Cohort,
    Facts,
    Round,
    name_of,
    overrides,
)
from fedloom.algorithm.records import Aggregate, Message, Plan
from fedloom.common.errors import InvalidValue
from fedloom.flat.layout import Layout, Unit
from fedloom.models.structure import block_parameters, layer_finder, require_untied_layers


def take(rows: Tensor, unit: Unit) -> Tensor:
    """Return columns of rows side by side.

    Args:
        rows: Rows, `[k, P]`.
        unit: Slices of the columns.

    Returns:
        The columns, `[k, m]`; the rows themselves if the unit covers all columns.
    """
    if unit == (slice(0, rows.shape[1]),):
        return rows
    return torch.cat([rows[:, columns] for columns in unit], 1) if unit else rows[:, :0]


def put(rows: Tensor, unit: Unit, values: Tensor) -> Tensor:
    """Return a copy of rows with other values in some columns: the inverse of `take`.

    Args:
        rows: Rows, `[k, P]`.
        unit: Slices of the columns.
        values: New values, `[k, m]`.

    Returns:
        Rows, `[k, P]`. If the unit covers the whole row, they are `values` without a copy.
    """
    return values if unit == (slice(0, rows.shape[1]),) else put_(rows.clone(), unit, values)


def put_(rows: Tensor, unit: Unit, values: Tensor) -> Tensor:
    """Write values into some columns of rows, in place.

    Args:
        rows: Rows, `[k, P]`. Modified in place.
        unit: Slices of the columns, m in total.
        values: New values, `[k, m]`.

    Returns:
        The rows.
    """
    for columns, block in zip(
        unit, values.split([columns.stop - columns.start for columns in unit], 1), strict=True
    ):
        rows[:, columns] = block
    return rows


def length(unit: Unit) -> int:
    """Return the number of columns in a unit."""
    return sum(columns.stop - columns.start for columns in unit)


def block_layers(module: nn.Module, blocks: slice) -> frozenset[str]:
    """Return the layers in a slice of the module's blocks.

    Args:
        module: The architecture.
        blocks: Slice of its blocks, which run from bottom to top (see `block_parameters`).

    Returns:
        Names of the layers.

    Raises:
        InvalidValue: Two layers share a tensor.
    """
    require_untied_layers(module)
    return frozenset(map(layer_finder(module), itertools.chain(*block_parameters(module)[blocks])))


def require_everybody(method: str, plan: Plan) -> None:
    """Raise `InvalidValue` unless all clients take part in every round.

    Args:
        method: Name of the method, with which errors begin.
        plan: The plan, with the numbers of clients and participants.
    """
    if plan.participants < plan.clients:
        share = f"{plan.participants} of {plan.clients}"
        raise InvalidValue(
            f"{method} needs all clients in every round: participation must be 1, not {share}"
        )


class PartlyShared(Algorithm):
    """Federated averaging of some layers; the base of the personalised methods.

    `private` returns the layers that stay with each client. They start as the layers of the initial
    model. The other layers are averaged by samples.

    Args:
        buffers: With `local` floating-point buffers (batch-norm statistics) stay with the client,
            as in FedALA's experiments; with `average` the buffers of the travelling layers travel
            too.
        eval_point: When a client's model is scored: `after_init`, before local training (FedALA's
            code), or `after_train`.
    """

    buffers: Literal["local", "average"] = field(default="local", kw_only=True)
    eval_point: Literal["after_init", "after_train"] = field(default="after_init", kw_only=True)

    # Name in the clients' memory of the personal model that they deploy, if any.
    own_model: ClassVar[str] = ""
    base_facts: ClassVar[Facts] = Facts()  # `facts` adds `deploys` and `initial`

    # --- what travels ---

    def private(self, module: nn.Module) -> frozenset[str]:
        """Return the layers that stay with the client; by default none."""
        return frozenset()

    def unit(self, module: nn.Module, layout: Layout) -> Unit:
        """Return the slices of a row that travel.

        Args:
            module: The architecture, from which `private` selects layers.
            layout: Position of each tensor in a row `[P]`.

        Returns:
            Slices without private layers, and without buffers if `buffers` is `local`.

        Raises:
            InvalidValue: No column travels, or all layers that stay are frozen.
        """
        private = self.private(module)
        end = layout.trainable if self.buffers == "local" else layout.size
        if private and all(tensor.layer not in private for tensor in layout.slices):
            raise InvalidValue(
                f"{name_of(self)}: all layers that would stay with the clients are frozen"
            )
        unit = layout.unit(lambda tensor: tensor.layer not in private and tensor.stop <= end)
        if not length(unit):
            raise InvalidValue(
                f"{name_of(self)}: all layers of {type(module).__name__} would stay with the "
                "clients, so nothing would travel"
            )
        return unit

    def shared(self, module: nn.Module, layout: Layout) -> Unit:
        return self.unit(module, layout)

    def complete(self, cohort: Cohort, model: Tensor) -> Tensor:
        unit = self.shared(cohort.module, cohort.layout)
        if length(unit) == cohort.layout.size:
            return model
        stays = complement(unit, cohort.layout)
        private = cohort.memory.get(_private(stays), take(cohort.initial, stays))
        rows = model.new_empty(len(model), cohort.layout.size)
        return put(put(rows, stays, private), unit, model)

    # --- the server half ---

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self._unit = self.unit(plan.module, plan.layout)

    def send(self, round: Round) -> Message:
        message = super().send(round)
        return {**message, "model": take(message["model"], self._unit)}

    def deploy(self, round: Round, clients: tuple[int, ...]) -> Message:
        return {"model": take(self.model().unsqueeze(0), self._unit)}

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (length(self._unit),)}

    def update(self, round: Round, aggregate: Aggregate) -> None:
        self.state["model"] = self.whole(self.state["model"], aggregate.mean["model"])

    def whole(self, model: Tensor, shared: Tensor) -> Tensor:
        """Return a model with other values in the columns that travel.

        Args:
            model: The model, `[P]`. It stays unchanged.
            shared: Values of the columns that travel, `[m]`.

        Returns:
            The model, `[P]`.
        """
        return put(model.unsqueeze(0), self._unit, shared.unsqueeze(0))[0]

    # --- the client half ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return self.upload(cohort, self.work(cohort, self.complete(cohort, inbox["model"]), inbox))

    def work(self, cohort: Cohort, start: Tensor, inbox: Message) -> Tensor:
        """Train locally.

        Args:
            cohort: The clients.
            start: Whole models, `[k, P]`.
            inbox: The server's message.

        Returns:
            The trained models, `[k, P]`.
        """
        return cohort.fit(start).model

    def upload(self, cohort: Cohort, model: Tensor) -> Message:
        """Return the reply, and store the private layers in the clients' memory.

        Args:
            cohort: The clients.
            model: The trained models, `[k, P]`.

        Returns:
            The columns of `model` that travel, `[k, m]`.
        """
        unit = self.shared(cohort.module, cohort.layout)
        if length(unit) < cohort.layout.size:
            stays = complement(unit, cohort.layout)
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
        return (
            cohort.memory.get("trained", initialised)
            if self.eval_point == "after_train"
            else initialised
        )

    def initialise(self, cohort: Cohort, model: Tensor, inbox: Message) -> Tensor:
        """Return the models that clients score, `[k, P]`.

        Args:
            cohort: The clients.
            model: The received models, completed by the private layers, `[k, P]`. By default they
                are scored unchanged.
            inbox: The server's message.

        Returns:
            Models, `[k, P]`.
        """
        return model

    @property
    def facts(self) -> Facts:
        initial = "private" if self.base_facts.initial == "none" else self.base_facts.initial
        return replace(self.base_facts, deploys=self._deploys(), initial=initial)

    def _deploys(self) -> Literal["received", "start", "memory"]:
        if self.own_model:
            return "memory"
        changed = overrides(type(self), PartlyShared, (*DEPLOYMENT, "initialise"))
        keeps_part = hasattr(self, "_unit") and length(self._unit) < self.plan.layout.size
        return "start" if changed or keeps_part or self.eval_point == "after_train" else "received"


def _private(stays: Unit) -> str:
    """Return the name of the private layers in memory. It contains their size, which can differ
    between `stages`.
    """
    return f"private_{length(stays)}"


def complement(unit: Unit, layout: Layout) -> Unit:
    """Return the slices of a row outside the unit.

    Args:
        unit: Slices in increasing order.
        layout: Layout of the row, which gives its length P.

    Returns:
        Slices in increasing order, none of them empty.
    """
    ends = [0, *(end for columns in unit for end in (columns.start, columns.stop)), layout.size]
    return tuple(
        slice(start, stop)
        for start, stop in zip(ends[::2], ends[1::2], strict=True)
        if start < stop
    )
