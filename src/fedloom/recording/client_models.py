"""Recorder of the models of single clients."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count, NonNegativeInt
from fedloom.recording.recorder import (
    ClientExchange,
    Measurement,
    Recorder,
    RunContext,
    Series,
    Tensors,
    recorders,
)


@recorders.register("client_models")
@dataclass(frozen=True)
class ClientModels(Recorder):
    """The models that clients send, after their local training.

    `fl.load(run, round=5, client=3)` loads one. Recorded are the `clients` that take part in the
    `rounds`. Without `clients`, all of a round are recorded; without `rounds`, all rounds, which
    needs a file of every model.
    """

    clients: list[NonNegativeInt] = field(default_factory=list)
    rounds: list[Count] = field(default_factory=list)

    def require(self, context: RunContext) -> None:
        for number in self.clients:
            context.client(number)
        if late := [number for number in self.rounds if number > context.rounds]:
            raise InvalidValue(f"round {late[0]} does not exist: the run has {context.rounds}")

    def measure(
        self, number: int, exchanges: Sequence[ClientExchange], context: RunContext
    ) -> Measurement | None:
        if self.rounds and number not in self.rounds:
            return None
        tensors = {}
        clients = []
        for exchange in exchanges:
            client = context.numbers[exchange.client]
            if self.clients and client not in self.clients:
                continue
            clients.append(client)
            tensors[f"{client}/model"] = exchange.uploaded.clone()
            if exchange.uploaded_integers is not None:
                tensors[f"{client}/integers"] = exchange.uploaded_integers.clone()
        return Measurement({"clients": sorted(clients)}, tensors) if clients else None

    def result(self, series: Series, tensors: Tensors, context: RunContext) -> dict[str, Any]:
        """Return the clients with a model in each recorded round."""
        rounds = [number for number, _ in series]
        return {"rounds": rounds, "clients": [value["clients"] for _, value in series]}
