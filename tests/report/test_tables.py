"""Statistics of comparisons against SciPy and plain loops, and their tables and files."""

from __future__ import annotations

import csv
import html
import io
import itertools
import math
import random
import re
import shutil
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from fedloom.cli.terminal import comparison_tables, difference_tables, overall_tables, print_tables
from fedloom.objectives import Metric
from fedloom.report.cells import best_cells
from fedloom.report.conclusions import conclusions
from fedloom.report.export import (
    differences_to_csv,
    to_csv,
    to_data,
    to_latex,
    to_markdown,
)
from fedloom.report.figures import plotly_script
from fedloom.report.layouts import escape_latex
from fedloom.report.page import render
from fedloom.report.sheet import (
    NOT_SIGNIFICANT,
    T_TEST_ONLY,
    ReportOptions,
    Sheet,
    caption,
    overall,
    reading,
)
from fedloom.report.significance import (
    FLIPS,
    comparisons,
    differences,
    holm,
    seeds_needed,
    sign_flip_test,
    smallest_exact,
    t_test,
)
from fedloom.report.summary import RunSummary, measured
from fedloom.study.comparison_result import ComparisonResult
from fedloom.study.stored_runs import StoredRun

differing = st.lists(st.integers(-50, 50).map(lambda k: k / 100), min_size=2, max_size=8)


def run_of(accuracies: list[float], method: str, seed: int, **figures: float) -> RunSummary:
    records: list[dict[str, Any]] = [
        {"round": k, "accuracy": accuracy, "bytes_down": 100, "bytes_up": 50}
        for k, accuracy in enumerate(accuracies, 1)
    ]
    records[-1] |= figures
    return RunSummary(
        method, seed, records, [{"round": k, "seconds": 1.0} for k in range(1, len(records) + 1)]
    )


def methods(seeds: int, **shifts: float) -> list[RunSummary]:
    """Make runs of methods, each `shift` above a level of the seed, with a little noise."""
    chance = random.Random(1)
    levels = [0.5 + 0.2 * chance.random() for _ in range(seeds)]
    return [
        run_of([0.1, levels[seed] + shift + 0.01 * chance.random()], name, seed)
        for name, shift in shifts.items()
        for seed in range(seeds)
    ]


@settings(deadline=None, max_examples=60)
@given(differing)
def test_the_t_test_equals_scipy(gaps: list[float]) -> None:
    p, low, high = t_test(gaps)
    if max(gaps) - min(gaps) < 1e-12:
        assert (p, low, high) == (None, None, None)  # no spread: no test is possible
    else:
        assert p == pytest.approx(
            stats.ttest_rel(gaps, [0.0] * len(gaps)).pvalue, rel=1e-9, abs=1e-300
        )


@settings(deadline=None, max_examples=60)
@given(differing)
@example([0.0, 0.0, 0.0, -0.03, -0.29, 0.24, -0.33, 0.41])  # they sum to 0
def test_the_sign_flip_test_counts_every_way_to_change_signs(gaps: list[float]) -> None:
    hits = 0
    for signs in itertools.product((1, -1), repeat=len(gaps)):
        total = sum(sign * round(100 * value) for sign, value in zip(signs, gaps, strict=True))
        hits += abs(total) >= abs(sum(round(100 * value) for value in gaps))
    assert sign_flip_test(gaps) == pytest.approx(hits / 2 ** len(gaps))


def test_many_seeds_are_flipped_at_random_and_agree_with_all_ways() -> None:
    chance = np.random.default_rng(0)
    gaps = chance.normal(0.3, 1, 20).tolist()
    sizes = np.abs(np.array(gaps))
    signs = 1 - 2 * ((np.arange(2**20)[:, None] >> np.arange(20)) & 1)
    exact = float(np.mean(np.abs(signs @ sizes) >= abs(sum(gaps)) - 1e-12))
    p = sign_flip_test(gaps)
    assert p is not None
    assert abs(p - exact) < 5 * math.sqrt(exact * (1 - exact) / FLIPS)
    assert sign_flip_test([0.1] * 40) == pytest.approx(2 / (FLIPS + 1))  # never 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=8))
