"""The notebooks in the documentation run completely and produce the outputs on the page."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
FIGURE = "application/vnd.plotly.v1+json"


ACCURACIES = [0.125, 0.25, 0.5, 0.625, 0.75]

SHORTER = {
    "rounds=30": "rounds=8",
    '"rounds": 40': '"rounds": 10',
    "seeds=range(6)": "seeds=range(4)",
    '"rounds": 20': '"rounds": 2',
    "[0.03, 0.1, 0.3, 1.0, 3.0]": "[0.03, 0.3]",
    "trials=5": "trials=2",
    "samples=2000": "samples=400",
}
"""Arguments in the notebooks, and smaller values that give the same kinds of output."""


def shown(cell: Any) -> list[str]:
    """Return the kinds of output of a cell.

    Progress lines are ignored, because their order and grouping vary.
    """
    return [" ".join(sorted(output["data"])) for output in cell.outputs if "data" in output]


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.fixture
def notebook_with_figure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A notebook that has run, with a figure of fedloom in its only cell."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.delenv("PLOTLY_RENDERER", raising=False)
    source = (
        "from fedloom.report.curves import learning_curves\n"
        "from fedloom.report.summary import RunSummary\n"
        f"records = [{{'round': k, 'accuracy': a}} for k, a in enumerate({ACCURACIES})]\n"
        "learning_curves([RunSummary('fedavg', 0, records)])"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(notebook, timeout=300).execute()
    return notebook


@pytest.mark.filterwarnings("ignore")
def test_a_figure_in_a_notebook_is_also_html_with_its_script(notebook_with_figure: Any) -> None:
    """Check the form that nbconvert keeps; it drops the kind of output that only JupyterLab draws."""
    data = notebook_with_figure.cells[0].outputs[-1]["data"]
    assert FIGURE in data
    assert "Plotly.newPlot(" in data["text/html"]
    assert '<script charset="utf-8" src="https://cdn.plot.ly/plotly-' in data["text/html"]


@pytest.mark.filterwarnings("ignore")
def test_a_figure_survives_the_conversion_of_its_notebook_to_html(
    notebook_with_figure: Any,
) -> None:
    reason = "nbconvert is not installed: the extra dev has it"
    nbconvert = pytest.importorskip("nbconvert", reason=reason)
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook_with_figure)
    assert re.search(r'<script[^>]* src="https://cdn\.plot\.ly/plotly-', page)
    (call,) = re.finditer(r"Plotly\.newPlot\(\s*\"[\w-]+\",\s*", page)
    traces, _ = json.JSONDecoder().raw_decode(page[call.end() :])
    (drawn,) = [trace["y"] for trace in traces if trace.get("y")]
    values = np.frombuffer(base64.b64decode(drawn["bdata"]), drawn["dtype"])
    assert values.tolist() == ACCURACIES


@pytest.mark.parametrize(
    "name",
    ["own_method", "comparison", pytest.param("tuned_mnist", marks=pytest.mark.minutes)],
)
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_runs_and_shows_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PLOTLY_RENDERER", "plotly_mimetype")
    if name == "tuned_mnist" and not (SHARED / "MNIST").is_dir():
        pytest.skip("MNIST is not in ../shared/data")
    monkeypatch.setenv("FEDLOOM_DATA", str(SHARED))
    stored = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            for long, short in SHORTER.items():
                cell.source = cell.source.replace(long, short)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises errors from cells
    cells = [
        (executed, saved)
        for executed, saved in zip(notebook.cells, stored.cells, strict=True)
        if executed.cell_type == "code"
    ]
    for executed, saved in cells:
        assert shown(executed) == shown(saved), executed.source
        if "fl.check" in executed.source:
            text, expected = (
                re.sub(r"client \d+", "client", cell.outputs[-1]["data"]["text/plain"])
                for cell in (executed, saved)
            )
            assert text == expected
        assert ("interrupted\n" in printed(executed)) == ('print("interrupted")' in executed.source)
    assert (
        sum(
            FIGURE in output.get("data", {}) for executed, _ in cells for output in executed.outputs
        )
        == 1
    )


def test_the_tuned_methods_of_the_notebook_had_one_budget() -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = nbformat.read(NOTEBOOKS / "tuned_mnist.ipynb", 4).cells
    (choices,) = [cell for cell in cells if "method_settings" in cell.source]
    table = choices.outputs[0]["data"]["text/html"]
    heads = re.findall(r"<th>([^<]*)</th>", table.partition("</thead>")[0])
    rows = [re.findall(r"<td>([^<]*)</td>", row) for row in table.split("<tr>")[1:]]
    chosen = [dict(zip(heads[1:], row, strict=True)) for row in rows if row]
    assert len(chosen) == 5
    assert {row["Trials"] for row in chosen} == {"5"}
    rates = [float(row["learning_rate"]) for row in chosen]
    assert set(rates) <= {0.03, 0.1, 0.3, 1.0}, "no method chose the highest rate"
    edge = sum(rate == 0.03 for rate in rates)
    assert edge == 3
    assert any("Three methods chose the lowest rate, 0.03" in cell.source for cell in cells)


def test_the_findings_of_the_notebook_are_its_two_mistakes() -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = nbformat.read(NOTEBOOKS / "own_method.ipynb", 4).cells
    checks = [cell for cell in cells if cell.cell_type == "code" and "fl.check" in cell.source]
    texts = [
        "".join(output["data"]["text/plain"] for output in cell.outputs if "data" in output)
        for cell in checks
    ]
    assert "without one row for each of" in texts[0]
    assert "self.velocity changes from round to round" in texts[1]
    assert texts[2] == "Nothing to fix: all ways to run the method gave the same models."
    assert all("notebook cell:" in text for text in texts[:2])
