"""Compare federated statistics with pandas on the pooled rows; check suppressed counts, noise and
the command.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import fedloom as fl
from fedloom.cli.terminal import statistics_tables
from fedloom.common.errors import InvalidValue, RefusedReply
from fedloom.parts.accounting import epsilon
from fedloom.survey.column_statistics import QUANTILES, Statistics, Survey
from fedloom.survey.federated_statistics import answer, collect, shared_rows, statistics
from forking_cli import main

SIZES = (50, 200, 7, 90)


def frames(seed: int = 0) -> list[pd.DataFrame]:
    """Return the rows of four hospitals, with empty cells and a rare category."""
    rng = np.random.default_rng(seed)
    tables = []
    for hospital, n in enumerate(SIZES):
        age = rng.normal(1e6 + hospital, 3, n)
        age[rng.random(n) < 0.1] = math.nan
        sex = rng.choice(["f", "m", "x"], n, p=[0.6, 0.36, 0.04]).astype(object)
        sex[rng.random(n) < 0.05] = None
        tables.append(pd.DataFrame({"age": age, "sex": sex, "dose": rng.lognormal(0, 1, n)}))
    return tables


def columns_of(frame: pd.DataFrame) -> dict[str, Any]:
    def values(column: pd.Series[Any]) -> Any:
        if pd.api.types.is_numeric_dtype(column):
            return column.to_numpy(float)
        return np.array([None if pd.isna(cell) else cell for cell in column], object)

    return {name: values(frame[name]) for name in frame}


def asking(frames: list[pd.DataFrame]) -> Callable[[dict[str, Any]], Mapping[int, dict[str, Any]]]:
    def ask(request: dict[str, Any]) -> dict[int, dict[str, Any]]:
        plain = json.loads(json.dumps(request))  # messages are JSON
        answers = {
            client: answer(columns_of(frame), plain, 1, 0, client)
            for client, frame in enumerate(frames)
        }
        return {client: json.loads(json.dumps(reply)) for client, reply in answers.items()}

    return ask


def test_all_figures_equal_pandas_on_the_pooled_rows() -> None:
    result = collect(asking(frames()), Survey(smallest=1, bins=400))
    pooled = pd.concat(frames())
    for name in ("age", "dose"):
        column = result.columns[name]
        assert (column.count, column.empty) == (pooled[name].count(), pooled[name].isna().sum())
        assert column.mean == pytest.approx(pooled[name].mean(), rel=1e-12)
        assert column.deviation == pytest.approx(pooled[name].std(ddof=0), rel=1e-9)
        width = (column.edges[1] - column.edges[0]) / 400
        inside = pooled[name].clip(*column.edges)
        for share in QUANTILES:
            assert column.quantile(share) == pytest.approx(inside.quantile(share), abs=3 * width)
        expected, _ = np.histogram(inside.dropna(), 400, column.edges)
        np.testing.assert_array_equal(column.bins, expected)
    assert result.columns["sex"].categories == dict(pooled["sex"].value_counts().sort_index())
    assert result.clients == len(SIZES)
    frame = result.frame()
    assert list(frame.index) == ["age", "sex", "dose"]
    assert frame.loc["dose", "mean"] == result.columns["dose"].mean


def test_the_figures_cover_the_data_and_bars_have_one_width() -> None:
    result = collect(asking(frames()), Survey(smallest=1, bins=50))
    pooled = pd.concat(frames())
    figure = result.plot()
    axes = [figure.layout.xaxis, figure.layout.xaxis2, figure.layout.xaxis3]
    for name, axis, bars in zip(result.columns, axes, figure.data, strict=True):
        column = result.columns[name]
        if column.categories:
            assert list(bars.y) == sorted(column.categories.values(), reverse=True)
            assert tuple(axis.range) == (-0.5, len(column.categories) - 0.5)
        else:
            width = (column.edges[1] - column.edges[0]) / 50
            inside = pooled[name].clip(*column.edges).dropna()
            assert inside.min() - width <= axis.range[0] <= inside.min()
            assert inside.max() <= axis.range[1] <= inside.max() + width
            assert sum(bars.y) == len(inside)
            assert bars.y[0] > 0 < bars.y[-1]


def test_counts_below_the_smallest_leave_no_client() -> None:
    result = collect(asking(frames()), Survey(smallest=8))
    rows, rare = frames(), {"f": 0, "m": 0, "x": 0}
    for frame in rows:
        counts = frame["sex"].value_counts()
        if frame["sex"].count() >= 8:
            for text in rare:
                rare[text] += int(counts.get(text, 0)) if counts.get(text, 0) >= 8 else 0
    assert result.columns["sex"].categories == {
        text: count for text, count in rare.items() if count
    }
    pooled = pd.concat([frame for frame in rows if frame["dose"].count() >= 8])
    assert result.columns["dose"].mean == pytest.approx(pooled["dose"].mean(), rel=1e-12)
    assert sum(result.columns["dose"].bins) == pytest.approx(len(pooled))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 12))
def test_bins_keep_all_rows_and_equal_bins_hold_at_least_the_smallest(
    counts: list[int], smallest: int
) -> None:
    shared = shared_rows(np.array(counts, float), smallest)
    if sum(counts) < smallest:
        assert not shared.any()
        return
    assert shared.sum() == pytest.approx(sum(counts))
    if smallest == 1:
        np.testing.assert_array_equal(shared, counts)
    total, value = 0.0, None
    for rows in [*shared.tolist(), None]:
        if rows != value and value:  # end of a run of equal bins
            assert total >= smallest - 1e-9
        total, value = (total + rows if rows == value else rows) if rows else 0.0, rows


def test_a_site_may_ask_for_more_rows_than_the_server() -> None:
    columns = columns_of(frames()[2])
    assert answer(
        columns, {"step": "sums", "smallest": 1, "noise": 0.0, "columns": {"dose": {}}}, 8
    ) == {"columns": {}}


def test_noise_has_the_scale_that_epsilon_needs_and_its_cost_is_reported() -> None:
    bounds = {"age": (1e6 - 20, 1e6 + 20), "dose": (0.0, 20.0)}
    result = collect(asking(frames()), Survey(epsilon=2.0, bounds=bounds))
    assert result.releases == 4 + 4 + 1
    assert epsilon(result.noise, 1.0, result.releases, 1e-5 / 2) <= 2.0
    repeated = collect(asking(frames()), Survey(epsilon=2.0, bounds=bounds))
    assert repeated == result
    exact, columns = frames()[1]["dose"], columns_of(frames()[1])
    request = {
        "smallest": 5,
        "noise": 3.0,
        "columns": {"dose": {"bounds": [0.0, 20.0], "mean": 1.0}},
    }
    sums, squares = [], []
    for seed in range(400):
        sums.append(answer(columns, {**request, "step": "sums"}, 1, seed)["columns"]["dose"][0])
        squares.append(
            answer(columns, {**request, "step": "squares"}, 1, seed)["columns"]["dose"][0][0]
        )
    count, _, total = np.array(sums).T
    assert count.std() == pytest.approx(3.0, rel=0.15)
    # Relative to the middle of the bounds, a row adds at most half their width.
    assert (total - 10 * count).std() == pytest.approx(3.0 * 10, rel=0.15)
    assert np.std(squares) == pytest.approx(3.0 * 19**2, rel=0.15)
    clipped = exact.clip(0, 20)
    assert np.mean(squares) == pytest.approx(((clipped - 1) ** 2).sum(), abs=4 * 3.0 * 19**2 / 20)


def test_noise_of_a_site_does_not_repeat() -> None:
    request = {
        "step": "sums",
        "smallest": 5,
        "noise": 3.0,
        "columns": {"dose": {"bounds": [0.0, 20.0]}},
    }
    assert answer(columns_of(frames()[1]), request) != answer(columns_of(frames()[1]), request)


@pytest.mark.parametrize(
    ("survey", "text"),
    [
        ({"epsilon": 1.0}, "epsilon needs bounds for column 'age'"),
        ({"bounds": {"aeg": (0, 1)}}, "bounds: 'aeg' is no column of numbers: did you mean 'age'?"),
        (
            {"bounds": {"age": (1, 0)}},
            "bounds of 'age' must be a lower and a higher number, not 1 and 0",
        ),
        ({"bins": 0}, "bins must be at least 1, not 0"),
        ({"smallest": 0}, "smallest must be at least 1, not 0"),
    ],
)
def test_bad_settings_are_one_line(survey: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(text)):
        collect(asking(frames()), Survey(**survey))


def test_clients_whose_columns_differ_are_named_by_column() -> None:
    rows = frames()
    rows[1] = rows[1].rename(columns={"dose": "doses"})
    rows[3]["age"] = rows[3]["age"].astype(str).astype(object)
    with pytest.raises(InvalidValue) as error:
        collect(asking(rows), Survey())
    assert "'age' is numbers at 0, 1, 2 and categories at 3" in str(error.value)
    assert "'dose' is numbers at 0, 2, 3 and missing at 1" in str(error.value)
    assert "'doses' is missing at 0, 2, 3 and numbers at 1" in str(error.value)


@pytest.mark.parametrize(
    "answer",
    [
        {}, {"columns": 3}, {"columns": {"dose": [[1.0, 2.0], {}]}}, {"columns": {"dose": [[math.nan, 0, 1], {}]}},
        {"columns": {"other": [[1.0, 0, 1], {}]}}, {"columns": {"dose": [[1, 0, 1], {"a": "b"}]}}, {"columns": {"dose": 1}},
    ],
)  # fmt: skip
def test_malformed_answers_are_refused(answer: Any) -> None:
    honest = asking(frames())
    with pytest.raises(RefusedReply, match="client 0 does not answer with numbers of the columns"):
        collect(
            lambda request: {
                **honest(request),
                **({} if request["step"] == "kinds" else {0: answer}),
            },
            Survey(),
        )


def test_statistics_of_a_task_are_those_of_its_training_rows() -> None:
    task = fl.make_task("digits", clients=4, partition="iid")
    result = statistics(task, smallest=1)
    pixels = task.train.inputs.double().numpy()
    pixels = pixels if task.train.inputs.is_floating_point() else pixels / 255
    (name, *_) = result.columns
    assert result.columns[name].mean == pytest.approx(pixels.mean(), rel=1e-9)
    assert result.columns[name].deviation == pytest.approx(pixels.std(), rel=1e-9)
    counts = np.bincount(task.train.labels.numpy(), minlength=10)
    assert list(result.columns["target"].categories.values()) == counts.tolist()


def test_the_command_shows_a_table_and_writes_all_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(
        'algorithm = "fedavg"\nrounds = 1\n[data]\nname = "wine"\nclients = 3\n'
    )
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    assert (
        main(
            [
                "statistics",
                str(tmp_path / "job.toml"),
                "--output",
                str(page),
                "--output",
                str(numbers),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "Deviation" in printed
    assert "3 clients" in printed
    columns = json.loads(numbers.read_text())["columns"]
    text = page.read_text()
    assert all(name in text for name in columns)
    assert '<script src="' not in text  # the page is self-contained
    assert {"kind", "mean", "deviation", "bins"} <= columns["target"].keys()
    assert main(["statistics", str(tmp_path / "job.toml"), "--bounds", "age"]) == 2
    assert "--bounds 'age' is not COLUMN=LOW,HIGH, such as age=0,120" in capsys.readouterr().err


def test_figures_without_rows_are_empty() -> None:
    result = collect(asking([frames()[2]]), Survey(smallest=8))
    assert isinstance(result, Statistics)
    assert all(
        math.isnan(column.mean) and math.isnan(column.quantile(0.5))
        for column in result.columns.values()
    )


BOUNDS = {"age": (1e6 - 20, 1e6 + 20), "dose": (0.0, 20.0)}


@pytest.mark.parametrize("filled", range(7))
def test_with_noise_every_client_answers_however_few_rows_it_has(filled: int) -> None:
    few = frames()[1].iloc[:6].copy()
    few.loc[few.index[filled:], ["age", "dose"]] = math.nan
    few["sex"] = [*["f"] * filled, *[None] * (6 - filled)]
    answers: list[tuple[str, list[str]]] = []

    def ask(request: dict[str, Any]) -> dict[int, dict[str, Any]]:
        reply = answer(columns_of(few), request, 5, 0, 0)
        answers.append((request["step"], sorted(reply.get("columns", {}))))
        return {0: reply}

    collect(ask, Survey(epsilon=1.0, bounds=BOUNDS))
    asked = {step: names for step, names in answers if step != "kinds"}
    assert asked["sums"] == ["age", "dose", "sex"]
    assert {*asked.get("squares", []), *asked.get("bins", [])} <= {"age", "dose"}
    assert asked.get("squares", []) == asked.get("bins", [])


def test_noisy_bins_add_noise_to_the_rows_of_each_bin_alone() -> None:
    """A row in one bin changes one number, because noise is added to each bin separately."""
    columns = {"dose": np.array([1.0, 1.0, 15.0])}
    about = {"bounds": [0.0, 20.0], "mean": 5.0, "bins": [0.0, 20.0, 4]}
    request = {"step": "bins", "smallest": 5, "noise": 2.0, "columns": {"dose": about}}
    replies = [answer(columns, request, 5, seed)["columns"]["dose"][0] for seed in range(4000)]
    np.testing.assert_allclose(np.mean(replies, 0), [2, 0, 0, 1], atol=0.15)


@pytest.mark.parametrize("least", [-1e9, 0, 1])
@pytest.mark.parametrize("noise", [0.0, 1.0, 20.0])
def test_a_server_cannot_lower_the_rows_of_a_category_that_a_site_tells(
    least: float, noise: float
) -> None:
    ward = np.array(["a"] * 1000 + ["b"] * 2 + ["c"], object)
    request = {
        "step": "sums", "smallest": 1, "noise": noise, "columns": {"ward": {"least": least}},
    }  # fmt: skip
    for seed in range(200):
        _, told = answer({"ward": ward}, request, 5, seed)["columns"]["ward"]
        assert list(told) == ["a"]


@pytest.mark.parametrize(
    "changes",
    [
        {"noise": 1e-9}, {"noise": 0.5}, {"noise": -1.0}, {"noise": math.nan}, {"noise": math.inf},
        {"noise": None}, {"smallest": 0}, {"smallest": -5}, {"smallest": 1.5}, {"step": "rows"}, {"step": None},
        {"columns": {"dose": {}}}, {"columns": {"dose": {"bounds": [20.0, 0.0]}}}, {"columns": {"dose": 3}},
        {"columns": {"dose": {"bounds": [-math.inf, 0.0]}}}, {"columns": {"other": {"bounds": [0.0, 20.0]}}},
        {"step": "squares"}, {"step": "squares", "columns": {"dose": {"bounds": [0.0, 20.0], "mean": math.nan}}},
        {"step": "bins"}, {"step": "bins", "columns": {"sex": {"bins": [0, 1, 2]}}},
        {"step": "bins", "columns": {"dose": {"bounds": [0.0, 20.0], "bins": [0, 1, 1 << 40]}}},
        {"step": "bins", "columns": {"dose": {"bounds": [0.0, 20.0], "bins": [1, 0, 4]}}},
    ],
)  # fmt: skip
def test_a_site_refuses_requests_that_no_server_sends(changes: dict[str, Any]) -> None:
    sound = {
        "step": "sums", "smallest": 5, "noise": 3.0, "columns": {"dose": {"bounds": [0.0, 20.0]}},
    }  # fmt: skip
    assert answer(columns_of(frames()[1]), sound, 5)["columns"].keys() == {"dose"}
    with pytest.raises((RefusedReply, InvalidValue)):
        answer(columns_of(frames()[1]), {**sound, **changes}, 5)


def test_narrow_bounds_tell_nothing_of_the_few_rows_between_them() -> None:
    columns = {"age": np.array([30.0] * 50 + [91.0])}
    request = {
        "step": "sums", "smallest": 1, "noise": 0.0, "columns": {"age": {"bounds": [90.0, 92.0]}},
    }  # fmt: skip
    assert answer(columns, request, 5) == {"columns": {}}


def told(
    categories: dict[int, dict[str, float]], kinds: Mapping[str, str] | None = None
) -> Statistics:
    """Return the statistics of clients that report these rows for each category of one column."""

    def ask(request: dict[str, Any]) -> dict[int, dict[str, Any]]:
        if request["step"] == "kinds":
            return {client: {"kinds": kinds or {"ward": "categories"}} for client in categories}
        return {
            client: {"columns": {"ward": [[sum(rows.values()), 0], rows]}}
            for client, rows in categories.items()
        }

    return collect(ask, Survey())


@pytest.mark.parametrize("rows", [{"\ud800": 9.0}, {"a" * 100_000: 9.0}, {"a": -9.0}, {"a": 1e300}])
def test_a_client_with_impossible_categories_is_refused_by_its_number(rows: dict[str, Any]) -> None:
    with pytest.raises(RefusedReply, match="client 1 does not answer"):
        told({0: {"a": 9.0}, 1: rows, 2: {"a": 9.0}})
    with pytest.raises(RefusedReply, match="client 0 does not answer"):
        told({0: {"a": 9.0}}, kinds={"\udfff": "categories"})


def test_one_client_adds_a_bounded_number_of_categories() -> None:
    shared = {f"shared {k}": 6.0 for k in range(500)}
    flood = {f"mine {k}": 1e12 + k for k in range(9000)}
    result = told({0: shared | {"own": 5.0}, 1: shared, 2: shared | flood})
    names = result.columns["ward"].categories
    assert {*shared, "own"} < names.keys()
    assert len(names) == 500 + 1 + 100
    assert names["shared 3"] == 18.0
    assert names["mine 8999"] == 1e12 + 8999


def test_names_of_strangers_steer_no_terminal_and_fill_no_page(tmp_path: Path) -> None:
    name, category = "age\x1b[2J\u202e", "x\x1b]0;owned\x07\r\n" + "y" * 900
    result = told({0: {category: 9.0}})
    result = Statistics({name: result.columns["ward"]}, 1)
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(*statistics_tables(result, 100))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    result.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for text in (shown, page.split("<table")[1].split("</table>")[0]):
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)
    assert "y" * 201 not in page
    assert len(page) < 1_500_000
    assert "Most frequent" in page
