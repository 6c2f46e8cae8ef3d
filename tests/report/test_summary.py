"""Metrics of runs compared with plain loops over their records, and the tables."""

from __future__ import annotations

import csv
import io
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.common.errors import InvalidValue
from fedloom.report.cells import best_cells, score_cell
from fedloom.report.export import to_csv, to_markdown
from fedloom.report.sheet import Sheet, difference_cells, explained, overall
from fedloom.report.summary import (
    RunSummary,
    Spread,
    best,
    bytes_down,
    bytes_to,
    bytes_up,
    elapsed_seconds,
    faults,
    final,
    mean_of_last,
    rounds_to,
    seconds,
    seconds_to,
    summarise,
)
from fedloom.report.units import byte_text, percent, time_text


def best_rows(table: pd.DataFrame, title: str) -> list[int]:
    """Return the rows with the best cell of a column."""
    titles = [column.title for column in table]
    return [int(k) for k in np.flatnonzero(best_cells(table).iloc[:, titles.index(title)])]


def run_of(
    accuracies: list[float | None],
    algorithm: str = "fedavg",
    seed: int = 0,
    timed: bool = True,
    cost: int = 10,
) -> RunSummary:
    """Return a run with these accuracies. None means no evaluation.

    Round t costs t * cost bytes down, half of this up, and t seconds.
    """
    records: list[dict[str, Any]] = []
    for number, accuracy in enumerate(accuracies, start=1):
        record: dict[str, Any] = {
            "round": number,
            "bytes_down": number * cost,
            "bytes_up": number * cost // 2,
        }
        records.append(record | ({} if accuracy is None else {"accuracy": accuracy}))
    timings = [{"round": record["round"], "seconds": float(record["round"])} for record in records]
    return RunSummary(algorithm, seed, records, timings if timed else [])


def test_final_best_and_mean_of_last_count_evaluations_not_rounds() -> None:
    run = run_of([None, 0.2, None, 0.8, None, 0.5, None])
    assert final(run) == 0.5
    assert best(run) == 0.8
    assert mean_of_last(run, 2) == pytest.approx(0.65)
    assert mean_of_last(run, 10) == pytest.approx(0.5)
    long = run_of([k / 100 for k in range(40)])
    assert mean_of_last(long, 39) == pytest.approx(0.20)
    # the last tenth of the evaluations
    assert mean_of_last(long, 40) == mean_of_last(long, 100) == pytest.approx(0.375)


def test_a_mean_over_every_evaluation_is_warned_of_and_never_taken() -> None:
    runs = [run_of([0.1, 0.2, 0.3], name) for name in ("a", "b")]
    assert "Only 3 evaluations: 'mean of last' uses the last one." in explained(
        [Sheet(runs, last=3)]
    )
    assert not any(text.startswith("Only") for text in explained([Sheet(runs, last=2)]))
    long = [run_of([k / 100 for k in range(40)])]
    assert "Only 40 evaluations: 'mean of last' uses the last 4." in explained(
        [Sheet(long, last=40)]
    )


def test_time_on_the_wall_counts_runs_side_by_side_once() -> None:
    def timed(*spans: tuple[float, float]) -> RunSummary:
        return RunSummary(
            "a", 0, [], [{"round": 1, "ended": end, "seconds": end - start} for start, end in spans]
        )

    assert elapsed_seconds(
        [timed((0, 5), (5, 9)), timed((2, 6)), timed((20, 21))]
    ) == pytest.approx(10)
    assert elapsed_seconds([timed((0, 10)), timed((1, 2), (3, 12))]) == pytest.approx(12)
    assert elapsed_seconds([run_of([0.5])]) is None


def test_a_run_without_evaluations_has_no_accuracy() -> None:
    run = run_of([None, None])
    assert (final(run), best(run), mean_of_last(run)) == (None, None, None)
    assert rounds_to(run, 0.1) is None


def test_rounds_to_a_target_are_counted_from_one_and_none_if_never() -> None:
    run = run_of([0.9, 0.95, 0.4])
    assert rounds_to(run, 0.9) == 1  # the target itself counts as reached
    assert rounds_to(run, 0.91) == 2
    assert rounds_to(run, 0.96) is None
    assert bytes_to(run, 0.96) is None
    assert seconds_to(run, 0.96) is None


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=30),
    st.floats(0.01, 1),
)
def test_targets_equal_a_plain_search(accuracies: list[float | None], target: float) -> None:
    run = run_of(accuracies)
    expected = None
    down = up = spent = 0
    for k, accuracy in enumerate(accuracies):
        down, up, spent = down + (k + 1) * 10, up + (k + 1) * 5, spent + k + 1
        if accuracy is not None and accuracy >= target:
            expected = k + 1
            break
    assert rounds_to(run, target) == expected
    assert bytes_to(run, target) == (None if expected is None else down + up)
    assert seconds_to(run, target) == (None if expected is None else spent)


