"""The report page in headless Chromium, at desktop and phone width and in print."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.report.ablation import LINES
from fedloom.report.page import render, write_page
from fedloom.report.summary import RunSummary
from fedloom.survey.column_statistics import ColumnStatistics, Statistics
from report_support import CHROMIUM, Browser, made_up_run

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on the path (Debian's package: chromium)"
)

METHODS = ("fedavg", "fedmr", "stages(fedavg:10, fedmr)", "<script>window.broken=1</script>")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    runs = [made_up_run(name, seed) for name in METHODS for seed in (0, 1)]
    write_page(path, render("Four methods", runs, (0.5, 0.8, 0.99, "loss <= 0.9")))
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


def visible(browser: Browser, slot: str) -> set[str]:
    """Return the methods that a figure shows."""
    return set(
        browser.run(
            f"document.getElementById('{slot}').data.filter(t => t.visible !== false).map(t => "
            "t.legendgroup)"
        )
    )


def press(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector({selector!r}).click()")


@pytest.mark.parametrize(
    ("width", "phone", "dark"), [(1280, False, False), (1280, False, True), (390, True, False)]
)
def test_it_loads_without_a_complaint_or_a_request(
    browser: Browser, page: Path, width: int, phone: bool, dark: bool
) -> None:
    browser.open(page, width, dark=dark, phone=phone)
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert browser.run("document.querySelectorAll('.js-plotly-plot .main-svg').length") >= 6
    # no content exceeds the width of the page
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert (
        browser.run(
            "[...document.querySelectorAll('.tile')].filter(e => e.scrollWidth > "
            "e.clientWidth).length"
        )
        == 0
    )
    assert (
        browser.run(
            "[...document.querySelectorAll('.compare')].filter(e => e.scrollWidth > "
            "e.parentElement.clientWidth).length"
        )
        == 0
    )
    assert browser.run("window.broken") is None
    ground = browser.run("getComputedStyle(document.documentElement).backgroundColor")
    assert (ground == "rgb(18, 21, 26)") is dark


@pytest.mark.parametrize(("width", "phone"), [(1280, False), (390, True)])
def test_legends_are_read_to_their_ends(
    browser: Browser, tmp_path: Path, width: int, phone: bool
) -> None:
    path = tmp_path / "ablation.html"
    write_page(
        path,
        render("Ablation", [run for share in (0.1, 0.5, 0.9) for run in told_apart(share)], ()),
    )
    browser.open(path, width, phone=phone)
    assert browser.errors == []
    box = (
        "(e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; })"
    )
    figure = "document.getElementById('ablation-participation')"
    left, top, right, bottom = browser.run(f"{box}({figure})")
    names = browser.run(f"[...{figure}.querySelectorAll('.legendtext')].map({box})")
    assert len(names) == LINES
    for name in names:
        assert left <= name[0] < name[2] <= right
        assert top <= name[1] < name[3] <= bottom
    scrollbars = browser.run(f"[...{figure}.querySelectorAll('.legend .scrollbar')].map({box})")
    assert all(x == beyond for x, _, beyond, _ in scrollbars)  # no legend needs to scroll
    lowest = max(
        browser.run(f"[...{figure}.querySelectorAll('.xtick text, .xtitle')].map({box})"),
        key=lambda r: r[3],
    )
    assert all(name[1] >= lowest[3] for name in names)  # below the axis
    assert browser.run(f"{figure}._fullLayout.yaxis._length") > 200
    cut = (
        "[...document.querySelectorAll('.chip span')].filter(e => e.scrollWidth > "
        "e.clientWidth).length"
    )
    # on a phone, without a mouse, the chip shows the complete name
    assert browser.run(cut) == 0 or not phone


def told_apart(share: float) -> list[RunSummary]:
    """Return runs with long names and the maximum number of lines of a parameter figure."""
    runs = []
    for number in range(LINES // len(METHODS)):
        for method in (*METHODS[:3], "fedmr(unit=segment, fraction=0.5)"):
            run = made_up_run(method, 0)
            changes = {
                "algorithm": method,
                "participation": share,
                "training": {"learning_rate": 0.125 / 2**number},
            }
            name = f"{method}, participation={share}, training.learning_rate={0.125 / 2**number}"
            runs.append(replace(run, algorithm=name, configuration=run.configuration | changes))
    return runs


def test_every_figure_draws_its_traces(browser: Browser, page: Path) -> None:
    browser.open(page)
    lines = "document.querySelectorAll('#curve-accuracy .scatterlayer .js-line').length"
    assert browser.run(lines) == 2 * len(METHODS)  # one line and one band per method
    assert browser.run("document.querySelectorAll('#labels .points path').length") > 20
    # two seeds and a mean
    assert browser.run("document.querySelectorAll('#seeds .points path').length") == 3 * len(
        METHODS
    )
    names = browser.run(
        "[...document.querySelectorAll('#seeds .ytick text')].map(t => t.textContent).join('|')"
    )
    assert "<script>" in names  # shown as text


def test_columns_sort_both_ways_and_what_is_missing_stays_last(
    browser: Browser, page: Path
) -> None:
    browser.open(page)
    column = browser.run(
        "[...document.querySelector('.compare').rows[0].cells].findIndex(h => "
        "h.textContent.startsWith('Final accuracy'))"
    )
    cells = (
        "[...document.querySelector('.compare').tBodies[0].rows].map(r => "
        f"Number(r.cells[{column}].dataset.value))"
    )
    button = f".compare th:nth-child({column + 1}) button"
    press(browser, button)
    values = browser.run(cells)
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(METHODS)
    press(browser, button)
    assert browser.run(cells) == sorted(values)
    state = (
        f"document.querySelector('.compare th:nth-child({column + 1})').getAttribute('aria-sort')"
    )
    assert browser.run(state) == "ascending"
    press(browser, ".compare th:first-child button")
    names = browser.run(
        "[...document.querySelector('.compare').tBodies[0].rows].map(r => r.dataset.method)"
    )
    assert sorted(names) == sorted(METHODS)
    assert names[1:] == ["fedavg", "fedmr", "stages(fedavg:10, fedmr)"]


def test_a_folded_figure_is_drawn_when_its_section_opens(browser: Browser, page: Path) -> None:
    browser.open(page)
    drawn = "document.getElementById('curve-pool_cosine').querySelectorAll('.js-line').length"
    assert browser.run(drawn) == 0
    unfold(browser)
    assert browser.run(drawn) == 2 * len(METHODS)
    width = "document.getElementById('{}').clientWidth"
    assert browser.run(width.format("curve-pool_cosine")) > 400
    assert browser.errors == []


def unfold(browser: Browser) -> None:
    """Open all folded sections and wait until their figures are drawn."""
    browser.run(
        "new Promise(done => { document.querySelectorAll('details').forEach(d => d.open = true); "
        "setTimeout(done, 500); })"
    )


def test_a_method_that_is_switched_off_is_off_everywhere(browser: Browser, page: Path) -> None:
    browser.open(page)
    unfold(browser)
    slots = ("seeds", "curve-accuracy", "curve-loss", "curve-training_loss", "curve-pool_cosine")
    assert all(visible(browser, slot) == set(METHODS) for slot in slots)
    press(browser, '.chip[data-method="fedmr"]')
    assert all(visible(browser, slot) == set(METHODS) - {"fedmr"} for slot in slots)
    # in the tables of accuracies and costs
    assert browser.run("document.querySelectorAll('.compare tr.off').length") == 2
    assert (
        browser.run(
            "document.querySelector('.chip[data-method=\"fedmr\"]').getAttribute('aria-pressed')"
        )
        == "false"
    )
    press(browser, '.choice button[data-value="bytes"]')
    assert visible(browser, "curve-loss") == set(METHODS) - {"fedmr"}  # also with another axis
    press(browser, '.chip[data-method="fedmr"]')
    assert all(visible(browser, slot) == set(METHODS) for slot in slots)
    browser.run(
        "document.querySelector('.chip[data-method=\"fedavg\"]').dispatchEvent(new "
        "MouseEvent('dblclick', {bubbles: true}))"
    )
    assert all(visible(browser, slot) == {"fedavg"} for slot in slots)
    assert visible(browser, "labels") == {None}
    assert browser.errors == []


def test_curves_can_be_seen_over_bytes_and_seconds(browser: Browser, page: Path) -> None:
    browser.open(page)
    title = "document.getElementById('curve-accuracy').layout.xaxis.title.text"
    end = "Math.max(...document.getElementById('curve-accuracy')._fullData.at(-1).x)"
    assert (browser.run(title), browser.run(end)) == ("Round", 30)
    press(browser, '.choice button[data-value="bytes"]')
    assert browser.run(end) == 57  # kB
    press(browser, '.choice button[data-value="seconds"]')
    assert (browser.run(title), browser.run(end)) == ("Seconds", 15)


def test_the_label_distribution_of_another_seed_can_be_chosen(browser: Browser, page: Path) -> None:
    browser.open(page)
    drawn = "document.getElementById('labels')._fullData[0].marker.size.join()"
    original = browser.run(drawn)
    press(browser, '.choice button[data-choice="labels"]:nth-of-type(2)')
    assert browser.run(drawn) != original


@pytest.mark.parametrize(("width", "phone"), [(1280, False), (390, True)])
def test_statistics_are_small_multiples_of_one_size(
    browser: Browser, tmp_path: Path, width: int, phone: bool
) -> None:
    columns = {
        "age": ColumnStatistics("numbers", 60, bins=(0, 10, 40, 10, 0), edges=(0.0, 100.0)),
        "sex": ColumnStatistics("categories", 60, categories={"f": 40, "m": 20}),
        "ward": ColumnStatistics(
            "categories", 60, categories={f"ward {k}": 9 - k for k in range(9)}
        ),
        "<b>cost": ColumnStatistics("numbers", 9e6, bins=(4e6, 5e6), edges=(0.0, 1e6)),
    }
    path = tmp_path / "statistics.html"
    Statistics(columns, 3).save(path)
    browser.open(path, width, phone=phone)
    assert browser.errors == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    sizes = browser.run(
        "[...document.querySelectorAll('.js-plotly-plot')].map(e => e._fullLayout._size)"
        ".map(s => `${s.w} x ${s.h}`)"
    )
    assert len(sizes) == len(columns)
    assert len(set(sizes)) == 1
    bars = browser.run(
        "['column-1', 'column-2'].map(name => document.querySelector(`#${name} .point path`)"
        ".getBBox().width)"
    )
    assert bars[0] == pytest.approx(bars[1], abs=1)
    table = "document.querySelector('table').getBoundingClientRect().width"
    assert phone or browser.run(table) <= width  # the categories are visible without scrolling


def test_it_prints_in_light_colours_with_all_figures(browser: Browser, page: Path) -> None:
    browser.open(page, dark=True)
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert (
        browser.run("getComputedStyle(document.documentElement).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    browser.call("Emulation.setEmulatedMedia", media="")


def test_twenty_runs_of_a_thousand_rounds_stay_light_and_are_drawn(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "large.html"
    write_page(
        path,
        render(
            "Large", [made_up_run(f"method{k}", 0, 1000, 100, 10) for k in range(20)], (0.5, 0.8)
        ),
    )
    assert path.stat().st_size < 8_000_000
    browser.open(path)
    assert browser.errors == []
    assert (
        browser.run("document.querySelectorAll('#curve-accuracy .scatterlayer .js-line').length")
        >= 20
    )
