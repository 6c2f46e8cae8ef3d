"""Data of sites with their own data: the common preprocessing, and reading the samples.

A federation of tables agrees before round 1 on statistics of columns: means, deviations and
categories. No file is shared.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fedloom.config.fields import checked
from fedloom.config.plugins import refused_code
from fedloom.data.columns import Columns, Moments, TableColumn, TableInputs
from fedloom.data.convert import BOOLEANS
from fedloom.data.dataset import Dataset, Samples, datasets, make_dataset
from fedloom.data.formats.arrow import PARQUET, as_arrow, read_any
from fedloom.data.formats.csv_files import TEXT_TABLES, CsvOptions
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.data.preprocessing import (
    ModelOutputs,
    PictureInputs,
    Preprocessing,
    TensorInputs,
    TextInputs,
    label_type,
)
from fedloom.data.sets.own import called, function_data, own_samples, split_arrays
from fedloom.data.sets.picture_files import read_image_folder
from fedloom.data.sets.table import table_dataset
from fedloom.errors import DataError, InvalidValue, RefusedReply, quoted
from fedloom.objectives import Objective
from fedloom.objectives.classification import CLASSIFICATION
from fedloom.objectives.custom import build_objective, expression_of
from fedloom.objectives.regression import Regression, Standardised
from fedloom.runs.configuration import Configuration
from fedloom.survey.column_statistics import Statistics


@dataclass(frozen=True)
class DataAgreement:
    """Properties that the samples of every site share.

    Attributes:
        name: Name of the data set.
        preprocessing: Transforms data to a model's inputs, and the model's outputs to answers.
        objective: The objective, as an expression.
        classes: Number of classes.
        vocabulary: Number of tokens, for token data.
    """

    name: str
    preprocessing: Preprocessing
    objective: str
    classes: int
    vocabulary: int | None

    @classmethod
    def of(cls, dataset: Dataset) -> "DataAgreement":
        """Return the agreement of the sites of a data set."""
        objective = dataset.objective
        if isinstance(objective, Standardised):
            objective = Regression(objective.kind, objective.delta)
        expression = expression_of(objective) or ""
        return cls(
            dataset.name, dataset.preprocessing, expression, dataset.classes, dataset.vocabulary
        )

    @classmethod
    def read(cls, words: Any) -> "DataAgreement":
        """Read the result of `words`.

        Raises:
            RefusedReply: The value is not valid.
        """
        try:
            preprocessing = Preprocessing.from_json(json.dumps(words["preprocessing"]))
            agreement = cls(**checked(cls, {**words, "preprocessing": preprocessing}))
            if agreement.objective:
                agreement.built_objective()
            return agreement
        except (DataError, InvalidValue, KeyError, TypeError, ValueError):
            raise RefusedReply("the server sent no valid description of the data") from None

    def built_objective(self) -> Objective:
        """Return the objective.

        Raises:
            InvalidValue: The objective names code: a server must not make sites import modules.
        """
        with refused_code():
            return build_objective(self.objective)

    def words(self) -> dict[str, Any]:
        """Return plain values for a message."""
        return {**vars(self), "preprocessing": json.loads(self.preprocessing.to_json())}

    def dataset(self, source: str, configuration: Configuration) -> Dataset:
        """Return a site's own samples.

        Args:
            source: Path or function of the site's data.
            configuration: Configuration of the federation.

        Raises:
            DataError: The data cannot be read.
            InvalidValue: The data do not fit; the text names the source and a table's column.
        """
        inputs, outputs = self.preprocessing.inputs, self.preprocessing.outputs
        try:
            objective = (
                build_objective(configuration.objective, configuration.metrics)
                if configuration.objective
                else self.built_objective()
            )
            table = None
            if isinstance(inputs, TableInputs | TextInputs):
                table = own_table(source, csv_options(configuration, self.preprocessing))
            if table is not None:
                columns = [inputs.column] if isinstance(inputs, TextInputs) else []
                roles = table_roles(configuration) or Columns(outputs.name, inputs=columns)
                rows = table_dataset("table", *table, roles, source, agreed=self.preprocessing)
                return standardised_target(rows, self.preprocessing, objective)
            scale = (
                (inputs.mean or None, inputs.deviation or None)
                if isinstance(inputs, PictureInputs)
                else (None, None)
            )
            train, test = own_data(source, self.preprocessing)
            dataset = Dataset(
                self.name, train, train[:0] if test is None else test, self.classes, *scale, self.vocabulary,
                outputs.classes or None, objective, standardise=False,
            )  # fmt: skip
        except InvalidValue as error:
            raise InvalidValue(f"{source}: {str(error).removeprefix(f'{source}: ')}") from None
        tokens = (
            TensorInputs((inputs.length,), "int64") if isinstance(inputs, TextInputs) else inputs
        )
        if differences := replace(dataset.preprocessing, outputs=ModelOutputs()).differences(
            Preprocessing(tokens)
        ):
            raise InvalidValue(f"{source} differs from the federation: {differences[0]}")
        highest = int(train.inputs.max()) if self.vocabulary is not None else 0
        if self.vocabulary is not None and highest >= self.vocabulary:
            raise InvalidValue(
                f"{source}: tokens must be 0 to {self.vocabulary - 1}, and {highest} is among them"
            )
        return dataset


def own_table(source: str, options: CsvOptions) -> tuple[Any, Any] | None:
    """Return the Arrow tables of a site's training and test rows; None for other data.

    The table of test rows may be empty.

    Args:
        source: `module:function`, or the path of a file or folder.
        options: Types of columns and the format of a CSV file.
    """
    path, test = Path(source), None
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
    """
    entry, options = datasets.read(configuration.data.name)
    formats = {"separator", "decimal", "encoding"} if entry.name == "table" else set()
    chosen = {name: value for name, value in options.items() if name in formats}
    roles = table_roles(configuration) or Columns()
    if agreed is None:
        return CsvOptions(roles.text, **chosen)
    types, outputs = agreed.csv_options, agreed.outputs
    text = [*roles.text, *types.text]
    names = outputs.classes
    is_class = outputs.answer == "class" and names and names != BOOLEANS
    if is_class and (outputs.label_type or label_type(names)) == "text":
        text.append(outputs.name)
    return CsvOptions(text, types.numbers, **chosen)


