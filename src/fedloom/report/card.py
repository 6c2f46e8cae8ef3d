"""The model card in Markdown: the training data, the training and the figures of a model, without
any sample.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from fedloom.data.columns import TableInputs
from fedloom.data.preprocessing import Preprocessing
from fedloom.report import summary
from fedloom.report.layouts import templates
from fedloom.report.summary import RunSummary


def model_card(
    run: RunSummary, preprocessing: Preprocessing, model: str, task: Mapping[str, Any]
) -> str:
    """Return the card of the model of a finished run.

    Args:
        run: Figures and configuration of the run.
        preprocessing: Inputs and outputs of the model.
        model: Expression of the model.
        task: Contents of the run's `task.json`, with the sizes of the data.

    Returns:
        The text of a Markdown page.
    """
    inputs = preprocessing.inputs
    columns = inputs.columns if isinstance(inputs, TableInputs) else ()
    notices = [notice for timing in run.timings for notice in timing.get("notices", ())]
    return (
        templates()
        .get_template("card.md")
        .render(
            run=run,
            model=model,
            task=task,
            preprocessing=preprocessing,
            outputs=preprocessing.outputs,
            columns=columns,
            notices=dict.fromkeys(notices),
            figures=_figures(run),
            epsilon=summary.epsilon(run),
        )
    )


def _is_evaluated(record: Mapping[str, Any], name: str) -> bool:
    """Return True for a round whose metric was measured at the server or by the clients."""
    return any(record.get(key) is not None for key in (name, f"client_{name}", f"personal_{name}"))


def _figures(run: RunSummary) -> dict[str, str]:
    metric = run.metric
    last: Mapping[str, Any] = next(
        (record for record in reversed(run.records) if _is_evaluated(record, metric.name)), {}
    )
    figures = {name: f"{value:.4g}" for name, value in last.items() if isinstance(value, float)}
    for kind, table in (run.clients[-1] if run.clients else {}).items():
        if kind != "round":
            values = table[metric.name]
            ends = f"{metric.text(min(values))} to {metric.text(max(values))}{metric.unit}"
            text = f"{ends}, median {metric.text(statistics.median(values))}"
            name = f"{kind} {metric.noun}, client by client"
            figures[name] = f"{text} ({len(values)} clients)"
    return figures
