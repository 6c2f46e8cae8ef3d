"""A paper's protocols, methods, tables and figures, as one TOML file holds them, such as `fedmr.toml`.

A value of a table or figure is described by words, such as `dataset = "mnist"`, `heterogeneity = "dir:0.1"` and
`method = "FedAvg"`: those of a printed number (numbers.json), or of a combination in a figure (`over`). From them follow its
experiment, its method and its measure. The parts of a file:

`[papers]`      the versions of the paper: the prefix of their tables' and figures' names, and their titles.
`[words]`       default words.
`[setting]`     the experiment (fields of `Setting`). Words stand in braces: `"{lr}"` is the word itself, `"dirichlet({of})"` text
                with it; `{of}` is the text after the colon in `heterogeneity`, `{alone}` the method up to a plus sign. In
                `name`, words are shown by their `[labels]`, chosen by pattern; absent words are left out.
`where`         rules, in `[setting]` for all and in a table or figure for its own: where all words match their patterns, `set`
                changes the setting, `words` adds words, `algorithm` replaces the expression of the method, `measure` the measure.
`[methods]`     the expression of each method, by name or pattern; `{inner}` is that of the method before a plus sign.
                `[methods_of]` says which of them a version of the paper has, if not all.
`[hour]`        a check of an hour on two cores: the `exhibit`, the command's options, what it `can` show and what it `cannot`.
`[not_run]`     tables and figures with nothing to run, and why.
`[[exhibits]]`  tables and figures: `id` (several where versions share it), what it `shows`, and its words: those of the printed
                `numbers`, or the combinations of words in `over`, methods innermost, with `words` that all have. It may have
                its own `set`, `where`, `methods` and `measure`; `like` takes absent keys from an earlier one.
                `cells` are the values of each combination, by default one: `row`, `column` (`{setting}` is the setting's name),
                `measure`, `target`; the word that is the `printed` value (by default `mean`, with `std`), and `times` which
                factor; the `baseline`, the method that it is compared with (`relative`: in parts of its number); and `when`,
                the words that must match.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from importlib.resources import files
from itertools import product
from typing import Any

from fedloom.errors import InvalidValue, UnknownName, suggestion
from fedloom.papers.protocols import Baseline, Exhibit, Measure, PaperCell, Printed, Setting

FILES = ("fedmr", "fedumf", "fedala", "mcmahan", "niid-bench")

Toml = Mapping[str, Any]
"""A table of a TOML file."""

Words = Mapping[str, Any]


class Paper:
    """One paper with its versions."""

    def __init__(self, contents: Toml) -> None:
        self.contents = contents
        self.titles: dict[str, str] = contents["papers"]
        self.methods: dict[str, str] = contents["methods"]
        self.not_run: dict[str, str] = contents["not_run"]
        self.hour: Toml = contents["hour"]

    @cached_property
    def exhibits(self) -> dict[str, Exhibit]:
        """All tables and figures that have something to run, by name."""
        tables: dict[str, Toml] = {}
        for table in self.contents["exhibits"]:
            complete = {**tables[table["like"]], **table} if "like" in table else table
            tables |= dict.fromkeys(_listed(table["id"]), complete)
        return {
            name: Exhibit(name, table["shows"], partial(self._cells, name.partition(".")[0], table))
            for name, table in tables.items()
        }

    def setting(self, **words: Any) -> Setting:
        """Return the experiment that words describe, such as `dataset="cifar100", heterogeneity="dir:0.1", clients=50`."""
        return _Described(self, words).setting

    def algorithm(self, method: str, **words: Any) -> str:
        """Return the expression of a method in the experiment that words describe."""
        return _Described(self, {**words, "method": method}).algorithm

    def _combinations(self, version: str, exhibit: Toml) -> Iterator[Words]:
        """Yield the words of each printed number, or of each combination in a figure, the methods innermost."""
        if "numbers" in exhibit:
            yield from printed(*exhibit["numbers"].format(paper=version).split("/"))
            return
        methods = exhibit.get("methods") or self.contents.get("methods_of", {}).get(version) or self.methods
        for block in _listed(exhibit["over"]):
            axes = {**block, "method": block.get("method", list(methods))}
            for values in product(*map(_listed, axes.values())):
                yield dict(zip(axes, values, strict=True))

    def _cells(self, version: str, exhibit: Toml) -> list[PaperCell]:
        combinations = list(self._combinations(version, exhibit))
        cells: dict[tuple[str, str], PaperCell] = {}
        for template in exhibit.get("cells", [{}]):
            for words in combinations:
                cell = self._cell(template, words, exhibit, combinations)
                if cell is not None:  # a number that is printed twice is one cell
                    cells.setdefault((cell.row, cell.column), cell)
        return list(cells.values())

    def _cell(self, template: Toml, words: Words, exhibit: Toml, combinations: Sequence[Words]) -> PaperCell | None:
        """Return the cell of a template for the words of one of the combinations; None where there is none, as for a method and
        itself."""
        described = _Described(self, words, exhibit)
        filled = {**described.words, "setting": described.setting.name}
        baseline = template.get("baseline", "").format(**filled)
        if not _match(template.get("when", {}), filled) or baseline == filled["method"]:
            return None
        target = template.get("target")
        compared = _Described(self, {**words, "method": baseline}, exhibit)
        divisor = (
            next(line for line in combinations if line["method"] == baseline) if template.get("relative") else None
        )
        return PaperCell(
            row=template.get("row", "{method}").format(**filled),
            column=template.get("column", "{setting}").format(**filled),
            setting=described.setting,
            algorithm=described.algorithm,
            measure=Measure(
                template.get("measure", described.measure),
                None if target is None else float(filled[target]),
                template.get("a_client", False),
                template.get("interpolated", False),
            ),
            printed=_printed(template, filled, divisor),
            baseline=Baseline(baseline, compared.setting, compared.algorithm) if baseline else None,
        )


class _Described:
    """An experiment, described by words in a table or figure, or in the whole paper."""

    def __init__(self, paper: Paper, described_by: Words, exhibit: Toml | None = None) -> None:
        contents, exhibit = paper.contents, exhibit or {}
        words = {"method": "", **contents.get("words", {}), **exhibit.get("words", {}), **described_by}
        self._method = str(words["method"])
        words |= {"of": str(words.get("heterogeneity")).partition(":")[2], "alone": self._method.partition("+")[0]}
        setting = {key: value for key, value in contents["setting"].items() if key != "where"}
        expression = _by_pattern(paper.methods, self._method, "")
        self.measure: str = exhibit.get("measure", contents["measure"])
        for rule in (*contents["setting"]["where"], *exhibit.get("where", ())):
            conditions = {
                key: value for key, value in rule.items() if key not in ("set", "words", "algorithm", "measure")
            }
            if _match(conditions, words):
                setting = _merged(setting, rule.get("set", {}))
                words |= rule.get("words", {})
                expression, self.measure = rule.get("algorithm", expression), rule.get("measure", self.measure)
                if "set" in rule and "method" in rule:
                    setting["only"] = self._method
        self.words: Words = words
        self._setting = _merged(setting, exhibit.get("set", {}))
        self._expression: str = exhibit.get("methods", {}).get(self._method, expression)
        self._paper, self._described_by, self._exhibit = paper, described_by, exhibit

    @property
    def setting(self) -> Setting:
        """The experiment."""
        table = self._setting
        filled = {
            key: value if key in ("name", "record") else _filled(value, self.words) for key, value in table.items()
        }
        filled["name"] = " ".join(table["name"].format(**self._shown()).split())
        return Setting(paper=next(iter(self._paper.titles)), **filled)

    @property
    def algorithm(self) -> str:
        """The expression of the method."""
        plain = {**self._described_by, "method": self.words["alone"]}
        inner = _Described(self._paper, plain, self._exhibit).algorithm if "{inner}" in self._expression else ""
        return self._expression.format(**self.words, inner=inner)

    def _shown(self) -> Words:
        """Return the labels of the words; empty for absent words."""
        return {
            word: _by_pattern(labels, self.words[word], f"{{{word}}}").format(**self.words)
            if word in self.words
            else ""
            for word, labels in self._paper.contents["labels"].items()
        }


@cache
def paper(name: str) -> Paper:
    """Return the paper of a file, such as `fedmr`."""
    return Paper(tomllib.loads((files("fedloom.papers") / f"{name}.toml").read_text(encoding="utf-8")))


def papers() -> list[Paper]:
    """Return all papers."""
    return [paper(name) for name in FILES]


def titles() -> dict[str, str]:
    """Return the titles of all versions of all papers, by the prefix of their tables and figures."""
    return {name: title for paper in papers() for name, title in paper.titles.items()}


@cache
def exhibits() -> dict[str, Exhibit]:
    """Return every table and figure that has something to run, paper by paper."""
    entries = {name: exhibit for paper in papers() for name, exhibit in paper.exhibits.items()}
    return {name: entries[name] for version in titles() for name in entries if name.partition(".")[0] == version}


def exhibit(name: str) -> Exhibit:
    """Return the table or figure called `fedumf.table-a2`.

    Raises:
        InvalidValue: For a name without anything to run, or an unknown name, with the nearest.
    """
    entries = exhibits()
    for paper in papers():
        if name in paper.not_run:
            raise InvalidValue(f"{name} is {paper.not_run[name]}: nothing to run")
    if name not in entries:
        near = suggestion(name, [*entries, *titles()])
        raise InvalidValue(f"no table or figure is called {name!r}{near} (fedloom reproduce lists all {len(entries)})")
    return entries[name]


def hour_of(name: str) -> Toml:
    """Return the check of a paper (`fedumf`) that takes two cores an hour. Raises `UnknownName` for an unknown paper."""
    if name not in FILES:
        raise UnknownName("paper", name, FILES)
    return paper(name).hour


@cache
def _numbers() -> tuple[Words, ...]:
    return tuple(json.loads((files("fedloom.papers") / "numbers.json").read_text(encoding="utf-8")))


def printed(version: str, table: str) -> list[Words]:
    """Return the numbers of a paper's table (`fedumf`, `A2`) in the printed order: dataset, heterogeneity, method and so on, with
    the figures."""
    return [number for number in _numbers() if number["paper"] == version and number["table"] == table]


def _printed(template: Toml, words: Words, divisor: Words | None) -> Printed | None:
    """Return the printed number, divided by that of the baseline in `divisor`; None where the paper prints no number."""
    word = template.get("printed", "mean")
    value, std = words.get(word, ""), words.get("std") if word == "mean" else None
    if value is None or value == "":
        return None if value == "" else Printed(None)
    return Printed(value * template.get("times", 1) / (1 if divisor is None else divisor[word]), std)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _match(conditions: Toml, words: Words) -> bool:
    """Return True if each of these words is there and matches its pattern, or one of its patterns."""
    return all(
        words.get(word) is not None and any(fnmatchcase(str(words[word]), pattern) for pattern in _listed(patterns))
        for word, patterns in conditions.items()
    )


def _by_pattern(texts: Mapping[str, str], value: Any, otherwise: str) -> str:
    """Return the text of the value itself, or else of the pattern that it matches, the earliest of several."""
    name = str(value)
    return texts.get(name, next((text for pattern, text in texts.items() if fnmatchcase(name, pattern)), otherwise))


def _merged(table: Toml, changes: Toml) -> dict[str, Any]:
    """Return the table with changes, tables inside it merged."""
    inside = {key: _merged(table[key], value) for key, value in changes.items() if isinstance(table.get(key), dict)}
    return {**table, **changes, **inside}


def _filled(value: Any, words: Words) -> Any:
    """Return the value with words for their names in braces."""
    if isinstance(value, dict):
        return {key: _filled(inner, words) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    word = value.removeprefix("{").removesuffix("}")
    return words[word] if value == f"{{{word}}}" else value.format(**words)