def test_bytes_and_seconds_are_totals_and_none_where_times_are_missing() -> None:
    run = run_of([0.1, 0.2, 0.3])
    assert (bytes_down(run), bytes_up(run), seconds(run)) == (60, 30, 6.0)
    untimed = run_of([0.1, 0.2], timed=False)
    assert seconds(untimed) is None
    assert seconds_to(untimed, 0.2) is None


def test_faults_name_round_client_and_reason() -> None:
    run = RunSummary(
        "fedavg",
        0,
        [{"round": 1}, {"round": 2, "faults": [{"client": 7, "reason": "dropped out"}]}],
    )
    assert faults(run) == [(2, 7, "dropped out")]


def test_spread_is_the_sample_deviation() -> None:
    values = [0.5, 0.7, 0.9, 0.6]
    spread = Spread.of(values)
    assert spread is not None
    mean = sum(values) / 4
    assert spread.mean == pytest.approx(mean)
    assert spread.std == pytest.approx((sum((v - mean) ** 2 for v in values) / 3) ** 0.5)
    assert Spread.of([0.5]) == Spread(0.5, 0.0, 1)
    assert Spread.of([]) is None


def test_a_comparison_groups_seeds_by_method_in_order_of_appearance() -> None:
    runs = [
        run_of([0.2, 0.9], "b", 0),
        run_of([0.5, 0.6], "a", 0),
        run_of([0.9, 0.7], "b", 1),
        run_of([0.1, 0.8], "a", 1),
    ]
    rows = summarise(runs, [0.85], evaluations=2)
    assert list(rows.index) == ["b", "a"]
    assert list(rows["seeds"]) == [2, 2]
    assert rows.at["b", "final"].mean == pytest.approx(0.8)
    assert rows.at["b", "final"].std == pytest.approx(statistics.stdev([0.9, 0.7]))
    # Two evaluations are all evaluations. The mean thus uses the last tenth, at least one.
    assert rows.at["b", "mean_of_last"].mean == pytest.approx((0.9 + 0.7) / 2)
    assert rows.at["b", "rounds_to_0.85"] == Spread(1.5, pytest.approx(0.5**0.5), 2)
    assert rows.at["b", "reached_0.85"] == 2
    assert rows.at["a", "rounds_to_0.85"] is None


def test_seeds_that_never_reach_a_target_are_in_no_mean_but_are_counted() -> None:
    runs = [run_of([0.2, 0.9], seed=0), run_of([0.2, 0.3], seed=1)]
    row = summarise(runs, [0.9]).iloc[0]
    assert row["rounds_to_0.9"] == Spread(2.0, 0.0, 1)
    assert (row["reached_0.9"], row["seeds"]) == (1, 2)


@pytest.mark.parametrize("target", [-0.1, 90.0])
def test_a_target_that_is_no_share_is_refused(target: float) -> None:
    with pytest.raises(InvalidValue, match=r"targets: accuracy must be"):
        summarise([run_of([0.5])], [target])


def test_the_table_marks_the_best_and_shows_speed_up_and_partial_success() -> None:
    runs = [
        *(run_of([0.1, 0.2, 0.3, 0.9], "slow", seed) for seed in (0, 1)),
        *(run_of([0.1, 0.9, 0.8, 0.8], "quick", seed) for seed in (0, 1)),
        run_of([0.9, 0.1, 0.1, 0.1], "lucky", 0),
        run_of([0.1, 0.1, 0.1, 0.1], "lucky", 1),
        run_of([0.1, 0.1, 0.1, 0.1], "never", 0),
    ]
    table = Sheet(runs, [0.9]).table
    titles = [column.title for column in table.columns]
    reach = titles.index("Rounds to 90 %")
    assert [cell.text for cell in table.iloc[:, reach]] == [
        "4.0 ± 0.0",
        "2.0 ± 0.0 (2.0×)",
        "1 (1 of 2 seeds)",
        "*",
    ]
    assert best_rows(table, "Rounds to 90 %") == [1]  # one lucky seed is not enough
    final_column = titles.index("Final accuracy, %")
    texts = [cell.text for cell in table.iloc[:, final_column]]
    assert (texts[0], texts[3]) == ("90.00 ± 0.00", "10.00")
    assert best_rows(table, "Final accuracy, %") == [0]
    assert best_rows(table, "Method") == []


