"""Curves compared with plain NumPy, correctness of thinned lines, and contents of figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.common.errors import InvalidValue
from fedloom.report.curves import curve, learning_curves, thinned
from fedloom.report.figures import (
    COLOURS,
    accuracy_by_seed,
    evenly_spaced,
    label_distribution,
    styles,
    wrapped,
)
from fedloom.report.summary import RunSummary
from report_support import made_up_run

EVIL = "<script>alert(1)</script>"


def curve_of(means: list[float]) -> pd.DataFrame:
    rounds = np.arange(1, len(means) + 1)
    return pd.DataFrame({"x": rounds.astype(float), "mean": means, "std": 0.0}, index=rounds)


def test_a_curve_is_mean_and_sample_deviation_over_seeds() -> None:
    runs = [made_up_run("fedavg", seed, rounds=9) for seed in range(3)]
    line = curve(runs, "loss")
    assert line is not None
    values = np.array([[record["loss"] for record in run.records] for run in runs])
    np.testing.assert_allclose(line["mean"], values.mean(0))
    np.testing.assert_allclose(line["std"], values.std(0, ddof=1))
    assert line.index.tolist() == list(range(1, 10))


def test_axes_are_what_was_spent_until_the_end_of_the_round() -> None:
    run = made_up_run("fedavg", 0, rounds=6)
    by_bytes, by_seconds = curve([run], x="bytes"), curve([run], x="seconds")
    assert by_bytes is not None
    assert by_seconds is not None
    assert by_bytes["x"].tolist() == [1900 * number for number in range(1, 7)]
    assert by_seconds["x"].tolist() == [0.5 * number for number in range(1, 7)]
    with pytest.raises(InvalidValue, match="x 'byte' is not allowed: did you mean 'bytes'"):
        curve([run], x="byte")


def test_rounds_that_were_not_evaluated_still_cost_bytes() -> None:
    run = made_up_run("fedavg", 0, rounds=6)
    records = [
        {
            name: value
            for name, value in record.items()
            if name != "accuracy" or record["round"] % 3 == 0
        }
        for record in run.records
    ]
    line = curve([replace(run, records=records)], x="bytes")
    assert line is not None
    assert line.index.tolist() == [3, 6]
    assert line["x"].tolist() == [5700, 11400]


def test_a_run_that_stopped_early_ends_the_mean_instead_of_bending_it() -> None:
    complete, short = made_up_run("fedavg", 0, rounds=10), made_up_run("fedavg", 1, rounds=4)
    line = curve([complete, short])
    assert line is not None
    assert line.index.tolist() == [1, 2, 3, 4]


def test_values_that_are_not_finite_and_measures_not_recorded_are_not_drawn() -> None:
    run = made_up_run("fedavg", 0, rounds=4)
    run.records[1]["loss"] = float("inf")
    run.records[2]["loss"] = float("nan")
    line = curve([run], "loss")
    assert line is not None
    assert line.index.tolist() == [1, 4]
    assert curve([run], "nothing") is None
    assert curve([replace(run, timings=[])], x="seconds") is None


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=600), st.integers(2, 60))
def test_thinning_keeps_measured_points_extremes_and_ends(means: list[float], points: int) -> None:
    complete = curve_of(means)
    thin = thinned(complete, points)
    assert len(thin) <= points + 2
    assert set(thin["mean"].items()) <= set(complete["mean"].items())
    assert thin["mean"].max() == max(means)
    assert thin["mean"].min() == min(means)
    assert (thin.index[0], thin.index[-1]) == (1, len(means))
    assert (np.diff(thin.index) > 0).all()


def test_learning_curves_draw_a_line_and_a_band_a_method_in_its_colour() -> None:
    runs = [made_up_run(name, seed, rounds=8) for name in ("a", "b") for seed in (0, 1)]
    figure = learning_curves(runs)
    assert [trace.legendgroup for trace in figure.data] == ["a", "a", "b", "b"]
    band, line = figure.data[:2]
    assert line.line.color == styles(runs)["a"].colour == COLOURS[0]
    mean_curve = curve(runs[:2])
    assert mean_curve is not None
    np.testing.assert_allclose(line.y, mean_curve["mean"], rtol=1e-6)
    np.testing.assert_allclose(
        band.y,
        [
            *(mean_curve["mean"] + mean_curve["std"]),
            *(mean_curve["mean"] - mean_curve["std"])[::-1],
        ],
        rtol=1e-6,
    )
    assert len(learning_curves(runs[:1]).data) == 1  # one seed has no band


def test_bytes_along_an_axis_are_in_the_unit_that_its_title_names() -> None:
    runs = [made_up_run("a", 0, rounds=10)]
    figure, bytes_curve = learning_curves(runs, x="bytes"), curve(runs, x="bytes")
    assert bytes_curve is not None
    assert figure.layout.xaxis.title.text == "Sent, down and up, kB"
    np.testing.assert_allclose(figure.data[0].x, bytes_curve["x"] / 1000, rtol=1e-6)


def test_a_method_that_did_not_record_a_measure_is_left_out_and_others_keep_their_colour() -> None:
    plain, pool = made_up_run("fedavg", 0), made_up_run("fedmr", 0)
    for record in plain.records:
        del record["pool_cosine"]
    figure = learning_curves([plain, pool], "pool_cosine")
    assert [trace.legendgroup for trace in figure.data] == ["fedmr"]
    assert figure.data[0].line.color == COLOURS[1]


def test_styles_differ_for_up_to_forty_methods() -> None:
    line_styles = styles([RunSummary(f"method{k}", 0, []) for k in range(40)])
    assert len(set(line_styles.values())) == 40


def test_long_runs_are_drawn_with_few_points() -> None:
    figure = learning_curves([made_up_run("fedavg", 0, rounds=1000)], points=100)
    assert 50 < len(figure.data[0].x) <= 102


def test_bubbles_have_the_area_of_their_samples() -> None:
    counts = [[4, 0, 16], [0, 9, 0]]
    figure = label_distribution(counts, ["cat", "dog", EVIL])
    bubbles = figure.data[0]
    drawn = {
        (x, y): int(size)
        for x, y, size in zip(bubbles.x, bubbles.y, bubbles.marker.size, strict=True)
    }
    evil = "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert drawn == {("0", "cat"): 4, ("0", evil): 16, ("1", "dog"): 9}
    assert bubbles.marker.sizemode == "area"
    assert list(figure.layout.yaxis.categoryarray) == ["cat", "dog", evil]


def test_many_clients_are_drawn_evenly_spaced() -> None:
    shown = evenly_spaced(1000, 60)
    assert len(shown) == 60
    assert (shown[0], shown[-1]) == (0, 999)
    gaps = set(np.diff(shown).tolist())
    assert max(gaps) - min(gaps) <= 1
    assert evenly_spaced(3) == [0, 1, 2]
    assert set(label_distribution([[1]] * 1000).data[0].x) == set(map(str, shown))


def test_each_seed_is_a_dot_and_their_mean_a_bar() -> None:
    runs = [made_up_run("a", seed) for seed in (3, 5)]
    mean, dots = accuracy_by_seed(runs).data
    expected = [run.records[-1]["accuracy"] for run in runs]
    assert list(dots.x) == expected
    assert list(dots.customdata) == [3, 5]
    assert mean.x[0] == pytest.approx(sum(expected) / 2)


def test_names_from_users_are_escaped_in_every_figure() -> None:
    runs = [made_up_run(EVIL, seed) for seed in (0, 1)]
    for figure in (learning_curves(runs), accuracy_by_seed(runs)):
        for trace in figure.data:
            assert "<script" not in trace.name
            labels = (
                [] if trace.y is None else [label for label in trace.y if isinstance(label, str)]
            )
            assert not any("<script" in label for label in labels)


def test_long_names_are_wrapped_at_commas() -> None:
    assert wrapped("stages(fedavg:100, fedmr)", 20) == "stages(fedavg:100,<br>fedmr)"
    assert (
        wrapped("fedmr, data.partition=dirichlet(0.1)")
        == "fedmr, data.partition=<br>dirichlet(0.1)"
    )
    assert (
        wrapped("plugins.of_my_own_house.named=a_method_with_words")
        == "plugins.<br>of_my_own_house.named=<br>a_method_with_words"
    )
    assert wrapped("fedavg") == "fedavg"


def test_an_axis_of_shares_stays_with_what_a_share_can_be() -> None:
    run = replace(
        made_up_run("fedavg", 0),
        records=[{"round": k, "accuracy": 0.07, "loss": 2.0} for k in (1, 2)],
    )
    allowed = learning_curves([run], "accuracy").layout.yaxis.autorangeoptions
    assert 0.05 <= allowed.clipmin < 0.07 < allowed.clipmax <= 0.09
    wide = replace(run, records=[{"round": k, "accuracy": float(k)} for k in (0, 1)])
    allowed = learning_curves([wide], "accuracy").layout.yaxis.autorangeoptions
    assert (allowed.clipmin, allowed.clipmax) == (-0.02, 1.02)
    assert learning_curves([run], "loss").layout.yaxis.autorangeoptions.clipmin is None
