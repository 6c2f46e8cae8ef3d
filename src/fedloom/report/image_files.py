"""Figures as image files, drawn offline by a Chromium on this machine (the extra `images`: Kaleido)."""

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

from fedloom.config.fields import require_one_of
from fedloom.errors import InvalidValue, MissingExtra
from fedloom.report.contents import image_figures
from fedloom.report.figures import ReportFigure
from fedloom.report.landscapes import COLUMNS
from fedloom.report.sheet import Criterion
from fedloom.report.summary import RunSummary

FORMATS = ("png", "svg", "pdf")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
"""Browsers that can draw, in the order in which they are looked for; BROWSER_PATH goes first."""

WIDTH = 1000  # of an image, in CSS pixels; PNG files have twice as many pixels
INK, SOFT = "#1b2026", "#5b6570"


def write_images(
    folder: Path,
    runs: Sequence[RunSummary],
    formats: Sequence[str] = ("png",),
    by: Criterion | None = None,
    *,
    captions: bool = True,
) -> list[Path]:
    """Write every figure that the runs have data for, judged `by` a criterion; return the files, such as `curve-accuracy.png`.

    Each is written in all `formats` (of `FORMATS`), by default with title and caption in the image. Raises `InvalidValue` for an
    unknown format, or when Kaleido or a Chromium is missing or fails.
    """
    require_images(formats)
    images = {figure.name: standalone(figure, captions) for figure in image_figures(runs, by)}
    return save_figures(folder, images, formats)


def require_images(formats: Sequence[str]) -> None:
    """Raise `InvalidValue` unless images of these formats can be written on this machine."""
    for name in formats:
        require_one_of("image format", name, FORMATS)
    _kaleido()
    browser()


def save_figures(folder: Path, figures: Mapping[str, go.Figure], formats: Sequence[str] = ("png",)) -> list[Path]:
    """Write figures by name into `folder`; return the files, figure by figure. Raises `InvalidValue` as `write_images` does."""
    kaleido = _kaleido()
    folder.mkdir(parents=True, exist_ok=True)
    images = [
        {"fig": figure, "path": folder / f"{name}.{form}", "opts": {"format": form, "scale": 1 + (form == "png")}}
        for name, figure in figures.items()
        for form in dict.fromkeys(formats)
    ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from libraries below, about nothing that a user could change
            options = {"path": browser(), "mathjax": False}
            kaleido.write_fig_from_object_sync(images, kopts=options, cancel_on_error=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidValue(f"images cannot be drawn with {browser()}: {reason}") from None
    return [Path(image["path"]) for image in images]


def _kaleido() -> Any:
    try:
        import kaleido
    except ImportError:
        raise MissingExtra("kaleido", "images", "drawing images") from None
    return kaleido


def browser() -> str:
    """Return the browser that draws. Raises `InvalidValue` when there is none."""
    configured = os.environ.get("BROWSER_PATH")
    if path := next(filter(None, map(shutil.which, [configured] if configured else BROWSERS)), None):
        return path
    problem = f"BROWSER_PATH={configured!r} is no program" if configured else "there is none on the path"
    raise InvalidValue(f"images need a Chromium or Chrome, but {problem} (Debian's package: chromium)")


def standalone(report_figure: ReportFigure, captions: bool = True) -> go.Figure:
    """Return the first variant of a figure on white with a legend and, with `captions`, its title and caption."""
    figure = go.Figure(next(iter(report_figure.variants.values())))
    width, height = _size(figure)
    heading, lines = _heading(report_figure, width) if captions else ("", 0)
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
    """Return width and height without the heading: panels of a surface are about square, all else is wide."""
    panels = sum(trace.type == "contour" for trace in figure.data)
    if not panels:
        return WIDTH, int(figure.layout.height)
    return max(560, 130 + 360 * min(panels, COLUMNS)), 60 + (400 if panels > 1 else 460) * math.ceil(panels / COLUMNS)


def _heading(figure: ReportFigure, width: int) -> tuple[str, int]:
    """Return title and caption as they stand in the report, in running text, and the number of their lines."""
    lines = textwrap.wrap(f"{figure.title} {figure.caption}", width // 8)
    bold = figure.title if lines[0].startswith(figure.title) else ""
    soft = [html.escape(line) for line in (lines[0].removeprefix(bold), *lines[1:])]
    spans = [f"<span style='color:{SOFT}'>{line}</span>" for line in soft]
    return (f"<b>{html.escape(bold)}</b>" if bold else "") + "<br>".join(spans), len(lines)


def _show_methods(figure: go.Figure) -> None:
    """Show a legend of the lines unless names along an axis or a bar of colours do."""
    if any(trace.type == "contour" for trace in figure.data) or figure.layout.yaxis.type == "category":
        figure.update_layout(showlegend=False)
    elif figure.layout.showlegend is None:
        named = {trace.name for trace in figure.data if trace.showlegend is not False and trace.name}
        figure.update_layout(showlegend=len(named) > 1)
