"""Evaluation of global and personal models.

Figures of one evaluation by name. Here "accuracy" is the objective's metric, and "loss" represents
its other figures (see `Tally.figures`):

    accuracy, loss                  global model on the global test set, unless that is empty
    client_accuracy, _std, _worst   global model on the clients' own test data (also client_loss)
    personal_accuracy, ...          each client's model (`Algorithm.personalise`) on its test data
    new_client_accuracy, ...        the same for clients that never train

A personal model is the model with which the client would begin the next round: after the download
and the local initialisation, before local training (as in FedALA).
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
from fedloom.algorithm.records import INTEGERS, Message
from fedloom.common.errors import InvalidValue
from fedloom.common.fields import require_one_of
from fedloom.common.randomness import stream
from fedloom.common.round import Round
from fedloom.models.structure import has_batch_norm, head_name, smallest_batch
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.checkpoint import Record as Record
from fedloom.rounds.engine import Engine, Job, inbox_of
from fedloom.rounds.pool_watch import PoolWatch
from fedloom.rounds.schedule import Patience, Schedule, Stop
from fedloom.rounds.scoring import Evaluator, Tally
from fedloom.task import Task

COST_SHARE = 0.1
"""Largest cost of evaluation, as a share of training, if the schedule has no intervals."""

TRAINING_PASSES = 3
"""Cost of a training step in forward passes: a backward pass costs about two."""

BLOCK = 64
"""Number of clients for which messages are created at once."""

MODELS = ("client", "personal", "new_client")
"""Prefixes of figures on the clients' own test data.

