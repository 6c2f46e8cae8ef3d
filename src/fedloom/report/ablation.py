"""The effect of a parameter or a setting: accuracy over each value that differs between the runs (FedMR, figures 9 to 11)."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fedloom.algorithm import algorithms
from fedloom.config.expression import Call, parse, show
from fedloom.errors import FedloomError
from fedloom.report.figures import DASHES, SHARES, Style, framed, wrapped
from fedloom.report.sheet import Criterion
from fedloom.report.summary import RunSummary, Spread, dotted

LINES = 8  # of one figure at most
GREY = "#7f7f7f"  # of lines that join several methods
NAME = 34  # letters of a line's name on one line, so that a legend fits the screen of a phone

METHOD = "method"  # the feature that names a run's method without its parameters
STAGE = "last round of "  # begins the feature that says when a stage ends; the method's name follows

# Keys of a configuration that are no settings, or that change nothing that is measured.
_IGNORED = ("algorithm", "seed", "command", "targets", "record", "engine", "name", "directory")


@dataclass(frozen=True)
class AblationLine:
    """Spreads over seeds by value, in the order of the values, and the method of the runs with that value, if it is one."""

    label: str
    methods: Mapping[Any, str | None]
    spreads: Mapping[Any, Spread]

    @property
    def method(self) -> str | None:
        """The method of all these runs, if it is one."""
        names = set(self.methods.values())
        return names.pop() if len(names) == 1 else None


@dataclass(frozen=True)
class Ablation:
    """Accuracies by the criterion `title` over the values of one parameter, a line for each combination of the others: `name` is
    a configuration key (`data.partition`) or a method's parameter (`fraction of fedmr`)."""

    name: str
    title: str
    lines: Sequence[AblationLine]
    share: bool = True  # they are shares, drawn in per cent

    @property
    def values(self) -> list[Any]:
        """All values, in the order in which the lines have them."""
        return list(dict.fromkeys(value for line in self.lines for value in line.spreads))

    @property
    def numeric(self) -> bool:
        """True if all values are numbers."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


@dataclass(frozen=True)
class _Trained:
    """A run with its settings and parameters by name, and its accuracy; `without_stage` where it stands for a run whose first
    stage has no rounds."""

    features: Mapping[str, Any]
    run: RunSummary
    accuracy: float
    without_stage: bool = False


def ablations(runs: Sequence[RunSummary], by: Criterion) -> list[Ablation]:
    """Return all parameters that differ between runs which agree in everything else but the seed.

    Parameters of methods count with their defaults, so that `fedmr(unit=segment)` and `fedmr(unit=segment, fraction=0.5)`
    differ in one; a method beside `stages(first:n, method)` counts as the one whose first stage has 0 rounds. Accuracies are
    those of the criterion `by`.
    """
    trained = list(_trained(runs, by))
    names = dict.fromkeys(name for run in trained for name in run.features if name != METHOD)
    varying = [name for name in names if len({_key(run.features[name]) for run in trained if name in run.features}) > 1]
    results = [Ablation(name, by.title, _lines(name, varying, trained), by.metric.share) for name in varying]
    return [ablation for ablation in results if ablation.lines]


def ablation_figure(ablation: Ablation, looks: Mapping[str, Style]) -> go.Figure:
    """Draw accuracy over the values, mean over seeds with ± one standard deviation: lines over numbers, else bars.

    Every point has the colour of its method in `looks`; a line that joins several methods is grey.
    """
    methods = [line.method for line in ablation.lines]
    by_method = None not in methods and len(set(methods)) == len(methods)
    form = ".2%" if ablation.share else ".4~g"
    traces: list[go.Scatter | go.Bar] = []
    for k, line in enumerate(ablation.lines[:LINES]):
        trace = _trace(line, looks, methods[:k].count(line.method), ablation.numeric, form)
        name = line.method if by_method and line.method else line.label
        traces.append(trace.update(name=wrapped(name, NAME), legendgroup=line.method))
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
        yaxis={
            "title": wrapped(ablation.title),
            **(SHARES if ablation.share else {}),
            "rangemode": "normal" if values else "tozero",
        },
        barmode="group",
        hovermode="closest",
        showlegend=len(traces) > 1,
        legend={"orientation": "h", "xref": "container", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom"},
    )


def _trace(
    line: AblationLine, looks: Mapping[str, Style], earlier: int, numeric: bool, form: str
) -> go.Scatter | go.Bar:
    """Return a line's points; `earlier` lines of the same method have other dashes, or a deeper colour."""
    spreads = list(line.spreads.values())
    colours = [looks[method].colour if method else GREY for method in line.methods.values()]
    error = {"array": [spread.std for spread in spreads], "visible": any(spread.count > 1 for spread in spreads)}
    common: dict[str, Any] = {
        "y": [spread.mean for spread in spreads],
        "error_y": {"type": "data", **error, "thickness": 1.5, "width": 4},
        "customdata": [spread.count for spread in spreads],
        "hovertemplate": f"%{{x}}: %{{y:{form}}}, %{{customdata}} seeds<extra>%{{fullData.name}}</extra>",
    }
    if not numeric:
        shade = {"color": colours, "opacity": 1 / (1 + 0.6 * earlier)}
        return go.Bar(x=[wrapped(_text(value)) for value in line.spreads], marker=shade, **common)
    stroke = {"color": colours[0] if line.method else GREY, "width": 2, "dash": DASHES[earlier % len(DASHES)]}
    marker = {"size": 9, "color": colours}
    return go.Scatter(x=list(line.spreads), mode="lines+markers", line=stroke, marker=marker, **common)


