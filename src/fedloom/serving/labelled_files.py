"""Files of rows whose answers are known, for the evaluation of a model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedloom.common.errors import InvalidValue
from fedloom.data.columns import CLIENT, TableInputs
from fedloom.data.formats.table_files import read_tables
from fedloom.data.preprocessing import label_type
from fedloom.serving.predictor import Predictor
from fedloom.serving.row_evaluation import RowEvaluation


def evaluate_file(predictor: Predictor, path: Path, by: str = "", **options: Any) -> RowEvaluation:
    """Evaluate a model on the rows of a file.

    Args:
        predictor: The model.
        path: A CSV or parquet file, or a folder or pattern with one file per client.
        by: Column that names the client of each row; of several files, by default their names.
        options: As for `Predictor.evaluate`.

    Returns:
        The metrics over all rows, and by client if the clients are known.

    Raises:
        DataError: The file cannot be read, or does not fit the model.
        InvalidValue: The model was not trained on a table.
    """
    preprocessing = predictor.preprocessing
    outputs = preprocessing.outputs
    if not isinstance(preprocessing.inputs, TableInputs):
        raise InvalidValue(
            "fedloom evaluate is for models of tables; in Python, "
            "fl.load(RUN).evaluate(data, labels) takes other data too"
        )
    types = preprocessing.csv_options
    text = [*types.text, *([by] if by else [])]
    kind = outputs.label_type or label_type(outputs.classes)
    if outputs.answer == "class" and kind == "text":
        text.append(outputs.name)
    table, _ = read_tables(str(path), replace(types, text=text))
    if not by and CLIENT in table.column_names:
        by = CLIENT
    return predictor.evaluate(table, by=by, **options)
