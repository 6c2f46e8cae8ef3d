"""What a parameter or a setting does: accuracy over each value that differs between the runs (FedMR, figures 9 to 11)."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fedloom.algorithm import algorithms
from fedloom.config.expression import Call, parse, show
from fedloom.errors import FedloomError
from fedloom.report.figures import COLOURS, SHARES, Style, framed, wrapped
from fedloom.report.sheet import Score
from fedloom.report.summary import RunSummary, Spread

LINES = 8
"""Lines of one figure at most."""

NAME = 34
"""Letters of a line's name beside each other, so that a legend fits the screen of a phone."""

METHOD = "method"
"""The feature that names a run's method without its parameters."""

STAGE = "last round of "
"""How the feature begins that says when a stage ends; the method's name follows."""

_APART = ("algorithm", "seed", "command", "targets", "record", "engine", "name", "directory")
"""Keys of a configuration that are no settings, or that change nothing that is measured."""


@dataclass(frozen=True)
class Line:
    """Spreads over seeds by value, in the order of the values; `method` is the one method whose runs these are, if it is one."""

    label: str
    method: str | None
    spreads: Mapping[Any, Spread]


@dataclass(frozen=True)
class Ablation:
    """Accuracies over the values of one parameter, a line for each combination of all else.

    `name` is the parameter: a configuration key (`data.partition`) or a method's (`fraction of fedmr`); `title` says which
    accuracies these are.
    """

    name: str
    title: str
    lines: Sequence[Line]

    @property
    def values(self) -> list[Any]:
        """All values, in the order of their first line."""
        return list(dict.fromkeys(value for line in self.lines for value in line.spreads))

    @property
    def numeric(self) -> bool:
        """Whether all values are numbers."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


@dataclass(frozen=True)
class _Told:
    """What a run was told, key by key, and how it did; `stands_in` for a first stage of no rounds."""

    features: Mapping[str, Any]
    run: RunSummary
    accuracy: float
    stands_in: bool = False


def ablations(runs: Sequence[RunSummary], by: Score) -> list[Ablation]:
    """All parameters that differ between runs which agree in everything else but the seed.

    Parameters of methods count with their defaults, so that `fedmr(unit=segment)` and `fedmr(unit=segment, fraction=0.5)`
    differ in one; a method beside `stages(first:n, method)` is the stage that begins after 0 rounds. Their accuracy is the score
    that they are judged `by`.
    """
    told = list(_told(runs, by))
    names = dict.fromkeys(name for one in told for name in one.features if name != METHOD)
    varying = [name for name in names if len({_key(one.features[name]) for one in told if name in one.features}) > 1]
    found = [Ablation(name, by.title, _lines(name, varying, told)) for name in varying]
    return [one for one in found if one.lines]


def ablation_figure(ablation: Ablation, looks: Mapping[str, Style]) -> go.Figure:
    """Accuracy over the values, mean over seeds with ± one standard deviation: lines over numbers, else bars.

    `looks` are the methods' styles, kept where each line is a method of its own.
    """
    methods = [line.method for line in ablation.lines]
    own = None not in methods and len(set(methods)) == len(methods)
    traces: list[go.Scatter | go.Bar] = []
    for k, line in enumerate(ablation.lines[:LINES]):
        style = looks[line.method] if own and line.method else Style(COLOURS[k % len(COLOURS)], "solid")
        name = wrapped(line.method if own and line.method else line.label, NAME)
        traces.append(_trace(line, name, style, ablation.numeric, line.method if own else None))
    values = sorted(ablation.values) if ablation.numeric else []
    wide = bool(values) and values[0] > 0 and values[-1] / values[0] >= 20
    kind = "category" if not values else "log" if wide else "linear"
    across: dict[str, Any] = {"title": html.escape(ablation.name), "type": kind}
    if wide or 0 < len(values) <= 8:
        across |= {"tickvals": values, "ticktext": [_text(value) for value in values]}
    legend = sum(10 + 17 * (1 + trace.name.count("<br>")) for trace in traces) if len(traces) > 1 else 0
    return framed(
        traces,
        max(360 + legend, 2 * legend),  # a legend that is taller than the plot would be cut
        xaxis=across,
        yaxis={"title": wrapped(ablation.title), **SHARES, "rangemode": "normal" if values else "tozero"},
        barmode="group",
        hovermode="closest",
        showlegend=len(traces) > 1,
        legend={"orientation": "h", "xref": "container", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom"},
    )


def _trace(line: Line, name: str, style: Style, numeric: bool, group: str | None) -> go.Scatter | go.Bar:
    spreads = list(line.spreads.values())
    error = {"type": "data", "array": [one.std for one in spreads], "visible": any(one.count > 1 for one in spreads)}
    common: dict[str, Any] = {
        "y": [one.mean for one in spreads],
        "error_y": {**error, "thickness": 1.5, "width": 4},
        "name": name,
        "legendgroup": group,
        "customdata": [one.count for one in spreads],
        "hovertemplate": "%{x}: %{y:.2%}, %{customdata} seeds<extra>%{fullData.name}</extra>",
    }
    if not numeric:
        return go.Bar(x=[wrapped(_text(value)) for value in line.spreads], marker={"color": style.colour}, **common)
    stroke = {"color": style.colour, "width": 2, "dash": style.dash}
    return go.Scatter(x=list(line.spreads), mode="lines+markers", line=stroke, marker={"size": 8}, **common)


def _lines(name: str, varying: Sequence[str], told: Sequence[_Told]) -> list[Line]:
    """The lines along `name` that have two values or more; their labels say what tells them apart."""
    groups: dict[tuple[tuple[str, str], ...], dict[Any, list[_Told]]] = {}
    others = [METHOD, *(other for other in varying if other != name)]
    for one in told:
        if name in one.features and (not one.stands_in or name.startswith(STAGE)):
            rest = tuple((other, _text(one.features[other])) for other in others if other in one.features)
            groups.setdefault(rest, {}).setdefault(_key(one.features[name]), []).append(one)
    groups = {rest: line for rest, line in groups.items() if len(line) > 1}
    shared = set.intersection(*(set(rest) for rest in groups)) if groups else set()
    if len(groups) == 1:
        shared = {(key, value) for key, value in shared if key != METHOD}
    lines = []
    for rest, line in groups.items():
        parts = [value if key == METHOD else f"{key}={value}" for key, value in rest if (key, value) not in shared]
        spreads = {
            value: spread for value in _ordered(line) if (spread := Spread.of([o.accuracy for o in line[value]]))
        }
        methods = {one.run.algorithm for members in line.values() for one in members}
        lines.append(Line(", ".join(parts), methods.pop() if len(methods) == 1 else None, spreads))
    return lines


def _told(runs: Sequence[RunSummary], by: Score) -> Iterator[_Told]:
    """Each run that was measured; one that also stands for a first stage of no rounds comes twice."""
    calls = [_call(run) for run in runs]
    staged = {str(call.positional[1]): call for call in calls if _two_staged(call)}
    for run, call in zip(runs, calls, strict=True):
        if (accuracy := by.of(run)) is None:
            continue
        settings = {key: value for key, value in _flat(run.configuration) if key.partition(".")[0] not in _APART}
        yield _Told(settings | _parameters(call), run, accuracy)
        if (like := staged.get(str(call))) is not None:
            first = like.positional[0]
            alias = Call(like.name, (Call(first.name, first.positional, first.named, 0), call), like.named)
            yield _Told(settings | _parameters(alias), run, accuracy, stands_in=True)


def _call(run: RunSummary) -> Call:
    """The run's method as its configuration resolves it; a name that is no expression stands for itself."""
    try:
        return parse(str(run.configuration.get("algorithm", run.algorithm)))
    except FedloomError:
        return Call(run.algorithm)


