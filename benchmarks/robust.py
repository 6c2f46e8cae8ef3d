"""Robust aggregation on poisoned digits: test accuracy by rule, attack and malicious share.

Instead of its model w_i trained from w, a malicious client sends w - 4 (w_i - w) (sign flip), w +
standard normal noise (noise), or a model trained on labels 9 - y instead of y (label flip). All 20
clients take part in each round; the seed draws the malicious ones. The rules get the true share.
Each figure is the mean over seeds.

    python benchmarks/robust.py [--rounds 30] [--seeds 3] [--partition "dirichlet(1.0)"]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.common.errors import Diverged
from fedloom.common.randomness import stream
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Answer, Fault, Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task

CLIENTS = 20
SHARES = (0.1, 0.2, 0.3, 0.4)
ATTACKS = ("sign flip", "noise", "label flip")
RULES = {
    "fedavg": "fedavg",
    "median": "robust(fedavg, rule=median)",
    "trimmed mean": "robust(fedavg, rule=trimmed_mean, malicious={share})",
    "Krum": "robust(fedavg, rule=krum, malicious={share})",
    "multi-Krum": "robust(fedavg, rule=multi_krum, malicious={share})",
    "norm clipping": "robust(fedavg, rule=clipping)",
    "centred clipping": "robust(fedavg, rule=clipping, steps=3)",
}


class Poisoned(RowsEngine):
    """A simulation with an `attack` of the `malicious` clients on their uploads."""

    def __init__(self, task: Task, malicious: Sequence[int], attack: str) -> None:
        super().__init__(task)
        self.malicious, self.attack = set(malicious), attack

    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> Iterator[Answer | Fault]:
        for result in super().train(pipeline, round, jobs):
            if isinstance(result, Answer) and result.job.client in self.malicious:
                tensors = {
                    **result.tensors,
                    "model": self._poisoned(round, result.job, result.tensors),
                }
                result = replace(result, tensors=tensors)
            yield result

    def _poisoned(self, round: Round, job: Job, tensors: Mapping[str, Tensor]) -> Tensor:
        sent, trained = job.inbox["model"][0], tensors["model"]
        if self.attack == "sign flip":
            return sent - 4 * (trained - sent)
        if self.attack == "noise":
            return sent + torch.randn(sent.shape, generator=round.stream("attack", job.client))
        return trained


def flipped(task: Task, malicious: Sequence[int]) -> Task:
    """Return the task with labels 9 - y instead of y for these clients."""
    labels = task.train.labels.clone()
    for client in malicious:
        index = torch.from_numpy(task.partition[client])
        labels[index] = 9 - labels[index]
    return replace(task, train=replace(task.train, labels=labels))


def accuracy(
    expression: str, attack: str, share: float, seed: int, rounds: int, partition: str
) -> float:
    training = {"learning_rate": 0.1, "epochs": 2, "batch_size": 20}
    task = make_task(
        "digits",
        clients=CLIENTS,
        partition=partition,
        model="mlp(hidden=[64])",
        training=training,
        seed=seed,
    )
    malicious = torch.randperm(CLIENTS, generator=stream(seed, "malicious"))[
        : round(share * CLIENTS)
    ].tolist()
    if attack == "label flip":
        task = flipped(task, malicious)
    schedule = Schedule(rounds=rounds, participation=1.0, seed=seed, evaluate_every=rounds)
    federation = Federation(
        build(expression.format(share=share)), task, Poisoned(task, malicious, attack), schedule
    )
    try:
        federation.run()
    except Diverged:
        return 0.1  # guessing
    return float(federation.history[-1]["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--partition", default="dirichlet(1.0)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [("none", 0.0), *((attack, share) for attack in ATTACKS for share in SHARES)]
    print("| rule | none |" + "".join(f" {attack} {share:.0%} |" for attack, share in cases[1:]))
    print("|---|" + "---|" * len(cases))
    for name, expression in RULES.items():
        accuracies = [
            statistics.fmean(
                accuracy(expression, attack, share, seed, options.rounds, options.partition)
                for seed in range(options.seeds)
            )
            for attack, share in cases
        ]
        print(
            f"| {name} | " + " | ".join(f"{100 * value:.1f}" for value in accuracies) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
