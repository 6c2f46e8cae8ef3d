"""The simulated clock: duration of a client's work, deadlines, and simulated time in tables and
curves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clock_support import STRAGGLERS, task, trained
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.common.round import Round
from fedloom.common.training import Training
from fedloom.report.curves import curve
from fedloom.report.sheet import Sheet
from fedloom.report.summary import RunSummary, seconds_to
from fedloom.rounds import clock
from fedloom.rounds.clock import DAY, Clock, Device
from fedloom.runs.config_file import configuration


def test_a_round_takes_as_long_as_the_slowest_client_by_counted_samples_and_bytes() -> None:
    """A round takes as long as its slowest client, computed by hand from the device's rates."""
    result, sizes = trained(), task().partition.sizes
    elapsed = 0.0
    for record in result.history:
        durations = []
        for client in record["clients"]:
            device = STRAGGLERS.device(3, client)
            durations.append(
                650 * 4 / device.down + sizes[client] / device.speed + 650 * 4 / device.up
            )
        elapsed += max(durations)
        assert record["simulated_seconds"] == pytest.approx(elapsed, rel=1e-12)
        assert record["bytes_up"] == record["bytes_down"] == 4 * 650 * 4


def test_the_clock_changes_no_other_figure() -> None:
    """The clock changes nothing that clients draw or learn."""
    clocked, plain = trained().history, trained(clock=Clock()).history
    assert [
        {k: v for k, v in record.items() if k != "simulated_seconds"} for record in clocked
    ] == plain


def test_training_for_steps_counts_their_samples() -> None:
    """Training for steps counts full batches, or all samples of a client that has fewer."""
    assert Training(epochs=3).samples_seen(70) == 210
    assert Training(steps=4, batch_size=20).samples_seen(70) == 80
    assert Training(steps=4, batch_size=20).samples_seen(7) == 28


@given(st.integers(0, 500_000), st.integers(1, 300_000), st.integers(0, 95), st.integers(1, 95))
@settings(max_examples=40, deadline=None)
def test_work_waits_outside_a_clients_hours(
    began: int, work: int, from_quarter: int, quarters: int
) -> None:
    """Work waits outside a client's hours, as in a walk from window to window."""
    start, hours = from_quarter / 4, quarters / 4
    device = Device(1.0, math.inf, math.inf, start, hours)
    opens, remaining, time = start * 3600 - DAY, float(work), float(began)
    while remaining > 0:
        closes = opens + hours * 3600
        if closes > time:
            time = max(time, opens)
            done = min(remaining, closes - time)
            remaining, time = remaining - done, time + done
        opens += DAY
    assert device.finish(began, work, 0, 0) == pytest.approx(time, abs=1e-3)


def test_replies_are_taken_in_their_order_until_the_deadline() -> None:
    """Replies count in order of arrival, with ties to the lower number, until the deadline.

    The server waits until the deadline only if a reply is missing.
    """
    finish, clients = [5.0, 3.0, 3.0, 9.0], [0, 7, 2, 1]
    endless = Round(1, 1, 0, 8, 4, 0.1, 0.1)
    assert endless.on_time(finish, clients, 4, 1.0) == ([0, 1, 2, 3], 9.0)
    assert endless.on_time(finish, clients, 1, 1.0) == ([2], 3.0)
    closing = replace(endless, closes=4.0)
    assert closing.on_time(finish, clients, 2, 1.0) == ([1, 2], 3.0)
    assert closing.on_time(finish, clients, 3, 1.0) == ([1, 2], 4.0)
    assert replace(endless, closes=2.0).on_time(finish, clients, 3, 1.0) == ([], 2.0)
    assert replace(endless, closes=2.0).on_time([], [], 3, 1.0) == ([], 1.0)


@pytest.mark.parametrize("method", ["fedavg", "fedmr"])
def test_late_replies_are_dropped_and_recorded(method: str) -> None:
    """No round exceeds its deadline, and late clients count as recipients of the model."""
    clock = Clock(speed="stragglers(100, 10)", deadline=6.0)
    history = trained(method, clock).history
    assert any(record["faults"] for record in history)
    assert all(
        fault["reason"].startswith("late: after ")
        for record in history
        for fault in record["faults"]
    )
    ends = [0.0, *(record["simulated_seconds"] for record in history)]
    for record, start, end in zip(history, ends[:-1], ends[1:], strict=True):
        assert end - start == pytest.approx(6.0) if record["faults"] else end - start < 6.0
        assert record["bytes_down"] == 4 * 650 * 4
        assert record["bytes_up"] == (4 - len(record["faults"])) * 650 * 4


def test_over_selection_takes_the_first_replies() -> None:
    """With six of eight clients selected for four replies, the two slowest clients of a round are
    late.
    """
    clock = Clock(speed="stragglers(100, 10)", over_selection=0.5)
    for record in trained(clock=clock).history:
        took = {
            client: task().partition.sizes[client] / clock.device(3, client).speed
            for client in record["clients"]
        }
        slowest = sorted(took, key=lambda client: (took[client], client))[4:]
        assert sorted(fault["client"] for fault in record["faults"]) == sorted(slowest)
        assert len(took) == 6


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fedmr", "fedmr needs the same number of clients in each round, and all replies"),
        ("stages(fedavg:1, indep)", "indep needs the same number of clients in each round"),
        (
            "umf(fedmr(local=fedprox))",
            r"fedmr\(local=fedprox\) needs the same number of clients in each round",
        ),
        (
            "clustered(fedavg)",
            r"clustered\(fedavg\) needs the same number of clients in each round",
        ),
        ("fedmr_async(k=2)", r"fedmr_async\(k=2\) decides which replies it uses"),
        ("fedbuff(fedavg, k=2)", r"fedbuff\(fedavg, k=2\) decides which replies it uses"),
    ],
)
def test_methods_that_need_every_selected_client_are_not_over_selected(
    method: str, reason: str
) -> None:
    clock = Clock(speed="stragglers(100, 10)", over_selection=0.5)
    with pytest.raises(
        InvalidValue, match=f"over_selection drops the last replies of every round, but {reason}"
    ):
        trained(method, clock)
    assert not any(
        record["faults"] for record in trained(method, replace(clock, over_selection=0.0)).history
    )


