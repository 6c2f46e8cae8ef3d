"""Figures as image files, drawn offline by a Chromium on this machine (the extra `images`: Kaleido)."""

from __future__ import annotations

import html
import math
import os
import shutil
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from fedloom.config.checks import require_one_of
from fedloom.errors import InvalidValue, MissingExtra
from fedloom.report.contents import image_figures
from fedloom.report.figures import ReportFigure
from fedloom.report.landscapes import COLUMNS
from fedloom.report.sheet import Criterion
from fedloom.report.summary import RunSummary

FORMATS = ("png", "svg", "pdf")
"""Formats that figures can be written in."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
"""Browsers that can draw, in the order in which they are looked for; BROWSER_PATH goes first."""

WIDTH = 1000
"""Of an image, in CSS pixels; PNG files have twice as many pixels."""

INK, SOFT = "#1b2026", "#5b6570"


def write_images(
    folder: Path,
    runs: Sequence[RunSummary],
    formats: Sequence[str] = ("png",),
    by: Criterion | None = None,
    *,
    captions: bool = True,
) -> list[Path]:
    """Write every figure that the runs, judged `by` a criterion (None: the usual one), have data for into `folder`, once in
    each format, with title and caption or without (`captions`); the files, in order.

    A file is named after the figure, such as `curve-accuracy.png` or `landscapes.svg`. Raises `InvalidValue` in
    one line for an unknown format, or when Kaleido or a Chromium is missing or fails.
    """
    require_images(formats)
    return save_figures(folder, {one.name: standalone(one, captions) for one in image_figures(runs, by)}, formats)


def require_images(formats: Sequence[str]) -> None:
    """Raise `InvalidValue` unless images of these formats can be written here."""
    for name in formats:
        require_one_of("image format", name, FORMATS)
    _kaleido()
    browser()


def save_figures(folder: Path, figures: Mapping[str, go.Figure], formats: Sequence[str] = ("png",)) -> list[Path]:
    """Write figures by name into `folder`; the files, figure by figure. Raises `InvalidValue` as `write_images` does."""
    kaleido = _kaleido()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [
        {
            "fig": figure,
            "path": folder / f"{name}.{form}",
            "opts": {"format": form, "scale": 2 if form == "png" else 1},
        }
        for name, figure in figures.items()
        for form in dict.fromkeys(formats)
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from libraries below, about nothing that a user could change
            kaleido.write_fig_from_object_sync(
                wanted, kopts={"path": browser(), "mathjax": False}, cancel_on_error=True
            )
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidValue(f"images cannot be drawn with {browser()}: {reason}") from None
    return [Path(one["path"]) for one in wanted]


def _kaleido() -> Any:
    try:
        import kaleido
    except ImportError:
        raise MissingExtra("kaleido", "images", "drawing images") from None
    return kaleido


def browser() -> str:
    """The browser that draws. Raises `InvalidValue` when there is none."""
    given = os.environ.get("BROWSER_PATH")
    found = shutil.which(given) if given else next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        what = f"BROWSER_PATH={given!r} is no program" if given else "there is none on the path"
        raise InvalidValue(f"images need a Chromium or Chrome, but {what} (Debian's package: chromium)")
    return found


def standalone(one: ReportFigure, captions: bool = True) -> go.Figure:
    """The first variant of a figure on a white background with a legend and, unless not `captions`, its title and caption."""
    figure = go.Figure(next(iter(one.variants.values())))
    width, height = _size(figure)
    heading, lines = _heading(one, width) if captions else ("", 0)
    top = (36 + 19 * lines if captions else 14) + (26 if figure.layout.annotations else 0)
    _show_methods(figure)
    figure.update_layout(
        width=width,
        height=height + top,
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        font_color=INK,
        margin={"l": 16, "r": 20, "t": top, "b": 14},
        title={
            "text": heading, "font": {"size": 14}, "x": 16 / width, "xref": "container", "yref": "container",
            "y": 1 - 18 / (height + top), "yanchor": "top",
        },
        legend={
            "orientation": "v", "x": 1.01, "xref": "paper", "xanchor": "left", "y": 1, "yref": "paper", "yanchor": "top",
        },
    )  # fmt: skip
    return figure


def _size(figure: go.Figure) -> tuple[int, int]:
    """Width and height without the heading: panels of a surface are about square, all else is wide."""
    if not any(trace.type == "contour" for trace in figure.data):
        return WIDTH, int(figure.layout.height)
    panels = sum(1 for trace in figure.data if trace.type == "contour")
    return max(560, 130 + 360 * min(panels, COLUMNS)), 60 + (400 if panels > 1 else 460) * math.ceil(panels / COLUMNS)


def _heading(one: ReportFigure, width: int) -> tuple[str, int]:
    """Title and caption as they stand in the report, one running into the other, and how many lines they take."""
    first, *rest = textwrap.wrap(f"{one.title} {one.caption}", width // 8)
    bold = one.title if first.startswith(one.title) else ""
    soft = [html.escape(line) for line in (first.removeprefix(bold), *rest)]
    lines = [f"<span style='color:{SOFT}'>{line}</span>" for line in soft]
    return (f"<b>{html.escape(bold)}</b>" if bold else "") + "<br>".join(lines), len(lines)


def _show_methods(figure: go.Figure) -> None:
    """A legend that names the methods, where nothing else does: no names along an axis and no bar of colours."""
    coloured = any(trace.type == "contour" or (trace.marker and trace.marker.showscale) for trace in figure.data)
    if coloured or figure.layout.yaxis.type == "category":
        figure.update_layout(showlegend=False)
        return
    shown = {trace.name for trace in figure.data if trace.showlegend is not False and trace.name}
    groups = {trace.legendgroup: trace for trace in figure.data if trace.legendgroup}
    if not shown and len(groups) > 1:
        for name, last in groups.items():
            last.update(showlegend=True, name=html.escape(name))
        shown = set(groups)
    if figure.layout.showlegend is None:
        figure.update_layout(showlegend=len(shown) > 1)
