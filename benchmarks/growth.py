"""Measure the growth of the server's work with participants K, model length P, and reports.

Each line is timed at three sizes, with the minimum of some turns. The exponent is between the two
largest sizes. The sizes are 20, 200 and 2,000 replies of 10,000 weights (up to 500 if pairs are
compared), and 10,000 to 1,000,000 weights of 20 replies. A method's time is for `send`, `receive`,
`finish`, `model` and `diagnose` in a round with all clients. A line with an exponent more than
`SLACK` above its necessary growth is named, and the exit code is 1. Data larger than the caches
cost up to half an exponent; a whole exponent is a fault.

    python benchmarks/growth.py [--only "fedavg;similarity"] [--turns 2]
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedloom as fl
from fedloom.algorithm.records import Plan, Replies, Selection
from fedloom.data import Dataset, Partition, Samples
from fedloom.flat.layout import Layout
from fedloom.parts.building import build
from fedloom.parts.course import Course
from fedloom.report.page import render, write_page
from outcome import tell

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from every_method import EVERY_METHOD
from report_support import made_up_run

SLACK = 0.6
FEWER = (20, 100, 500)
CLIENTS, WEIGHTS, ROUNDS, RUNS = (
    (20, 200, 2000),
    (10_000, 100_000, 1_000_000),
    (100, 1000, 10_000),
    (10, 100, 1000),
)

PAIRS = "all pairs of models are compared"
MUST = {
    "apple": (2, "every client holds a weight for every other"),
    "clusamp": (2, PAIRS),
    "clustered(fedmr)": (2, PAIRS),
    "fedamp": (2, PAIRS),
    "fedfomo": (
        2,
        "every client asks for other clients' models, and the server knows who gains by whom",
    ),
    "robust(fedavg, rule=krum)": (2, PAIRS),
}
"""Exponents of methods that must grow faster than linearly with the participants, with the
reason.
"""

METHODS = (
    *EVERY_METHOD,
    "robust(fedavg, rule=krum)",
    "robust(fedavg, rule=median)",
    "fedmr(blend=auto)",
)
RECORDERS = ("similarity(every=1)", "aggregate(every=1)", "objective(every=1)")


def least(work: Callable[[], object], turns: int) -> float:
    """Return seconds of the fastest of some turns; one turn is enough if it takes long."""
    quickest = math.inf
    for _ in range(turns):
        began = time.perf_counter()
        work()
        quickest = min(quickest, time.perf_counter() - began)
        if quickest > 3:
            break
    return quickest


def server_round(name: str, clients: int, weights: int) -> Callable[[], object]:
    """Run the server half of a second round."""
    hidden = max(1, (weights - 10) // (60 + 11))
    module = nn.Sequential(nn.Linear(59, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    layout = Layout(module)
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(layout.size, generator=generator)
    plan = Plan(
        layout, initial, clients, clients, 20, 0, 10, lambda numbers: 1 + numbers % 7, module
    )
    course = Course(build(name))
    course.setup(plan)
    everybody = torch.arange(clients)
    rounds = [
        replace(plan.opening().at(number), learning_rate=0.1, initial_learning_rate=0.1)
        for number in (1, 2)
    ]
    rounds = [replace(round, selected=tuple(range(clients))) for round in rounds]

    def replies(round: Any) -> Replies:
        tensors = {}
        for tensor, spec in course.at(round.number).expected(round).items():
            rows = torch.rand(clients, *spec.shape, generator=generator)
            tensors[tensor] = rows if spec.dtype == initial.dtype else (9 * rows).to(spec.dtype)
        return Replies(tensors, everybody, everybody, 1 + everybody % 7)

    def run(round: Any, answers: Replies) -> None:
        pipeline = course.at(round.number)
        selection = pipeline.select(round) if pipeline.waits else Selection(round.selected)
        round = replace(round, selected=selection.clients)
        exchange = pipeline.open(round, selection)
        pipeline.close(exchange, replace(first(answers, len(selection.clients)), exchange=exchange))
        pipeline.finish(exchange)
        course.next(round.number)
        course.at(round.number + 1).model()
        course.at(round.number + 1).diagnose()

    run(rounds[0], replies(rounds[0]))
    state, second = course.state(), replies(rounds[1])

    def second_round() -> None:
        course.restore(state)
        run(rounds[1], replace(second, matrices=dict(second.matrices)))

    return second_round


def first(replies: Replies, count: int) -> Replies:
    """Return the replies of the first slots."""
    matrices = {name: matrix[:count] for name, matrix in replies.matrices.items()}
    return Replies(
        matrices, replies.clients[:count], replies.slots[:count], replies.weights[:count]
    )


def recorded_round(name: str, clients: int) -> float:
    """Return seconds of a recorder in a round."""
    draw, total = torch.Generator().manual_seed(0), 10 * clients
    train = Samples(
        torch.randn(total, 200, generator=draw), torch.randint(10, (total,), generator=draw)
    )
    task = fl.make_task(
        Dataset("random", train, train[:100], 10),
        partition=Partition.from_sizes(np.arange(total), np.full(clients, 10)),
        model=nn.Linear(200, 10),
        training=fl.Training(learning_rate=0.1, steps=1, batch_size=10),
    )
    with tempfile.TemporaryDirectory() as folder:
        result = fl.run(
            "fedavg",
            task,
            rounds=1,
            participation=1.0,
            record=[name],
            directory=Path(folder) / "run",
        )
    return float(result.timings[0]["record_seconds"])


def report(runs: int, rounds: int) -> tuple[float, float]:
    """Return seconds to write a report, and its megabytes."""
    summaries = [made_up_run(f"method{k % 10}", k // 10, rounds, 20, 10) for k in range(runs)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        seconds = least(lambda: write_page(path, render("growth", summaries, (0.5, 0.8))), 1)
        return seconds, path.stat().st_size / 1e6


def line(
    quantity: str,
    grows_with: str,
    sizes: Sequence[int],
    figures: Sequence[float],
    must: float = 1,
    reason: str = "",
) -> dict[str, Any]:
    """Return a line of the table: a quantity at each size, and its growth."""
    exponent = math.log(figures[-1] / figures[-2]) / math.log(sizes[-1] / sizes[-2])
    measured = dict(zip(("least", "middle", "most"), figures, strict=True))
    verdict = "steeper than it must be" if exponent > must + SLACK else reason
    print(f"{quantity}: {grows_with}, {exponent:.2f}", file=sys.stderr)
    return {
        "what": quantity,
        "grows_with": f"{grows_with}, to {sizes[-1]:,}",
        **measured,
        "exponent": exponent,
        "must": must,
        "note": verdict,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="lines whose names hold one of these")
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    def chosen(name: str) -> bool:
        return not arguments.only or any(word in name for word in arguments.only.split(";"))

    rows = []
    for name in filter(chosen, METHODS):
        must, reason = MUST.get(name, (1, ""))
        counts = CLIENTS if must == 1 else FEWER
        seconds = [
            least(server_round(name, clients, WEIGHTS[0]), arguments.turns) for clients in counts
        ]
        rows.append(line(name, "participants", counts, seconds, must, reason))
        seconds = [
            least(server_round(name, CLIENTS[0], weights), arguments.turns) for weights in WEIGHTS
        ]
        rows.append(line(name, "weights", WEIGHTS, seconds))
    rows += [
        line(
            f"record {name}",
            "participants",
            CLIENTS,
            [recorded_round(name, clients) for clients in CLIENTS],
        )
        for name in filter(chosen, RECORDERS)
    ]
    if chosen("report"):
        for grown, sizes, measurements in (
            ("runs", RUNS, [report(runs, 100) for runs in RUNS]),
            ("rounds", ROUNDS, [report(10, rounds) for rounds in ROUNDS]),
        ):
            for column, unit in enumerate(("seconds", "megabytes")):
                figures = [measured[column] for measured in measurements]
                rows.append(line(f"report, {unit}", grown, sizes, figures))
    tell("growth", rows)
    sys.exit(any(row["exponent"] > row["must"] + SLACK for row in rows))


if __name__ == "__main__":
    main()
