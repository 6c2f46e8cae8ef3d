"""The model card in Markdown: the training data, the training and the figures of a model, without
any sample.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from fedloom.common.errors import printable, shortened
from fedloom.data.columns import TableInputs
from fedloom.data.preprocessing import Preprocessing
from fedloom.report import summary as figures
from fedloom.report.summary import RunSummary

_LISTED = 50  # categories and classes, at most


def model_card(
    run: RunSummary, preprocessing: Preprocessing, model: str, task: Mapping[str, Any]
) -> str:
    """Return the card of the model of a finished run; `task` has the sizes in its `task.json`."""
    epsilon = figures.epsilon(run)
    sections = {
        "Data": _data(run, preprocessing, task),
        "Training": [
            f"method `{run.algorithm}`, seed {run.seed}, {len(run.records)} rounds; "
            f"{task['parameters']:,} parameters",
            ", ".join(
                f"{key} {value}" for key, value in run.configuration["training"].items() if value
            ),
            *dict.fromkeys(
                notice for timing in run.timings for notice in timing.get("notices", ())
            ),
        ],
        "Figures": _figures(run),
        "Privacy": [
            "no differential privacy was asked for"
            if epsilon is None
            else f"epsilon spent: {epsilon:.3g}"
        ],
        "Versions": [
            f"{key} {run.environment[key]}"
            for key in ("fedloom", "python", "torch")
            if key in run.environment
        ],
    }
    text = [
        f"## {title}\n\n" + "".join(f"- {printable(line)}\n" for line in lines)
        for title, lines in sections.items()
    ]
    return "\n".join([f"# {_code(model)} trained by {_code(run.algorithm)}\n", *text])


def _data(run: RunSummary, preprocessing: Preprocessing, task: Mapping[str, Any]) -> list[str]:
    inputs, outputs = preprocessing.inputs, preprocessing.outputs
    size = f"{task['train_samples']:,} samples to train on, {task['test_samples']:,} to test on"
    described = {
        column.name: "numbers" if column.categories is None else _listed(column.categories)
        for column in (inputs.columns if isinstance(inputs, TableInputs) else ())
    } or {inputs.kind: f"of shape {list(preprocessing.shape)}"}
    return [
        f"{_code(run.configuration['data']['name'])}: {size}; none of them is in the model's files",
        *(f"input {_code(name)}: {text}" for name, text in described.items()),
        f"output {_code(outputs.name or outputs.answer)}: "
        f"{_listed(outputs.classes) or f'a {outputs.answer}'}",
    ]


def _figures(run: RunSummary) -> list[str]:
    last: Mapping[str, Any] = next(
        (record for record in reversed(run.records) if run.metric.name in record), {}
    )
    lines = [f"{name}: {value:.4g}" for name, value in last.items() if isinstance(value, float)]
    for kind, table in (run.clients[-1] if run.clients else {}).items():
        if kind != "round":
            values = table[run.metric.name]
            low, middle, high = map(
                run.metric.text, (min(values), statistics.median(values), max(values))
            )
            spread = f"{low} to {high}{run.metric.unit}, median {middle}"
            lines.append(
                f"{kind} {run.metric.noun}, client by client: {spread} ({len(values)} clients)"
            )
    return lines


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(_code, names[:_LISTED])) + (", ..." if len(names) > _LISTED else "")


def _code(text: str) -> str:
    """Return a name as code in Markdown; it may be a stranger's."""
    name = shortened(text).replace("`", "'")
    return f"`{name}`"