def test_fedmut_is_over_selected_with_a_model_for_each_selected_client() -> None:
    """Every selected client gets a mutant, and the mean uses only the first replies."""
    history = trained("fedmut", Clock(speed="stragglers(100, 10)", over_selection=0.5)).history
    assert [len(record["clients"]) - len(record["faults"]) for record in history] == [4] * len(
        history
    )


def test_a_resumed_run_has_the_simulated_time_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """A lengthened run continues the clock from its last record."""
    trained(directory=tmp_path, rounds=2)
    assert trained(directory=tmp_path).history == trained().history


def test_a_trace_gives_each_client_its_line(tmp_path: Path) -> None:
    """Clients use the lines of a trace in turn, and the table supplies missing columns."""
    path = tmp_path / "trace.csv"
    path.write_text("speed,from,hours\n10,0,24\n20,6,12\n")
    clock = Clock(trace=str(path), up=7.0)
    assert clock.device(0, 2) == Device(10, math.inf, 7.0, 0, 24)
    assert clock.device(5, 1) == Device(20, math.inf, 7.0, 6, 12)
    for text, message in {
        "sped\n1\n": "column 'sped'",
        "speed\n-1\n": "line 2: speed cannot be '-1'",
        "speed\n": "no client",
    }.items():
        bad = tmp_path / f"{len(text)}.csv"
        bad.write_text(text)
        with pytest.raises(InvalidValue, match=message):
            Clock(trace=str(bad))


def test_a_run_does_not_resume_with_a_changed_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    for speed in (10, 20):
        path.write_text(f"speed\n{speed}\n")
        clock._lines.cache_clear()  # as in a new process
        if speed == 10:
            trained(clock=Clock(trace=str(path)), directory=tmp_path / "run", rounds=2)
    with pytest.raises(FedloomError, match="another run"):
        trained(clock=Clock(trace=str(path)), directory=tmp_path / "run")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"speed": "lognormol(3)"}, "clock.speed: .*did you mean 'lognormal'"),
        (
            {"up": "lognormal(1e-308, 1)"},
            "clock.up: lognormal: median must be at least 1e-09 and at most .*, not 1e-308",
        ),
        (
            {"up": "lognormal(5, 1000)"},
            "clock.up: lognormal: sigma must be between 0 and 100, not 1000",
        ),
        ({"down": 1e-320}, "clock.down must be at least 1e-09 and at most .* or text, not 1e-320"),
        ({"speed": 0}, "clock.speed must be at least 1e-09 .* not 0"),
        ({"deadline": 3.0}, "needs the clients' speed"),
        ({"sped": 3}, "did you mean 'clock.speed'"),
        ({"trace": "missing.csv"}, "clock.trace: missing.csv: cannot be read .*No such file"),
        ({"trace": "/dev/zero"}, "clock.trace: /dev/zero: cannot be read .*may have no end"),
        ({"speed": 1, "hours": 25}, "clock.hours must be .*24"),
    ],
)
def test_bad_clocks_are_refused_in_one_line(table: dict[str, Any], message: str) -> None:
    """Each error of a bad clock is one line with the value and the allowed values."""
    with pytest.raises(FedloomError, match=message):
        configuration({"clock": table})


def test_a_long_trace_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace.csv").write_text("speed\n" + 40_000 * "1\n")
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "0.004")
    with pytest.raises(
        InvalidValue, match=r"trace.csv: takes 0.00 GiB of memory, more than the 0.00 GiB"
    ):
        Clock(trace=str(tmp_path / "trace.csv"))


def test_every_rate_that_is_drawn_gives_a_finite_time() -> None:
    device = Clock(up="lognormal(1e-9, 100)", hours=1).device
    rates = [device(0, client).up for client in range(200)]
    assert min(rates) >= 1e-9
    assert max(rates) <= 3.4e38
    assert all(math.isfinite(device(0, client).finish(5.0, 100, 1e9, 1e9)) for client in range(200))


def test_targets_are_reached_in_simulated_seconds() -> None:
    """Tables have a column of simulated seconds, and curves over seconds use simulated seconds."""
    records = [{"round": k, "accuracy": k / 4, "simulated_seconds": 10.0 * k} for k in (1, 2, 3)]
    summary = RunSummary("fedavg", 0, records, [{"round": k, "seconds": 0.1} for k in (1, 2, 3)])
    assert seconds_to(summary, 0.5) == 20.0
    table = Sheet([summary], [0.5]).table
    cells = dict(zip([column.title for column in table.columns], table.iloc[0], strict=True))
    assert cells["Seconds to 50 %"].text == "20"
    assert cells["Simulated time"].value == 30.0
    drawn = curve([summary], x="seconds")
    assert drawn is not None
    assert drawn["x"].tolist() == [10.0, 20.0, 30.0]