def _two_staged(call: Call) -> bool:
    return call.name == "stages" and len(call.positional) == 2 and all(isinstance(one, Call) for one in call.positional)


def _parameters(call: Call) -> dict[str, Any]:
    """The method without its parameters, and every parameter with its value, those not given with their defaults."""
    inner = [
        value
        for value in (*call.positional, *call.named.values())
        if isinstance(value, Call) and value.name in algorithms
    ]
    found: dict[str, Any] = {}
    names: list[str] = []
    for one in inner:
        below = _parameters(one)
        names.append(str(below.pop(METHOD)))
        found |= below
        if one.until is not None:
            found[f"{STAGE}{one.name}"] = one.until
    if call.name in algorithms:
        entry = algorithms[call.name]
        wraps = entry.make.wraps
        for name, parameter in entry.parameters.items():
            if name not in wraps and parameter.default is not parameter.empty:
                found[f"{name} of {call.name}"] = _plain(call.named.get(name, parameter.default))
    return found | {METHOD: f"{call.name}({', '.join(names)})" if names else call.name}


def _plain(value: Any) -> Any:
    """A bare word is text."""
    return str(value) if isinstance(value, Call) else value


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _key(value: Any) -> Any:
    """The value, or what stands for it where it cannot be a key."""
    return value if isinstance(value, int | float | str) or value is None else show(value)


def _ordered(values: Mapping[Any, Any]) -> list[Any]:
    """Numbers by size, all else as they come."""
    numbers = all(isinstance(value, int | float) for value in values)
    return sorted(values) if numbers else list(values)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else show(value)