They belong to the global model, the clients' own models, and models of clients that never train.
"""


class Evaluation:
    """Measures the models of one federation.

    Args:
        task: Data and model. Clients from number `trainers` never train.
        engine: Evaluates personal models.
        schedule: Intervals of evaluations.
        trainers: Number of clients that train.
        numbers: The user's number of each client. By default the numbers of the task.

    Raises:
        InvalidValue: If the task has no data for a requested figure.
    """

    def __init__(
        self,
        task: Task,
        engine: Engine,
        schedule: Schedule,
        trainers: int,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.task = task
        self.engine = engine
        self.rounds = schedule.rounds
        self.numbers = range(task.clients) if numbers is None else numbers
        self.evaluator = Evaluator(task.model, task.layout, task.dataset)
        if task.local_test is None and (schedule.personal_every or schedule.new_clients):
            option = "personal_every" if schedule.personal_every else "new_clients"
            raise InvalidValue(
                f"{option} needs the clients' own test data: set local_test of the task, "
                "such as 0.25"
            )
        sizes = np.zeros(task.clients) if task.local_test is None else task.local_test.sizes
        with_data = np.flatnonzero(sizes)
        self.clients = _draw(with_data[with_data < trainers], schedule)
        self.newcomers = _draw(with_data[with_data >= trainers], schedule)
        self.every, self.personal_every = cadence(
            task, schedule, trainers, len(self.clients) + len(self.newcomers)
        )
        self.patience = self._patience(schedule.stop)
        self._pool_watch = PoolWatch(task.test.labels, schedule.rounds)

    @property
    def notices(self) -> list[str]:
        """Warnings about diverging models of a pool, and the reason of an early end."""
        return [*self._pool_watch.notices, *self.patience.notices]

    def follow(self, record: Record) -> None:
        """Read the figures of a finished round, to stop early and to warn about a pool."""
        self._pool_watch.update(record)
        self.patience.update(record["round"], record)

    def _patience(self, stop: Stop) -> Patience:
        """Return the counter for early stopping.

        Raises `InvalidValue` if the run never measures the figure, or if the direction of an
        improvement is unknown.
        """
        objective = self.task.objective
        metrics = self.task.dataset.metrics
        names = [*objective.figure_names, *(metric.name for metric in metrics)]
        measured = [*(names if len(self.task.test) else ())]
        measured += [f"{model}_{name}" for model in MODELS for name in names if self.personal_every]
        figure = stop.metric or objective.metric.name
        if stop.evaluations is not None:
            require_one_of(
                "stop.metric", figure, tuple(measured) or ("none, without test samples",)
            )
        model = next((model for model in MODELS if figure.startswith(f"{model}_")), "")
        metric = objective.metric
        name = figure.removeprefix(f"{model}_")
        if stop.evaluations is not None and stop.goal is None and name not in ("loss", metric.name):
            raise InvalidValue(f"stop.goal: set 'rise' or 'fall' as the direction of {figure}")
        rises = stop.goal == "rise" or (
            stop.goal is None and name == metric.name and metric.higher_is_better
        )
        every = self.personal_every if model in MODELS[1:] else self.every
        return Patience(stop, figure, rises, every)

    def measure(
        self, pipeline: Pipeline, round: Round, model: Tensor, integers: Tensor, ends: bool = False
    ) -> tuple[Record, Record | None]:
        """Measure the figures that are due after a round.

        Args:
            pipeline: Pipeline of the next round.
            round: The finished round.
            model: The global model, `[P]`.
            integers: Integer buffers of the global model, `[Z]`.
            ends: True if the run ends: all figures are due. The last round always ends it.

        Returns:
            The figures by name, and the figures of each client if personal models are due.
        """
        figures: Record = {}
        ends = ends or round.number == self.rounds
        due = ends or round.number % self.every == 0
        personal = self.personal_every > 0 and (ends or round.number % self.personal_every == 0)
        if due and len(self.task.test):
            figures |= self.evaluator.score(model, self.task.test, integers)
        if due:
            figures |= pipeline.diagnose()
        tallies: dict[str, Tally] = {}
        upcoming = self.task.training.round_at(round, round.number + 1)
        score = partial(self._tally, pipeline, upcoming, integers)
        if personal or (due and self.personal_every):
            tallies["client"] = score(model, self.clients)
        if personal:
            tallies["personal"] = (
                score(None, self.clients) if pipeline.personal else tallies["client"]
            )
            if self.newcomers:
                tallies["new_client"] = score(None if pipeline.personal else model, self.newcomers)
        # Absent sites return no figures.
        tallies = {name: tally for name, tally in tallies.items() if len(tally.clients)}
        for name, tally in tallies.items():
            figures |= tally.figures(name, self.task.objective)
        if not ends and self.patience.ends(round.number, figures):
            return self.measure(pipeline, round, model, integers, ends=True)
        if not personal:
            return figures, None
        tables = {name: self._table(tally) for name, tally in tallies.items()}
        return figures, {"round": round.number, **tables}

    def _tally(
        self,
        pipeline: Pipeline,
        upcoming: Round,
        integers: Tensor,
        model: Tensor | None,
        clients: Sequence[int],
    ) -> Tally:
        """Score `model`, or the clients' own models if it is None, on the clients' test data."""
        if model is not None and not self.task.elsewhere and self.task.local_test is not None:
            return self.evaluator.tally(
                model, self.task.train, self.task.local_test, clients, integers
            )
        if model is not None:
            plain = Algorithm()  # its clients use the model that they receive
            plain.plan = pipeline.plan
            plain.state = {"model": model}
            pipeline = Pipeline(plain)
        tallies: list[Tally] = []
        for jobs in self.deployed(pipeline, upcoming, clients, integers):
            tallies += self.engine.evaluate(pipeline, upcoming, jobs)
        return Tally.joined(tallies)

    def deployed(
        self, pipeline: Pipeline, upcoming: Round, clients: Sequence[int], integers: Tensor
    ) -> Iterator[list[Job]]:
        """Yield blocks of jobs in which clients create their own models.

        Args:
            pipeline: Pipeline of the next round.
            upcoming: The next round.
            clients: Numbers of the clients.
            integers: The server's integer buffers, `[Z]`.

        Yields:
            Jobs of at most `BLOCK` clients, in the order of `clients`.
        """
        for start in range(0, len(clients), BLOCK):
            block = tuple(clients[start : start + BLOCK])
            message: Message = pipeline.deploy(upcoming, block)
            if INTEGERS in pipeline.expected(upcoming):
                message[INTEGERS] = integers.unsqueeze(0)
            yield [Job(client, None, inbox_of(message, k)) for k, client in enumerate(block)]

    def _table(self, tally: Tally) -> Record:
        figures = tally.by_client(self.task.objective)
        if self.task.objective.metric.name != "loss":
            del figures["loss"]  # its last digits depend on how clients share batches
        return {
            "clients": [self.numbers[client] for client in tally.clients.tolist()],
            "samples": tally.samples.tolist(),
            **{name: _or_none(values) for name, values in figures.items()},
        }


def _or_none(values: Tensor) -> list[float | None]:
    """Return numbers with None for NaN: a metric may be undefined for the samples of a client."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def cadence(task: Task, schedule: Schedule, trainers: int, evaluated: int) -> tuple[int, int]:
    """Return the numbers of rounds between evaluations.

    If the schedule has no interval, the evaluations cost at most `COST_SHARE` of training. Costs
    are counted in samples of forward passes:

    - Training K clients costs 3 K s, with s the samples of one client's local training.
    - The global model costs one pass over the test set and over the clients' own test data.
    - A personal model costs 3 s + 2 m. Personalising counts as one local training (no method here
      needs more), and the client scores the global and the personal model on its m test samples.

    The intervals depend neither on a clock nor on the method, so that compared methods are
    evaluated in the same rounds.

    Args:
        task: Data and local training.
        schedule: Intervals, if set, and participation.
        trainers: Number of clients that train.
        evaluated: Number of clients that are evaluated on their own data.

    Returns:
        Rounds between evaluations of the global model, and of personal models (0: never).
    """
    local = TRAINING_PASSES * task.training.samples_seen(
        float(task.partition.sizes[:trainers].mean())
    )
    training = schedule.participants(trainers) * local
    if evaluated == 0 or schedule.personal_every == 0 or task.local_test is None:
        smallest = max(1, math.ceil(len(task.test) / (COST_SHARE * training)))
        return schedule.evaluate_every or smallest, 0
    local_test = float(task.local_test.sizes.mean())
    overall = len(task.test) + evaluated * local_test
    every = schedule.evaluate_every or math.ceil(overall / (COST_SHARE / 2 * training))
    share = max(COST_SHARE - overall / (every * training), COST_SHARE / 2)
    return every, schedule.personal_every or math.ceil(
        evaluated * (local + 2 * local_test) / (share * training)
    )


