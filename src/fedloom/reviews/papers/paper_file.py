"""A paper's protocols, methods, tables and figures, as one TOML file holds them, such as
`fedmr.toml`.

A value of a table or figure is described by words, such as `dataset = "mnist"`, `heterogeneity =
"dir:0.1"` and `method = "FedAvg"`: those of a printed number (numbers.json), or of a combination in
a figure (`over`). From them follow its experiment, its method and its `measure`, which is a word as
well. The parts of a file:

`[papers]`      the versions of the paper: the prefix of their tables' and figures' names, and their titles.
`[defaults]`    default words.
`[setting]`     the experiment (fields of `Setting`) before any words; `as_printed` lists fields that are words themselves.
`[methods]`     the expression of each method; `[methods_of]` says which of them a version of the paper has, if not all.
`[words.WORD]`  for each value of a word: the `label` in the setting's name, and changes. `set` changes the setting, `methods`
                expressions, `words` adds words.
`[[where]]`     changes by several words at once: `when` all of them have these values.
`[hour]`        a check of an hour on two cores: the `exhibit`, the command's options, what it `can` show and what it `cannot`.
`[not_run]`     tables and figures with nothing to run, and why.
`[[exhibits]]`  tables and figures: `id` (several where versions share it), what it `shows`, and its words: those of the printed
                `numbers`, or the combinations of words in `over`, methods innermost, with `words` that all have. It may have
                its own `set`, `where` and `methods`; `like` takes absent keys from an earlier one.
                `cells` are the values of each combination, by default one: `row`, `column` and `baseline`, the method that it is
                compared with, name words in braces (`{setting}`: the setting's name, `{alone}`: the method up to a plus sign);
                `measure`, `target`; the word that is the `printed` value (by default `mean`, with `std`), and `times` which
                factor; `relative`: in parts of the baseline's number; and `needs`, a word without which there is no cell.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

from fedloom.errors import InvalidValue, UnknownName, suggestion
from fedloom.reviews.papers.protocols import Exhibit, Measure, PaperCell, PaperRun, Printed, Setting

FILES = ("fedmr", "fedumf", "fedala", "mcmahan", "niid-bench")

Toml = Mapping[str, Any]
"""A table of a TOML file, or words with their values."""


class Paper:
    """One paper with its versions."""

    def __init__(self, contents: Toml) -> None:
        self.contents = contents
        self.titles: dict[str, str] = contents["papers"]
        self.methods: dict[str, str] = contents["methods"]
        self.not_run: dict[str, str] = contents["not_run"]
        self.hour: Toml = contents["hour"]

    def exhibits(self) -> list[Exhibit]:
        """Return all tables and figures that have something to run, version by version."""
        tables: dict[str, Toml] = {}
        for table in self.contents["exhibits"]:
            complete = {**tables[table["like"]], **table} if "like" in table else table
            tables |= dict.fromkeys(_listed(table["id"]), complete)
        return [
            Exhibit(name, table["shows"], self._cells(version, table))
            for version in self.titles
            for name, table in tables.items()
            if name.partition(".")[0] == version
        ]

    def setting(self, **words: Any) -> Setting:
        """Return the experiment that words describe, such as `dataset="cifar100",
        heterogeneity="dir:0.1", clients=50`.
        """
        return self._described(words)[1].setting

    def algorithm(self, method: str, **words: Any) -> str:
        """Return the expression of a method in the experiment that words describe."""
        return self._described({**words, "method": method})[1].algorithm

    def _cells(self, version: str, exhibit: Toml) -> list[PaperCell]:
        combinations: list[Toml] = []
        if "numbers" in exhibit:
            combinations = printed(*f"{version}/{exhibit['numbers']}".split("/")[-2:])
        methods = (
            exhibit.get("methods")
            or self.contents.get("methods_of", {}).get(version)
            or self.methods
        )
        for block in _listed(exhibit.get("over", [])):
            axes = {**block, "method": block.get("method", list(methods))}  # the innermost
            combinations += [
                dict(zip(axes, values, strict=True))
                for values in product(*map(_listed, axes.values()))
            ]
        cells: dict[tuple[str, str], PaperCell] = {}
        for template, words in product(exhibit.get("cells", [{}]), combinations):
            cell = self._cell(template, words, exhibit, combinations)
            if cell is not None:  # a number that is printed twice is one cell
                cells.setdefault((cell.row, cell.column), cell)
        return list(cells.values())

    def _described(self, words: Toml, exhibit: Toml | None = None) -> tuple[Toml, PaperRun]:
        """Return all words of a value in a table or figure, or in the whole paper, and its run,
        which follows from them.
        """
        paper, exhibit = self.contents, exhibit or {}
        words = {"method": "", **paper.get("defaults", {}), **exhibit.get("words", {}), **words}
        values = [
            table[str(words[word])]
            for word, table in paper["words"].items()
            if words.get(word) is not None
        ]
        rules = [
            rule
            for rule in (*paper.get("where", ()), *exhibit.get("where", ()))
            if all(words.get(word) in _listed(allowed) for word, allowed in rule["when"].items())
        ]
        as_printed = {
            name: words[name] for name in paper.get("as_printed", ()) if words.get(name) is not None
        }
        fields = {**paper["setting"], **as_printed}
        methods, method = {**self.methods}, words["method"]
        name = " ".join(value["label"] for value in values if "label" in value)
        described = {**words, "setting": name, "alone": method.partition("+")[0]}
        own = {key: exhibit[key] for key in ("set", "methods") if key in exhibit}
        for change in (*values, *rules, own):
            fields = _merged(fields, change.get("set", {}))
            methods |= change.get("methods", {})
            described |= change.get("words", {})
        only = method if any("set" in rule and "method" in rule["when"] for rule in rules) else ""
        setting = Setting(next(iter(self.titles)), name, **fields, only=only)
        return described, PaperRun(method, setting, methods.get(method, ""))

    def _cell(
        self, template: Toml, words: Toml, exhibit: Toml, combinations: Sequence[Toml]
    ) -> PaperCell | None:
        """Return the cell of a template for one of the combinations; None where there is none, as
        for a method and itself.
        """
        described, run = self._described(words, exhibit)
        baseline = template.get("baseline", "").format(**described)
        if described.get(template.get("needs", "method")) is None or baseline == run.row:
            return None
        word = template.get("printed", "mean")
        value, divisor = described.get(word, ""), 1
        if template.get("relative"):
            divisor = next(line[word] for line in combinations if line["method"] == baseline)
        if value not in (None, ""):
            value = value * template.get("times", 1) / divisor
        return PaperCell(
            row=template.get("row", run.row).format(**described),
            setting=run.setting,
            algorithm=run.algorithm,
            column=template.get("column", run.setting.name).format(**described),
            measure=Measure(
                template.get("measure", described["measure"]),
                float(described[template["target"]]) if "target" in template else None,
                template.get("a_client", False),
                template.get("interpolated", False),
            ),
            printed=None
            if value == ""
            else Printed(value, described.get("std") if word == "mean" else None),
            baseline=self._described({**words, "method": baseline}, exhibit)[1]
            if baseline
            else None,
        )


@cache
def paper(name: str) -> Paper:
    """Return the paper of a file, such as `fedmr`. Raises `UnknownName` for an unknown paper."""
    if name not in FILES:
        raise UnknownName("paper", name, FILES)
    return Paper(
        tomllib.loads(
            (files("fedloom.reviews.papers") / f"{name}.toml").read_text(encoding="utf-8")
        )
    )


def titles() -> dict[str, str]:
    """Return the titles of all versions of all papers, by the prefix of their tables and figures."""
    return {version: title for name in FILES for version, title in paper(name).titles.items()}


@cache
def exhibits() -> dict[str, Exhibit]:
    """Return every table and figure that has something to run, paper by paper."""
    return {exhibit.id: exhibit for name in FILES for exhibit in paper(name).exhibits()}


def not_run() -> dict[str, str]:
    """Return the tables and figures with nothing to run, and why."""
    return {exhibit: reason for name in FILES for exhibit, reason in paper(name).not_run.items()}


def exhibit(name: str) -> Exhibit:
    """Return the table or figure called `fedumf.table-a2`. Raises `InvalidValue` for one with
    nothing to run, or unknown.
    """
    entries, nothing = exhibits(), not_run()
    if name in nothing:
        raise InvalidValue(f"{name} is {nothing[name]}: nothing to run")
    if name not in entries:
        near = suggestion(name, [*entries, *titles()])
        raise InvalidValue(
            f"no table or figure is called {name!r}{near} (fedloom reproduce lists all {len(entries)})"
        )
    return entries[name]


@cache
def _numbers() -> tuple[Toml, ...]:
    return tuple(
        json.loads((files("fedloom.reviews.papers") / "numbers.json").read_text(encoding="utf-8"))
    )


def printed(version: str, table: str) -> list[Toml]:
    """Return the numbers of a paper's table (`fedumf`, `A2`) in the printed order: dataset,
    heterogeneity, method and so on, with the figures.
    """
    return [
        number for number in _numbers() if number["paper"] == version and number["table"] == table
    ]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _merged(table: Toml, changes: Toml) -> dict[str, Any]:
    inside = {
        key: _merged(table[key], value)
        for key, value in changes.items()
        if isinstance(table.get(key), dict)
    }
    return {**table, **changes, **inside}