def test_methods_are_ranked_and_tested_by_the_seconds_to_a_target() -> None:
    def timed(algorithm: str, seed: int, pace: float, reaches: int = 3) -> RunSummary:
        records = [
            {"round": k, "accuracy": 0.9 if k >= reaches else 0.1, "simulated_seconds": pace * k + seed / 100,
             "bytes_down": 5, "bytes_up": 5} for k in range(1, 5)
        ]  # fmt: skip
        return RunSummary(algorithm, seed, records)

    # fast, but one seed does not reach the target
    never = [timed("never", 0, 1.0), timed("never", 1, 1.0, reaches=9)]
    slow, fast = (
        [timed(name, seed, pace) for seed in (0, 1)]
        for name, pace in (("slow", 20.0), ("fast", 10.0))
    )
    late = [timed("never", seed, 15.0) for seed in (0, 1)]
    sheets = [
        Sheet(
            [*slow, *fast, *runs], [0.8], measure="seconds", setting=name, changes={"rounds": name}
        )
        for name, runs in (("one", never), ("two", late), ("three", never))
    ]
    table = overall(sheets)
    assert [[cell.value for cell in line] for line in table.to_numpy()] == [
        ["slow", *[pytest.approx(60.005)] * 3, pytest.approx(7 / 3)],
        ["fast", *[pytest.approx(30.005)] * 3, 1.0],
        ["never", None, pytest.approx(45.005), None, pytest.approx(8 / 3)],
    ]
    best = best_cells(table)
    assert [np.flatnonzero(best.iloc[:, k]).tolist() for k in range(5)] == [[], [1], [1], [1], [1]]
    assert sheets[0].criterion.name == "seconds to 80 %"
    (difference,) = sheets[0].tests["seconds"]  # only methods that reach the target with each seed
    assert (difference.method, difference.other, difference.mean) == (
        "slow",
        "fast",
        pytest.approx(30.0),
    )
    by_bytes = Sheet([*slow, *fast, *never], [0.8], measure="bytes")
    assert difference_cells(by_bytes.tests["bytes"][0], by_bytes.criterion.metric)[0] == "+0 B"
    assert (
        score_cell(by_bytes.spreads("bytes")["slow"], by_bytes.criterion.metric).text
        == "30 B ± 0 B"
    )
    assert sheets[1].spreads("rounds")["slow"] == Spread(3.0, 0.0, 2)
    assert sheets[1].spreads("bytes")["slow"] == Spread(30.0, 0.0, 2)


def test_nothing_is_best_where_all_are_equal() -> None:
    table = Sheet([run_of([0.5], "a"), run_of([0.5], "b")]).table
    assert not best_cells(table).to_numpy().any()


def test_csv_holds_plain_numbers_that_read_back() -> None:
    results = Sheet(
        [run_of([0.1, 0.9], "ala(fedavg, s=80)", 0), run_of([0.1, 0.7], "ala(fedavg, s=80)", 1)],
        [0.75],
    )
    read = list(csv.DictReader(io.StringIO(to_csv([results]))))
    assert len(read) == 1
    assert read[0]["method"] == "ala(fedavg, s=80)"
    assert float(read[0]["final"]) == pytest.approx(0.8)
    assert float(read[0]["final_std"]) == pytest.approx(statistics.stdev([0.9, 0.7]))
    assert (read[0]["reached_0.75"], float(read[0]["rounds_to_0.75"])) == ("1", 2.0)
    assert float(read[0]["bytes_down"]) == 30


def test_markdown_has_one_line_a_method_and_keeps_bars_out_of_cells() -> None:
    text = to_markdown([Sheet([run_of([0.5], "a|b"), run_of([0.25], "c")])])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 8  # tables of accuracies and costs
    assert lines[2].startswith(r"| a\|b | **50.00** | **50.00** |")
    for table in (lines[:4], lines[4:]):
        assert {line.replace(r"\|", "").count("|") for line in table} == {table[0].count("|")}


def test_bytes_and_seconds_are_written_in_readable_units() -> None:
    assert [
        byte_text(n) for n in (0, 999, 1000, 1234, 999_600, 5_432_100, 123_456_789, 2.5e12)
    ] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 kB",
        "1 MB",
        "5.43 MB",
        "123 MB",
        "2.5 TB",
    ]
    assert [time_text(s) for s in (0.42, 38.2, 59.7, 245, 7620)] == [
        "0.42 s",
        "38 s",
        "1 min 00 s",
        "4 min 05 s",
        "2 h 07 min",
    ]
    assert [percent(s) for s in (0.9, 0.875, 1.0, 0.07)] == ["90", "87.5", "100", "7"]


def test_figures_of_runs_do_not_wait_for_scipys_statistics() -> None:
    code = (
        "import sys, fedloom.report, fedloom.report.sheet, fedloom.report.export; "
        "print('scipy.stats' in sys.modules)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "False"
