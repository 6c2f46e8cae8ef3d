"""Arrow tables: from parquet and CSV files, folders of Hugging Face's `datasets`, or their hub; and columns of pictures."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedloom.data.dataset import Samples
from fedloom.data.formats.labels import class_labels
from fedloom.data.formats.limits import read_text, reading, require_room
from fedloom.data.formats.pictures import decode_images
from fedloom.errors import LONGEST_QUOTED, DataError, MissingExtra, one_line, shortened

_ROWS = 1000  # that are unpacked at a time

IMAGE_COLUMNS = ("image", "img")


def read_tables(paths: Sequence[Path]) -> Any:
    """The parquet files `paths` as one Arrow table; raises `DataError` for a damaged file or differing columns."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    tables: list[pa.Table] = []
    taken = 0
    for path in paths:
        with reading(path, "damaged parquet file"), pq.ParquetFile(path) as file:
            batches = []
            for batch in file.iter_batches(_ROWS):  # a few bytes of a file can stand for any number of rows
                batches.append(batch)
                taken += batch.nbytes
                require_room(taken, path)
            tables.append(pa.Table.from_batches(batches, file.schema_arrow))
    with reading(paths[0], "other columns than its sister files"):
        return pa.concat_tables(tables)


def read_any(path: Path) -> tuple[Any, Any]:
    """The rows to train on and, where there are any, to test on (else None), as Arrow tables: of a CSV file with a header, a
    parquet file, or a folder that `save_to_disk` of Hugging Face's `datasets` wrote.

    Raises `DataError` for a file that is missing, damaged or of another kind, or takes more memory than a data set may.
    """
    from pyarrow import csv

    if (path / "dataset_dict.json").is_file():
        with reading(path, "damaged folder of a DatasetDict"):
            splits = json.loads(read_text(path / "dataset_dict.json", "json"))["splits"]
            test = next((one for one in ("test", "validation") if one in splits), None)
        if "train" not in splits:
            raise DataError(f"{path}: no split 'train' (it has: {shortened(', '.join(map(str, splits)))})")
        return _saved(path / "train"), None if test is None else _saved(path / test)
    if path.is_dir():
        return _saved(path), None
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix in (".parquet", ".pq"):
        return read_tables([path]), None
    if path.suffix not in (".csv", ".tsv", ".txt"):
        raise DataError(f"{path}: wanted a .csv, .tsv or .parquet file, or a folder that save_to_disk wrote")
    parsing = csv.ParseOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
    # As Excel and pandas write what is missing; text may be empty, too.
    empty = csv.ConvertOptions(
        null_values=["", "NA", "N/A", "NaN", "nan", "null", "None", "?"], strings_can_be_null=True
    )
    with reading(path, "damaged csv"):
        require_room(path.stat().st_size, path)
        found = csv.read_csv(path, parse_options=parsing, convert_options=empty)
        require_room(found.nbytes, path)
    if len(set(found.column_names)) < len(found.column_names):
        raise DataError(f"{path}: two columns have one name ({shortened(', '.join(found.column_names))})")
    return found, None


def _saved(folder: Path) -> Any:
    """The rows in the Arrow files of a folder, in the order in which `state.json` lists them."""
    import pyarrow as pa

    with reading(folder, "no folder that save_to_disk wrote"):
        names = [one["filename"] for one in json.loads(read_text(folder / "state.json", "json"))["_data_files"]]
        paths = [folder / Path(name).name for name in names]  # in this folder, wherever a name leads to
        require_room(sum(path.stat().st_size for path in paths), folder)
        tables = []
        for path in paths:
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
                tables.append(stream.read_all())
        found = pa.concat_tables(tables)
        require_room(found.nbytes, folder)
    return found


def is_pictures(kind: Any) -> bool:
    """Whether a column of this type holds packed pictures, as Hugging Face's `datasets` store them."""
    import pyarrow as pa

    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def hub_installed() -> bool:
    """Whether the package `datasets` can be imported."""
    try:
        importlib.import_module("datasets")
    except ImportError:
        return False
    return True


def hub_table(repository: str, split: str) -> Any:
    """The `split` of the hub's data set `repository` as an Arrow table, pictures still packed.

    Raises `MissingExtra` if `datasets` is not installed and `DataError` if the hub cannot give the data.
    """
    if not hub_installed():
        raise MissingExtra("datasets", "hub", f"loading {repository} from the Hugging Face hub")
    hub = importlib.import_module("datasets")
    try:
        # The format "arrow" hands out the stored columns; decoding each picture into an object would cost minutes.
        return hub.load_dataset(repository, split=split).with_format("arrow")[:]
    # Network, hub and file errors of several packages reach here; each means that the hub gave no data.
    except Exception as error:
        reason = one_line(str(error), LONGEST_QUOTED) or type(error).__name__
        raise DataError(f"hub data set {repository!r}, split {split!r}: cannot be loaded ({reason})") from error


def image_samples(table: Any, label: str, classes: int, channels: int, source: str) -> Samples:
    """The pictures (struct column `image` or `img` of bytes and path) and labels of `table`.

    Raises `DataError`, naming `source` and the row, for a missing column, a bad label or an unreadable picture.
    """
    labels = class_labels(column(table, (label,), source).to_numpy(), classes, source)
    return Samples(decode_column(table, channels, source), labels)


def decode_column(table: Any, channels: int, source: str, names: Sequence[str] = IMAGE_COLUMNS) -> Tensor:
    """The column of pictures as uint8 `[n, channels, height, width]`; raises as `image_samples`."""
    import pyarrow as pa

    found = column(table, names, source)
    kind = found.type
    if is_pictures(kind):
        found = pa.chunked_array([chunk.field("bytes") for chunk in found.chunks], type=kind.field("bytes").type)
    if not pa.types.is_binary(found.type) and not pa.types.is_large_binary(found.type):
        raise DataError(f"{source}: pictures must be stored as bytes, not as {shortened(str(found.type))}")
    # One contiguous array: indexing a chunked one searches its chunks for every picture.
    whole = found.combine_chunks() if found.num_chunks else pa.array([], type=found.type)
    return decode_images(len(whole), lambda row: whole[row].as_py(), lambda row: f"{source}: row {row}", channels)


def column(table: Any, names: Sequence[str], source: str) -> Any:
    """The first column of `table` called one of `names`; raises `DataError` if there is none or it has holes."""
    for name in names:
        if name in table.column_names:
            found = table.column(name)
            if found.null_count:
                row = int(np.flatnonzero(found.is_null().to_numpy())[0])
                raise DataError(f"{source}: nothing in column {name!r} of row {row}")
            return found
    raise DataError(
        f"{source}: no column {' or '.join(map(repr, names))} (it has: {shortened(', '.join(table.column_names))})"
    )
