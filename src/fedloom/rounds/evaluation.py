"""What a federation measures of its models, on whom, and how often.

Figures of one evaluation, by name (`Tally.figures` defines the parts). What stands here as accuracy is the metric of the task's
objective, whose other figures follow it:

    accuracy, loss                  the global model on the global test set, unless that is empty
    client_accuracy, _std, _worst   the global model on the clients' own test data; client_loss
    personal_accuracy, ...          each client's own model (`Algorithm.personalise`) on the client's own test data
    new_client_accuracy, ...        the same for clients that never train

Personal models are those with which the next round would begin, made from what the next round would send: after the download
and the local initialisation, before local training (as FedALA does).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message
from fedloom.errors import InvalidValue, quoted, suggestion
from fedloom.randomness import stream
from fedloom.round import Round
from fedloom.rounds.engine import INTEGERS, ClientTask, Engine, expectations, inbox_of
from fedloom.rounds.schedule import Patience, Schedule, Stop
from fedloom.rounds.scoring import Evaluator, Tally
from fedloom.task import Task

Record = dict[str, Any]
"""Figures ready for JSON."""

SHARE = 0.1
"""What evaluation may cost, as a share of training, where the schedule leaves open how often to evaluate."""

TRAINING_PASSES = 3
"""A training step costs about three forward passes: the backward pass takes twice as long as the forward pass."""

BLOCK = 64
"""How many clients' messages are made at a time."""

MODELS = ("client", "personal", "new_client")
"""Beginnings of figures on the clients' own test data: of the global model, of their own, and of those that never trained."""


class Evaluation:
    """Measures the models of one federation, in which clients from number `trainers` on never train.

    `numbers` are the clients' numbers in figures, where those differ. Raises `InvalidValue` when the schedule asks for figures
    that the task has no data for.
    """

    def __init__(
        self, task: Task, engine: Engine, schedule: Schedule, trainers: int, numbers: Sequence[int] | None = None
    ) -> None:
        self.task, self.engine = task, engine
        self.rounds = schedule.rounds
        self.numbers = range(task.clients) if numbers is None else numbers
        self.evaluator = Evaluator(task.model, task.layout, task.dataset)
        if task.local_test is None and (schedule.personal_every or schedule.new_clients):
            option = "personal_every" if schedule.personal_every else "new_clients"
            raise InvalidValue(
                f"{option}={getattr(schedule, option)} needs test data of the clients' own: give the task local_test, "
                "such as 0.25"
            )
        sizes = np.zeros(task.clients) if task.local_test is None else task.local_test.sizes
        able = np.flatnonzero(sizes)
        self.clients = _chosen(able[able < trainers], schedule)
        self.newcomers = _chosen(able[able >= trainers], schedule)
        self.every, self.personal_every = cadence(task, schedule, trainers, len(self.clients) + len(self.newcomers))
        self.patience = self._patience(schedule.stop)

    def _patience(self, stop: Stop) -> Patience:
        """Return what ends the run. Raises `InvalidValue` for a figure that is never measured, or improves in no known way."""
        objective, metrics = self.task.objective, self.task.dataset.metrics
        names = [*objective.figure_names, *(metric.name for metric in metrics)]
        measured = [*(names if len(self.task.test) else ())]
        measured += [f"{model}_{name}" for model in MODELS for name in names if self.personal_every]
        figure = stop.metric or objective.metric.name
        if stop.evaluations is not None and figure not in measured:
            raise InvalidValue(
                f"stop.metric: {quoted(figure)} is never measured{suggestion(figure, measured)} "
                f"(there are: {', '.join(measured) or 'none, without test samples'})"
            )
        model = next((model for model in MODELS if figure.startswith(f"{model}_")), "")
        name = figure.removeprefix(f"{model}_")
        if stop.evaluations is not None and stop.goal is None and name not in ("loss", objective.metric.name):
            raise InvalidValue(f"stop.goal: say whether {figure} should rise or fall")
        rises = (
            stop.goal == "rise" if stop.goal else name == objective.metric.name and objective.metric.higher_is_better
        )
        return Patience(stop, figure, rises, self.personal_every if model in MODELS[1:] else self.every)

    def measure(
        self, algorithm: Algorithm, round: Round, model: Tensor, integers: Tensor, ends: bool = False
    ) -> tuple[Record, Record | None]:
        """Return the figures due after `round`, and those of each client when personal models are due. The global `model` is the
        algorithm's, `integers` are its integer buffers. After a round that `ends` the run all figures are due."""
        figures: Record = {}
        ends = ends or algorithm.spent
        if ends or self._due(round, self.every):
            figures |= self.evaluator.score(model, self.task.test, integers) if len(self.task.test) else {}
            figures |= algorithm.diagnose()
        tallies: dict[str, Tally] = {}
        personal = self.personal_every > 0 and (ends or self._due(round, self.personal_every))
        upcoming = self.task.training.round_at(round, round.number + 1)
        scored = partial(self._global, algorithm, upcoming, model=model, integers=integers)
        personalised = partial(self._personal, algorithm, upcoming, integers=integers) if algorithm.personal else scored
        if self.personal_every and (personal or ends or self._due(round, self.every)):
            tallies["client"] = scored(self.clients)
        if personal:
            tallies["personal"] = personalised(self.clients) if algorithm.personal else tallies["client"]
            if self.newcomers:
                tallies["new_client"] = personalised(self.newcomers)
        tallies = {name: tally for name, tally in tallies.items() if len(tally.clients)}  # absent sites answer nothing
        for name, tally in tallies.items():
            figures |= tally.figures(name, self.task.objective)
        if not ends and self.patience.ends(round.number, figures):
            return self.measure(algorithm, round, model, integers, ends=True)
        table = {"round": round.number, **{name: self._table(tally) for name, tally in tallies.items()}}
        return figures, table if personal else None

    def _due(self, round: Round, every: int) -> bool:
        return every > 0 and (round.number % every == 0 or round.number == self.rounds)

    def _global(
        self, algorithm: Algorithm, upcoming: Round, clients: Sequence[int], model: Tensor, integers: Tensor
    ) -> Tally:
        local_test = self.task.local_test
        assert local_test is not None  # else there are no clients to evaluate
        if self.task.elsewhere:
            plain = Algorithm()  # with it, clients use what they are sent
            plain.plan, plain.state = algorithm.plan, {"model": model}
            return self._personal(plain, upcoming, clients, integers)
        return self.evaluator.tally(model, self.task.train, local_test, clients, integers)

    def _personal(self, algorithm: Algorithm, upcoming: Round, clients: Sequence[int], integers: Tensor) -> Tally:
        tallies: list[Tally] = []
        for client_tasks in self.deployed(algorithm, upcoming, clients, integers):
            tallies += self.engine.evaluate(algorithm, upcoming, client_tasks)
        return Tally.joined(tallies)

    def deployed(
        self, algorithm: Algorithm, upcoming: Round, clients: Sequence[int], integers: Tensor
    ) -> Iterator[list[ClientTask]]:
        """Yield what clients are sent in order to personalise, some at a time."""
        for start in range(0, len(clients), BLOCK):
            block = tuple(clients[start : start + BLOCK])
            message: Message = dict(algorithm.deploy(upcoming, block))
            if INTEGERS in expectations(algorithm, upcoming, self.task.layout):
                message[INTEGERS] = integers.unsqueeze(0)
            yield [ClientTask(client, None, inbox_of(message, k)) for k, client in enumerate(block)]

    def _table(self, tally: Tally) -> Record:
        """Each client's accuracy, or whatever the metric is, and number of test samples."""
        metric = self.task.objective.metric.name
        return {
            "clients": [self.numbers[client] for client in tally.clients.tolist()],
            "samples": tally.samples.tolist(),
            metric: tally.each(self.task.objective)[metric].tolist(),
        }


