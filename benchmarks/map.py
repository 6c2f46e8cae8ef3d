"""Compare FedMR and related methods with averaging, over tasks, skews, wrong labels and
training.

Twenty clients. On digits and on 6,000 images of MNIST, every skew is combined with every share of
wrong labels. Around each combination, participation, local epochs, learning rate and momentum are
changed one at a time. FedMR's runs record the quantities of the pool that a server can measure: the
mean cosine similarity, and the variance S of the models and U of their updates over the common
progress T. The tables show how well each predicts, early in a run, the better method at its end. A
limit chosen on some settings is tested on others.

    # continues where it ended; about five core-hours
    python benchmarks/map.py [--mnist FOLDER] [--minutes 60] [--record FILE]
    python benchmarks/map.py --tables  # only print
    python benchmarks/map.py --draw FILE.svg  # draw the map (extra `images`)
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fedloom as fl
from blend import noisy_task
from fedloom.algorithm.records import Replies
from fedloom.common.round import Round
from fedloom.data import Dataset
from fedloom.data.dataset import make_dataset
from fedloom.flat.population import total_variance, weighted_mean
from outcome import append, finished_runs, tell

SEEDS = 3
EVALUATIONS = 20
AVERAGING = "fedavg"
METHODS = (
    AVERAGING,
    "fedmr",
    "stages",
    "fedmr(blend='auto')",
    "fedprox(mu=0.1)",
    "fedavg(weighted=false)",
)
SKEWS = ("iid", "dirichlet(1.0)", "dirichlet(0.1)")
NOISES = (0.0, 0.2, 0.4)
EARLY = 2
"""The evaluation with the early figures of the pool, from 0: the third of twenty."""


class Setting(NamedTuple):
    """A task with its local training; `noise` is the share of replaced training labels."""

    data: str
    model: str
    partition: str
    noise: float
    rounds: int
    participation: float = 0.5
    epochs: int = 5
    rate: float = 0.1
    momentum: float = 0.0

    @property
    def method_of(self) -> dict[str, fl.Algorithm | str]:
        """Return the methods by name; two stages average for a sixth of the rounds."""
        stages = f"stages(fedavg:{self.rounds // 6}, fedmr)"
        return {**{name: name for name in METHODS}, "fedmr": WatchedFedMR(), "stages": stages}


@dataclass
class WatchedFedMR(fl.FedMR):
    """FedMR with records of the variance of its pool and updates, and the common progress."""

    def receive(self, round: Round, replies: Replies) -> None:
        pool, sent = replies.by_slot("model"), replies.sent_by_slot("model")
        trainable = self.plan.layout.trainable
        progress = (weighted_mean(pool) - self.plan.initial)[:trainable].square().sum()
        spread = total_variance(pool[:, :trainable])
        added = total_variance(pool[:, :trainable], since=sent[:, :trainable])
        self.figures = {"T": float(progress), "S": float(spread), "U": float(added)}
        super().receive(round, replies)

    def diagnose(self) -> dict[str, float]:
        return super().diagnose() | getattr(self, "figures", {})


def groups() -> list[list[Setting]]:
    """Return all settings, the cheapest and most informative group first."""
    digits = [
        Setting("digits", "mlp(hidden=[64, 64])", skew, noise, 200)
        for skew, noise in product(SKEWS, NOISES)
    ]
    corners = [setting for setting in digits if setting.noise != 0.2]
    variants: list[dict[str, Any]] = [
        {"rate": 0.03}, {"rate": 0.3}, {"rate": 0.01, "momentum": 0.9}, {"epochs": 1}, {"epochs": 20, "rounds": 100},
        {"participation": 0.25},
    ]  # fmt: skip
    around = [setting._replace(**variant) for variant in variants for setting in corners]
    deeper = [setting._replace(model="digits_cnn", rounds=60, rate=0.05) for setting in corners]
    mnist = [
        Setting("mnist", "mcmahan_2nn", skew, noise, 100)
        for noise, skew in product((0.0, 0.4, 0.2), SKEWS)
    ]
    slower = [setting._replace(rate=0.02) for setting in mnist if setting.noise != 0.2]
    pictures = [
        setting._replace(model="mcmahan_cnn", rounds=20, epochs=1)
        for setting in mnist
        if setting.noise != 0.2
    ]
    return [digits, around, mnist, deeper, slower, pictures]


def settings() -> list[Setting]:
    """Return all settings in the order of their groups."""
    return [setting for group in groups() for setting in group]


def measure(setting: Setting, method: str, seed: int, data: Dataset) -> dict[str, Any]:
    """Make one run: the accuracies of its twenty evaluations and the early figures of the pool.

    A run that diverges guesses.
    """
    task = noisy_task(data, setting, 50, seed)
    began = time.process_time()
    line: dict[str, Any] = {"setting": list(setting), "method": method, "seed": seed}
    try:
        result = fl.run(
            setting.method_of[method],
            task,
            rounds=setting.rounds,
            participation=setting.participation,
            seed=seed,
            evaluate_every=setting.rounds // EVALUATIONS,
            engine="rows" if "cnn" in setting.model else "stacked",
        )
    except fl.FedloomError as error:
        return line | {"accuracy": [1 / task.dataset.classes], "error": str(error)}
    evaluated = [record for record in result.history if "accuracy" in record]
    pool = {
        name: [record[name] for record in evaluated]
        for name in ("pool_cosine", "T", "S", "U")
        if name in evaluated[0]
    }
    return {
        **line,
        "accuracy": [round(record["accuracy"], 4) for record in evaluated],
        **{name: [float(f"{value:.4g}") for value in values] for name, values in pool.items()},
        "processor_seconds": round(time.process_time() - began, 1),
    }


Key = tuple[Setting, str, int]
Runs = dict[Key, dict[str, Any]]


def recorded(path: Path) -> Runs:
    """Return the finished runs."""
    return {
        (Setting(*run["setting"]), run["method"], run["seed"]): run for run in finished_runs(path)
    }


def late(run: dict[str, Any]) -> float:
    """Return the mean of the last four of twenty evaluations, in %."""
    return 100 * statistics.fmean(run["accuracy"][-4:])


def ahead(done: Runs, setting: Setting, method: str) -> list[float]:
    """Return the final lead of `method` over averaging, in points, for each seed of both."""
    return [
        late(done[setting, method, seed]) - late(done[setting, AVERAGING, seed])
        for seed in range(SEEDS)
        if (setting, method, seed) in done and (setting, AVERAGING, seed) in done
    ]


def signals(run: dict[str, Any]) -> dict[str, float]:
    """Return the server's early signals in FedMR's run; larger values favour recombination."""
    cosine, progress, spread, added = (run[name][EARLY] for name in ("pool_cosine", "T", "S", "U"))
    return {
        "pool's cosine": cosine,
        "T / S": progress / spread,
        "T / U": progress / added,
        "T^2 / (S U)": progress**2 / (spread * added),
    }


def area(values: Sequence[float], wins: Sequence[bool]) -> float:
    """Return the probability that a won setting has a larger value than a lost one.

    This is the area under the curve.
    """
    won = [value for value, win in zip(values, wins, strict=True) if win]
    lost = [value for value, win in zip(values, wins, strict=True) if not win]
    pairs = [(a > b) + (a == b) / 2 for a, b in product(won, lost)]
    return statistics.fmean(pairs) if pairs else math.nan


def limit(values: Sequence[float], wins: Sequence[bool]) -> float:
    """Return the limit with the most right predictions of winning at or above it."""
    return max(
        [*sorted(values), math.inf],
        key=lambda bound: sum(
            (value >= bound) == win for value, win in zip(values, wins, strict=True)
        ),
    )


def foretelling(done: Runs, margin: float = 0.5) -> list[dict[str, str]]:
    """Return, by signal and method, the area under the curve and the share of right predictions.

    A limit chosen on digits with an MLP is tested on all other settings. FedMR wins if it is more
    than `margin` points ahead, and loses if it is more than `margin` points behind.
    """
    rows = []
    for name in ("pool's cosine", "T / S", "T / U", "T^2 / (S U)"):
        points = [
            (setting, statistics.fmean(signals(run)[name] for run in runs), statistics.fmean(above))
            for setting in dict.fromkeys(setting for setting, _, _ in done)
            if (
                runs := [
                    run
                    for (of, method, _), run in done.items()
                    if of == setting and method == "fedmr" and "S" in run
                ]
            )
            and (above := ahead(done, setting, "fedmr"))
        ]
        decided = [
            (setting, value, above > 0) for setting, value, above in points if abs(above) > margin
        ]
        chosen = [
            (value, win) for setting, value, win in decided if setting.model.startswith("mlp")
        ]
        unseen = [
            (value, win) for setting, value, win in decided if not setting.model.startswith("mlp")
        ]
        if not chosen or not unseen:
            continue
        bound = limit(*zip(*chosen, strict=True))
        rows.append(
            {
                "signal": name,
                "limit": f"{bound:.3g}",
                "area, chosen on": f"{area(*zip(*chosen, strict=True)):.2f} ({len(chosen)})",
                "right, chosen on": f"{statistics.fmean((value >= bound) == win for value, win in chosen):.0%}",
                "area, held out": f"{area(*zip(*unseen, strict=True)):.2f} ({len(unseen)})",
                "right, held out": f"{statistics.fmean((value >= bound) == win for value, win in unseen):.0%}",
            }
        )
    return rows


def tables(done: Runs) -> None:
    """Print the map, one row per setting, and the quality of each signal's prediction."""
    rows = []
    for setting in settings():
        base = [
            late(done[setting, AVERAGING, seed])
            for seed in range(SEEDS)
            if (setting, AVERAGING, seed) in done
        ]
        if not base:
            continue
        row = {
            "data": setting.data,
            "model": setting.model,
            "partition": setting.partition,
            "wrong": f"{setting.noise:.0%}",
            "share / epochs / rate / momentum": f"{setting.participation:g} / {setting.epochs} "
            f"/ {setting.rate:g} / "
            f"{setting.momentum:g}",
            "fedavg": f"{statistics.fmean(base):.1f}",
        }
        for method in METHODS[1:]:
            above = ahead(done, setting, method)
            row[method] = f"{statistics.fmean(above):+.1f}" if above else ""
        early = [
            signals(run)
            for (of, method, _), run in done.items()
            if of == setting and method == "fedmr" and "S" in run
        ]
        for name in ("pool's cosine", "T^2 / (S U)"):
            row[name] = (
                f"{statistics.fmean(figures[name] for figures in early):.3g}" if early else ""
            )
        rows.append(row | {"seeds": str(len(base))})
    tell(
        "FedAvg's mean of the last four evaluations, %, and by how many points the others end "
        "above it",
        rows,
    )
    if foretold := foretelling(done):
        tell("Which early figure of the pool foretells that FedMR ends ahead", foretold)


