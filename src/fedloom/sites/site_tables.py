"""Tables of sites: roles and formats of their columns, and their common preprocessing.

A federation of tables agrees before round 1 on statistics of columns: means, deviations and
categories. No file is shared.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from fedloom.common.errors import InvalidValue, quoted
from fedloom.data.columns import Columns, Moments, TableColumn, TableInputs
from fedloom.data.convert import BOOLEANS
from fedloom.data.dataset import Dataset, Samples, datasets, make_dataset
from fedloom.data.formats.arrow import PARQUET, as_arrow, read_any
from fedloom.data.formats.csv_files import TEXT_TABLES, CsvOptions
from fedloom.data.preprocessing import ModelOutputs, Preprocessing, label_type
from fedloom.data.sets.own import called
from fedloom.data.table_rows import table_dataset
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.objectives.custom import build_objective
from fedloom.objectives.regression import Regression, Standardised
from fedloom.runs.configuration import Configuration
from fedloom.survey.column_statistics import Statistics


def own_table(source: str, options: CsvOptions) -> tuple[Any, Any] | None:
    """Return the Arrow tables of a site's training and test rows; None for other data.

    The table of test rows may be empty.

    Args:
        source: `module:function`, or the path of a file or folder.
        options: Types of columns and the format of a CSV file.

    Returns:
        Training and test rows with the same columns, or None.
    """
    path = Path(source)
    test = None
    if ":" in source and not path.exists():
        table = as_arrow(called(source))
    elif (
        path.suffix.lower() in (*TEXT_TABLES, *PARQUET)
        or (path / "state.json").is_file()
        or (path / "dataset_dict.json").is_file()
    ):
        table, test = read_any(path, options)
    else:
        return None
    return None if table is None else (table, table.slice(0, 0) if test is None else test)


def csv_options(configuration: Configuration, agreed: Preprocessing | None = None) -> CsvOptions:
    """Return the types of columns and the format of the CSV files of a federation's sites.

    Args:
        configuration: Configuration, which may name columns of categories and the format.
        agreed: Preprocessing on which the sites have agreed.

    Returns:
        The options to read a file. Without an agreement, types of other columns are guessed from
        the file.
    """
    entry, options = datasets.read(configuration.data.name)
    formats = {"separator", "decimal", "encoding"} if entry.name == "table" else set()
    chosen = {name: value for name, value in options.items() if name in formats}
    roles = table_roles(configuration) or Columns()
    if agreed is None:
        return CsvOptions(roles.text, **chosen)
    types = agreed.csv_options
    outputs = agreed.outputs
    text = [*roles.text, *types.text]
    names = outputs.classes
    is_class = outputs.answer == "class" and names and names != BOOLEANS
    if is_class and (outputs.label_type or label_type(names)) == "text":
        text.append(outputs.name)
    return CsvOptions(text, types.numbers, **chosen)


def table_roles(configuration: Configuration) -> Columns | None:
    """Return the roles of columns in a configuration; None if its data set is not a table."""
    entry, options = datasets.read(configuration.data.name)
    names = {field.name for field in fields(Columns)}
    return (
        Columns(**{n: value for n, value in options.items() if n in names})
        if entry.name == "table"
        else None
    )


def of_columns(configuration: Configuration) -> bool:
    """Return True unless the server's example shows that the table contains texts or pictures."""
    _, options = datasets.read(configuration.data.name)
    return not options.get("path") or isinstance(
        make_dataset(configuration.data.name).encoding, TableInputs
    )


def standardised_target(dataset: Dataset, agreed: Preprocessing, objective: Any) -> Dataset:
    """Return the data set with this objective and a numeric target standardised as agreed.

    Args:
        dataset: The site's data set.
        agreed: Preprocessing of the federation, with mean and deviation of the target.
        objective: The objective of the federation.

    Returns:
        The data set. Labels of numbers have mean 0 and deviation 1 over the federation, if the
        sites agreed on this.
    """
    if not agreed.outputs.mean or not isinstance(objective, Regression):
        return replace(dataset, objective=objective, standardise=False)
    scaled = Standardised(
        objective.kind, objective.delta, agreed.outputs.mean, agreed.outputs.deviation
    )
    train, test = (
        replace(s, labels=scaled.standardised(s.labels)) for s in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test, objective=scaled)


