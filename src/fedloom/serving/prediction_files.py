"""Files of samples to predict, and of the predictions."""

import sys
from pathlib import Path

from fedloom.data.formats.arrow import read_any
from fedloom.data.formats.limits import reading
from fedloom.data.formats.pictures import pictures
from fedloom.data.preprocessing import PictureInputs
from fedloom.errors import InvalidValue
from fedloom.serving.predictor import Predictor


def predict_file(predictor: Predictor, path: Path, to: Path | None = None, *, probabilities: bool = False) -> int:
    """Predict the samples of a file or folder, write a table with a row each, and return their number.

    Args:
        predictor: The model.
        path: A CSV or parquet file with the columns of the training data; or a picture, or a folder of them.
        to: A `.csv` or `.parquet` file; by default CSV on the standard output.
        probabilities: Add a column for the probability of each class.

    Raises:
        DataError: The file cannot be read, or does not fit the model.
        InvalidValue: `to` is neither.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    if to is not None and to.suffix not in (".csv", ".parquet"):
        raise InvalidValue(f"--to {to}: predictions are written as .csv or .parquet")
    if isinstance(predictor.preprocessing.inputs, PictureInputs):
        paths = pictures(path) if path.is_dir() else [path]
        data, table = paths, pa.table({"file": list(map(str, paths))})
    else:
        data = table = read_any(path)[0]
    columns = {"prediction": predictor.predict(data).tolist()}
    if probabilities:
        shares = zip(predictor.classes, predictor.predict_proba(data).T, strict=True)
        columns |= {f"probability of {name}": share.tolist() for name, share in shares}
    for name, values in columns.items():
        table = table.append_column(f"{name} (model)" if name in table.column_names else name, [values])
    with reading(to or path, "cannot be written"):
        if to is None or to.suffix == ".csv":
            csv.write_csv(table, sys.stdout.buffer if to is None else to)
        else:
            parquet.write_table(table, to)
    return int(table.num_rows)
