"""Files of samples to predict, and of the predictions."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.common.errors import DataError, InvalidValue, shortened
from fedloom.data.formats.arrow import read_any, read_csv
from fedloom.data.formats.csv_files import TEXT_TABLES
from fedloom.data.formats.limits import read_text, reading
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.data.formats.pictures import pictures
from fedloom.data.preprocessing import PictureInputs, TextInputs
from fedloom.serving.predictor import Predictor


def predict_file(
    predictor: Predictor,
    path: Path,
    to: Path | None = None,
    *,
    probabilities: bool = False,
    tokens: int = 100,
) -> int:
    """Predict the samples of a file or folder, and write a table with one row per sample.

    Args:
        predictor: The model.
        path: A CSV or parquet file with the columns of the training data, a picture or a folder of
            pictures, a text file with one text per line, or an npz file with `inputs`.
        to: The file to write, `.csv`, `.parquet` or `.npz`; by default CSV to stdout.
        probabilities: Also write the probabilities of the classes.
        tokens: Number of tokens with which a model of the next token continues each text.

    Returns:
        The number of samples.

    Raises:
        DataError: The file cannot be read, or does not fit the model.
        InvalidValue: `to` has another suffix, or predictions of a sample do not fit in a row of a
            table.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    if to is not None and to.suffix not in (".csv", ".parquet", ".npz"):
        raise InvalidValue(f"--to {to}: predictions are written as .csv, .parquet or .npz")
    data, table = _samples(predictor, path, to is None or to.suffix == ".csv")
    column = getattr(predictor.preprocessing.inputs, "column", "")
    answer = predictor.preprocessing.outputs.answer
    if answer == "token" and column and not isinstance(data, list):
        data = data.column(column).to_pylist() if column in data.column_names else data
    if isinstance(data, list) and answer == "token":
        arrays = {
            "prediction": np.array(
                [predictor.generate(text, tokens).removeprefix(text) for text in data]
            )
        }
    else:
        outputs = predictor.outputs(data, str(path))
        arrays = {"prediction": predictor.answers(outputs)}
        if probabilities:
            arrays["probability"] = predictor.probabilities(outputs)
    with reading(to or path, "cannot be written"):
        if to is not None and to.suffix == ".npz":
            np.savez(to, **arrays)  # type: ignore[arg-type]
            return int(table.num_rows)
        for name, values in prediction_columns(predictor, arrays).items():
            title = f"{name} (model)" if name in table.column_names else name
            table = table.append_column(title, pa.array(values.tolist()))
        if to is None or to.suffix == ".csv":
            csv.write_csv(table, sys.stdout.buffer if to is None else to)
        else:
            parquet.write_table(table, to)
    return int(table.num_rows)


def _samples(predictor: Predictor, path: Path, to_text: bool) -> tuple[Any, Any]:
    """Return the samples of a file or folder, and the Arrow table to which predictions are added.

    With `to_text`, the cells of a CSV file are unchanged in the table.

    """
    import pyarrow as pa

    inputs = predictor.preprocessing.inputs
    if path.suffix == ".npz":
        arrays = read_arrays(path)
        if "inputs" not in arrays:
            raise DataError(
                f"{path}: no array 'inputs' (it has: "
                f"{shortened(', '.join(sorted(arrays))) or 'none'})"
            )
        return arrays["inputs"], pa.table({"sample": range(len(arrays["inputs"]))})
    if isinstance(inputs, PictureInputs):
        paths = pictures(path) if path.is_dir() else [path]
        return paths, pa.table({"file": list(map(str, paths))})
    if isinstance(inputs, TextInputs) and path.suffix == ".txt":
        # `splitlines` would also cut at form feeds and at U+2028
        content = read_text(path).removeprefix("\ufeff").replace("\r\n", "\n")
        texts = content.removesuffix("\n").split("\n") if content else []
        if not all(texts):
            raise DataError(f"{path}: line {texts.index('') + 1} is empty: write one text per line")
        return texts, pa.table({"text": texts})
    options = predictor.preprocessing.csv_options
    if path.is_file() and path.suffix.lower() in TEXT_TABLES:
        table, cells = read_csv(path, options)
        # the written file must not change cells such as 007
        return table, cells if to_text else table
    table = read_any(path, options)[0]
    return table, table


def prediction_columns(predictor: Predictor, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a table with the results of n samples.

    Args:
        predictor: The model.
        arrays: Predictions and probabilities by name, `[n, ...]`.

    Returns:
        Columns `[n]` by name.

    Raises:
        InvalidValue: A result has more than two axes.
    """
    columns = {}
    for name, values in arrays.items():
        if values.ndim > 2:
            raise InvalidValue(
                f"predictions of shape {list(values.shape[1:])} do not fit in a row: use --to "
                "FILE.npz"
            )
        if values.ndim == 1:
            columns[name] = values
            continue
        named = len(predictor.classes) == values.shape[1]
        for k in range(values.shape[1]):
            columns[f"{name} of {predictor.classes[k]}" if named else f"{name} {k}"] = values[:, k]
    return columns
