"""Figures as image files: contents, and a one-line error if an image is impossible."""

from __future__ import annotations

import html
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.common.errors import InvalidValue, MissingExtra
from fedloom.report.contents import image_figures
from fedloom.report.image_files import require_images, save_figures, standalone, write_images
from report_support import CHROMIUM, made_up_run

RUNS = [made_up_run(name, seed) for name in ("fedavg", "fed<b>mr") for seed in (0, 1)]


def test_a_figure_that_stands_alone_says_what_it_shows() -> None:
    slots = {slot.name: slot for slot in image_figures(RUNS)}
    figure = standalone(slots["curve-accuracy"])
    assert figure.layout.title.text.startswith("<b>Test accuracy</b>")
    assert "band ± one standard deviation" in figure.layout.title.text
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "#ffffff"
    assert figure.layout.showlegend
    named = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert named == ["fedavg", "fed&lt;b&gt;mr"]
    assert not standalone(slots["seeds"]).layout.showlegend  # the axis names the methods
    # the figure of the page is unchanged
    assert slots["curve-accuracy"].variants["round"].layout.title.text is None


def test_a_figure_for_a_paper_has_no_caption_of_its_own() -> None:
    (slot,) = [slot for slot in image_figures(RUNS) if slot.name == "curve-accuracy"]
    bare, captioned = standalone(slot, captions=False), standalone(slot)
    assert not bare.layout.title.text
    assert bare.layout.showlegend
    assert (
        bare.layout.height - bare.layout.margin.t
        == captioned.layout.height - captioned.layout.margin.t
    )
    assert bare.layout.margin.t < captioned.layout.margin.t


def test_a_legend_names_the_lines_where_there_are_several() -> None:
    objective = {"kind": "objective", "rounds": [1, 2, 3], "before": [3, 2, 1], "after": [1, 1, 0]}
    recorded = [replace(run, recorded=[objective]) for run in RUNS]
    slots = {slot.name: slot for slot in image_figures(recorded)}
    figure = standalone(slots["objective"])
    methods = ("fedavg", "fed&lt;b&gt;mr")
    assert {trace.name for trace in figure.data if trace.hoverinfo != "skip"} == {
        f"{name}, {when}" for name in methods for when in ("before", "after")
    }
    assert figure.layout.showlegend
    slots_of_one_run = {slot.name: slot for slot in image_figures(recorded[:1])}
    assert standalone(slots_of_one_run["objective"]).layout.showlegend
    assert not standalone(slots_of_one_run["curve-accuracy"]).layout.showlegend


def test_what_is_missing_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        InvalidValue, match=r"^image format 'pgn' is not allowed: did you mean 'png'\?"
    ):
        write_images(tmp_path, RUNS, ["pgn"])
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(
        MissingExtra,
        match=r"^drawing images needs 'kaleido': pip install -e '.\[images\]' in the clone",
    ):
        require_images(["png"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path (Debian's package: chromium)")
def test_png_and_svg_are_drawn_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kaleido", reason="Kaleido is not installed")
    # network requests would fail
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    slot = next(slot for slot in image_figures(RUNS) if slot.name == "seeds")
    figure = standalone(slot)
    png, svg = save_figures(tmp_path / "new", {"seeds": figure}, ["png", "svg", "png"])
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    assert (width, height) == (2 * figure.layout.width, 2 * figure.layout.height)
    text = svg.read_text()
    assert text.startswith("<svg")
    assert "Final accuracy of each seed" in text
    assert "fed<b>mr" in html.unescape(text)  # shown as text
    assert "<b>mr" not in text


@pytest.mark.parametrize("path", ["/bin/false", "/nowhere/chrome"])
def test_a_browser_that_fails_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    pytest.importorskip("kaleido", reason="Kaleido is not installed")
    monkeypatch.setenv("BROWSER_PATH", path)
    slot = next(slot for slot in image_figures(RUNS) if slot.name == "seeds")
    with pytest.raises(
        InvalidValue, match=r"^images cannot be drawn, which takes a Chromium or Chrome: "
    ) as refused:
        save_figures(tmp_path, {"seeds": standalone(slot)})
    assert "\n" not in str(refused.value)
