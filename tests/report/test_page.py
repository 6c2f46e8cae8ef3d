"""The report page as text.

Tests its contents, escaping of user markup and the absence of network requests.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedloom.common.errors import InvalidValue
from fedloom.objectives import ACCURACY
from fedloom.report.figures import plotly_script
from fedloom.report.page import render, write_page
from fedloom.report.sheet import Sheet, difference_cells, reading
from fedloom.report.summary import RunSummary
from report_support import made_up_run

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


class Elements(HTMLParser):
    """Collects element names, their attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.names[-1:] != ["script"] and self.names[-1:] != ["style"]:
            self.text += f" {data}"


def page_of(*runs: RunSummary, title: str = "A comparison") -> str:
    return render(title, runs, (0.5,), "fedloom compare digits.toml").replace(plotly_script([]), "")


def test_the_page_says_what_was_run_and_how_to_repeat_it() -> None:
    text = Elements(page_of(made_up_run("fedavg", 0), made_up_run("fedmr", 0))).text
    for expected in (
        "A comparison",
        "fedloom compare digits.toml",
        "digits",
        "x86_64",
        "fedavg",
        "fedmr",
        "dropped out",
    ):
        assert expected in text


def test_the_embedded_figures_are_json_of_every_kind() -> None:
    page = page_of(*(made_up_run(name, seed) for name in ("fedavg", "fedmr") for seed in (0, 1)))
    match = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL
    )
    assert match is not None
    slots = json.loads(match[1])
    assert set(slots) == {
        "seeds", "curve-accuracy", "curve-loss", "curve-training_loss", "curve-pool_cosine", "labels",
    }  # fmt: skip
    assert set(slots["curve-accuracy"]["variants"]) == {"round", "bytes", "seconds"}
    assert {f'<div id="{name}"' in page for name in slots} == {True}


def test_text_from_users_never_becomes_markup() -> None:
    run = made_up_run(EVIL, 0)
    run.records[0]["faults"] = [{"client": 1, "reason": EVIL}]
    hostile = replace(
        run,
        class_names=[EVIL, "b", "c", "d", "e"],
        configuration={EVIL: EVIL, "data": {"name": EVIL}, "model": EVIL},
        environment={EVIL: [EVIL]},
    )
    quiet = replace(
        run, algorithm="fedavg", records=[record | {"faults": []} for record in run.records]
    )
    page = render(EVIL, [hostile, quiet], (), EVIL).replace(plotly_script([]), "")
    tame = Elements(page_of(made_up_run("fedavg", 0), made_up_run("fedmr", 0)))
    elements = Elements(page)
    assert elements.names.count("script") == tame.names.count("script") == 4
    assert "img" not in elements.names
    assert not any(name.startswith("on") for name, _ in elements.attributes)
    assert elements.text.count(EVIL) >= 8


def test_nothing_is_loaded_from_anywhere() -> None:
    elements = Elements(page_of(made_up_run("fedavg", 0)))
    links = [
        value or ""
        for name, value in elements.attributes
        if name in ("src", "href", "action", "srcset")
    ]
    assert all(link.startswith("data:") for link in links)
    policy = [value or "" for name, value in elements.attributes if name == "content"]
    assert any(value.startswith("default-src 'none'") for value in policy)


def test_runs_that_stopped_early_are_named() -> None:
    short = replace(made_up_run("fedmr", 3, rounds=4), configuration={"rounds": 30})
    page = page_of(made_up_run("fedavg", 0), short)
    assert "Not all runs have all their rounds: fedmr (seed 3: 4 of 30)." in page
    assert "Not all runs" not in page_of(made_up_run("fedavg", 0))


def test_values_that_differ_between_runs_are_all_shown() -> None:
    runs = [
        replace(made_up_run("fedavg", k), configuration={"training": {"rate": rate}})
        for k, rate in enumerate((0.1, 0.2))
    ]
    assert "0.1; 0.2" in Elements(page_of(*runs)).text


def test_targets_and_command_of_the_configuration_stand_in() -> None:
    run = replace(
        made_up_run("fedavg", 0),
        configuration={"targets": [0.25], "command": "fedloom run mine.toml"},
    )
    page = render("One run", [run])
    assert "Rounds to 25\u00a0%" in page
    assert "fedloom run mine.toml" in page


