"""The effect of a parameter or a setting: accuracy over each value that differs between the runs
(FedMR, figures 9 to 11).
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fedloom.algorithm.method import algorithms, method_fields
from fedloom.common.errors import FedloomError
from fedloom.common.expression import Call, parse, show
from fedloom.report.figures import DASHES, Style, framed, number_format, share_axis, wrapped
from fedloom.report.sheet import Criterion
from fedloom.report.summary import RunSummary, Spread, dotted

LINES = 8  # of one figure at most
PATTERNS = ("", "/", "x", ".", "-", "|")  # of bars of the same method
GREY = "#7f7f7f"  # of lines that join several methods
NAME = 34  # letters of a line's name on one line, so that a legend fits the screen of a phone

METHOD = "method"  # the feature that names a run's method without its parameters
# prefix of the feature with the last round of a stage, before the method's name
STAGE = "last round of "

# Keys of a configuration that are no settings, or that change nothing that is measured.
_IGNORED = ("algorithm", "seed", "command", "targets", "record", "engine", "name", "directory")


_Trained = tuple[dict[str, Any], RunSummary, float]
"""Settings and parameters of a run by name, the run, and its accuracy."""


@dataclass(frozen=True)
class AblationLine:
    """Spreads over seeds by value, in the order of the values, and the method of the runs with each
    value, if it is one.
    """

    label: str
    spreads: Mapping[Any, Spread]
    methods: Sequence[str | None]

    @property
    def method(self) -> str | None:
        """The method of all these runs, if it is one."""
        return self.methods[0] if len(set(self.methods)) == 1 else None


def ablations(runs: Sequence[RunSummary], by: Criterion) -> dict[str, list[AblationLine]]:
    """Return, by name, the parameters in which runs differ that agree in all else but the seed.

    Configuration keys count, and parameters of methods with their defaults. Beside runs of
    `stages(first:n, method)`, a run of `method` counts as one with 0 rounds of the first stage.

    Args:
        runs: Runs of any methods and settings.
        by: The measure; runs without it are left out.

    Returns:
        For each parameter its lines of figures over the values, one line for each combination of
        the other parameters.
    """
    calls = [_call(run) for run in runs]
    two_staged = [call for call in calls if call.name == "stages" and len(call.positional) == 2]
    staged = {
        str(call.positional[1]): call
        for call in two_staged
        if {*map(type, call.positional)} == {Call}
    }
    trained: list[_Trained] = []
    without_stage: list[_Trained] = []
    for run, call in zip(runs, calls, strict=True):
        if (accuracy := by.of(run)) is None:
            continue
        settings = dotted(
            {key: value for key, value in run.configuration.items() if key not in _IGNORED}
        )
        trained.append((settings | _parameters(call), run, accuracy))
        if like := staged.get(str(call)):
            stage = like.positional[0]
            alias = Call(
                like.name, (Call(stage.name, stage.positional, stage.named, 0), call), like.named
            )
            without_stage.append((settings | _parameters(alias), run, accuracy))
    values: dict[str, set[Any]] = {}
    for features, *_ in trained + without_stage:
        for name, value in features.items():
            values.setdefault(name, set()).add(_key(value))
    varying = [name for name, distinct in values.items() if name != METHOD and len(distinct) > 1]
    lines = {
        name: _lines(name, varying, trained + without_stage * name.startswith(STAGE))
        for name in varying
    }
    return {name: drawn for name, drawn in lines.items() if drawn}


def ablation_figure(
    name: str, lines: Sequence[AblationLine], by: Criterion, looks: Mapping[str, Style]
) -> go.Figure:
    """Draw accuracy over the values, mean over seeds ± one standard deviation.

    At least three numbers are joined by lines; other values are bars.

    Args:
        name: Name of the parameter, the title of the axis.
        lines: Lines of `ablations`; only the first 8 are drawn.
        by: The measure of the figures.
        looks: Styles by method. A line of several methods is grey.

    Returns:
        The figure. Numbers of a wide range are on a logarithmic axis.
    """
    methods, share = [line.method for line in lines], by.metric.share
    by_method = None not in methods and len(set(methods)) == len(methods)
    values = list(dict.fromkeys(value for line in lines for value in line.spreads))
    numeric = len(values) > 2 and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )
    traces: list[go.Scatter | go.Bar] = []
    for k, line in enumerate(lines[:LINES]):
        trace = _trace(
            line, looks, methods[:k].count(line.method), numeric, number_format(share, 2)
        )
        label = line.method if by_method and line.method else line.label
        traces.append(trace.update(name=wrapped(label, NAME), legendgroup=line.method))
    across: dict[str, Any] = {"title": html.escape(name), "type": "category"}
    if numeric:
        wide = min(values) > 0 and max(values) / min(values) >= 20
        across["type"] = "log" if wide else "linear"
        if wide or len(values) <= 8:
            across |= {
                "tickvals": sorted(values),
                "ticktext": [_text(value) for value in sorted(values)],
            }
    legend = (
        sum(10 + 17 * (1 + trace.name.count("<br>")) for trace in traces) if len(traces) > 1 else 0
    )
    return framed(
        traces,
        max(360 + legend, 2 * legend),  # a legend that is taller than the plot would be cut
        xaxis=across,
        yaxis={
            "title": wrapped(by.title),
            **(share_axis(traces, from_zero=not numeric) if share else {}),
            "rangemode": "normal" if numeric else "tozero",
        },
        barmode="group",
        hovermode="closest",
        showlegend=len(traces) > 1,
        legend={
            "orientation": "h",
            "xref": "container",
            "x": 0,
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
        },
    )


def _trace(
    line: AblationLine, looks: Mapping[str, Style], earlier: int, numeric: bool, form: str
) -> go.Scatter | go.Bar:
    """Return a line's points; `earlier` lines of the same method have other dashes or patterns."""
    spreads = list(line.spreads.values())
    colours = [looks[method].colour if method else GREY for method in line.methods]
    error = {
        "array": [spread.std for spread in spreads],
        "visible": any(spread.count > 1 for spread in spreads),
    }
    common: dict[str, Any] = {
        "y": [spread.mean for spread in spreads],
        "error_y": {"type": "data", **error, "thickness": 1.5, "width": 4},
        "customdata": [spread.count for spread in spreads],
        "hovertemplate": f"%{{x}}: %{{y:{form}}}, %{{customdata}} "
        f"seeds<extra>%{{fullData.name}}</extra>",
    }
    if not numeric:
        shade = {"color": colours, "pattern": {"shape": PATTERNS[earlier % len(PATTERNS)]}}
        return go.Bar(x=[wrapped(_text(value)) for value in line.spreads], marker=shade, **common)
    stroke = {
        "color": colours[0] if line.method else GREY,
        "width": 2,
        "dash": DASHES[earlier % len(DASHES)],
    }
    marker = {"size": 9, "color": colours}
    return go.Scatter(
        x=list(line.spreads), mode="lines+markers", line=stroke, marker=marker, **common
    )


