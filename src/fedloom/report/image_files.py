"""Figures as image files, drawn offline by a Chromium on this machine (the extra `images`:
Kaleido).
"""

import html
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from fedloom.common.errors import InvalidValue, import_extra
from fedloom.common.fields import require_one_of
from fedloom.report.contents import image_figures
from fedloom.report.figures import ReportFigure
from fedloom.report.sheet import Criterion
from fedloom.report.summary import RunSummary

FORMATS = ("png", "svg", "pdf")
WIDTH = 1000  # of an image, in CSS pixels; PNG files have two pixels for each


def write_images(
    folder: Path,
    runs: Sequence[RunSummary],
    formats: Sequence[str] = ("png",),
    by: Criterion | None = None,
    *,
    captions: bool = True,
) -> list[Path]:
    """Write every figure that the runs have data for in all `formats`.

    Args:
        folder: Folder of the images. It is made if it is missing.
        runs: Runs of one task.
        formats: Endings such as `png`, `svg` or `pdf`.
        by: As in `image_figures`.
        captions: Draw the title and the caption above each figure.

    Returns:
        The files, such as `curve-accuracy.png`, figure by figure.
    """
    require_images(formats)
    images = {figure.name: standalone(figure, captions) for figure in image_figures(runs, by)}
    return save_figures(folder, images, formats)


def require_images(formats: Sequence[str]) -> None:
    """Raise `InvalidValue` unless images of these formats can be written on this machine."""
    for name in formats:
        require_one_of("image format", name, FORMATS)
    _kaleido()


def save_figures(
    folder: Path, figures: Mapping[str, go.Figure], formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Write figures by name into `folder`.

    Args:
        folder: Folder of the images. It is made if it is missing.
        figures: Figures by the name of their file, without an ending.
        formats: Endings such as `png`. A png has twice the figure's pixels.

    Returns:
        The files, figure by figure.

    Raises:
        InvalidValue: The images cannot be drawn, for example without a browser.
    """
    kaleido = _kaleido()
    folder.mkdir(parents=True, exist_ok=True)
    images = [
        {
            "fig": figure,
            "path": folder / f"{name}.{form}",
            "opts": {"format": form, "scale": 1 + (form == "png")},
        }
        for name, figure in figures.items()
        for form in dict.fromkeys(formats)
    ]
    try:
        with warnings.catch_warnings():
            # from libraries below, about nothing that a user could change
            warnings.simplefilter("ignore")
            kaleido.write_fig_from_object_sync(
                images, kopts={"mathjax": False}, cancel_on_error=True
            )
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidValue(
            f"images cannot be drawn, which takes a Chromium or Chrome: {reason}"
        ) from None
    return [Path(image["path"]) for image in images]


def _kaleido() -> Any:
    return import_extra("kaleido", "images", "drawing images")


def standalone(report_figure: ReportFigure, captions: bool = True) -> go.Figure:
    """Return the first variant of a figure on white with a legend.

    Args:
        report_figure: A figure of the report. It stays unchanged.
        captions: Draw its title and its caption above it.

    Returns:
        A new figure.
    """
    figure = go.Figure(next(iter(report_figure.variants.values())))
    surface = any(trace.type == "contour" for trace in figure.data)
    width = 560 if surface else WIDTH
    lines = textwrap.wrap(report_figure.caption, width // 8) if captions else []
    heading = f"<b>{html.escape(report_figure.title)}</b><br>{'<br>'.join(map(html.escape, lines))}"
    top = 55 + 19 * len(lines) if captions else 14
    # colours and names along an axis replace a legend
    if surface or figure.layout.yaxis.type == "category":
        figure.update_layout(showlegend=False)
    elif figure.layout.showlegend is None:
        named = {
            trace.name for trace in figure.data if trace.showlegend is not False and trace.name
        }
        figure.update_layout(showlegend=len(named) > 1)
    figure.update_layout(
        width=width,
        height=figure.layout.height + top,
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        font_color="#1b2026",
        margin={"l": 16, "r": 20, "t": top, "b": 14},
        title={
            "text": heading if captions else "",
            "font": {"size": 14},
            "x": 0,
            "y": 1,
            "pad": {"l": 16, "t": 18},
        },
        title_xref="container",
        title_yanchor="top",
        legend={
            "orientation": "v",
            "x": 1.01,
            "xref": "paper",
            "xanchor": "left",
            "y": 1,
            "yref": "paper",
            "yanchor": "top",
        },
    )
    return figure
