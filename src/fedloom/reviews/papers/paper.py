"""One paper as data: its experiment, its methods, and its tables and figures.

A value of a table or figure is described by words, such as `dataset="mnist"`,
`heterogeneity="dir:0.1"` and `method="FedAvg"`. They are those of a printed number (numbers.json),
or of a combination in a figure (`ExhibitTemplate.over`). The experiment, the expression of the
method and the measure follow from them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypedDict

from fedloom.reviews.papers.printed import Words, printed
from fedloom.reviews.papers.protocols import (
    Exhibit,
    Measure,
    PaperCell,
    PaperRun,
    Printed,
    Setting,
)


class SettingFields(TypedDict, total=False):
    """Fields of `Setting`; keys of `training` are added to those before."""

    data: str
    clients: int
    partition: str
    model: str
    training: dict[str, Any]
    rounds: int
    participation: float
    evaluate_every: int
    personal: bool
    seeds: Sequence[int]
    record: Sequence[str]


@dataclass(frozen=True)
class Change:
    """A change of the experiment.

    Attributes:
        label: Word in the setting's name.
        setting: Fields that it changes.
        methods: Expressions that it changes, by method.
        words: Words that it adds.
    """

    label: str = ""
    setting: SettingFields = field(default_factory=SettingFields)
    methods: Mapping[str, str] = field(default_factory=dict)
    words: Words = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rule(Change):
    """A change where several words at once have these values; a list allows each of its values."""

    when: Words


@dataclass(frozen=True)
class CellTemplate:
    """A value of each combination of words.

    Attributes:
        row: Row of the table, by default the method. As in `column` and `baseline`, words in braces
            are replaced: `{setting}` is the setting's name, `{alone}` the method up to a plus sign.
        column: Column of the table, by default the setting's name.
        measure: Kind of the measure, by default the word `measure`.
        target: Word that is the target of the measure.
        printed: Word that is the printed value; `mean` has the deviation `std`.
        times: Factor of the printed value.
        baseline: Method that the run is compared with.
        relative: True if the value is in parts of the baseline's number.
        needs: Word without which there is no such cell.
        a_client: See `Measure`.
        interpolated: See `Measure`.
    """

    row: str = "{method}"
    column: str = "{setting}"
    measure: str = ""
    target: str = ""
    printed: str = "mean"
    times: float = 1
    baseline: str = ""
    relative: bool = False
    needs: str = "method"
    a_client: bool = False
    interpolated: bool = False


@dataclass(frozen=True)
class ExhibitTemplate:
    """A table or figure.

    Attributes:
        ids: Names; several where versions of the paper share it.
        shows: Short description.
        numbers: The printed numbers, such as `fedumf/A2`, or `1` of each version.
        over: Combinations of words, methods innermost; a list has an axis of its values.
        words: Words that all values have.
        rules: Changes by words.
        setting: Fields of the experiment.
        methods: Its methods where they are not those of the paper.
        cells: The values of each combination.
    """

    ids: Sequence[str]
    shows: str
    numbers: str = ""
    over: Sequence[Words] = ()
    words: Words = field(default_factory=dict)
    rules: Sequence[Rule] = ()
    setting: SettingFields = field(default_factory=SettingFields)
    methods: Mapping[str, str] = field(default_factory=dict)
    cells: Sequence[CellTemplate] = (CellTemplate(),)


@dataclass(frozen=True)
class Hour:
    """What two cores check in about an hour.

    Attributes:
        exhibit: The table or figure.
        can: What the check can show.
        cannot: What it cannot show.
        limits: Options of the reproduction (fields of `ReproduceOptions`).
    """

    exhibit: str
    can: str
    cannot: str
    limits: Mapping[str, Any]


@dataclass(frozen=True)
class Paper:
    """One paper with its versions.

    Attributes:
        titles: Title of each version, by the prefix of its tables and figures.
        words: Default words.
        setting: The experiment before any change.
        changes: Changes by word and value.
        methods: Expression of each method.
        hour: A check that takes about an hour.
        templates: Tables and figures.
        rules: Changes by several words at once.
        methods_of: Methods of a version that does not have all of them.
        not_run: Tables and figures with nothing to run, and why.
        as_printed: Fields of the setting that are words themselves.
    """

    titles: Mapping[str, str]
    words: Words
    setting: SettingFields
    changes: Mapping[str, Mapping[Any, Change]]
    methods: Mapping[str, str]
    hour: Hour
    templates: Sequence[ExhibitTemplate]
    rules: Sequence[Rule] = ()
    methods_of: Mapping[str, Sequence[str]] = field(default_factory=dict)
    not_run: Mapping[str, str] = field(default_factory=dict)
    as_printed: Sequence[str] = ()

    def exhibits(self) -> list[Exhibit]:
        """Return all tables and figures that have something to run, version by version."""
        return [
            Exhibit(name, template.shows, self._cells(version, template))
            for version in self.titles
            for template in self.templates
            for name in template.ids
            if name.partition(".")[0] == version
        ]

    def experiment(self, **words: Any) -> Setting:
        """Return the experiment that words describe, such as `dataset="cifar100",
        heterogeneity="dir:0.1", clients=50`.
        """
        return self._described(words)[1].setting

    def algorithm(self, method: str, **words: Any) -> str:
        """Return the expression of a method in the experiment that words describe.

        Args:
            method: Name of the method in the paper.
            **words: Words of the experiment, such as the data set and the heterogeneity.

        Returns:
            The expression, with the parameters that the paper gives.
        """
        return self._described({**words, "method": method})[1].algorithm

    def _cells(self, version: str, template: ExhibitTemplate) -> list[PaperCell]:
        combinations: list[Words] = []
        if template.numbers:
            combinations = printed(*f"{version}/{template.numbers}".split("/")[-2:])
        methods = template.methods or self.methods_of.get(version) or self.methods
        for words in template.over:
            axes = {**words, "method": words.get("method", list(methods))}  # the innermost
            combinations += [
                dict(zip(axes, values, strict=True))
                for values in product(*map(_listed, axes.values()))
            ]
        cells: dict[tuple[str, str], PaperCell] = {}
        for cell_template, words in product(template.cells, combinations):
            for cell in self._cell(cell_template, words, template, combinations):
                cells.setdefault((cell.row, cell.column), cell)  # a number may be printed twice
        return list(cells.values())

    def _described(
        self, words: Words, template: ExhibitTemplate | None = None
    ) -> tuple[Words, PaperRun]:
        """Return all words of a value in a table or figure, or in the whole paper, and its run,
        which follows from them.
        """
        own = template or ExhibitTemplate((), "")
        words = {"method": "", **self.words, **own.words, **words}
        values = [
            changes[words[word]]
            for word, changes in self.changes.items()
            if words.get(word) is not None
        ]
        rules = [
            rule
            for rule in (*self.rules, *own.rules)
            if all(words.get(word) in _listed(allowed) for word, allowed in rule.when.items())
        ]
        fields: dict[str, Any] = dict(self.setting)
        fields |= {name: words[name] for name in self.as_printed if words.get(name) is not None}
        methods = dict(self.methods)
        method = words["method"]
        name = " ".join(change.label for change in values if change.label)
        described = {**words, "setting": name, "alone": method.partition("+")[0]}
        for change in (*values, *rules, Change("", own.setting, own.methods)):
            training = {**fields.get("training", {}), **change.setting.get("training", {})}
            fields |= {**change.setting, "training": training}
            methods |= change.methods
            described |= change.words
        only = any(rule.setting and "method" in rule.when for rule in rules)
        version = next(iter(self.titles))
        setting = Setting(version, name, **fields, only=method if only else "")
        return described, PaperRun(method, setting, methods.get(method, ""))

    def _cell(
        self,
        cell: CellTemplate,
        words: Words,
        template: ExhibitTemplate,
        combinations: Sequence[Words],
    ) -> Iterator[PaperCell]:
        """Yield the cell of a template for one of the combinations, if there is one: a method is
        not compared with itself.
        """
        described, run = self._described(words, template)
        baseline = cell.baseline.format(**described)
        if described.get(cell.needs) is None or baseline == run.row:
            return
        value = described.get(cell.printed, "")
        divisor = 1
        if cell.relative:
            divisor = next(
                line[cell.printed] for line in combinations if line["method"] == baseline
            )
        if value not in (None, ""):
            value = value * cell.times / divisor
        deviation = described.get("std") if cell.printed == "mean" else None
        yield PaperCell(
            row=cell.row.format(**described),
            setting=run.setting,
            algorithm=run.algorithm,
            column=cell.column.format(**described),
            measure=Measure(
                cell.measure or described["measure"],
                float(described[cell.target]) if cell.target else None,
                cell.a_client,
                cell.interpolated,
            ),
            printed=None if value == "" else Printed(value, deviation),
            baseline=self._described({**words, "method": baseline}, template)[1]
            if baseline
            else None,
        )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
