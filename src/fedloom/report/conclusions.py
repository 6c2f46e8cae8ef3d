"""The verdict of a comparison: one short line for each setting, limited to its tests."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.objectives import Metric
from fedloom.report.cells import score_cell
from fedloom.report.sheet import Sheet, p_text
from fedloom.report.significance import Difference
from fedloom.report.summary import TO_TARGET
from fedloom.report.units import byte_text, percent

PROVEN = ("significant", "t-test only")
"""Verdicts of tests that found a difference."""

NAMED = 2  # methods without a significant difference that are named; more are counted


def conclusions(sheets: Sequence[Sheet]) -> list[str]:
    """Return for each setting with a figure which method is better, by how much, and its p."""
    return [text for sheet in sheets if (text := _conclusion(sheet))]


def situation(changes: Mapping[str, Any]) -> str:
    """Return the keys that a setting changes in words: `with 40 % wrong labels and partition iid`;
    empty without any.
    """
    words = [
        _in_words(key.rpartition(".")[2].replace("_", " "), str(value))
        for key, value in changes.items()
    ]
    return f"with {' and '.join(words)}" if words else ""


def _in_words(key: str, value: str) -> str:
    if key == "label noise" and (noise := re.fullmatch(r"(\w+)\((?:rate=)?([\d.]+)\)", value)):
        kind = "" if noise[1] == "symmetric" else f" ({noise[1]})"
        return f"{percent(float(noise[2]))} % wrong labels{kind}"
    plain = {("label noise", "none"): "clean labels", ("shift", "none"): "no shift of the inputs"}
    return plain.get((key, value), f"{key} {value}")


def _conclusion(sheet: Sheet) -> str:
    metric, name = sheet.criterion.metric, sheet.criterion.name
    spreads = {method: spread for method, spread in sheet.spreads(sheet.measure).items() if spread}
    if not spreads:
        return ""
    where = f" {situation(sheet.changes)}" if sheet.changes else ""
    ranked = sorted(spreads, key=lambda method: spreads[method].mean)
    if metric.higher_is_better:
        ranked.reverse()
    best = ranked[0]
    level = f"{score_cell(spreads[best], metric).text}{metric.unit}"
    if len(ranked) == 1:
        return f"{best}: {name} {level}{where}."
    tests = sheet.tests[sheet.measure]
    if not tests:
        return f"{best} has the best {name}{where}, {level} (one seed, not tested)."
    proven = [test for test in tests if test.verdict in PROVEN]
    # The best method beside the baseline: the first method, unless that is the best one.
    unequal = [test for test in tests if test.verdict != "equal"]
    shown = min(
        proven or unequal or tests,
        key=lambda test: ranked.index(test.method) if sheet.against == "first" else 0,
    )
    others = [test.method for test in tests if test not in proven and test is not shown]
    if shown.verdict == "equal":
        return f"{shown.method} and {shown.other} are equal{where} with every seed."
    if not proven:
        return f"No significant difference{where}: {_comparison(sheet, shown)}."
    return f"{_comparison(sheet, shown, where)}{_not_proven(others)}."


def _comparison(sheet: Sheet, test: Difference, where: str = "") -> str:
    """Return the difference in words, with the larger p of both tests and the seeds."""
    metric = sheet.criterion.metric
    better, worse, word = test.method, test.other, "better"
    if (test.mean > 0) != metric.higher_is_better:
        if sheet.against == "first":
            word = "worse"
        else:
            better, worse = worse, better
    measure = "" if metric.share and sheet.measure == "last" else f" in the {sheet.criterion.name}"
    values, by = [test.t_test_corrected, test.exact_corrected], ""
    if test.verdict == "t-test only":
        values, by = values[:1], " by the t-test only"
    p = p_text(max(value for value in values if value is not None))
    evidence = f"p = {p}{by}, {test.seeds} seeds".replace("= <", "<")
    size = _size(abs(test.mean), metric)
    return f"{better} is {size} {word} than {worse}{measure}{where} ({evidence})"


def _size(difference: float, metric: Metric) -> str:
    if metric.name == "bytes":
        return byte_text(difference)
    if metric.share:
        return f"{100 * difference:.1f} points"
    unit = f" {metric.name}" if metric.name in TO_TARGET else ""
    return f"{difference:.3g}{unit}"


def _not_proven(methods: Sequence[str]) -> str:
    if not methods:
        return ""
    named = " and ".join(methods) if len(methods) <= NAMED else f"{len(methods)} others"
    return f"; {named} {'does' if len(methods) == 1 else 'do'} not differ significantly"