def test_holm_steps_down_as_its_definition_says(values: list[float | None]) -> None:
    corrected = holm(values)
    m = len(values)
    order = sorted((k for k in range(m) if values[k] is not None), key=lambda k: values[k] or 0.0)
    for rank, k in enumerate(order):
        expected = max(min(1.0, (m - j) * (values[order[j]] or 0.0)) for j in range(rank + 1))
        assert corrected[k] == pytest.approx(expected)
    assert all(corrected[k] is None for k in range(m) if values[k] is None)


def test_holm_equals_an_example_worked_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_few_seeds_cannot_reach_the_level_and_the_number_needed_can() -> None:
    for count in range(1, 40):
        seeds = seeds_needed(count)
        assert count * smallest_exact(seeds) < 0.05 <= count * smallest_exact(seeds - 1)
    assert [smallest_exact(n) for n in (2, 3, 6)] == [0.5, 0.25, 0.03125]
    assert sign_flip_test([0.2, 0.3, 0.25]) == 0.25
    assert (comparisons(5, "best"), comparisons(5, "first")) == (10, 4)


def verdicts(comparison: Sheet) -> dict[str, str]:
    return {test.method: test.verdict for test in comparison.tests["last"]}


def test_verdicts_say_what_the_seeds_can_show() -> None:
    few = Sheet(methods(3, best=0.2, near=0.2, far=0.0))
    assert few.tests["last"][0].other in ("best", "near")
    assert verdicts(few)["far"] == "t-test only"  # three seeds are too few for the other test
    assert "not significant" in verdicts(few).values()
    many = Sheet(methods(9, best=0.2, near=0.2, far=0.0))
    assert verdicts(many)["far"] == "significant"
    assert many.marks["last"]["far"] == ""
    assert few.marks["last"]["far"] == T_TEST_ONLY
    assert NOT_SIGNIFICANT in few.marks["last"].values()
    equal = Sheet([run_of([0.5], name, seed) for name in ("a", "b") for seed in range(3)])
    assert verdicts(equal) == {"b": "equal"}
    single_seed = Sheet([run_of([0.5], "a", 0), run_of([0.7], "b", 0)])
    assert not single_seed.tests["last"]
    assert reading([single_seed]) == []


def test_equal_differences_are_no_proof_by_themselves() -> None:
    """Two equal differences have no spread; the t-test must not report certainty."""
    comparison = Sheet(
        [
            run_of([level + shift], name, k)
            for name, shift in (("a", 0.1), ("b", 0))
            for k, level in enumerate((0.5, 0.6))
        ]
    )
    test = comparison.tests["last"][0]
    assert (test.t_test, test.exact, test.verdict) == (None, 0.5, "not significant")


def test_methods_are_compared_over_the_seeds_that_both_have() -> None:
    values = {"a": {0: 0.5, 1: 0.6, 2: 0.7}, "b": {1: 0.1, 2: 0.3, 5: 0.9}, "c": {9: 0.2}}
    verdicts = differences(values, "first")
    assert [(difference.method, difference.other, difference.seeds) for difference in verdicts] == [
        ("b", "a", 2)
    ]
    assert verdicts[0].mean == pytest.approx(((0.1 - 0.6) + (0.3 - 0.7)) / 2)
    theirs = stats.ttest_rel([0.1, 0.3], [0.6, 0.7])
    assert verdicts[0].t_test == pytest.approx(theirs.pvalue)
    interval = theirs.confidence_interval(0.95)
    assert (verdicts[0].low, verdicts[0].high) == pytest.approx((interval.low, interval.high))