def own_data(source: str, agreed: Preprocessing | None = None) -> tuple[Samples, Samples | None]:
    """Return a site's samples for training and for testing; None if it has no test samples.

    Args:
        source: `module:function`, called without arguments, or the path of a folder of npy files,
            an npz file, or a folder of pictures by class.
        agreed: Preprocessing of the federation, for pictures.

    Raises:
        DataError: Samples are missing or do not fit together.
    """
    path, encoding = Path(source), None if agreed is None else agreed.inputs
    if ":" in source and not path.exists():
        data = function_data(source)
        splits = [data.train, data.test] if isinstance(data, Dataset) else data
        train, *held_out = (replace(samples, groups=None) for samples in splits)
    elif (
        agreed
        and isinstance(encoding, PictureInputs)
        and path.is_dir()
        and not any(path.glob("*.npy"))
    ):
        channels, height, width = encoding.shape
        folders = [path / name for name in ("train", "test") if (path / name).is_dir()] or [path]
        classes, size = agreed.outputs.classes, (height, width)
        train, *held_out = (
            read_image_folder(folder, classes, channels, size) for folder in folders
        )
    else:
        arrays = [
            (inputs, labels, None) for inputs, labels, _ in split_arrays(read_arrays(path), source)
        ]
        train, *held_out = own_samples(arrays, "channels_first", source)
    if not len(train):
        raise DataError(f"{source}: no samples to train on")
    test = held_out[0] if held_out and len(held_out[0]) else None
    if test is not None and (test.inputs.shape[1:], test.inputs.dtype) != (
        train.inputs.shape[1:],
        train.inputs.dtype,
    ):
        raise DataError(f"{source}: samples for testing look different from those for training")
    return train, test


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
    return Preprocessing(TableInputs(tuple(inputs), roles.missing, roles.standardise), outputs)


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
        train, test = read_any(Path(path), csv_options(configuration, agreed))
        if options.get("test_path"):
            train, test = train.slice(0, 1), train
        dataset = table_dataset("table", train, test, roles, path, agreed=agreed, **held_out)
    else:
        label = torch.zeros(0, dtype=torch.int64 if agreed.outputs.classes else torch.float32)
        assert isinstance(agreed.inputs, TableInputs), "`agreed_table` makes it"
        nothing = Samples(torch.zeros(0, agreed.inputs.features, dtype=torch.float64), label)
        names = agreed.outputs.classes
        dataset = Dataset("table", nothing, nothing, len(names), class_names=names or None, objective=objective,
                          encoding=agreed.inputs, target=agreed.outputs.name)  # fmt: skip
    return standardised_target(dataset, agreed, objective)