def agreed_table(statistics: Statistics, roles: Columns) -> Preprocessing:
    """Return the preprocessing of tables with these statistics.

    Args:
        statistics: Statistics of the sites' columns; the last column is the target.
        roles: Roles of columns in the configuration.

    Returns:
        The preprocessing, equal at all sites: the means, deviations and categories of the inputs,
        and the target.

    Raises:
        InvalidValue: Too few rows of each site have values of a column.
    """
    columns = []
    for name, column in statistics.columns.items():
        if not column.count > 0 or (column.kind == "categories" and not column.categories):
            least = f"no site has {statistics.survey.smallest} rows with one value of it (smallest)"
            raise InvalidValue(f"column {quoted(name)}: {least}")
        spread, (low, high) = column.deviation, column.edges
        if statistics.noise and not spread:  # the noise hides it
            spread = (high - low) / 12**0.5  # of a uniform distribution
        count, mean, square = (
            torch.tensor([x]).double() for x in (column.count, column.mean, spread**2)
        )
        deviation = Moments(count, mean, square * count).deviation
        categories = (
            None
            if column.kind == "numbers"
            else tuple(sorted(column.categories, key=_numbers_first))
        )
        figures = ((column.mean,), (float(deviation),)) if categories is None else ((), ())
        columns.append(TableColumn(name, categories, *figures))
    *inputs, target = columns
    if target.categories is not None:
        outputs = ModelOutputs("class", target.name, target.categories)
    elif roles.standardise:
        outputs = ModelOutputs("number", target.name, mean=target.mean, deviation=target.deviation)
    else:
        outputs = ModelOutputs("number", target.name)
    encoding = TableInputs(tuple(inputs), roles.missing, roles.standardise, roles.dates)
    return Preprocessing(encoding, outputs)


def _numbers_first(text: str) -> tuple[bool, int, str]:
    """Sort key for classes: integers by value, then strings."""
    number = text.removeprefix("-").isdigit()
    return not number, int(text) if number else 0, text


def server_table(agreed: Preprocessing, configuration: Configuration) -> Dataset:
    """Return the server's data set of a federation of tables.

    Args:
        agreed: Preprocessing of the federation.
        configuration: Configuration of the federation; its data set may have a path.

    Returns:
        A data set without training rows. The rows of the path, if any, are for testing.
    """
    _, options = datasets.read(configuration.data.name)
    roles = replace(table_roles(configuration) or Columns(), target=agreed.outputs.name)
    objective: Objective = CLASSIFICATION if agreed.outputs.classes else Regression()
    if configuration.objective is not None:
        objective = build_objective(configuration.objective, configuration.metrics)
    if path := options.get("test_path") or options.get("path"):
        held_out = {name: options[name] for name in ("test_fraction", "seed") if name in options}
        train, test = read_any(Path(str(path)), csv_options(configuration, agreed))
        if options.get("test_path"):
            train, test = train.slice(0, 1), train
        dataset = table_dataset("table", train, test, roles, str(path), agreed=agreed, **held_out)
    else:
        label = torch.zeros(0, dtype=torch.int64 if agreed.outputs.classes else torch.float32)
        assert isinstance(agreed.inputs, TableInputs), "`agreed_table` makes it"
        nothing = Samples(torch.zeros(0, agreed.inputs.features, dtype=torch.float64), label)
        names = agreed.outputs.classes
        dataset = Dataset(
            "table",
            nothing,
            nothing,
            len(names),
            class_names=names or None,
            objective=objective,
            encoding=agreed.inputs,
            target=agreed.outputs.name,
        )
    return standardised_target(dataset, agreed, objective)
