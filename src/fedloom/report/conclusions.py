"""Conclusions of a comparison: a sentence for each setting, which says no more than its tests do."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.report.cells import score_cell
from fedloom.report.sheet import Sheet, p_text, spread_of
from fedloom.report.significance import Difference, comparisons, seeds_needed
from fedloom.report.summary import TO_TARGET
from fedloom.report.units import byte_text, percent

NAMED = 3  # methods that a sentence names with their differences; more are counted


def conclusions(sheets: Sequence[Sheet]) -> list[str]:
    """Return for each setting with a figure which method is ahead, by how much, and whether the seeds show it."""
    return [text for sheet in sheets if (text := _conclusion(sheet))]


def situation(changes: Mapping[str, Any]) -> str:
    """Return the keys that a setting changes in words: `With 40 % symmetric label noise and partition iid`; empty without any."""
    words = [_in_words(key.rpartition(".")[2].replace("_", " "), str(value)) for key, value in changes.items()]
    return f"With {' and '.join(words)}" if words else ""


def _in_words(key: str, value: str) -> str:
    if key == "label noise" and (noise := re.fullmatch(r"(\w+)\((?:rate=)?([\d.]+)\)", value)):
        return f"{percent(float(noise[2]))} % {noise[1]} label noise"
    plain = {("label noise", "none"): "clean labels", ("shift", "none"): "no shift of the inputs"}
    return plain.get((key, value), f"{key} {value}")


def _conclusion(sheet: Sheet) -> str:
    metric, name, start = sheet.criterion.metric, sheet.criterion.name, situation(sheet.changes)
    spreads = {row.algorithm: spread for row in sheet.rows if (spread := spread_of(row, sheet.measure)) is not None}
    if not spreads:
        return ""
    start = start and f"{start}, "
    best = (max if metric.higher_is_better else min)(spreads, key=lambda method: spreads[method].mean)
    level = f"{score_cell(spreads[best], metric).text}{metric.unit}"
    tests = sheet.tests[sheet.measure]
    if len(spreads) == 1:
        return f"{start}{best}: {name} {level}."
    if not tests:
        return f"{start}{best} has the best {name}, {level}; one seed cannot tell whether another would show the same."
    verdicts = ("significant", "t-test only", "not significant", "equal")
    clear, doubtful, unclear, equal = ([test for test in tests if test.verdict == verdict] for verdict in verdicts)
    texts = [_differences(sheet, clear)] if clear else []
    if doubtful:
        seeds = seeds_needed(comparisons(len(sheet.rows), sheet.against))
        text = f"by the t-test alone, {_differences(sheet, doubtful)}"
        texts.append(f"{text}: the exact test needs {seeds} seeds to confirm it")
    if unclear and texts:
        texts.append(f"no significant difference between {tests[0].other} and {_names(unclear)}")
    elif unclear:
        texts += [f"no difference in the {name} is significant", _differences(sheet, unclear)]
    if equal:
        texts.append(f"equal to {tests[0].other} with every seed: {_names(equal)}")
    text = "; ".join(texts)
    return f"{start}{text}." if start or clear else f"{text[0].upper()}{text[1:]}."


def _differences(sheet: Sheet, tests: Sequence[Difference]) -> str:
    """Return the differences, each as that of the reference where it is the best method, else as the other method's."""
    verb = {"last": "ends", "final": "ends", "best": "peaks", **dict.fromkeys(TO_TARGET, "takes")}.get(
        sheet.measure, "is"
    )
    up, down = ("more than", "less than") if verb == "takes" else ("above", "below")
    unit = {"rounds": " rounds", "seconds": " seconds"}.get(
        sheet.measure, " points" if sheet.criterion.metric.share else ""
    )
    if len(tests) > NAMED:
        extremes = sorted(tests, key=lambda test: abs(test.mean))[:: len(tests) - 1]
        span = " to ".join(f"{_text(sheet, abs(test.mean))}{unit} ({test.method})" for test in extremes)
        return f"{len(tests)} methods differ from {tests[0].other} by {span}"
    phrases: list[str] = []
    for test in tests:
        best = sheet.against == "best"
        subject, beside = (test.other, test.method) if best else (test.method, test.other)
        side = down if (test.mean > 0) is best else up
        size = f"{_text(sheet, abs(test.mean))}{unit} {side} {beside}{_evidence(sheet, test)}"
        phrases.append(size if best and phrases else f"{subject} {verb} {size}")
    return _joined(phrases)


def _evidence(sheet: Sheet, test: Difference) -> str:
    """Return the interval, from the side of the larger, and p: that of the t-test where it alone shows the difference, else the
    larger of both."""
    texts, sign = [], -1 if test.mean < 0 else 1
    if test.low is not None and test.high is not None:
        low, high = sorted((sign * test.low, sign * test.high))
        texts.append(f"95 % interval {_text(sheet, low)} to {_text(sheet, high)}")
    exact = None if test.verdict == "t-test only" else test.exact_corrected
    if values := [p for p in (test.t_test_corrected, exact) if p is not None]:
        texts.append(f"p = {p_text(max(values))}".replace("= <", "<"))
    return f" ({', '.join(texts)})" if texts else ""


def _text(sheet: Sheet, value: float) -> str:
    """Return a difference without its unit, of shares in points; of bytes with it."""
    metric = sheet.criterion.metric
    return byte_text(value) if metric.name == "bytes" else f"{100 * value:.1f}" if metric.share else f"{value:.3g}"


def _names(tests: Sequence[Difference]) -> str:
    names = [test.method for test in tests]
    return _joined(names[:NAMED] + ([f"{len(names) - NAMED} more"] if len(names) > NAMED else []))


def _joined(texts: Sequence[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
