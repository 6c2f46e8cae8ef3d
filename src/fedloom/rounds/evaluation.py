"""What a federation measures of its models, on whom, and how often.

Figures of one evaluation, by name (parts: `Tally.figures`); accuracy stands for the objective's
metric, loss for the others:

    accuracy, loss                  the global model on the global test set, unless that is empty
    client_accuracy, _std, _worst   the global model on the clients' own test data; client_loss
    personal_accuracy, ...          each client's own model (`Algorithm.personalise`) on the client's own test data
    new_client_accuracy, ...        the same for clients that never train

Personal models are those with which the next round would begin, made from what the next round would
send: after the download and the local initialisation, before local training (as FedALA does).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.config.fields import require_one_of
from fedloom.errors import InvalidValue
from fedloom.models.structure import has_batch_norm, head_name, smallest_batch
from fedloom.parts.pipeline import Pipeline
from fedloom.randomness import stream
from fedloom.records import INTEGERS, Message
from fedloom.round import Round
from fedloom.rounds.checkpoint import Record as Record
from fedloom.rounds.engine import Engine, Job, inbox_of
from fedloom.rounds.schedule import Patience, Schedule, Stop
from fedloom.rounds.scoring import Evaluator, Tally
from fedloom.task import Task

SHARE = 0.1
"""What evaluation may cost, as a share of training, where the schedule leaves open how often to
evaluate.
"""

TRAINING_PASSES = 3
"""A training step costs about three forward passes: the backward pass takes twice as long as the
forward pass.
"""

BLOCK = 64
"""How many clients' messages are made at a time."""

MODELS = ("client", "personal", "new_client")
"""Beginnings of figures on the clients' own test data: of the global model, of their own, and of
those that never trained.
"""


