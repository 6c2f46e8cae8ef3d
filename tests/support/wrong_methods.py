"""Methods with one typical mistake each, in the line marked `# wrong`.

`MISTAKES` lists the findings of `fedloom check`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import fedloom as fl
from fedloom.algorithm.records import Aggregate, Message, Plan, Replies
from fedloom.common.round import Round
from fedloom.flat.population import weighted_mean
from fedloom.local.cohort import Cohort, Context

MISTAKES = {
    "ReturnsNothing": "returned nothing",
    "ReturnsAllOfFit": "returned the whole result of cohort.fit",
    "LosesTheAxis": "without one row for each of 1 clients",
    "RepliesMore": "the reply holds 'loss', contrary to `expects`",
    "RepliesHalf": "'model' has shape",
    "KeepsAllRows": "left a global model of shape [",
    "Widens": "left a global model of torch.float64, not torch.float32",
    "WritesModle": "self.state['modle'] is not there after setup",
    "KeepsAnAttribute": "self.velocity changes from round to round",
    "CountsInTheState": "left int in self.state['count']",
    "AddsInPlace": "changes self.state['model'] in place",
    "EditsTheInbox": "changed inbox['model'] in place",
    "ReadsTheState": "the client half reads self.state['model']",
    "WritesToItself": "the client half writes self.seen",
    "ForgetsToStore": "changes what cohort.memory.get('displacement') gave in place",
    "EnclosesTheInbox": "clients that advance together: RuntimeError",
    "EnclosesATensor": "clients that advance together: RuntimeError",
    "LooksAtTheFirst": "clients that advance together come to other models",
    "DrawsFromTorch": "draws from torch's global generator (randn)",
    "DrawsFromNumPy": "two runs with one seed come to other models: np.random.rand() is not of "
    "the seed",
    "DrawsFromPython": "two runs with one seed come to other models: random.uniform(0.4, 0.6) "
    "is not of the seed",
    "NeverMoves": "the global model has not moved in 3 rounds",
    "Recieves": "Recieves.recieve is called by nobody",
    "HasNoType": "mu = 0.01 has no type",
    "CountsRounds": "the first rounds depend on how many there will be",
    "ForgetsThePlan": "has not stored the plan",
    "SendsTwoRows": "returned 'model' with 2 rows",
    "DividesByZero": "ZeroDivisionError",
    "WritesTheState": "the client half writes self.state['seen']",
    "KeepsAGlobal": "SERVER_MODEL of wrong_methods changes while rounds go on, and each "
    "process has one of its own",
    "ReadsTheClock": "two runs with one seed come to other models: time.time() is not of the seed",
    "DrawsUnseeded": "two runs with one seed come to other models: np.random.default_rng() is "
    "not of the seed",
    "DrawsAtAClient": "two runs with one seed come to other models: random.random() is not of "
    "the seed",
    "TakesALogarithm": "training diverged",
    "RepliesWithIntegers": "returned 'model' as int64, not float32",
    "RepliesWithDoubles": "returned 'model' as float64, not float32",
}


class ReturnsNothing(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:  # type: ignore[return]  # wrong
        cohort.fit(inbox["model"])


class ReturnsAllOfFit(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:  # wrong
        return cohort.fit(inbox["model"])  # type: ignore[return-value]


class LosesTheAxis(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:  # wrong
        return {"model": cohort.fit(inbox["model"]).model[0]}


class RepliesMore(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:  # wrong
        trained = cohort.fit(inbox["model"])
        return {"model": trained.model, "loss": trained.loss}


class RepliesHalf(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:  # wrong
        return {"model": cohort.fit(inbox["model"]).model[:, ::2]}


class KeepsAllRows(fl.Algorithm):
    def receive(self, round: Round, replies: Replies) -> None:  # wrong
        self.state["model"] = replies["model"]


class Widens(fl.Algorithm):
    def update(self, round: Round, aggregate: Aggregate) -> None:  # wrong
        self.state["model"] = aggregate.mean["model"].double()


class WritesModle(fl.Algorithm):
    def receive(self, round: Round, replies: Replies) -> None:
        self.state["modle"] = weighted_mean(replies["model"], replies.weights)  # wrong


class KeepsAnAttribute(fl.Algorithm):
    def receive(self, round: Round, replies: Replies) -> None:
        mean = weighted_mean(replies["model"], replies.weights)
        velocity = getattr(self, "velocity", torch.zeros_like(mean))
        self.velocity = 0.5 * velocity + mean - self.state["model"]  # wrong
        self.state["model"] = self.state["model"] + self.velocity


class CountsInTheState(fl.Algorithm):
    def receive(self, round: Round, replies: Replies) -> None:  # wrong
        super().receive(round, replies)
        self.state["count"] = round.number  # type: ignore[assignment]


class AddsInPlace(fl.Algorithm):
    def receive(self, round: Round, replies: Replies) -> None:
        mean = weighted_mean(replies["model"], replies.weights)
        self.state["model"] += mean - self.state["model"]  # wrong


class EditsTheInbox(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        inbox["model"].mul_(0.9)  # wrong
        return {"model": cohort.fit(inbox["model"]).model}


class ReadsTheState(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        trained = cohort.fit(inbox["model"]).model
        return {"model": (trained + self.state["model"]) / 2}  # wrong


class WritesToItself(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        self.seen = cohort.clients  # wrong
        return super().train(cohort, inbox)


class ForgetsToStore(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        displacement = cohort.memory.get("displacement", torch.zeros_like(inbox["model"]))  # wrong
        trained = cohort.fit(inbox["model"] + 0.5 * displacement).model
        displacement += trained - inbox["model"]
        return {"model": trained}


class EnclosesTheInbox(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        def proximal(weights: Tensor, gradient: Tensor, context: Context) -> Tensor:
            return gradient + 0.1 * (weights - inbox["model"][:, : cohort.layout.trainable])

        return {"model": cohort.fit(inbox["model"], correction=proximal).model}  # wrong


class EnclosesATensor(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        anchor = inbox["model"][:, : cohort.layout.trainable]
        pull = lambda weights, gradient, context: gradient + 0.1 * (weights - anchor)  # noqa: E731
        return {"model": cohort.fit(inbox["model"], correction=pull).model}  # wrong


class LooksAtTheFirst(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:  # wrong
        trained = cohort.fit(inbox["model"]).model
        return {"model": trained + 0.1 * (trained[0] - inbox["model"])}


class DrawsFromTorch(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        noise = 0.01 * torch.randn(inbox["model"].shape)  # wrong
        return {"model": cohort.fit(inbox["model"]).model + noise}


class DrawsFromNumPy(fl.Algorithm):
    def receive(self, round: Round, replies: Replies) -> None:
        share = np.random.rand()  # wrong
        self.state["model"] = torch.lerp(
            self.state["model"], weighted_mean(replies["model"], replies.weights), share
        )


class DrawsFromPython(fl.Algorithm):
    def receive(self, round: Round, replies: Replies) -> None:
        share = random.uniform(0.4, 0.6)  # wrong
        self.state["model"] = torch.lerp(
            self.state["model"], weighted_mean(replies["model"], replies.weights), share
        )


class NeverMoves(fl.Algorithm):
    def receive(self, round: Round, replies: Replies) -> None:  # wrong
        weighted_mean(replies["model"], replies.weights)


class Recieves(fl.Algorithm):
    def recieve(self, round: Round, replies: Replies) -> None:  # wrong
        self.state["model"] = 0.5 * weighted_mean(replies["model"], replies.weights)


@dataclass
class HasNoType(fl.Algorithm):
    step: float = 0.5
    mu = 0.01  # wrong


class CountsRounds(fl.Algorithm):
    def receive(self, round: Round, replies: Replies) -> None:
        share = round.number / round.rounds  # wrong
        self.state["model"] = torch.lerp(
            self.state["model"], weighted_mean(replies["model"], replies.weights), share
        )


class ForgetsThePlan(fl.Algorithm):
    def setup(self, plan: Plan) -> None:  # wrong
        self.step = 0.5


class SendsTwoRows(fl.Algorithm):
    def send(self, round: Round) -> Message:  # wrong
        return {"model": self.state["model"].repeat(2, 1)}


class DividesByZero(fl.Algorithm):
    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return super().expects(round)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        share = 1 / len(cohort.labels[len(cohort.clients) :])  # wrong
        return {"model": share * cohort.fit(inbox["model"]).model}


class WritesTheState(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        self.state["seen"] = inbox["model"].mean()  # wrong
        return super().train(cohort, inbox)


SERVER_MODEL: dict[str, Tensor] = {}


class KeepsAGlobal(fl.Algorithm):
    def send(self, round: Round) -> Message:
        SERVER_MODEL["model"] = self.state["model"]  # wrong
        return super().send(round)

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return {"model": cohort.fit(inbox["model"]).model.lerp(SERVER_MODEL["model"], 0.1)}


class ReadsTheClock(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        share = time.time() % 1  # wrong
        return {"model": cohort.fit(inbox["model"]).model.lerp(inbox["model"], share)}


class DrawsUnseeded(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        share = float(np.random.default_rng().random())  # wrong
        return {"model": cohort.fit(inbox["model"]).model.lerp(inbox["model"], share)}


class DrawsAtAClient(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        share = random.random()  # wrong
        return {"model": cohort.fit(inbox["model"]).model.lerp(inbox["model"], share)}


class TakesALogarithm(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        trained = cohort.fit(inbox["model"]).model
        lengths = (trained - inbox["model"]).log()  # wrong
        return {"model": trained + 0.1 * lengths}


class RepliesWithIntegers(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:  # wrong
        return {"model": cohort.fit(inbox["model"]).model.long()}


class RepliesWithDoubles(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:  # wrong
        return {"model": cohort.fit(inbox["model"]).model.double()}


class KeepsTheGraph(fl.Algorithm):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        def smoothed(loss: Tensor, net: object, batch: object, context: Context) -> Tensor:
            self.last = 0.9 * loss + 0.1 * getattr(self, "last", torch.zeros(()))  # wrong
            return self.last

        return {"model": cohort.with_loss(smoothed, {}).fit(inbox["model"]).model}
