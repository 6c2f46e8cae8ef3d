"""Runs cases and compares each round with the definitions.

As a program: python tests/seams/harness.py --minutes 30
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # as a program: add the folder of the test modules, as pytest does
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]

import torch
from torch import Tensor

from fedloom.algorithm.method import components
from fedloom.common.errors import FedloomError
from fedloom.common.round import Round
from fedloom.parts.robust import Robust
from fedloom.rounds.federation import Federation
from seams.cases import (
    ROUNDS,
    WRAPPERS,
    Case,
    covering_cases,
    every_case,
    methods,
    pair_refusal,
    rare_cases,
)
from seams.definitions import (
    Answer,
    Chain,
    Definition,
    Setting,
    difference,
    same_tensors,
    weights_of,
)
from seams.setting import SIZES, ClientRecord, Recording, Records, federation, small_task


class Deviation(AssertionError):
    """A round differs from the definitions."""


def run_case(case: Case, directory: Path | None = None) -> None:
    """Run one case round by round.

    In straight courses, foldable replies come in blocks of two slots. Raises `Deviation`.
    """
    slots = {"LEAST_SLOTS": 2, "MOST_SLOTS": 2} if case.course == "straight" else {}
    with mock.patch.multiple("fedloom.algorithm.records", **slots) if slots else nullcontext():
        _run_case(case, directory)


def _run_case(case: Case, directory: Path | None) -> None:
    task = small_task(case.model)
    folder = directory if case.course == "resumed" else None

    def begin() -> tuple[Federation, Recording]:
        made = federation(
            case.expression, task, change=case.change, directory=folder, **case.options()
        )
        if case.attendance == "nobody":
            made[0].engine.lost = lambda number, client: number == 2  # type: ignore[attr-defined]
        return made

    run, recording = begin()
    definitions = Chain(run.algorithm, setting_of(run))
    for number in range(1, ROUNDS + 1):
        if case.course == "resumed" and number == 2 + len(case.method) % 2:
            run.save()
            run, recording = begin()
            definitions.rebind(run.algorithm)
            if run.finished != number - 1:
                raise Deviation(f"resumed after round {run.finished}, not {number - 1}")
        counters = run.integers
        try:
            run.step()
        except FedloomError as error:
            raise Deviation(
                f"round {number} is refused: {type(error).__name__}: {error}"
            ) from error
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise Deviation(
                f"round {number}: {type(error).__name__}: {error} "
                f"({Path(place.filename).name}:{place.lineno})"
            ) from error
        compare(case, run, recording, definitions, number, counters)


def setting_of(run: Federation) -> Setting:
    task, clock = run.task, run.schedule.clock
    speeds = (
        [clock.device(run.schedule.seed, client).speed for client in range(task.clients)]
        if clock.runs
        else []
    )
    closes = float("inf") if clock.deadline is None else clock.deadline
    return Setting(
        task.layout,
        task.model,
        task.initial,
        SIZES,
        run.course.plan.participants,
        task.dataset.classes,
        speeds,
        closes,
    )


def records_by_level(recording: Recording, definitions: Chain, number: int) -> list[Records]:
    """Return the records of a round by definition.

    A definition without work at clients has the records of the next definition.
    """
    records: list[Records] = []
    following: Records = {}
    for level in reversed(definitions.levels):
        own = recording.of(number, level.method) if getattr(level, "at_clients", True) else {}
        if level is definitions.leaf:
            made = (recording.of(number, method) for method in components(level.method))
            own = next(filter(None, made), {})
        following = own or following
        records.insert(0, following)
    return records


def compare(
    case: Case,
    run: Federation,
    recording: Recording,
    definitions: Chain,
    number: int,
    counters: Tensor,
) -> None:
    """Raise `Deviation` unless all messages, codes, counts and replies match the definitions."""
    round, selection = recording.selections[number]
    round = replace(round, selected=selection.clients)
    outer, record = recording.of(number), run.history[number - 1]
    sends = definitions.first.sends(round)
    for slot, client in enumerate(selection.clients):
        if client in outer:
            same_message(
                f"round {number}: client {client} is sent", outer[client].inbox, sends[slot]
            )
    for client in selection.idle:
        if client in outer:
            idle = definitions.first.sends_idle(round)
            same_message(f"round {number}: idle client {client} is sent", outer[client].inbox, idle)
    faulty = {fault["client"]: fault["reason"] for fault in record["faults"]}
    refused = [client for client in faulty if client in outer]
    same_clients(case, recording, definitions, round, refused)
    if case.attendance == "not finite" and number == 2:
        expected = {client for client in selection.clients if client % 3 == 0}
        if set(faulty) != expected:
            raise Deviation(
                f"round 2: {sorted(faulty)} are refused, and {sorted(expected)} are not finite"
            )
    weights = weights_of(selection, SIZES)
    answers = [
        Answer(slot, client, weights[slot], outer[client].inbox, outer[client].reply)
        for slot, client in enumerate(selection.clients)
        if client not in faulty
    ]
    trained = [outer[answer.client] for answer in answers]
    same_counters(case, run, definitions.leaf, trained, counters, number)
    same_bytes(run, definitions.leaf, recording, outer, record, faulty)
    if answers:
        definitions.first.receive(round, answers)
    definitions.finish(round)
    if recording.impure:
        raise Deviation(recording.impure)
    for (position, hook), count in recording.calls.items():
        if count > 1:
            name = recording.methods[position]
            raise Deviation(f"round {number}: {hook} of {name} is called {count} times")
    if wrong := difference(run.model(), definitions.first.model()):
        raise Deviation(
            f"round {number}: the model is off by {wrong:.3g} with {len(answers)} answers"
        )


def same_clients(
    case: Case, recording: Recording, definitions: Chain, round: Round, refused: Sequence[int]
) -> None:
    """Raise `Deviation` unless the clients use the transmitted messages as defined."""
    number = round.number
    records, wire = records_by_level(recording, definitions, number), recording.of(number)
    if wire.keys() != records[0].keys():
        raise Deviation(
            f"round {number}: {sorted(wire)} were sent something, and {sorted(records[0])} work"
        )
    if case.change is not None and number == 2:  # idle clients also change replies, without a fault
        refused = [*refused, *(client for client in wire if client % 3 == 0)]
    for client, record in wire.items():
        own = records[0][client]
        if not same_tensors(record.inbox, own.inbox):
            raise Deviation(
                f"round {number}: client {client} works on another inbox than travelled"
            )
        if client not in refused and not same_tensors(record.reply, own.reply):
            raise Deviation(f"round {number}: client {client} uploads another reply than it made")
    records[0] = wire
    for k, level in enumerate(definitions.levels[:-1]):
        if wrong := level.unlike(round, records[k], records[k + 1], refused):
            raise Deviation(f"round {number}: {type(level).__name__}: {wrong}")


def same_message(what: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        if name not in found:
            raise Deviation(f"{what} no {name!r}")
        if wrong := difference(found[name], value):
            raise Deviation(f"{what} {name!r} off by {wrong:.3g}")


def same_counters(
    case: Case,
    run: Federation,
    leaf: Definition,
    records: list[ClientRecord],
    before: Tensor,
    number: int,
) -> None:
    """Compare the server's integer buffers with the expected values.

    The expected value is the largest answer, limited to a growth of four times the lower median. A
    robust rule takes the lower median if the answers can outvote a minority. If clients have
    private buffers, the server's buffers are constant.
    """
    if not run.task.layout.integers or not leaf.whole or "stages" in case.expression or not records:
        return
    counters = torch.stack([record.counters for record in records])
    growth = (counters - before).sort(0).values
    expected = before + torch.minimum(growth[-1], 4 * growth[(len(records) - 1) // 2])
    robust = next(
        (method for method in components(run.algorithm) if isinstance(method, Robust)), None
    )
    if robust is not None:
        few = len(records) < 2 * math.ceil(robust.malicious * len(records) - 1e-9) + (
            3 if "krum" in robust.rule else 1
        )
        expected = before if few else counters.sort(0).values[(len(records) - 1) // 2]
    if not torch.equal(run.integers, expected):
        raise Deviation(
            f"round {number}: integer buffers are {run.integers.tolist()}, of answers "
            f"{counters.tolist()}"
        )


def same_bytes(
    run: Federation,
    leaf: Definition,
    recording: Recording,
    outer: dict[int, ClientRecord],
    record: dict[str, Any],
    faulty: dict[int, str],
) -> None:
    """Compare the counted bytes with the messages.

    Uploads count for accepted answers, and downloads count for all reached clients. A client in a
    poll receives a model and answers a number. Selected clients do not receive the same message
    again.
    """
    _, selection = recording.selections[record["round"]]
    counters = 8 * run.task.layout.integers if leaf.whole else 0
    answers = [client for client in selection.clients if client not in faulty]
    up = sum(size_of(outer[client].reply) + counters for client in answers)
    question, asked = recording.asked.get(record["round"], ({}, ()))
    heard = [client for client in asked if not run.engine.lost(record["round"], client)]  # type: ignore[attr-defined]
    up += run.task.initial.element_size() * len(heard)
    if record["bytes_up"] != up:
        raise Deviation(
            f"round {record['round']}: {record['bytes_up']} bytes up are counted, {up} were "
            "uploaded"
        )
    receivers = selection.receivers or len(selection.clients) + len(selection.idle)
    receivers -= sum(reason == "dropped out" for reason in faulty.values())
    if outer:
        inbox = next(iter(outer.values())).inbox
        down = (size_of(inbox) + counters) * receivers
        sent = recording.sent[record["round"]]
        same = question.keys() == sent.keys() and all(
            torch.equal(rows, sent[name]) for name, rows in question.items()
        )
        shown = len(asked) - same * len(selection.clients)
        down += sum(rows[0].numel() * rows.element_size() for rows in question.values()) * shown
        if record["bytes_down"] != down:
            raise Deviation(
                f"round {record['round']}: {record['bytes_down']} bytes down are counted, "
                f"{down} were sent"
            )


def size_of(message: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in message.values())


@dataclass
class Outcome:
    """Number of cases that agree, and the deviations."""

    agreed: int = 0
    deviations: list[tuple[Case, str]] = field(default_factory=list)
    tried: Counter[tuple[str, str]] = field(default_factory=Counter)


def run_all(cases: Iterable[Case], seconds: float = float("inf")) -> Outcome:
    """Run cases until the time is over."""
    outcome, end = Outcome(), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="fedloom-seams-") as folder:
        for k, case in enumerate(cases):
            if time.monotonic() > end:
                break
            outcome.tried[case.method, case.wrapper] += 1
            (Path(folder) / str(k)).mkdir()
            try:
                run_case(case, Path(folder) / str(k))
            except Exception as error:
                text = str(error) if isinstance(error, Deviation) else traceback.format_exc()
                outcome.deviations.append((case, text))
                print(
                    f"{case.expression} [{case.attendance}, {case.model}, {case.course}]: {text}",
                    flush=True,
                )
            else:
                outcome.agreed += 1
    return outcome


def table(outcome: Outcome) -> str:
    """Return a table by part: accepted, refused and tested methods, and numbers of cases."""
    lines = [
        "| part | takes | refuses | methods run | cases | deviations |",
        "|---|---|---|---|---|---|",
    ]
    totals = Counter[str]()
    for wrapper in WRAPPERS:
        refused = sum(bool(pair_refusal(method, wrapper)) for method in methods())
        row = Counter(
            takes=len(methods()) - refused,
            refuses=refused,
            run=sum(name == wrapper for _, name in outcome.tried),
            cases=sum(count for (_, name), count in outcome.tried.items() if name == wrapper),
            deviations=sum(case.wrapper == wrapper for case, _ in outcome.deviations),
        )
        totals.update(row)
        lines.append(f"| {wrapper} | {' | '.join(str(row[name]) for name in COLUMNS)} |")
    return "\n".join([*lines, f"| all | {' | '.join(str(totals[name]) for name in COLUMNS)} |"])


COLUMNS = ("takes", "refuses", "run", "cases", "deviations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--pairs", action="store_true", help="the selection in which every pair of factors occurs"
    )
    parser.add_argument("--seed", type=int, default=0, help="the order of the cases")
    parser.add_argument("--only", default="", help="cases whose expression has this in it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    cases: Iterable[Case] = every_case(options.seed, options.only)
    if options.pairs:
        each = (covering_cases(method, options.only) for method in methods())
        cases = itertools.chain(itertools.chain.from_iterable(each), rare_cases())
    outcome = run_all(cases, 60 * options.minutes)
    print(table(outcome))
    print(
        f"{outcome.agreed} agree, {len(outcome.deviations)} deviate, "
        f"{time.monotonic() - began:.1f} s"
    )
    raise SystemExit(1 if outcome.deviations else 0)


if __name__ == "__main__":
    main()
