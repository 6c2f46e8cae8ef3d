"""Compare rules for FedMR's share of averaging b, tried beside `blend=auto`.

The tables show how much of FedMR's gain each rule preserves, and where it loses. A rule uses the
server's figures of a round with K models: T, the squared distance of the pool's mean from the
start; S, the variance of the pool; U, the variance of its updates; and D, the squared length of the
mean update. The mean by samples gets the share b of each model after recombination.

Settings, FedAvg, FedMR, two stages and `blend=auto` are from the map (records/map.jsonl.gz). A
finished run adds one line to the record. A restarted script continues with the missing runs.

    # three hours of one core in all
    python benchmarks/blend_rules.py [--only WORDS] [--mnist FOLDER] [--record FILE]
    python benchmarks/blend_rules.py --tables  # only print
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

import fedloom as fl
from blend import noisy_task
from fedloom.algorithm import Facts, Round
from fedloom.algorithm.records import Plan, Replies
from fedloom.data import Dataset
from fedloom.data.dataset import make_dataset
from fedloom.flat.population import recombine_, total_variance, weighted_mean
from map import EVALUATIONS, SKEWS, Runs, Setting, late, recorded
from outcome import append

RECORD = Path(__file__).parent / "records" / "blend_rules.jsonl.gz"
MAP = RECORD.with_name("map.jsonl.gz")
SEED = 0


class Figures(NamedTuple):
    """The server's figures of a round."""

    number: int
    models: int
    progress: float  # T
    spread: float  # S
    added: float  # U
    step: float  # D


@dataclass
class Memory:
    """Running means of U and D over about `1 / pace` rounds, and the begin of recombination."""

    pace: float
    added: float = math.nan
    step: float = math.nan
    begun: bool = False

    def noise(self, figures: Figures) -> float:
        """Return p = max(0, 1 - U / ((K - 1) D)), the common progress in the mean update."""
        starts = math.isnan(self.added)
        self.added = (
            figures.added if starts else (1 - self.pace) * self.added + self.pace * figures.added
        )
        self.step = (
            figures.step if starts else (1 - self.pace) * self.step + self.pace * figures.step
        )
        return max(0.0, 1 - self.added / (figures.models - 1) / self.step)


def cap(figures: Figures, limit: float) -> float:
    """Return c(x) = max(0, 1 - sqrt(x T / S)), which limits the variance to x T."""
    return (
        max(0.0, 1 - math.sqrt(limit * figures.progress / figures.spread))
        if figures.spread > 0
        else 0.0
    )


def auto(figures: Figures, tolerance: float) -> float:
    """Return the share of `blend=auto`."""
    spread = figures.spread * figures.added
    return max(0.0, 1 - (tolerance * figures.progress) ** 2 / spread) if spread > 0 else 0.0


def averaging_first(figures: Figures, memory: Memory, threshold: float, limit: float) -> float:
    """Return 1 until p is below `threshold` after the third round, then c(limit)."""
    if memory.noise(figures) < threshold and figures.number > 3:
        memory.begun = True
    return cap(figures, limit) if memory.begun else 1.0


