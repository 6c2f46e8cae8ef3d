"""Estimates of the runs' time on this machine: the time of a few real local steps, times the steps
of the protocol.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from fedloom.common.expression import Call, parse
from fedloom.data.dataset import Dataset, DataSpec, Samples, make_dataset
from fedloom.data.partition import Partition
from fedloom.engines.work import using_threads
from fedloom.reviews.papers.paper_data import FACTS, DataFacts, data_of
from fedloom.reviews.papers.plan import ReproducePlan
from fedloom.rounds.evaluation import TRAINING_PASSES
from fedloom.rounds.schedule import Schedule
from fedloom.runs.configuration import Configuration
from fedloom.runs.run import run
from fedloom.task.making import make_task

TIMED = 3
"""Local steps of which the fastest counts (the first, which warms up, is never the fastest)."""

ALA = 0.3
"""Work of ALA's learning in a client, also before its own model is scored, relative to a local
training.
"""

WORK = {
    "moon": 1.7, "fedgen": 1.5, "fedasam": 2.0, "fedsam": 2.0, "fedrep": 1.5,
    "pfedme": 5.0, "ditto": 3.0, "fedphp": 1.4, "fedfomo": 2.5, "apple": 2.5, "fedala": 1 + ALA,
}  # fmt: skip
"""Time of a method's local training relative to plain SGD, by its passes over the data; 1 for those
that are not listed.
"""


class Cost(NamedTuple):
    """A run's local steps (of all clients) and its seconds."""

    steps: int
    seconds: float


def estimate(plan: ReproducePlan, threads: int) -> dict[str, list[Cost]]:
    """Return the costs of the runs that are not finished, by setting.

    Args:
        plan: The runs of the table.
        threads: Threads of each run, with which a local step is timed.

    Returns:
        Costs by setting: steps, and seconds on this machine.
    """
    costs: dict[str, list[Cost]] = {}
    for job in plan.waiting(fresh=False):
        configuration = job.configuration
        training = job.configuration.training
        data = _facts(configuration.data.name)
        kind = (training.batch_size or 50, training.augmentation, training.optimizer)
        step = _timed(configuration.model, data.spec, *kind, threads)
        costs.setdefault(job.name.setting, []).append(
            cost(configuration, job.name.algorithm, data, step)
        )
    return costs


def cost(configuration: Configuration, algorithm: str, data: DataFacts, step: float) -> Cost:
    """Return the cost of a run. A local step on a whole batch takes `step` seconds.

    Steps are K clients x epochs x ceil(n / B) a round, with n samples a client in the mean; an
    evaluation only passes forward.

    Args:
        configuration: Configuration of the run.
        algorithm: Expression of the method.
        data: Numbers of samples of the data set.
        step: Seconds of a local step on a whole batch.

    Returns:
        Local steps of all rounds, and seconds with the evaluations.
    """
    schedule = configuration.schedule
    training = configuration.training
    clients = configuration.data.clients or 180  # natural clients: FEMNIST's writers
    local_test = configuration.data.local_test
    total = data.train + (data.test if configuration.data.merge else 0)
    samples = total * (1 - (local_test or 0.0)) / clients
    batch = min(training.batch_size or samples, samples)
    local = int(training.local_steps(torch.tensor(samples, dtype=torch.float64)))
    steps = schedule.rounds * schedule.participants(clients) * local
    call = parse(algorithm)
    # a client with less than a batch takes smaller steps
    step *= batch / (training.batch_size or samples)
    forward = step / (TRAINING_PASSES * batch)
    evaluations = math.ceil(schedule.rounds / (schedule.evaluate_every or 1))
    seconds = steps * step * work(call, schedule.participation) + evaluations * data.test * forward
    if schedule.personal_every and local_test is not None:
        scored = math.ceil(schedule.rounds / schedule.personal_every)
        seconds += scored * (total * local_test * forward + scoring(call) * clients * local * step)
    return Cost(steps, seconds)


def work(call: Call, participation: float) -> float:
    """Return the time of local training relative to plain SGD.

    Under `umf` the clients of the next round train as well.

    Args:
        call: The method.
        participation: Share of the clients in each round, in (0, 1].

    Returns:
        A factor, 1 for plain SGD. Of nested methods the largest factor counts.
    """
    most = max((work(method, participation) for method in _methods_of(call)), default=1.0)
    if call.name == "umf":
        return most * (2 - participation)
    if call.name == "ala":
        return most + ALA
    if call.name == "per_fedavg":
        return float(call.named.get("passes", 1))
    if "finetune_epochs" in call.named:
        return 1.0 + float(call.named["finetune_epochs"])
    return WORK.get(call.name, most)


def scoring(call: Call) -> float:
    """Return the work of a client before its own model is scored, relative to a local training."""
    training = (
        ALA if call.name in ("fedala", "ala") else float(call.named.get("finetune_epochs", 0.0))
    )
    return training + sum(map(scoring, _methods_of(call)))


def _methods_of(call: Call) -> list[Call]:
    return [value for value in (*call.positional, *call.named.values()) if isinstance(value, Call)]


@cache
def _timed(
    model: str, spec: DataSpec, batch: int, augmentation: str, optimizer: str, threads: int
) -> float:
    with using_threads(threads):
        dtype = torch.float32 if len(spec.shape) != 3 else torch.uint8
        inputs = torch.ones(
            (batch, *spec.shape), dtype=dtype if spec.vocabulary is None else torch.int64
        )
        samples = Samples(inputs, torch.zeros(batch, dtype=torch.int64))
        data = Dataset("ones", samples, samples[:1], spec.outputs, vocabulary=spec.vocabulary)
        everyone = Partition.of([torch.arange(batch).numpy()])
        training: dict[str, Any] = {
            "batch_size": batch,
            "augmentation": augmentation,
            "optimizer": optimizer,
        }
        task = make_task(data, clients=1, partition=everyone, model=model, training=training)
        schedule = Schedule(TIMED, 1.0, evaluate_every=TIMED)
        result = run("fedavg", task, schedule=schedule, engine="rows", quiet=True)
        return min(float(line["train_seconds"]) for line in result.timings)


@cache
def _facts(name: str) -> DataFacts:
    """Return shape and sizes of the data: of the papers' sets from the table of facts, of any
    different data from themselves.
    """
    data_facts = FACTS.get(data_of(name))
    call = parse(name)
    if data_facts is None:
        data = make_dataset(name)
        return DataFacts(data.name, data.spec, len(data.train), len(data.test))
    total = data_facts.train + data_facts.test
    share = min(1.0, int(call.named["samples"]) / total) if call.name == "part" else 1.0
    return replace(
        data_facts, train=round(data_facts.train * share), test=round(data_facts.test * share)
    )