def test_the_best_is_corrected_for_all_pairs_and_the_first_for_the_others() -> None:
    runs = methods(7, a=0.0, b=0.05, c=0.1, d=0.1)
    best, against_first = Sheet(runs, against="best"), Sheet(runs, against="first")
    assert {test.other for test in against_first.tests["last"]} == {"a"}
    reference = {test.other for test in best.tests["last"]}
    assert reference < {"c", "d"}
    values = {
        name: [measured(run, "last") or 0 for run in runs if run.algorithm == name]
        for name in "abcd"
    }
    exact = {}
    for first_method, second_method in itertools.combinations("abcd", 2):
        exact[frozenset((first_method, second_method))] = sign_flip_test(
            [x - y for x, y in zip(values[first_method], values[second_method], strict=True)]
        )
    corrected = dict(zip(exact, holm(list(exact.values())), strict=True))
    for test in best.tests["last"]:
        assert test.exact_corrected == pytest.approx(
            corrected[frozenset((test.method, test.other))]
        )
        assert test.mean < 0  # minus the best


def test_fairness_is_read_from_the_clients_own_models_or_else_the_global_one() -> None:
    personal = {
        "personal_accuracy": 0.9,
        "personal_accuracy_std": 0.1,
        "personal_accuracy_worst": 0.7,
    }
    global_model = {
        "client_accuracy": 0.8,
        "client_accuracy_std": 0.2,
        "client_accuracy_worst": 0.3,
    }
    comparison = Sheet(
        [
            run_of([0.5], "a", 0, **personal, **global_model),
            run_of([0.5], "b", 0, **global_model),
            run_of([0.5], "c", 0),
        ]
    )
    spreads = comparison.rows[["personal", "client_spread", "client_worst"]].to_numpy()
    assert [[None if s is None else s.mean for s in triple] for triple in spreads] == [
        [0.9, 0.1, 0.7],
        [0.8, 0.2, 0.3],
        [None, None, None],
    ]
    titles = [column.title for column in comparison.table.columns]
    best = best_cells(comparison.table).iloc[:, titles.index("Std over clients, %")]
    assert best.tolist() == [True, False, False]
    assert "Worst tenth, %" not in [c.title for c in Sheet([run_of([0.5], "c", 0)]).table.columns]


def three_settings() -> list[Sheet]:
    """Make sheets of three settings with three methods and three seeds each."""
    return [
        Sheet(
            methods(3, **{"fedavg": 0.0, "ala(fedavg, s=80)": shift, "a_b|c": 0.1}),
            [0.5, 0.99],
            last=1,
            setting=f"data.partition={name}",
            changes={"data.partition": name},
        )
        for name, shift in (("iid", 0.1), ("dirichlet(0.1)", 0.2), ("dirichlet(1.0)", 0.3))
    ]


def test_one_table_over_all_settings_ranks_the_methods() -> None:
    table, titles = overall(three_settings()), ["Method", "iid", "dirichlet(0.1)", "dirichlet(1.0)"]
    assert [column.title for column in table.columns] == [*titles, "Mean rank"]
    means = [[float(cell.value) for cell in table.iloc[:, k]] for k in (1, 2, 3)]
    ranks = [[1 + sum(higher > mean for higher in column) for mean in column] for column in means]
    assert [cell.value for cell in table.iloc[:, 4]] == [
        sum(three) / 3 for three in zip(*ranks, strict=True)
    ]
    assert caption(three_settings()).endswith("Rank 1 is the best.")
    # With two settings the mean rank has no information: a method that wins one and loses the other
    # is in the middle, like all methods.
    two_settings = three_settings()[:2]
    assert [column.title for column in overall(two_settings).columns] == titles[:3]
    assert "ank" not in caption(two_settings)


def test_csv_and_json_hold_every_setting_with_plain_numbers() -> None:
    sheets = three_settings()
    lines = list(csv.DictReader(io.StringIO(to_csv(sheets))))
    assert [line["data.partition"] for line in lines] == ["iid"] * 3 + ["dirichlet(0.1)"] * 3 + [
        "dirichlet(1.0)"
    ] * 3
    expected = sheets[1].rows["mean_of_last"].iloc[1]
    assert float(lines[4]["mean_of_last"]) == expected.mean
    tested = list(csv.DictReader(io.StringIO(differences_to_csv(sheets))))
    assert {line["measure"] for line in tested} == {"final", "best", "last"}
    assert len(tested) == 3 * 3 * 2
    assert to_data(sheets)["differences"][0]["setting"] == {"data.partition": "iid"}