Rule = Callable[[Figures, Memory], float]
RULES: dict[str, tuple[float, Rule]] = {  # pace of the memory (0.2: five rounds, 1: none), rule
    "p, smoothed over five rounds": (0.2, lambda f, m: m.noise(f)),
    "c(0.1)": (0.2, lambda f, m: cap(f, 0.1)),
    "averaging until p < 0.1, then c(0.1)": (0.2, lambda f, m: averaging_first(f, m, 0.1, 0.1)),
    "averaging until p < 0.2, then c(0.2)": (0.2, lambda f, m: averaging_first(f, m, 0.2, 0.2)),
    "1 while p > 0.2, else c(0.2)": (0.2, lambda f, m: 1.0 if m.noise(f) > 0.2 else cap(f, 0.2)),
    "max(p smoothed, c(0.2))": (0.2, lambda f, m: max(m.noise(f), cap(f, 0.2))),
    "max(p smoothed, c(0.1))": (0.2, lambda f, m: max(m.noise(f), cap(f, 0.1))),
    "max(p smoothed, c(0.05))": (0.2, lambda f, m: max(m.noise(f), cap(f, 0.05))),
    "max(p over twenty rounds, c(0.1))": (0.05, lambda f, m: max(m.noise(f), cap(f, 0.1))),
    "max(2 p smoothed, c(0.1))": (0.2, lambda f, m: max(min(1.0, 2 * m.noise(f)), cap(f, 0.1))),
    "max(c(0.1), auto with 0.02)": (0.2, lambda f, m: max(cap(f, 0.1), auto(f, 0.02))),
    "max(p smoothed, c(0.05), auto with 0.03)": (
        0.2,
        lambda f, m: max(m.noise(f), cap(f, 0.05), auto(f, 0.03)),
    ),
    "max(p smoothed, c(0.1), auto with 0.02)": (
        0.2,
        lambda f, m: max(m.noise(f), cap(f, 0.1), auto(f, 0.02)),
    ),
    "max(p smoothed, c(0.1), auto with 0.03)": (
        0.2,
        lambda f, m: max(m.noise(f), cap(f, 0.1), auto(f, 0.03)),
    ),
    "max(p smoothed, c(0.1), auto with 0.05)": (
        0.2,
        lambda f, m: max(m.noise(f), cap(f, 0.1), auto(f, 0.05)),
    ),
    "max(p, c(0.1))": (1.0, lambda f, m: max(m.noise(f), cap(f, 0.1))),
}
CENTRED = "around the mean by samples: max(p smoothed, c(0.1))"
RULES[CENTRED] = RULES["max(p smoothed, c(0.1))"]
# the map lacks some of these settings
METHODS = ("fedavg(weighted=false)", "stages(fedavg:auto, fedmr)")
OF_MAP = ("fedmr", "stages", "fedmr(blend='auto')")


@dataclass
class RuledFedMR(fl.FedMR):
    """FedMR with a share of averaging by one of the `RULES`."""

    rule: str = field(default="c(0.1)", kw_only=True)

    @property
    def facts(self) -> Facts:
        return replace(super().facts, anonymous=False)  # the mean is by samples

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        self.memory = Memory(RULES[self.rule][0])

    def receive(self, round: Round, replies: Replies) -> None:
        pool, sent = replies.by_slot("model"), replies.sent_by_slot("model")
        trainable = self.plan.layout.trainable
        average = weighted_mean(pool, replies.weights_by_slot())
        figures = Figures(
            round.number,
            len(pool),
            float((average - self.plan.initial)[:trainable].square().sum()),
            float(total_variance(pool[:, :trainable])),
            float(total_variance(pool[:, :trainable], since=sent[:, :trainable])),
            float((weighted_mean(pool) - weighted_mean(sent))[:trainable].square().sum()),
        )
        share = RULES[self.rule][1](figures, self.memory)
        self.state["pool"] = pool
        recombine_(pool, self.units(), round.stream("recombine"))
        if self.rule == CENTRED:
            pool.sub_(weighted_mean(pool)).mul_(1 - share).add_(average)
        elif share > 0:
            pool.lerp_(average, share)


def settings() -> list[Setting]:
    """Return the twelve settings of digits for the choice of the rules."""
    clean_and_wrong = [
        Setting("digits", "mlp(hidden=[64, 64])", skew, noise, 200)
        for skew in SKEWS
        for noise in (0.0, 0.4)
    ]
    changes: list[tuple[int, dict[str, float]]] = [
        (3, {}), (5, {}), (4, {}), (4, {"rate": 0.3}), (5, {"rate": 0.3}), (1, {"rate": 0.3}), (2, {"rate": 0.3}),
        (4, {"epochs": 1}), (5, {"epochs": 1}), (5, {"epochs": 20, "rounds": 100}), (3, {"epochs": 20, "rounds": 100}),
        (1, {"epochs": 20, "rounds": 100}),
    ]  # fmt: skip
    return [clean_and_wrong[index]._replace(**change) for index, change in changes]  # type: ignore[arg-type]


