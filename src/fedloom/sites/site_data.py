"""Data of sites with their own data: the common preprocessing, and reading the samples."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedloom.common.errors import DataError, InvalidValue, RefusedReply
from fedloom.common.fields import checked
from fedloom.common.plugins import refused_code
from fedloom.data.columns import Columns, TableInputs
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.data.preprocessing import (
    ModelOutputs,
    PictureInputs,
    Preprocessing,
    TensorInputs,
    TextInputs,
)
from fedloom.data.sets.own import function_data, own_samples, split_arrays
from fedloom.data.sets.picture_files import read_image_folder
from fedloom.data.table_rows import table_dataset
from fedloom.objectives import Objective
from fedloom.objectives.custom import build_objective, expression_of
from fedloom.objectives.regression import Regression, Standardised
from fedloom.runs.configuration import Configuration
from fedloom.sites.site_tables import csv_options, own_table, standardised_target, table_roles


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

        Returns:
            A data set with the inputs and classes of the agreement. Its test part may be empty.

        Raises:
            DataError: The data cannot be read.
            InvalidValue: The data do not fit; the text names the source and a table's column.
        """
        inputs = self.preprocessing.inputs
        outputs = self.preprocessing.outputs
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
                self.name,
                train,
                train[:0] if test is None else test,
                self.classes,
                *scale,
                self.vocabulary,
                outputs.classes or None,
                objective,
                standardise=False,
            )
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


def own_data(source: str, agreed: Preprocessing | None = None) -> tuple[Samples, Samples | None]:
    """Return a site's samples for training and for testing; None if it has no test samples.

    Args:
        source: `module:function`, called without arguments, or the path of a folder of npy files,
            an npz file, or a folder of pictures by class.
        agreed: Preprocessing of the federation, for pictures.

    Returns:
        The training samples, at least one, and the test samples or None.

    Raises:
        DataError: Samples are missing or do not fit together.
    """
    path = Path(source)
    encoding = None if agreed is None else agreed.inputs
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
        classes = agreed.outputs.classes
        size = (height, width)
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
