"""Effects of parameters and settings: the selection of comparable runs and their figures."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from fedloom.report.ablation import ablation_figure, ablations
from fedloom.report.contents import effect_figures, image_figures
from fedloom.report.figures import styles
from fedloom.report.page import render
from fedloom.report.sheet import Sheet, criterion
from fedloom.report.summary import RunSummary
from report_support import ablations_drawn


def run(algorithm: str, accuracy: float, seed: int = 0, **settings: Any) -> RunSummary:
    records = [{"round": 1, "accuracy": 0.99}, {"round": 2, "accuracy": accuracy}]
    configuration = {"algorithm": algorithm, "seed": seed, "rounds": 2, **settings}
    return RunSummary(algorithm, seed, records, configuration=configuration)


def table(runs: list[RunSummary], measure: str = "final") -> dict[str, dict[str, dict[Any, float]]]:
    return {
        name: {
            line.label: {value: spread.mean for value, spread in line.spreads.items()}
            for line in lines
        }
        for name, lines in ablations(runs, criterion(measure)).items()
    }


def test_a_setting_is_a_line_a_method_over_its_values() -> None:
    accuracy = {
        ("fedavg", 0.5): (0.5, 0.7),
        ("fedavg", 0.1): (0.2, 0.4),
        ("fedmr", 0.1): (0.3, 0.3),
        ("fedmr", 0.5): (0.6, 0.8),
        ("fedavg", 0.9): (0.6, 0.6),
        ("fedmr", 0.9): (0.5, 0.9),
    }
    runs = [
        run(method, value, seed, participation=share)
        for (method, share), values in accuracy.items()
        for seed, value in enumerate(values)
    ]  # fmt: skip
    final = criterion("final")
    ((name, lines),) = ablations(runs, final).items()
    assert (name, len(lines)) == ("participation", 2)
    for line in lines:
        for share, spread in line.spreads.items():
            values = accuracy[str(line.method), share]
            assert (spread.mean, spread.std) == pytest.approx(
                (statistics.mean(values), statistics.stdev(values))
            )
    looks = styles(runs)
    for line, trace in zip(lines, ablation_figure(name, lines, final, looks).data, strict=True):
        assert list(trace.x) == [0.1, 0.5, 0.9]
        assert list(trace.y) == [spread.mean for spread in line.spreads.values()]
        assert list(trace.error_y.array) == [spread.std for spread in line.spreads.values()]
        assert (trace.legendgroup, trace.line.color) == (
            line.method,
            looks[str(line.method)].colour,
        )
    assert table(runs, "best") == {
        "participation": {m: {0.1: 0.99, 0.5: 0.99, 0.9: 0.99} for m in ("fedavg", "fedmr")}
    }


def test_two_numbers_are_drawn_as_bars() -> None:
    runs = [run("fedavg", 0.2 + share, participation=share) for share in (0.1, 0.5)]
    final = criterion("final")
    ((name, lines),) = ablations(runs, final).items()
    (bars,) = ablation_figure(name, lines, final, styles(runs)).data
    assert bars.type == "bar"
    assert dict(zip(bars.x, bars.y, strict=True)) == pytest.approx({"0.1": 0.3, "0.5": 0.7})


def test_parameters_of_methods_count_with_their_defaults() -> None:
    runs = [
        run("fedmr(unit='segment', fraction=0.25)", 0.4),
        run("fedmr(unit='segment')", 0.5),
        run("fedmr", 0.6),
        run("fedavg", 0.7),
    ]
    assert table(runs) == {
        "unit of fedmr": {"fedmr": {"segment": 0.5, "layer": 0.6}},
        "fraction of fedmr": {"fedmr": {0.25: 0.4, 1.0: 0.5}},
    }


def test_a_method_stands_for_its_second_stage_from_the_start() -> None:
    runs = [
        run("stages(fedavg:20, fedmr)", 0.5),
        run("fedmr", 0.4),
        run("stages(fedavg:5, fedmr)", 0.7),
        run("fedavg", 0.3),
    ]
    assert table(runs) == {
        "last round of fedavg": {"stages(fedavg, fedmr)": {0: 0.4, 5: 0.7, 20: 0.5}}
    }


def test_two_things_that_differ_are_told_apart() -> None:
    runs = [
        run("fedavg", 0.1 * k, data={"partition": partition}, training={"epochs": epochs})
        for k, (partition, epochs) in enumerate([("iid", 1), ("iid", 5), ("dirichlet(0.1)", 1), ("dirichlet(0.1)", 5)])
    ]  # fmt: skip
    assert table(runs) == {
        "data.partition": {
            "training.epochs=1": {"iid": 0.0, "dirichlet(0.1)": 0.2},
            "training.epochs=5": {"iid": 0.1, "dirichlet(0.1)": pytest.approx(0.3)},
        },
        "training.epochs": {
            "data.partition=iid": {1: 0.0, 5: 0.1},
            "data.partition=dirichlet(0.1)": {1: 0.2, 5: pytest.approx(0.3)},
        },
    }
    final = criterion("final")
    name, lines = next(iter(ablations(runs, final).items()))
    bars = ablation_figure(name, lines, final, styles(runs)).data
    assert [bar.type for bar in bars] == ["bar", "bar"]
    assert list(bars[0].x) == ["iid", "dirichlet(0.1)"]


def test_methods_that_only_differ_in_name_show_nothing() -> None:
    runs = [
        run("fedavg", 0.5),
        run("fedprox", 0.5),
        run("<b>my own</b>", 0.5),
        run("fedavg", 0.6, 1),
    ]
    assert ablations(runs, criterion()) == {}
    assert "Effect of parameters and settings" not in render(
        "Two", [run("fedavg", 0.5), run("fedmr", 0.5)]
    )


def test_the_page_draws_them_and_escapes_their_names() -> None:
    runs = [
        run("fedavg", 0.1 * k, data={"<script>": value})
        for k, value in enumerate(("<i>a</i>", "<i>b</i>"))
    ]
    page = render("Two", runs)
    assert "Effect of parameters and settings" in page
    assert '<div id="ablation-data.-script"' in page
    assert "<i>" not in page


def test_a_figure_shows_and_names_the_measure_that_its_table_goes_by() -> None:
    runs = [
        run("fedavg", value, participation=share)
        for share, value in ((0.1, 0.2), (0.5, 0.6), (0.9, 0.6))
    ]
    for summary in runs:
        summary.records[1:1] = [{"round": 2, "accuracy": 0.4}]
        summary.records[-1] |= {"round": 3, "personal_accuracy": 0.7}
    expected = {
        "final": ([0.2, 0.6, 0.6], "Accuracy after the last<br>round"),
        "best": ([0.99, 0.99, 0.99], "Best accuracy of any<br>evaluation"),
        "last": ([0.3, 0.5, 0.5], "Mean accuracy of the<br>last 2 evaluations"),
        "personal": ([0.7, 0.7, 0.7], "Accuracy of the clients&#x27;<br>own models"),
    }
    for measure, (values, title) in expected.items():
        judged = Sheet(runs, last=2, measure=measure)
        (figure,) = ablations_drawn(render("Shares", runs, sheet=judged))
        assert figure["data"][0]["y"] == pytest.approx(values)
        assert figure["layout"]["yaxis"]["title"]["text"] == title
        (slot,) = effect_figures(runs, judged.criterion)
        assert slot.title == judged.criterion.title
        (image,) = [
            slot
            for slot in image_figures(runs, judged.criterion)
            if slot.name.startswith("ablation")
        ]
        assert list(image.variants[""].data[0].y) == pytest.approx(values)