def cadence(task: Task, schedule: Schedule, trainers: int, evaluated: int) -> tuple[int, int]:
    """Every how many rounds the global model is scored, and every how many personal models are; 0 is never.

    What the schedule leaves open is chosen such that evaluation costs at most `SHARE` of training, counted in samples that
    pass forward: training K clients costs 3 K s, with s the samples of one client's local training; the global model, one
    pass over the test set and the clients' own; a client, 3 s + 2 m, as if personalising were one more local training (no
    method here does more) and with m own test samples for the global and for the personal model. So the choice depends on no
    clock and on no method, and methods that are compared are evaluated in the same rounds.
    """
    settings, sizes = task.training, task.partition.sizes[:trainers]
    mean = float(sizes.mean())
    batch = mean if settings.batch_size is None else min(mean, settings.batch_size)
    local = TRAINING_PASSES * (settings.epochs * mean if settings.steps is None else settings.steps * batch)
    training = schedule.participants(trainers) * local
    if evaluated == 0 or schedule.personal_every == 0 or task.local_test is None:
        return schedule.evaluate_every or max(1, math.ceil(len(task.test) / (SHARE * training))), 0
    local_test = float(task.local_test.sizes.mean())
    overall = len(task.test) + evaluated * local_test
    every = schedule.evaluate_every or math.ceil(overall / (SHARE / 2 * training))
    share = max(SHARE - overall / (every * training), SHARE / 2)
    return every, schedule.personal_every or math.ceil(evaluated * (local + 2 * local_test) / (share * training))


def newcomers_last(task: Task, count: int, seed: int) -> tuple[Task, Sequence[int]]:
    """The task with `count` clients, drawn at random, moved behind all others, and the clients' numbers before that, by
    their new ones. The others keep their order.

    A draw, since in some partitions neighbours hold the same classes. Raises `InvalidValue` when nobody is left to train.
    """
    if count == 0:
        return task, range(task.clients)
    if count >= task.clients:
        raise InvalidValue(f"new_clients leaves none of the {task.clients} clients to train")
    drawn = torch.randperm(task.clients, generator=stream(seed, "new clients"))[:count].sort().values.tolist()
    newcomers = set(drawn)
    numbers = [client for client in range(task.clients) if client not in newcomers] + drawn
    local_test = None if task.local_test is None else task.local_test.take(numbers)
    return replace(task, partition=task.partition.take(numbers), local_test=local_test), numbers


def _chosen(able: Any, schedule: Schedule) -> tuple[int, ...]:
    """At most `personal_clients` of the clients, drawn by the seed, in the order of their numbers."""
    order = torch.randperm(len(able), generator=stream(schedule.seed, "evaluated clients"))
    return tuple(sorted(able[order[: schedule.personal_clients].numpy()].tolist()))