def test_every_setting_says_how_often_clients_failed_where_any_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sheets, comparisons_and_runs = [], []
    for number, count in enumerate((3, 0, 1, 0)):
        runs = [run_of([0.5, 0.6], name, 0) for name in ("a", "b")]
        runs[0].records[0]["faults"] = [{"client": 1, "reason": "late"}] * count
        sheets.append(Sheet(runs, setting=f"epochs={number}", changes={"epochs": number}))
        comparisons_and_runs.append((sheets[-1], runs))
    expected = [
        "3 times a client was absent, failed or was refused",
        "",
        "once a client was absent, failed or was refused",
        "",
    ]

    for width in ("80", "160"):
        monkeypatch.setenv("COLUMNS", width)
        print_tables(sheets)
        blocks = " ".join(capsys.readouterr().out.split()).split("epochs=")[1:]
        assert [
            re.findall(r"(?:once|\d+ times) a client was absent, failed or was refused", block)
            for block in blocks
        ] == [[text] if text else [] for text in expected]

    stored = [
        StoredRun(comparison.setting, tmp_path, run, comparison.changes)
        for comparison, runs in comparisons_and_runs
        for run in runs
    ]
    result = ComparisonResult(tmp_path, stored, ReportOptions("Epochs"))
    overview, *pages = [page.read_text() for page in result.write_reports(tmp_path)]
    for page, comparison, text in zip(pages, sheets, expected, strict=True):
        assert ("a client was absent" in page) is bool(text)
        assert not text or f"{text[0].upper()}{text[1:]}." in page
        assert (
            f"{comparison.setting}</a> <small>{text}</small></li>"
            if text
            else f"{comparison.setting}</a></li>"
        ) in overview


def test_markdown_marks_the_best_and_escapes_names() -> None:
    text = to_markdown(three_settings(), "job")
    assert "## data.partition=iid" in text
    assert r"a\_b\|c" in text
    assert re.search(r"\| \*\*\d\d\.\d\d ± \d\.\d\d\*\* \|", text)
    assert "3 seeds the exact test cannot reach significance" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.replace(r"\|", "").count("|") for line in block.splitlines()}) == 1


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
def test_latex_is_set_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "tables.tex").write_text(to_latex(three_settings(), "50 % & more"))
    long = {"stages(fedavg:100, fedmr(unit=segment, fraction=0.5))": 0.1, "fedprox(mu=0.01)": 0.0}
    wide = to_latex([Sheet(methods(3, **long), [0.3, 0.5, "loss <= 0.2"])], "Wide").replace(
        "{tab:", "{tab:wide-"
    )
    (tmp_path / "wide.tex").write_text(wide)
    preamble = "\\documentclass{article}\\usepackage{booktabs,graphicx}"
    document = preamble + "\\begin{document}\\input{tables}\\input{wide}\\end{document}"
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", document]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-2000:]
    assert "Undefined" not in process.stdout
    assert "Overfull" not in process.stdout
    assert "too large" not in process.stdout
    assert "multiply" not in process.stdout  # two labels of one name