def draw(done: Runs, path: Path) -> None:
    """Draw FedMR's lead over FedAvg, setting by setting, over the pool's early T / S.

    Leads below -25 points are at the edge.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    symbols = {
        "digits mlp": "circle",
        "digits cnn": "diamond",
        "mnist mlp": "square",
        "mnist cnn": "x",
    }
    points: dict[str, list[tuple[float, float, float]]] = {}
    for setting in dict.fromkeys(setting for setting, _, _ in done):
        runs = [
            run
            for (of, method, _), run in done.items()
            if of == setting and method == "fedmr" and "S" in run
        ]
        above = ahead(done, setting, "fedmr")
        if runs and above:
            name = f"{setting.data} {'cnn' if 'cnn' in setting.model else 'mlp'}"
            signal = statistics.fmean(signals(run)["T / S"] for run in runs)
            points.setdefault(name, []).append(
                (signal, max(-25.0, statistics.fmean(above)), setting.noise)
            )
    for name, values in points.items():
        horizontal, vertical, noises = zip(*values, strict=True)
        marker = {
            "symbol": symbols[name],
            "size": 10,
            "color": noises,
            "coloraxis": "coloraxis",
            "line": {"width": 1},
        }
        figure.add_scatter(x=horizontal, y=vertical, mode="markers", name=name, marker=marker)
    figure.add_hline(y=0, line_width=1)
    figure.update_layout(
        template="plotly_white",
        width=900,
        height=480,
        xaxis={
            "type": "log",
            "title": "T / S at 15 % of the rounds: common progress over the pool's variance",
        },
        yaxis_title="FedMR above FedAvg at the end, points",
        coloraxis={
            "colorscale": "Bluered",
            "colorbar": {"title": "wrong labels", "tickformat": ".0%", "y": 0.4},
        },
        legend={"y": 1.0},
    )
    figure.write_image(path)


def work() -> Iterator[Key]:
    """Yield the runs: group by group, and within a group seed by seed over all settings."""
    for group in groups():
        for seed, setting, method in product(range(SEEDS), group, METHODS):
            yield setting, method, seed


def main() -> None:
    """Make the missing runs, then print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mnist", help="folder with MNIST's idx files; without it those runs are left out"
    )
    parser.add_argument(
        "--record", type=Path, default=Path(__file__).parent / "records" / "map.jsonl.gz"
    )
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--tables", action="store_true", help="print what is recorded, run nothing")
    parser.add_argument("--draw", type=Path, help="draw what is recorded, run nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * arguments.minutes
    done = recorded(arguments.record)
    if arguments.draw:
        draw(done, arguments.draw)
        return
    data = {"digits": make_dataset("digits")}
    if arguments.mnist:
        mnist = make_dataset(f"mnist(folder={arguments.mnist!r})")
        data["mnist"] = replace(mnist, train=mnist.train[:6000])
    for key in () if arguments.tables else work():
        if key in done or key[0].data not in data or time.monotonic() > until:
            continue
        done[key] = run = measure(*key, data[key[0].data])
        append(arguments.record, run)
    tables(done)


if __name__ == "__main__":
    main()