def _lines(name: str, varying: Sequence[str], trained: Sequence[_Trained]) -> list[AblationLine]:
    groups: dict[tuple[tuple[str, str], ...], dict[Any, list[_Trained]]] = {}
    fixed = [METHOD, *(feature for feature in varying if feature != name)]
    for run in trained:
        if name in (features := run[0]):
            group = tuple(
                (feature, _text(features[feature])) for feature in fixed if feature in features
            )
            groups.setdefault(group, {}).setdefault(_key(features[name]), []).append(run)
    groups = {group: line for group, line in groups.items() if len(line) > 1}
    shared = set.intersection(*(set(group) for group in groups)) if groups else set()
    if len(groups) == 1:
        shared = {(feature, value) for feature, value in shared if feature != METHOD}
    lines = []
    for group, line in groups.items():
        differing = [(feature, value) for feature, value in group if (feature, value) not in shared]
        label = [
            value if feature == METHOD else f"{feature}={value}" for feature, value in differing
        ]
        values = (
            sorted(line) if all(isinstance(value, int | float) for value in line) else list(line)
        )
        spreads = {value: Spread.of([accuracy for *_, accuracy in line[value]]) for value in values}
        names = [{run.algorithm for _, run, _ in line[value]} for value in values]
        methods = [next(iter(methods)) if len(methods) == 1 else None for methods in names]
        lines.append(
            AblationLine(
                ", ".join(label), {k: spread for k, spread in spreads.items() if spread}, methods
            )
        )
    return lines


def _call(run: RunSummary) -> Call:
    """Return the run's method as its configuration gives it; a name that is no expression stands
    for itself.
    """
    try:
        return parse(str(run.configuration.get("algorithm", run.algorithm)))
    except FedloomError:
        return Call(run.algorithm)


def _parameters(call: Call) -> dict[str, Any]:
    """Return the method without its parameters, and every parameter with its value or its
    default.
    """
    values = (*call.positional, *call.named.values())
    features: dict[str, Any] = {}
    names: list[str] = []
    for inner in [
        value for value in values if isinstance(value, Call) and value.name in algorithms
    ]:
        nested = _parameters(inner)
        names.append(str(nested.pop(METHOD)))
        features |= nested
        if inner.until is not None:
            features[f"{STAGE}{inner.name}"] = inner.until
    if call.name in algorithms:
        entry = algorithms[call.name]
        for name, parameter in entry.parameters.items():
            if name not in method_fields(entry.make) and parameter.default is not parameter.empty:
                value = call.named.get(name, parameter.default)
                features[f"{name} of {call.name}"] = (
                    str(value) if isinstance(value, Call) else value
                )
    return features | {METHOD: f"{call.name}({', '.join(names)})" if names else call.name}


def _key(value: Any) -> Any:
    return value if isinstance(value, int | float | str) or value is None else show(value)


def _text(value: Any) -> str:
    return (
        f"{value:g}"
        if isinstance(value, float)
        else value
        if isinstance(value, str)
        else show(value)
    )
