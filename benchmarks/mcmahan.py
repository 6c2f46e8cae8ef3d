"""Learning rates and starts for the tables of McMahan et al. 2017 on MNIST.

The figures are rounds to 97 % (2NN) and 99 % (CNN). The paper takes the best learning rate of a
multiplicative grid for each cell. The script searches the grid 10^(k/3). It goes up and down from a
first guess until both neighbours of the best rate are worse. A run ends when it is later than the
best so far. The other seeds run at the rate of the first one. The ablation repeats this for other
pixels and other starts.

    # continues where it ended
    python benchmarks/mcmahan.py --mnist FOLDER [--runs FOLDER] [--only WORDS] [--minutes 60]
    python benchmarks/mcmahan.py --tables  # only print

A finished run adds one line to the record; unfinished runs continue from their checkpoint in
`--runs`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import fedloom as fl
from fedloom.common.errors import Diverged
from fedloom.common.randomness import stream
from fedloom.data.dataset import make_dataset
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.models.build import build_model
from fedloom.parts.building import build
from fedloom.reviews.papers.exhibit_record import ExhibitRecord, today
from fedloom.reviews.papers.library import exhibit
from fedloom.reviews.papers.measure import Measured
from fedloom.reviews.papers.result_table import CellResult
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.runs.identity import environment
from fedloom.state.files import write_text
from outcome import append, finished_runs, tell

SEEDS = 3
RECORD = Path(__file__).parent / "records" / "mcmahan.jsonl.gz"


class Cell(NamedTuple):
    """A cell of a table with its start.

    With `batch` 0 a batch has all samples of a client; with `participation` 0 one client trains per
    round.
    """

    model: str
    epochs: int
    partition: str
    participation: float
    batch: int
    pixels: str = "none"
    start: str = "torch"

    @property
    def target(self) -> float:
        """Return the test accuracy that ends a run."""
        return 0.97 if self.model == "2nn" else 0.99

    @property
    def text(self) -> str:
        """Return a text such as `2nn E=1 iid C=0.1 B=10 pixels=none start=torch`."""
        batch = self.batch or "inf"
        return (
            f"{self.model} E={self.epochs} {self.partition} C={self.participation:g} B={batch} "
            f"pixels={self.pixels} start={self.start}"
        )


@dataclass(frozen=True)
class Plan:
    """A cell with its first grid position, the most rounds of a run, and the paper's value.

    With seed 0 the positions in `uncut` run until they reach the target, without this limit.
    """

    cell: Cell
    guess: int
    cap: int
    printed: float | None = None
    seeds: int = SEEDS
    uncut: Sequence[int] = ()


def plans() -> Iterator[Plan]:
    """Return the work, cheapest and most informative first."""
    base = Cell("2nn", 1, "iid", 0.1, 10)
    skewed = base._replace(partition="shards(2)")
    yield Plan(base, -2, 150, 87, uncut=(-4, -3))
    for pixels, start in (("standard", "torch"), ("none", "truncated"), ("none", "glorot")):
        yield Plan(base._replace(pixels=pixels, start=start), -2, 150, seeds=1, uncut=(-4, -3))
    yield Plan(skewed, -2, 900, 664, uncut=(-3,))
    for participation, printed in {0.0: 316, 0.2: 77}.items():
        yield Plan(
            base._replace(participation=participation),
            -2,
            3 * printed,
            printed,
            uncut=(-5, -4) if participation == 0 else (-4,),
        )
    for participation, printed in {0.0: 3275, 0.2: 619}.items():
        yield Plan(
            skewed._replace(participation=participation),
            -3 if participation == 0 else -2,
            2 * printed,
            printed,
        )
    for pixels, start in (("standard", "torch"), ("none", "truncated")):
        yield Plan(skewed._replace(pixels=pixels, start=start), -2, 900, seeds=1)
    yield Plan(skewed, -2, 900, 664, uncut=(-4,))
    for participation, printed in {0.0: 1455, 0.1: 1474, 0.2: 1658}.items():
        yield Plan(base._replace(participation=participation, batch=0), 0, 2 * printed, printed)
    for participation, printed in {0.5: 75, 1.0: 70}.items():
        yield Plan(base._replace(participation=participation), -2, 2 * printed, printed, 1)
    for participation, printed in {0.5: 443, 1.0: 380}.items():
        yield Plan(skewed._replace(participation=participation), -2, 2 * printed, printed, 1)
    for participation, printed in {0.1: 1796, 0.2: 1528, 0.0: 4278}.items():
        yield Plan(skewed._replace(participation=participation, batch=0), -1, 2 * printed, printed)
    yield Plan(Cell("cnn", 1, "iid", 0.1, 10), -2, 100, 34, 1)
    yield Plan(Cell("cnn", 5, "iid", 0.1, 10), -3, 60, 20, 1)
    yield Plan(Cell("cnn", 5, "iid", 0.0, 10), -3, 150, 50, 1)
    yield Plan(Cell("cnn", 1, "iid", 0.1, 50), -2, 130, 65, 1)


def rate(position: int) -> float:
    """Return the learning rate at a position of the grid."""
    return float(f"{10 ** (position / 3):.3g}")


def crossing(accuracies: Sequence[float], target: float) -> float | None:
    """Return rounds to the target, or None if it is not reached.

    The best accuracy so far is interpolated linearly between rounds.
    """
    highest = 0.0
    for index, accuracy in enumerate(accuracies):
        if accuracy >= target:
            return index + (target - highest) / (accuracy - highest)
        highest = max(highest, accuracy)
    return None


def started(module: nn.Module, start: str, seed: int) -> nn.Module:
    """Return the model with another start than PyTorch's.

    `glorot` is uniform by fan-in and fan-out with zero biases. `truncated` is normal with deviation
    0.1 cut at two deviations, with biases of 0.1, as in TensorFlow's first tutorials.
    """
    generator = stream(seed, "start")
    for name, parameter in module.named_parameters() if start != "torch" else ():
        if name.endswith("bias"):
            nn.init.constant_(parameter, 0.0 if start == "glorot" else 0.1)
        elif start == "glorot":
            nn.init.xavier_uniform_(parameter, generator=generator)
        else:
            nn.init.trunc_normal_(parameter, std=0.1, a=-0.2, b=0.2, generator=generator)
    return module


def measure(
    cell: Cell, position: int, seed: int, cap: int, mnist: str, runs: Path, until: float
) -> dict[str, Any] | None:
    """Make one run until the target or `cap` rounds; return it as a line of the record.

    Return None if the time ends before.
    """
    dataset = make_dataset(f"mnist(folder={mnist!r}, normalise={cell.pixels!r})")
    module = started(build_model(f"mcmahan_{cell.model}", dataset.spec, seed), cell.start, seed)
    training = {
        "learning_rate": rate(position),
        "batch_size": cell.batch or None,
        "epochs": cell.epochs,
    }
    task = fl.make_task(
        dataset, clients=100, partition=cell.partition, model=module, seed=seed, training=training
    )
    stacked = cell.model == "2nn" and cell.participation > 0
    schedule = Schedule(
        cap, cell.participation or 0.01, seed=seed, evaluate_every=1, checkpoint_every=10
    )
    identity = f"{cell.text} {rate(position)} {seed}"
    engine = StackedEngine(task) if stacked else RowsEngine(task)
    folder = runs / identity.replace(" ", "_").replace("(", "").replace(")", "")
    folder.mkdir(parents=True, exist_ok=True)
    run = Federation(build("fedavg"), task, engine, schedule, folder, identity)
    began = time.process_time()
    highest = max((record["accuracy"] for record in run.history), default=0.0)
    while run.finished < cap and highest < cell.target:
        if time.monotonic() > until:
            run.save()
            return None
        try:
            record, _ = run.step()
        except Diverged:
            break
        highest = max(highest, record["accuracy"])
        if run.finished % 10 == 0:
            run.save()
    accuracies = [round(record["accuracy"], 4) for record in run.history]
    return {
        "cell": list(cell),
        "position": position,
        "rate": rate(position),
        "seed": seed,
        "cap": cap,
        "crossing": crossing(accuracies, cell.target),
        "accuracy": accuracies,
        "processor_seconds": round(time.process_time() - began, 1),
    }


Done = dict[tuple[Cell, int, int], dict[str, Any]]


def recorded() -> Done:
    """Return the finished runs; if a run was made twice, the longer one counts."""
    done: Done = {}
    for line in finished_runs(RECORD):
        key = Cell(*line["cell"]), line["position"], line["seed"]
        if key not in done or len(line["accuracy"]) > len(done[key]["accuracy"]):
            done[key] = line
    return done


def best(done: Done, cell: Cell) -> tuple[int, float] | None:
    """Return the grid position that reaches the target first with seed 0, and its rounds."""
    crossings = [
        (line["crossing"], position)
        for (of, position, seed), line in done.items()
        if of == cell and seed == 0
    ]
    reached = [(rounds, position) for rounds, position in crossings if rounds is not None]
    return (min(reached)[1], min(reached)[0]) if reached else None


def required(done: Done, plan: Plan) -> tuple[int, int, int] | None:
    """Return the next run of a cell: position, seed and the most rounds; None after the last."""
    tried = {position for of, position, seed in done if of == plan.cell and seed == 0}
    if not tried:
        return plan.guess, 0, plan.cap
    chosen = best(done, plan.cell)
    if chosen is None:  # the guess does not reach the target: look above and below it
        for position in (plan.guess + 1, plan.guess - 1, plan.guess + 2):
            if position not in tried:
                return position, 0, plan.cap
        return None
    position, rounds = chosen
    for neighbour in (position + 1, position - 1):
        if neighbour not in tried:
            return neighbour, 0, min(plan.cap, math.ceil(rounds))
    for neighbour in plan.uncut:
        line = done.get((plan.cell, neighbour, 0))
        if line is None or (line["crossing"] is None and line["cap"] < plan.cap):
            return neighbour, 0, plan.cap
    for seed in range(1, plan.seeds):
        if (plan.cell, position, seed) not in done:
            return position, seed, plan.cap
    return None


def table(done: Done) -> None:
    """Print a row for each cell.

    It has the tried rates, the chosen one, and the rounds of each seed beside the printed ones.
    """
    rows = []
    for plan in {plan.cell: plan for plan in plans()}.values():
        chosen = best(done, plan.cell)
        tried = {
            position: line
            for (cell, position, seed), line in done.items()
            if cell == plan.cell and seed == 0
        }
        if not tried:
            continue
        seeds = [
            done[plan.cell, chosen[0], seed]["crossing"]
            for seed in range(SEEDS)
            if chosen and (plan.cell, chosen[0], seed) in done
        ]
        reached = [rounds for rounds in seeds if rounds is not None]
        rows.append(
            {
                "cell": plan.cell.text,
                "printed": "" if plan.printed is None else str(plan.printed),
                "rounds": f"{statistics.fmean(reached):.1f}" if reached else "not reached",
                "of each seed": ", ".join(
                    "-" if crossing_round is None else f"{crossing_round:.1f}"
                    for crossing_round in seeds
                ),
                "rate": f"{rate(chosen[0]):g}" if chosen else "",
                "tried": ", ".join(
                    f"{line['rate']:g}: "
                    + (
                        f">{len(line['accuracy'])}"
                        if line["crossing"] is None
                        else f"{line['crossing']:.1f}"
                    )
                    for _, line in sorted(tried.items())
                ),
            }
        )
    if rows:
        tell("Rounds to 97 % (2NN) and 99 % (CNN), MNIST, 100 clients", rows)


def tuned(done: Done) -> dict[str, tuple[Cell, int]]:
    """Return the cells of the paper's table with a finished search, by column.

    Each has its grid position.
    """
    columns = {}
    for cell in {plan.cell: plan for plan in plans()}:
        chosen = best(done, cell)
        if chosen is None or any((cell, chosen[0] + step, 0) not in done for step in (-1, 1)):
            continue
        if cell.model == "2nn" and (cell.pixels, cell.start) == ("none", "torch"):
            distribution = "IID" if cell.partition == "iid" else "non-IID"
            columns[f"2NN {distribution} C={cell.participation:g} E=1 B={cell.batch or 'inf'}"] = (
                cell,
                chosen[0],
            )
    return columns


def record(done: Done) -> ExhibitRecord:
    """Return the results at the tuned rates as a record of the table."""
    exhibit_name = "mcmahan.table-1-2nn"
    cells = {cell.column: cell for cell in exhibit(exhibit_name).cells}
    results = []
    for column, (cell, position) in tuned(done).items():
        lines = [done[key] for seed in range(SEEDS) if (key := (cell, position, seed)) in done]
        crossings = [line["crossing"] for line in lines if line["crossing"] is not None]
        complete, rounds = (
            len(crossings) == len(lines),
            max(len(line["accuracy"]) for line in lines),
        )
        left_out = [f"{rounds} of {cells[column].setting.rounds:,} rounds"] if complete else []
        left_out += [f"{len(lines)} of {SEEDS} seeds"] if len(lines) < SEEDS else []
        value = Measured(
            statistics.fmean(crossings) if complete else None,
            statistics.stdev(crossings) if complete and len(crossings) > 1 else None,
            len(lines),
            len(crossings),
            rounds,
            100 * max(max(line["accuracy"]) for line in lines),
        )
        results.append(CellResult(cells[column], value, tuple(left_out)))
    command = "python benchmarks/mcmahan.py --mnist FOLDER"
    return ExhibitRecord(exhibit_name, command, today(), environment(), tuple(results))


def main() -> None:
    """Make the missing runs, then print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mnist", help="folder with MNIST's idx files")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/mcmahan"), help="checkpoints of unfinished runs"
    )
    parser.add_argument("--only", default="", help="cells that have these words in their text")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument(
        "--tables",
        action="store_true",
        help="print what is recorded and write its page, run nothing",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * arguments.minutes
    done = recorded()
    for plan in () if arguments.tables else plans():
        if not all(word in plan.cell.text.split() for word in arguments.only.split()):
            continue
        while (following := required(done, plan)) is not None:
            position, seed, cap = following
            line = measure(plan.cell, position, seed, cap, arguments.mnist, arguments.runs, until)
            if line is None:
                return
            done[plan.cell, position, seed] = line
            append(RECORD, line)
            rounds = "not reached" if line["crossing"] is None else f"{line['crossing']:.1f}"
            print(
                f"{plan.cell.text} rate {line['rate']:g} seed {seed}: {rounds} "
                f"({line['processor_seconds']} s)",
                flush=True,
            )
    table(done)
    write_text(RECORD.parent / "papers" / "mcmahan.table-1-2nn.json", record(done).to_json())


if __name__ == "__main__":
    main()