def held_out() -> list[Setting]:
    """Return the settings of MNIST's 2NN, which had no part in the choice of the rules."""
    return [
        Setting("mnist", "mcmahan_2nn", skew, noise, 100) for noise in (0.0, 0.4) for skew in SKEWS
    ]


def measure(setting: Setting, rule: str, data: Dataset) -> list[float]:
    """Return the accuracies of the twenty evaluations of a run; a run that diverges guesses."""
    task = noisy_task(data, setting, 50, SEED)
    try:
        result = fl.run(
            RuledFedMR(rule=rule) if rule in RULES else rule,
            task,
            rounds=setting.rounds,
            participation=setting.participation,
            seed=SEED,
            evaluate_every=setting.rounds // EVALUATIONS,
            engine="stacked",
        )
    except fl.FedloomError:
        return [1 / task.dataset.classes]
    return [round(record["accuracy"], 4) for record in result.history if "accuracy" in record]


def row(rule: str, done: Runs, where: list[Setting]) -> str | None:
    """Return the row of a rule.

    It has the preserved share of FedMR's gain, the mean lead over FedAvg, the number of settings
    more than a point behind, and the two worst leads.
    """
    if any((setting, rule, SEED) not in done for setting in where):
        return None
    leads = {
        setting: late(done[setting, rule, SEED]) - late(done[setting, "fedavg", SEED])
        for setting in where
    }
    gains = {
        setting: late(done[setting, "fedmr", SEED]) - late(done[setting, "fedavg", SEED])
        for setting in where
    }
    won = [setting for setting in where if gains[setting] > 1]
    share = (
        f"{sum(leads[setting] for setting in won) / sum(gains[setting] for setting in won):.0%}"
        if won
        else "-"
    )
    worst = sorted(leads.values())
    behind = sum(lead < -1 for lead in worst)
    return (
        f"| {rule} | {share} | {statistics.fmean(worst):+.1f} | {behind} | {worst[0]:+.1f}, "
        f"{worst[1]:+.1f} |"
    )


def print_tables(done: Runs) -> None:
    """Print one table of the settings that decided the rules, and one of the held-out settings."""
    for where in (settings(), held_out()):
        print(f"\n{len(where)} settings of {where[0].data}\n")
        print("| share of averaging b | kept | mean | behind | worst |\n|---|---|---|---|---|")
        for rule in (*OF_MAP, *METHODS, *RULES):
            if (line := row(rule, done, where)) is not None:
                print(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--mnist", type=Path, help="the folder of its four files")
    parser.add_argument("--only", default="", help="rules whose names hold these words")
    parser.add_argument("--tables", action="store_true", help="only print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    done = recorded(MAP) | recorded(options.record)
    if not options.tables:
        data = {"digits": make_dataset("digits")}
        if options.mnist is not None:
            mnist = make_dataset(f"mnist(folder='{options.mnist}')")
            data["mnist"] = replace(mnist, train=mnist.train[:6000])
        for rule in (*METHODS, *RULES):
            for setting in settings() + held_out() if options.only in rule else ():
                if (setting, rule, SEED) in done or setting.data not in data:
                    continue
                run = {"setting": list(setting), "method": rule, "seed": SEED}
                run["accuracy"] = measure(setting, rule, data[setting.data])
                done[setting, rule, SEED] = run
                append(options.record, run)
                print(f"{rule}, {' '.join(map(str, setting))}: {late(run):.1f}", flush=True)
    print_tables(done)


if __name__ == "__main__":
    main()