def test_latex_is_booktabs_with_everything_escaped_and_balanced() -> None:
    text = to_latex(three_settings(), "50 % & more")
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 7
    assert r"50 \% \& more, data.partition=iid" in text
    assert r"a\_b|c" in text
    assert r"\textbf{" in text
    assert r"$\pm$" in text
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    for body in re.findall(r"\\begin\{tabular\}\{(l+r*)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        for line in re.findall(r"^    (.*) \\\\$", body[1], re.MULTILINE):
            assert len(re.findall(r"(?<!\\)&", line)) == len(body[0]) - 1
    assert not set("±×ⁿᵗ–") & set(text)
    assert escape_latex(r"\a_b^c~{d}#$") == (
        r"\textbackslash{}a\_b\textasciicircum{}c\textasciitilde{}\{d\}\#\$"
    )


def test_the_note_on_tests_stands_once_and_in_the_same_words_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = methods(3, best=0.2, near=0.2, far=0.0)
    comparison = Sheet(runs)
    print_tables([comparison])
    shown = {
        "terminal": capsys.readouterr().out,
        "page": re.sub(
            'data-title=".*?"',
            "",
            html.unescape(render("Three", runs, sheet=comparison).replace(plotly_script([]), "")),
        ),
        "markdown": to_markdown([comparison]),
    }
    for surface, text in shown.items():
        plain = " ".join(text.split())
        for sentence in reading([comparison]):
            assert sentence in plain, surface
        assert [plain.count(word) for word in ("sign-flip", "Holm's method")] == [1, 1], surface
        assert plain.count("Holm") == 3, surface  # both columns of p name their correction
    paper = to_latex([comparison])
    assert all(escape_latex(sentence) in paper for sentence in reading([comparison]))
    assert [paper.count(word) for word in ("sign-flip", "Holm")] == [1, 1]
    captions = re.findall(r"\\caption\{(.*)\}", paper)
    assert captions == [
        "Comparison: accuracy.",
        "Comparison: cost. Rounds and bytes until the target; * never.",
    ]


def test_conclusions_say_no_more_than_the_tests() -> None:
    noisy, clean = {"data.label_noise": "symmetric(0.4)"}, {"data.label_noise": "none"}
    runs = methods(9, best=0.2, near=0.2, far=0.0)
    clear = Sheet(runs, changes=noisy)
    (far,) = (test for test in clear.tests["last"] if test.method == "far")
    scores = {
        name: {run.seed: run.records[-1]["accuracy"] for run in runs if run.algorithm == name}
        for name in ("best", "far")
    }
    gap = statistics.fmean(scores["best"][seed] - scores["far"][seed] for seed in range(9))
    p = max(far.t_test_corrected or 0, far.exact_corrected or 0)
    assert conclusions([clear]) == [
        f"best is {100 * gap:.1f} points better than far with 40 % wrong labels "
        f"(p = {p:.2g}, 9 seeds); near does not differ significantly."
    ]
    few = conclusions([Sheet(methods(3, best=0.2, near=0.2, far=0.0))])[0]
    assert "better than far (p < 0.001 by the t-test only, 3 seeds)" in few
    alike = conclusions(
        [Sheet(methods(9, a=0.2, b=0.2), changes={"data.partition": "iid", "rounds": 5})]
    )[0]
    assert alike.startswith("No significant difference with partition iid and rounds 5: ")
    many = conclusions([Sheet(methods(9, **{f"m{k}": k / 20 for k in range(9)}))])[0]
    assert many.startswith("m8 is 40.1 points better than m0 (")  # 40 points apart, and noise
    close = [run_of([0.5 + seed / 99], name, seed) for name in "abcd" for seed in range(12)]
    close += [run_of([0.2 + seed / 50], "low", seed) for seed in range(12)]
    (text,) = conclusions([Sheet(close)])
    assert text.startswith("a is ")
    assert " points better than low (" in text
    assert text.endswith("; 3 others do not differ significantly.")
    equal_runs = [run_of([0.5], name, seed) for name in ("a", "b") for seed in range(3)]
    assert conclusions([Sheet(equal_runs)]) == ["b and a are equal with every seed."]
    similar = [run_of([0.5 - seed / 100], "c", seed) for seed in range(3)]
    assert conclusions([Sheet([*equal_runs, *similar])])[0].startswith(
        "No significant difference: a is 1.0 points better than c ("
    )
    single_seed = [run_of([0.5], "a", 0), run_of([0.7], "b", 0)]
    assert conclusions([Sheet(single_seed, changes=clean)]) == [
        "b has the best mean accuracy of the last evaluation with clean labels, 70.00 % "
        "(one seed, not tested)."
    ]
    assert conclusions([Sheet(single_seed[:1])]) == [
        "a: mean accuracy of the last evaluation 50.00 %."
    ]
    slow = [run_of([0.1, 0.1, 0.9], "slow", seed) for seed in range(7)]
    quick = [run_of([0.1, 0.9, 0.9], "quick", seed) for seed in range(7)]
    costs = conclusions([Sheet([*slow, *quick], [0.8], measure="rounds")])
    assert costs == [
        "quick is 1 rounds better than slow in the rounds to 80 % (p = 0.016, 7 seeds)."
    ]


@pytest.mark.parametrize("against", ["best", "first"])
def test_conclusions_and_differences_agree_in_sign(against: str) -> None:
    for order in (("low", "high"), ("high", "low")):
        levels = {name: {"low": 0.0, "high": 0.2}[name] for name in order}
        sheet = Sheet(methods(9, **levels), against=against)
        (line,) = sheet.differences[1].to_numpy().tolist()
        method, difference, interval = (cell.text for cell in line[:3])
        ends = [float(end) for end in interval.split(" to ")]
        assert min(ends) < float(difference) < max(ends)
        assert (float(difference) < 0) == (method == "low")
        expected = f"high is {abs(float(difference)):.1f} points better than low"
        if against == "first" and method == "low":
            expected = f"low is {abs(float(difference)):.1f} points worse than high"
        assert conclusions([sheet])[0].startswith(expected)


def test_the_page_begins_with_its_conclusions() -> None:
    runs = methods(9, best=0.2, far=0.0)
    page = html.unescape(render("Conclusions", runs))
    assert page.index(conclusions([Sheet(runs)])[0]) < page.index("<dl class=tiles>")
    tiles = re.findall(
        r"<dt>Fewest rounds to 50.%</dt><dd>[^<]*<small>([^<]*)</small>",
        render("Tiles", runs, [0.5]),
    )
    assert tiles == ["best, far"]


def test_the_terminal_shows_everything_in_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    sheets = three_settings()
    for table in (
        *comparison_tables(sheets[0], 80),
        *overall_tables(sheets * 6, 80),
        *difference_tables(sheets[0], 80),
    ):
        console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text  # nothing is cut
    for word in (
        "accuracy,",
        "1, %",
        "Rounds to 50 %",
        "down",
        "rank",
        "(exact),",
        "Holm",
        "not significant",
    ):
        assert word in text, word
    assert text.count("dirichlet(0.1)") == 6
    assert len(comparison_tables(sheets[0], 200)) == 2


@pytest.mark.parametrize("width", [40, 60, 80])
def test_columns_without_room_move_to_another_table(width: int) -> None:
    """Errors with their deviations, also per client, need more room than accuracies."""
    runs = methods(3, fedavg=0.2, **{"stages(fedavg:10, fedmr)": 0.1})
    for run in runs:
        for record in run.records:
            for name in ("personal_accuracy", "personal_accuracy_std", "personal_accuracy_worst"):
                record[name] = 0.0123 * (1 + run.seed)
    comparison = Sheet(
        [replace(run, metric=Metric("accuracy", "RMSE")) for run in runs], [0.3, "loss <= 0.25"]
    )
    console = Console(width=width, record=True, file=io.StringIO())
    tables = comparison_tables(comparison, width)
    for table in tables:
        console.print(table)
    text = console.export_text()
    assert len(tables) > 2
    assert max(map(len, text.splitlines())) <= width
    for column in comparison.table.columns[3:-1]:
        for word in column.title.split():
            assert re.search(rf"(^| ){re.escape(word)}( |$)", text, re.MULTILINE), word
    assert all(cell.text in text for cell in comparison.table.iloc[:, 3:-1].to_numpy().flat)
