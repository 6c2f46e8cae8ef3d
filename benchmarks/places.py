"""Compare a round in each place of training with the rows engine in this process.

The figures are seconds of a FedAvg round of ten clients with the CNN on CIFAR shapes (500 samples
each, batch 50, momentum 0.9, one epoch). The places run in turn, round by round, on one thread per
worker. The printed figures are medians.

- `over_rows`: median of the ratios to the rows engine in the same turn.
- `best`: minimum seconds of any round.
- `sends`: time in which this process prepares and sends messages.
- `waits`: time in which this process waits for training.
- `takes`: time in which this process reads answers.
- `rest`: all other time of the round (collecting replies, averaging).

    python benchmarks/places.py [--rounds 7] [--workers 2] [--samples 500]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fedloom.algorithms.fedavg import FedAvg
from fedloom.engines.processes.parent import ProcessesEngine, WorkerProcess
from fedloom.engines.ray.driver import RayEngine
from fedloom.engines.rows import RowsEngine
from fedloom.rounds.federation import Federation, Schedule
from fedloom.task import Task
from limit import cnn, random_task
from outcome import tell


@dataclass
class Clock:
    """Seconds of this process by activity."""

    seconds: dict[str, float] = field(default_factory=dict)

    def watch(self, target: Any, name: str, activity: str) -> None:
        """Count the time in `thing.name` as `what`; calls inside others count for the outer one."""
        call = getattr(target, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            if self.seconds.get("inside"):
                return call(*arguments, **options)
            self.seconds["inside"] = 1.0
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds["inside"] = 0.0
                self.seconds[activity] = (
                    self.seconds.get(activity, 0.0) + time.perf_counter() - began
                )

        setattr(target, name, timed)


@dataclass
class Place:
    """A place for a round: `step` runs one, `close` frees its resources, `clock` has the times."""

    step: Callable[[], Any]
    close: Callable[[], None]
    clock: Clock = field(default_factory=Clock)
    rounds: list[float] = field(default_factory=list)
    shares: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> None:
        self.clock.seconds.clear()
        began = time.perf_counter()
        self.step()
        self.rounds.append(time.perf_counter() - began)
        self.shares.append(dict(self.clock.seconds))


def federation(task: Task, engine: Any, rounds: int) -> Federation:
    return Federation(
        FedAvg(), task, engine, Schedule(rounds, participation=1.0, evaluate_every=rounds + 1)
    )


def rows_place(task: Task, workers: int, rounds: int) -> Place:
    engine = RowsEngine(task)
    return Place(federation(task, engine, rounds).step, engine.close)


def processes_place(task: Task, workers: int, rounds: int) -> Place:
    engine = ProcessesEngine(task, workers=workers)
    place = Place(federation(task, engine, rounds).step, engine.close)
    place.clock.watch(engine, "_packed", "sends")
    place.clock.watch(WorkerProcess, "give", "sends")
    place.clock.watch(engine, "_wait", "waits")
    place.clock.watch(engine, "_listen", "takes")
    return place


def ray_place(task: Task, workers: int, rounds: int) -> Place:
    engine = RayEngine(task, workers=workers)
    place = Place(federation(task, engine, rounds).step, engine.close)
    place.clock.watch(engine, "_packed", "sends")
    place.clock.watch(engine._ray, "put", "sends")
    place.clock.watch(engine, "_wait", "waits")
    place.clock.watch(engine, "_listen", "takes")
    return place


# Add one more entry for a place with a fixed minimum time per round, such as sites with Flower.
PLACES: dict[str, Callable[[Task, int, int], Place]] = {
    "rows": rows_place,
    "processes": processes_place,
    "ray": ray_place,
}


def measure(task: Task, workers: int, rounds: int) -> list[dict[str, Any]]:
    """Print a row for each place; the first two rounds are a warm-up."""
    places = {name: make(task, workers, rounds + 2) for name, make in PLACES.items()}
    try:
        for _ in range(rounds + 2):
            for place in places.values():
                place.run()
    finally:
        for place in reversed(places.values()):
            place.close()
    base = places["rows"].rounds[2:]
    return [row(name, place, base) for name, place in places.items()]


def row(name: str, place: Place, base: list[float]) -> dict[str, Any]:
    seconds, shares = place.rounds[2:], place.shares[2:]
    medians = {
        name: statistics.median(share.get(name, 0.0) for share in shares)
        for name in ("sends", "waits", "takes")
    }
    return {
        "place": name,
        "round_s": statistics.median(seconds),
        "best_s": min(seconds),
        "over_rows": statistics.median(
            mine / rows for mine, rows in zip(seconds, base, strict=True)
        ),
        **{f"{name}_s": value for name, value in medians.items()},
        "rest_s": statistics.median(
            total - sum(share.get(name, 0.0) for name in medians)
            for total, share in zip(seconds, shares, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = random_task(cnn(), (3, 32, 32), options.samples, 50, 0.9)
    tell(
        f"a round in each place, {options.workers} workers of one thread",
        measure(task, options.workers, options.rounds),
    )


if __name__ == "__main__":
    main()