def newcomers_last(task: Task, count: int, seed: int) -> tuple[Task, Sequence[int]]:
    """Draw the clients that never train, and move them behind all others.

    They are drawn at random, because in some partitions neighbouring clients have the same classes.

    Args:
        task: The task.
        count: Number of clients that never train.
        seed: Seed of the run.

    Returns:
        The task with the new order of clients, and the previous number of each client.

    Raises:
        InvalidValue: If no client remains for training.
    """
    if count == 0:
        return task, range(task.clients)
    if count >= task.clients:
        raise InvalidValue(
            f"new_clients leaves none of the {task.clients} clients to train: set a smaller share"
        )
    drawn = (
        torch.randperm(task.clients, generator=stream(seed, "new clients"))[:count]
        .sort()
        .values.tolist()
    )
    numbers = [client for client in range(task.clients) if client not in {*drawn}] + drawn
    local_test = None if task.local_test is None else task.local_test.take(numbers)
    return replace(task, partition=task.partition.take(numbers), local_test=local_test), numbers


def _local_tensors(algorithm: Algorithm) -> set[str]:
    """Return the names of the tensors that clients do not upload."""
    plan = algorithm.plan
    # `expects` may need the state, but a later stage has none yet.
    if algorithm.state and "model" not in algorithm.expects(plan.opening()):
        # Clients upload other tensors, such as prototypes: the server only trains the head.
        head = head_name(plan.module)
        return {tensor.name for tensor in plan.layout.slices if tensor.layer != head}
    unit = algorithm.shared(plan.module, plan.layout)
    return {
        tensor.name
        for tensor in plan.layout.slices
        if not any(s.start <= tensor.start and tensor.stop <= s.stop for s in unit)
    }


def untrained(pipeline: Pipeline, stages: Sequence[Pipeline] = ()) -> list[str]:
    """Return a notice about layers and statistics of the global model that never change.

    Args:
        pipeline: Pipeline of the first round.
        stages: Pipelines of all stages.

    Returns:
        One notice, or none if the whole model changes.
    """
    algorithm = pipeline.algorithm
    layout = pipeline.plan.layout
    initial = pipeline.plan.initial
    names = _local_tensors(algorithm)
    for stage in stages:
        names &= _local_tensors(stage.algorithm)
    local = [tensor for tensor in layout.slices if tensor.name in names]
    changed = algorithm.model() != initial if local else torch.empty(0)
    fixed = [tensor for tensor in local if not changed[tensor.slice].any()]
    layers = dict.fromkeys(tensor.layer for tensor in fixed if tensor.stop <= layout.trainable)
    statistics = dict.fromkeys(tensor.layer for tensor in fixed if tensor.layer not in layers)
    fixed_names = [*layers, *(f"the statistics of {layer}" for layer in statistics)]
    if not fixed_names:
        return []
    fault = f"never changes {', '.join(fixed_names)}: clients do not upload them"
    remedy = "Evaluate the clients' own models (personal_every, measure = personal)"
    if statistics and hasattr(algorithm, "buffers"):
        remedy += ", or set buffers=average"
    return [f"the global model of {pipeline} {fault}. {remedy}"]


def clients_without_steps(task: Task) -> list[str]:
    """Return notices about clients that cannot train on all their samples because of batch norm.

    Batch norm cannot normalise a batch of one sample. Some clients therefore take no training step,
    others skip the last sample of each epoch.
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
    reason = "because batch norm cannot normalise a batch of one sample"
    size = task.training.batch_size
    remedy = f"set batch_size to 2 or more (got {size}), or give these clients more samples"
    notices = []
    if idle:
        notices.append(
            f"{idle} of {task.clients} clients take 0 training steps, {reason}: {remedy}"
        )
    if shorter:
        notices.append(
            f"{shorter} of {task.clients} clients skip the last sample of each epoch, {reason}: "
            "use another batch_size to train on all samples"
        )
    return notices


def _draw(clients: Any, schedule: Schedule) -> tuple[int, ...]:
    """Draw at most `personal_clients` of the clients. Return them in order of their numbers."""
    order = torch.randperm(len(clients), generator=stream(schedule.seed, "evaluated clients"))
    return tuple(sorted(clients[order[: schedule.personal_clients].numpy()].tolist()))