def _lines(name: str, varying: Sequence[str], trained: Sequence[_Trained]) -> list[AblationLine]:
    """Return the lines along `name` that have two values or more; their labels say in what they differ."""
    groups: dict[tuple[tuple[str, str], ...], dict[Any, list[_Trained]]] = {}
    fixed = [METHOD, *(feature for feature in varying if feature != name)]
    for run in trained:
        if name in run.features and (not run.without_stage or name.startswith(STAGE)):
            group = tuple((feature, _text(run.features[feature])) for feature in fixed if feature in run.features)
            groups.setdefault(group, {}).setdefault(_key(run.features[name]), []).append(run)
    groups = {group: line for group, line in groups.items() if len(line) > 1}
    shared = set.intersection(*(set(group) for group in groups)) if groups else set()
    if len(groups) == 1:
        shared = {(feature, value) for feature, value in shared if feature != METHOD}
    lines = []
    for group, line in groups.items():
        differing = [(feature, value) for feature, value in group if (feature, value) not in shared]
        label = [value if feature == METHOD else f"{feature}={value}" for feature, value in differing]
        values = sorted(line) if all(isinstance(value, int | float) for value in line) else list(line)
        spreads = {value: spread for value in values if (spread := Spread.of([run.accuracy for run in line[value]]))}
        names = {value: {run.run.algorithm for run in line[value]} for value in spreads}
        methods = {value: next(iter(group)) if len(group) == 1 else None for value, group in names.items()}
        lines.append(AblationLine(", ".join(label), methods, spreads))
    return lines


def _trained(runs: Sequence[RunSummary], by: Criterion) -> Iterator[_Trained]:
    """Yield each run with an accuracy; one that also takes the place of a run without a first stage comes twice."""
    calls = [_call(run) for run in runs]
    two_staged = [call for call in calls if call.name == "stages" and len(call.positional) == 2]
    staged = {str(call.positional[1]): call for call in two_staged if {*map(type, call.positional)} == {Call}}
    for run, call in zip(runs, calls, strict=True):
        if (accuracy := by.of(run)) is None:
            continue
        settings = dotted({key: value for key, value in run.configuration.items() if key not in _IGNORED})
        yield _Trained(settings | _parameters(call), run, accuracy)
        if (like := staged.get(str(call))) is not None:
            stage = like.positional[0]
            alias = Call(like.name, (Call(stage.name, stage.positional, stage.named, 0), call), like.named)
            yield _Trained(settings | _parameters(alias), run, accuracy, without_stage=True)


def _call(run: RunSummary) -> Call:
    """Return the run's method as its configuration gives it; a name that is no expression stands for itself."""
    try:
        return parse(str(run.configuration.get("algorithm", run.algorithm)))
    except FedloomError:
        return Call(run.algorithm)


def _parameters(call: Call) -> dict[str, Any]:
    """Return the method without its parameters, and every parameter with its value or its default."""
    values = (*call.positional, *call.named.values())
    features: dict[str, Any] = {}
    names: list[str] = []
    for inner in [value for value in values if isinstance(value, Call) and value.name in algorithms]:
        nested = _parameters(inner)
        names.append(str(nested.pop(METHOD)))
        features |= nested
        if inner.until is not None:
            features[f"{STAGE}{inner.name}"] = inner.until
    if call.name in algorithms:
        entry = algorithms[call.name]
        for name, parameter in entry.parameters.items():
            if name not in entry.make.wraps and parameter.default is not parameter.empty:
                value = call.named.get(name, parameter.default)
                features[f"{name} of {call.name}"] = str(value) if isinstance(value, Call) else value
    return features | {METHOD: f"{call.name}({', '.join(names)})" if names else call.name}


def _key(value: Any) -> Any:
    """Return the value, or its expression where it cannot be a key."""
    return value if isinstance(value, int | float | str) or value is None else show(value)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else show(value)