class Evaluation:
    """Measures the models of one federation, in which clients from number `trainers` on never
    train.

    `numbers` are the clients' numbers in figures, if others. Raises `InvalidValue` for figures that
    the task has no data for.
    """

    def __init__(
        self,
        task: Task,
        engine: Engine,
        schedule: Schedule,
        trainers: int,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.task, self.engine = task, engine
        self.rounds = schedule.rounds
        self.numbers = range(task.clients) if numbers is None else numbers
        self.evaluator = Evaluator(task.model, task.layout, task.dataset)
        if task.local_test is None and (schedule.personal_every or schedule.new_clients):
            option = "personal_every" if schedule.personal_every else "new_clients"
            raise InvalidValue(
                f"{option} needs test data of the clients' own: give the task local_test, such as 0.25"
            )
        sizes = np.zeros(task.clients) if task.local_test is None else task.local_test.sizes
        able = np.flatnonzero(sizes)
        self.clients = _chosen(able[able < trainers], schedule)
        self.newcomers = _chosen(able[able >= trainers], schedule)
        self.every, self.personal_every = cadence(
            task, schedule, trainers, len(self.clients) + len(self.newcomers)
        )
        self.patience = self._patience(schedule.stop)

    def _patience(self, stop: Stop) -> Patience:
        """Return what ends the run. Raises `InvalidValue` for a figure that is never measured, or
        improves in no known way.
        """
        objective, metrics = self.task.objective, self.task.dataset.metrics
        names = [*objective.figure_names, *(metric.name for metric in metrics)]
        measured = [*(names if len(self.task.test) else ())]
        measured += [f"{model}_{name}" for model in MODELS for name in names if self.personal_every]
        figure = stop.metric or objective.metric.name
        if stop.evaluations is not None:
            require_one_of(
                "stop.metric", figure, tuple(measured) or ("none, without test samples",)
            )
        model = next((model for model in MODELS if figure.startswith(f"{model}_")), "")
        metric, name = objective.metric, figure.removeprefix(f"{model}_")
        if stop.evaluations is not None and stop.goal is None and name not in ("loss", metric.name):
            raise InvalidValue(f"stop.goal: say whether {figure} should rise or fall")
        rises = stop.goal == "rise" or (
            stop.goal is None and name == metric.name and metric.higher_is_better
        )
        return Patience(
            stop, figure, rises, self.personal_every if model in MODELS[1:] else self.every
        )

    def measure(
        self, pipeline: Pipeline, round: Round, model: Tensor, integers: Tensor, ends: bool = False
    ) -> tuple[Record, Record | None]:
        """Return the figures due after `round` (all when it `ends` the run), and those of each
        client when personal models are due. The global `model` is the pipeline's, `integers` are
        its integer buffers.
        """
        figures: Record = {}
        ends = ends or round.number == self.rounds
        due = ends or round.number % self.every == 0
        personal = self.personal_every > 0 and (ends or round.number % self.personal_every == 0)
        if due:
            figures |= (
                self.evaluator.score(model, self.task.test, integers) if len(self.task.test) else {}
            )
            figures |= pipeline.diagnose()
        tallies: dict[str, Tally] = {}
        scored = partial(
            self._tally, pipeline, self.task.training.round_at(round, round.number + 1), integers
        )
        if personal or (due and self.personal_every):
            tallies["client"] = scored(model, self.clients)
        if personal:
            tallies["personal"] = (
                scored(None, self.clients) if pipeline.personal else tallies["client"]
            )
            if self.newcomers:
                tallies["new_client"] = scored(None if pipeline.personal else model, self.newcomers)
        # absent sites answer nothing
        tallies = {name: tally for name, tally in tallies.items() if len(tally.clients)}
        for name, tally in tallies.items():
            figures |= tally.figures(name, self.task.objective)
        if not ends and self.patience.ends(round.number, figures):
            return self.measure(pipeline, round, model, integers, ends=True)
        table = {
            "round": round.number,
            **{name: self._table(tally) for name, tally in tallies.items()},
        }
        return figures, table if personal else None

    def _tally(
        self,
        pipeline: Pipeline,
        upcoming: Round,
        integers: Tensor,
        model: Tensor | None,
        clients: Sequence[int],
    ) -> Tally:
        """Score the global `model`, or else the models that the clients would use, on the clients'
        own test data.
        """
        if model is not None and not self.task.elsewhere and self.task.local_test is not None:
            return self.evaluator.tally(
                model, self.task.train, self.task.local_test, clients, integers
            )
        if model is not None:
            plain = Algorithm()  # with it, clients use what they are sent
            plain.plan, plain.state = pipeline.plan, {"model": model}
            pipeline = Pipeline(plain)
        blocks = self.deployed(pipeline, upcoming, clients, integers)
        return Tally.joined(
            [t for block in blocks for t in self.engine.evaluate(pipeline, upcoming, block)]
        )

    def deployed(
        self, pipeline: Pipeline, upcoming: Round, clients: Sequence[int], integers: Tensor
    ) -> Iterator[list[Job]]:
        """Yield what clients are sent in order to personalise, some at a time."""
        for start in range(0, len(clients), BLOCK):
            block = tuple(clients[start : start + BLOCK])
            message: Message = pipeline.deploy(upcoming, block)
            if INTEGERS in pipeline.expected(upcoming):
                message[INTEGERS] = integers.unsqueeze(0)
            yield [Job(client, None, inbox_of(message, k)) for k, client in enumerate(block)]

    def _table(self, tally: Tally) -> Record:
        metric = self.task.objective.metric.name
        return {
            "clients": [self.numbers[client] for client in tally.clients.tolist()],
            "samples": tally.samples.tolist(),
            metric: tally.each(self.task.objective)[metric].tolist(),
        }


def cadence(task: Task, schedule: Schedule, trainers: int, evaluated: int) -> tuple[int, int]:
    """Every how many rounds the global model is scored, and every how many personal models are; 0
    is never.

    What the schedule leaves open is chosen such that evaluation costs at most `SHARE` of training,
    counted in samples that pass forward: training K clients costs 3 K s, with s the samples of one
    client's local training; the global model, one pass over the test set and the clients' own; a
    client, 3 s + 2 m, as if personalising were one more local training (no method here does more)
    and with m own test samples for the global and for the personal model. So the choice depends on
    no clock and on no method, and methods that are compared are evaluated in the same rounds.
    """
    local = TRAINING_PASSES * task.training.samples_seen(
        float(task.partition.sizes[:trainers].mean())
    )
    training = schedule.participants(trainers) * local
    if evaluated == 0 or schedule.personal_every == 0 or task.local_test is None:
        return schedule.evaluate_every or max(1, math.ceil(len(task.test) / (SHARE * training))), 0
    local_test = float(task.local_test.sizes.mean())
    overall = len(task.test) + evaluated * local_test
    every = schedule.evaluate_every or math.ceil(overall / (SHARE / 2 * training))
    share = max(SHARE - overall / (every * training), SHARE / 2)
    return every, schedule.personal_every or math.ceil(
        evaluated * (local + 2 * local_test) / (share * training)
    )


def newcomers_last(task: Task, count: int, seed: int) -> tuple[Task, Sequence[int]]:
    """The task with `count` drawn clients moved behind all others, which keep their order, and the
    clients' earlier numbers.

    A draw, since in some partitions neighbours hold the same classes. Raises `InvalidValue` when
    nobody is left to train.
    """
    if count == 0:
        return task, range(task.clients)
    if count >= task.clients:
        raise InvalidValue(f"new_clients leaves none of the {task.clients} clients to train")
    drawn = (
        torch.randperm(task.clients, generator=stream(seed, "new clients"))[:count]
        .sort()
        .values.tolist()
    )
    numbers = [client for client in range(task.clients) if client not in {*drawn}] + drawn
    local_test = None if task.local_test is None else task.local_test.take(numbers)
    return replace(task, partition=task.partition.take(numbers), local_test=local_test), numbers


def _staying(algorithm: Algorithm) -> set[str]:
    """Return the names of the tensors that clients do not send."""
    plan = algorithm.plan
    # a later stage has no state yet, which `expects` may need
    if algorithm.state and "model" not in algorithm.expects(plan.opening()):
        # such as prototypes, which the server makes a classifier of
        head = head_name(plan.module)
        return {tensor.name for tensor in plan.layout.slices if tensor.layer != head}
    unit = algorithm.shared(plan.module, plan.layout)
    return {
        tensor.name
        for tensor in plan.layout.slices
        if not any(s.start <= tensor.start and tensor.stop <= s.stop for s in unit)
    }


def untrained(pipeline: Pipeline, stages: Sequence[Pipeline] = ()) -> list[str]:
    """Return a notice that names the layers and statistics of the global model that nothing
    changes, where there are any.

    Args:
        pipeline: That of the first round.
        stages: Those of all stages.
    """
    algorithm, layout, initial = pipeline.algorithm, pipeline.plan.layout, pipeline.plan.initial
    names_staying = _staying(algorithm).intersection(*(_staying(s.algorithm) for s in stages))
    stays = [tensor for tensor in layout.slices if tensor.name in names_staying]
    moved = algorithm.model() != initial if stays else torch.empty(0)
    fixed = [tensor for tensor in stays if not moved[tensor.slice].any()]
    layers = dict.fromkeys(tensor.layer for tensor in fixed if tensor.stop <= layout.trainable)
    others = dict.fromkeys(tensor.layer for tensor in fixed if tensor.layer not in layers)
    names = [*layers, *(f"the statistics of {layer}" for layer in others)]
    reason = f"has {', '.join(names)} as drawn at first, since they never leave the clients"
    remedy = "judge it by the clients' own models (personal_every, measure = personal)"
    if others and hasattr(algorithm, "buffers"):
        remedy += ", or set buffers=average"
    return [f"the global model of {pipeline} {reason}: {remedy}"] if names else []


def clients_without_steps(task: Task) -> list[str]:
    """Return notices of the clients that take no training step, and of those that leave out samples,
    since batch norm cannot normalise a batch of one sample.
    """
    if not has_batch_norm(task.model) or not len(task.train):
        return []
    smallest = smallest_batch(task.model, task.dataset.prepare(task.train.inputs[:1]).clone())
    if smallest == 1 or not bool(task.training.local_steps(torch.ones(1)).any()):
        return []
    sizes = task.sizes(torch.arange(task.clients))
    steps = task.training.local_steps(sizes, smallest)
    idle = int((steps == 0).sum())
    shorter = int(((steps > 0) & (steps < task.training.local_steps(sizes))).sum())
    reason = "since batch norm cannot normalise a batch of one sample"
    size = task.training.batch_size
    remedy = f"set batch_size to 2 or more (it is {size}), or give these clients more samples"
    notices = []
    if idle:
        notices.append(
            f"{idle} of {task.clients} clients take 0 training steps, {reason}: {remedy}"
        )
    if shorter:
        notices.append(
            f"{shorter} of {task.clients} clients skip the last sample of each epoch, {reason}: "
            "choose another batch_size to use all samples"
        )
    return notices


def _chosen(able: Any, schedule: Schedule) -> tuple[int, ...]:
    """At most `personal_clients` of the clients, drawn by the seed, in the order of their numbers."""
    order = torch.randperm(len(able), generator=stream(schedule.seed, "evaluated clients"))
    return tuple(sorted(able[order[: schedule.personal_clients].numpy()].tolist()))
