"""Arrow tables with a column of pictures or text and a column of labels: from parquet files or the Hugging Face hub."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from fedloom.data.dataset import Samples
from fedloom.data.formats.labels import class_labels
from fedloom.data.formats.limits import reading, require_room
from fedloom.data.formats.pictures import decode_images
from fedloom.errors import LONGEST_QUOTED, DataError, MissingExtra, one_line, shortened

_ROWS = 1000  # that are unpacked at a time

IMAGE_COLUMNS = ("image", "img")


def read_tables(paths: Sequence[Path]) -> Any:
    """The parquet files `paths` as one Arrow table; raises `DataError` for a damaged file or differing columns."""
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


def decode_column(table: Any, channels: int, source: str) -> Tensor:
    """The column of pictures as uint8 `[n, channels, height, width]`; raises as `image_samples`."""
    found = column(table, IMAGE_COLUMNS, source)
    kind = found.type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
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
