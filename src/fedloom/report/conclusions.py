"""Conclusions of a comparison: a sentence for each setting, limited to the results of its tests."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.report.cells import score_cell
from fedloom.report.sheet import Sheet, p_text
from fedloom.report.significance import Difference, comparisons, seeds_needed
from fedloom.report.units import byte_text, percent

NAMED = 3  # methods that a sentence names, those with the smallest differences; more are counted


def conclusions(sheets: Sequence[Sheet]) -> list[str]:
    """Return for each setting with a figure which method is ahead, by how much, and whether the
    seeds show it.
    """
    return [text for sheet in sheets if (text := _conclusion(sheet))]


def situation(changes: Mapping[str, Any]) -> str:
    """Return the keys that a setting changes in words: `With 40 % symmetric label noise and
    partition iid`; empty without any.
    """
    words = [
        _in_words(key.rpartition(".")[2].replace("_", " "), str(value))
        for key, value in changes.items()
    ]
    return f"With {' and '.join(words)}" if words else ""


def _in_words(key: str, value: str) -> str:
    if key == "label noise" and (noise := re.fullmatch(r"(\w+)\((?:rate=)?([\d.]+)\)", value)):
        return f"{percent(float(noise[2]))} % {noise[1]} label noise"
    plain = {("label noise", "none"): "clean labels", ("shift", "none"): "no shift of the inputs"}
    return plain.get((key, value), f"{key} {value}")


def _conclusion(sheet: Sheet) -> str:
    metric, name, start = sheet.criterion.metric, sheet.criterion.name, situation(sheet.changes)
    spreads = {
        method: spread
        for method, spread in sheet.spreads(sheet.measure).items()
        if spread is not None
    }
    if not spreads:
        return ""
    start = start and f"{start}, "
    best = (max if metric.higher_is_better else min)(
        spreads, key=lambda method: spreads[method].mean
    )
    level = f"{score_cell(spreads[best], metric).text}{metric.unit}"
    tests = sheet.tests[sheet.measure]
    if len(spreads) == 1:
        return f"{start}{best}: {name} {level}."
    if not tests:
        return (
            f"{start}{best} has the best {name}, {level}; one seed cannot tell whether "
            "another would show the same."
        )
    shown = sorted(tests, key=lambda test: abs(test.mean))[:NAMED]
    more = [f"{len(tests) - NAMED} more in the table"] if len(tests) > NAMED else []
    details = "; ".join([*(_difference(sheet, test) for test in shown), *more])
    if any(test.verdict in ("significant", "t-test only") for test in tests):
        return f"{start}{best} has the best {name}, {level}: {details}."
    none = "no" if start else "No"
    return (
        f"{start}{none} difference in the {name} is significant ({best} has the best, "
        f"{level}): {details}."
    )


def _difference(sheet: Sheet, test: Difference) -> str:
    """Return a method's difference from the reference with its interval, the larger p of both
    tests, and the verdict.
    """
    if test.verdict == "equal":
        return f"{test.method} equals {test.other} with every seed"
    metric = sheet.criterion.metric
    unit = (
        f" {metric.name}"
        if metric.name in ("rounds", "seconds")
        else " points"
        if metric.share
        else ""
    )

    def text(value: float) -> str:
        return (
            byte_text(value)
            if metric.name == "bytes"
            else f"{100 * value:.1f}"
            if metric.share
            else f"{value:.3g}"
        )

    evidence, sign = [], -1 if test.mean < 0 else 1
    if test.low is not None and test.high is not None:
        low, high = sorted((sign * test.low, sign * test.high))
        evidence.append(f"95 % interval {text(low)} to {text(high)}")
    verdict: str = test.verdict
    values = [test.t_test_corrected, test.exact_corrected]
    if verdict == "t-test only":
        values, seeds = values[:1], seeds_needed(comparisons(len(sheet.rows), sheet.against))
        verdict = f"significant by the t-test only: the exact test needs {seeds} seeds"
    p = p_text(max(value for value in values if value is not None))
    evidence += [f"p = {p}".replace("= <", "<"), verdict]
    side = "above" if test.mean > 0 else "below"
    return (
        f"{test.method} is {text(abs(test.mean))}{unit} {side} {test.other} ({', '.join(evidence)})"
    )