def test_a_run_with_hardly_anything_still_has_a_report(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_page(
        path,
        render("Bare", [RunSummary("fedavg", 0, [{"round": 1, "bytes_down": 1, "bytes_up": 1}])]),
    )
    text = path.read_text(encoding="utf-8")
    assert "<h1>Bare</h1>" in text
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    write_page(path, render("No round yet", [RunSummary("fedavg", 0, [])]))
    assert "No round yet" in path.read_text(encoding="utf-8")


def test_whatever_a_method_records_is_drawn_too() -> None:
    run = made_up_run("fedala", 0, rounds=3)
    for number, record in enumerate(run.records):
        record |= {
            "personal_accuracy": 0.5 + number / 10,
            "<b>step</b>": number / 2,
            "client_loss": 0.1,
        }
    page = page_of(run)
    assert "Personal accuracy" in page
    assert "&lt;b&gt;step&lt;/b&gt;" in page
    assert "<b>step" not in page
    assert '<div id="other-b-step-b"' in page
    assert '<div id="other-client_loss"' in page


def test_the_same_runs_give_the_same_page() -> None:
    runs = [made_up_run("fedavg", 0), made_up_run("fedmr", 0)]
    assert render("Twice", runs) == render("Twice", runs)


def test_a_single_run_shows_at_most_four_figures_first() -> None:
    run = made_up_run("fedmr", 0, rounds=20)
    for record in run.records:
        record |= {"personal_accuracy": 0.5, "pool_progress": record["round"] / 20}
    page = page_of(run)
    folded = re.findall("<details>.*?</details>", page, re.DOTALL)
    names = set(re.findall('<figure>.*?<div id="(.*?)"', page, re.DOTALL))
    hidden = set(re.findall('<figure>.*?<div id="(.*?)"', "".join(folded), re.DOTALL))
    assert names - hidden == {"curve-accuracy", "curve-personal_accuracy", "curve-loss", "labels"}
    assert hidden == {"curve-training_loss", "curve-pool_cosine", "other-pool_progress"}


def test_figures_without_information_are_left_out() -> None:
    names = set(
        re.findall('<figure>.*?<div id="(.*?)"', page_of(made_up_run("fedavg", 0, 2)), re.DOTALL)
    )
    assert names == {"labels"}  # two rounds give lines between two points


def test_a_report_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidValue, match="at least one run"):
        render("Nothing", [])


def labels_of(*runs: RunSummary) -> dict[str, Any]:
    match = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', page_of(*runs), re.DOTALL
    )
    assert match is not None
    slot: dict[str, Any] = json.loads(match[1])["labels"]
    return slot


def test_every_label_distribution_can_be_chosen_also_where_settings_share_a_seed() -> None:
    run, other_clients = (
        made_up_run("fedavg, Dir(0.1)", 0),
        made_up_run("fedavg, Dir(0.5)", 0, clients=7),
    )
    assert list(labels_of(run, other_clients)["variants"]) == [
        "fedavg, Dir(0.1), seed 0",
        "fedavg, Dir(0.5), seed 0",
    ]
    repeated = made_up_run("fedavg, Dir(0.1)", 1)
    assert list(labels_of(run, repeated)["variants"]) == ["seed 0", "seed 1"]
    assert list(labels_of(run, repeated, other_clients)["variants"]) == [
        "fedavg, Dir(0.1), seed 0", "fedavg, Dir(0.1), seed 1", "fedavg, Dir(0.5), seed 0",
    ]  # fmt: skip


def test_a_page_begins_with_the_section_it_is_about() -> None:
    def headings(opening: str) -> list[str]:
        return re.findall(
            "<h2>(.*?)</h2>", render("A figure", [made_up_run("fedavg", 0)], (), opening=opening)
        )

    usual = headings("")
    assert usual[:2] == ["Result", "Learning curves"]
    moved = headings("clients")
    assert moved[0] == "The clients and their data"
    assert [name for name in moved if name != moved[0]] == [
        name for name in usual if name != moved[0]
    ]


def test_the_page_says_what_the_terminal_says_of_differences() -> None:
    runs = [made_up_run(name, seed) for name in ("fedavg", "fedmr", "indep") for seed in range(3)]
    table = Sheet(runs, (0.5,), last=4, against="first", measure="final")
    page = render("Three", runs, sheet=table).replace(plotly_script([]), "")
    text = Elements(page).text
    for cell in (cell for cell in table.table.to_numpy().flat if "±" in cell.text):
        assert cell.text in text
    for difference in table.tests["final"]:
        assert all(cell in text for cell in difference_cells(difference, ACCURACY))
    folded = " ".join(re.findall("<details>(.*?)</details>", page, re.DOTALL))
    for sentence in reading([table]):
        assert sentence in text
        assert sentence in html.unescape(folded)
    assert "mean of the last 4 evaluations" in text
    assert "Differences from fedavg in the accuracy after the last round" in text


def test_names_may_be_broken_but_no_number() -> None:
    page = render("a", [made_up_run("umf(feddc(alpha=0.01), clock=of.mine)", 0)])
    assert "umf(<wbr>feddc(<wbr>alpha=<wbr>0.01), clock=<wbr>of.<wbr>mine)" in page


def test_publishing_the_participants_of_private_rounds_is_warned_of() -> None:
    run = made_up_run("mine", 0, 3)
    warned = render(
        "t",
        [
            replace(
                run, configuration={**run.configuration, "algorithm": "private(fedavg, clip=1.0)"}
            )
        ],
    )
    text = (
        "mine: its epsilon counts on amplification by sampling, which publishing who took "
        "part in which round voids"
    )
    assert text in warned
    for method in ("local_private(fedavg)", "fedavg"):
        assert text not in render(
            "t", [replace(run, configuration={**run.configuration, "algorithm": method})]
        )


def test_pages_hold_the_small_library_unless_a_figure_needs_the_full_one(tmp_path: Path) -> None:
    run = made_up_run("fedavg", 0)
    surface = {
        "kind": "landscape",
        "x": [-1.0, 0.0, 1.0],
        "y": [-1.0, 0.0, 1.0],
        "surface": [[3.0, 2.0, 3.0], [2.0, 1.0, 2.0], [3.0, 2.0, 3.0]],
        "loss": 1.0,
        "samples": 10,
        "data": "test",
        "directions": 0,
    }
    page, large = render("Curves", [run]), render("Surface", [replace(run, recorded=[surface])])
    assert len(page) < 1_500_000 < len(large)
    assert "plotly.js (basic" in page
    assert '"type":"contour"' in large
    assert "plotly.js (basic" not in large
