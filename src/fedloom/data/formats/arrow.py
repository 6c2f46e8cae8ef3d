"""Arrow tables: of parquet and CSV files, folders of Hugging Face's `datasets` and their hub, and
of data frames; columns of pictures.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedloom.common.errors import DataError, import_extra, quoted, shortened
from fedloom.data.formats.arrow_columns import is_pictures
from fedloom.data.formats.csv_files import TEXT_TABLES, CsvOptions, read_text_table, typed
from fedloom.data.formats.limits import (
    allowed_bytes,
    read_text,
    reading,
    require_columns,
    require_room,
)
from fedloom.data.formats.pictures import decode_images, open_picture

PARQUET = (".parquet", ".pq")
"""Endings of parquet files."""

_BATCH = 1 << 16  # rows that are unpacked at a time, if a row has a fixed width
_TEXT_BATCH = 1000  # the same if it has not
_ROW_BYTES = 64  # a row's label and group, and the permutation that holds out rows
_CELL_BYTES = 8  # an input in float64
_COLUMN_BYTES = 10_000  # Arrow's builder of a column


def read_parquet(paths: Sequence[Path]) -> Any:
    """Read parquet files as one Arrow table; raises `DataError` for a damaged or too large one, or
    columns that differ.
    """
    return _read_all(paths, _parquet_batches, "damaged parquet file")


def _read_all(paths: Sequence[Path], batches: Callable[[Path], Iterator[Any]], damage: str) -> Any:
    """Return one table of files, of each of which `batches` yields the schema and then the
    batches.
    """
    import pyarrow as pa

    tables: list[Any] = []
    for path in paths:
        with reading(path, damage):
            stream = batches(path)
            schema = next(stream)
            unpacked: list[Any] = []
            rows = 0
            content = sum(table.nbytes for table in tables)
            for batch in stream:  # stops as soon as it takes too much memory
                unpacked.append(batch)
                rows = rows + len(batch)
                content = content + batch.nbytes
                require_room(_table_bytes(rows, len(schema), content), path)
            tables.append(checked(pa.Table.from_batches(unpacked, schema), path))
    with reading(paths[0], "other columns than its sister files"):
        return pa.concat_tables(tables)


def _parquet_batches(path: Path) -> Iterator[Any]:
    """Yield the schema and the batches of a parquet file, after a check of the sizes in its
    footer.
    """
    import pyarrow as pa
    from pyarrow import parquet as pq

    with pq.ParquetFile(path) as file:
        footer = file.metadata
        schema = file.schema_arrow
        groups = [max(0, footer.row_group(k).total_byte_size) for k in range(footer.num_row_groups)]
        widths = [
            kind.bit_width / 8 if pa.types.is_primitive(kind) else None for kind in schema.types
        ]
        fixed = int(footer.num_rows * sum(width or 0 for width in widths))
        require_room(_table_bytes(footer.num_rows, len(widths), max(fixed, sum(groups))), path)
        # A few bytes of a file can stand for many rows of text, each at most as long as its row
        # group. While Arrow builds a batch, it holds more than one copy.
        rows = (
            _BATCH
            if None not in widths
            else min(_TEXT_BATCH, allowed_bytes() // (4 * max([1, *groups])) or 1)
        )
        yield schema
        # Arrow's thread pool can abort the process at its exit.
        yield from file.iter_batches(rows, use_threads=False)


def _stream_batches(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        yield stream.schema
        yield from stream


def _table_bytes(rows: int, columns: int, content: int) -> int:
    return rows * (_ROW_BYTES + _CELL_BYTES * columns) + columns * _COLUMN_BYTES + content


def _unpacked_bytes(cells: Any) -> int:
    """Return the bytes of a column, of a dictionary's with each row's own value.

    Few bytes in a dictionary may stand for much text in many rows.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(cells.type):
        return int(cells.nbytes)
    total = 0
    for chunk in cells.chunks:
        values = chunk.dictionary
        if values.type in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
            # Arrow trusts indices; those outside the dictionary are found by a full check.
            chunk.validate(full=True)
            lengths = pc.binary_length(values).cast(pa.int64())
            total += pc.sum(lengths.take(chunk.indices)).as_py() or 0
        else:  # numbers, or as if each row had all values
            width = 8 if pa.types.is_primitive(values.type) else values.nbytes
            total += width * len(chunk)
    return total


def checked(table: Any, source: Path | str) -> Any:
    """Return an Arrow table after a check of its size, its text and the names of its columns.

    Args:
        table: Arrow table of any origin.
        source: Its name in errors.

    Returns:
        The same table.

    Raises:
        DataError: The table is damaged or too large, or two columns have one name.
    """
    with reading(source, "damaged table"):
        require_columns(table.num_columns, source)
        names = Counter(table.column_names)
        content = sum(map(_unpacked_bytes, table.columns))
        require_room(_table_bytes(table.num_rows, len(names), content), source)
        # Arrow trusts offsets, and Python's text must be UTF-8.
        table.validate(full=True)
    if len(names) < table.num_columns:
        raise DataError(
            f"{source}: two columns have one name: {quoted(names.most_common(1)[0][0])}"
        )
    return table


def read_any(path: Path, options: CsvOptions | None = None) -> tuple[Any, Any]:
    """Read a CSV or parquet file or a folder of `save_to_disk`.

    Args:
        path: The file or folder.
        options: Types of columns and the format of a CSV file.

    Returns:
        Arrow tables of the rows to train on, and of the rows to test on or None.

    Raises:
        DataError: There is no such file, it is damaged, or its kind is not supported.
    """
    with reading(path, "damaged folder of a DatasetDict"):
        if (path / "dataset_dict.json").is_file():
            splits = json.loads(read_text(path / "dataset_dict.json", "json"))["splits"]
            if "train" not in splits:
                raise DataError(
                    f"{path}: no split 'train' (it has: {shortened(', '.join(map(str, splits)))})"
                )
            test = next((name for name in ("test", "validation") if name in splits), None)
            return _saved(path / "train"), None if test is None else _saved(path / test)
        if path.is_dir():
            return _saved(path), None
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    suffix = path.suffix.lower()
    if suffix in PARQUET:
        return read_parquet([path]), None
    if suffix not in TEXT_TABLES:
        raise DataError(
            f"{path}: wanted a .csv, .tsv or .parquet file, or a folder that save_to_disk wrote"
        )
    return read_csv(path, options)[0], None


def read_csv(path: Path, options: CsvOptions | None = None) -> tuple[Any, Any]:
    """Read a CSV file once.

    Args:
        path: The file.
        options: Types of columns and the format.

    Returns:
        An Arrow table with the type of each column, and one with each cell as text.
    """
    options = options or CsvOptions()
    with reading(path, "damaged csv"):
        cells = checked(read_text_table(path, options), path)
        return typed(cells, str(path), options), cells


def as_arrow(data: Any) -> Any:
    """Return a table of pandas, Polars, Arrow or Hugging Face's `datasets` as an Arrow table; None
    for anything else.
    """
    library = type(data).__module__.partition(".")[0]
    if library == "pandas" and hasattr(data, "columns"):
        import pyarrow as pa

        names = [str(name) for name in data.columns]
        return pa.Table.from_pandas(data.set_axis(names, axis=1), preserve_index=False)
    if library == "polars" and hasattr(data, "to_arrow") and hasattr(data, "columns"):
        return data.to_arrow()
    if library == "datasets" and hasattr(data, "with_format"):
        return data.with_format("arrow")[:]
    return data if library == "pyarrow" and hasattr(data, "column_names") else None


def _saved(folder: Path) -> Any:
    with reading(folder, "no folder that save_to_disk wrote"):
        files = json.loads(read_text(folder / "state.json", "json"))["_data_files"]
        # in this folder, wherever a name leads
        paths = [folder / Path(file["filename"]).name for file in files]
        if len({*paths}) < len(paths):
            raise DataError(f"{folder}: state.json names a file twice")
        require_room(sum(path.stat().st_size for path in paths), folder)
        return checked(
            _read_all(paths, _stream_batches, "no folder that save_to_disk wrote"), folder
        )


def hub_table(repository: str, split: str) -> Any:
    """Load a data set of the Hugging Face hub as an Arrow table, pictures still packed.

    Args:
        repository: The data set.
        split: Its part, such as `train`.

    Returns:
        An Arrow table. Pictures are bytes.

    Raises:
        MissingExtra: The extra `hub` is not installed.
        DataError: The data set cannot be loaded.
    """
    hub = import_extra("datasets", "hub", f"loading {repository} from the Hugging Face hub")
    with reading(f"hub data set {repository!r}, split {split!r}", "cannot be loaded"):
        # The format "arrow" returns the stored columns; decoding each picture into an object
        # would cost minutes.
        return hub.load_dataset(repository, split=split).with_format("arrow")[:]


def decode_column(
    table: Any, channels: int, source: str, names: Sequence[str] = ("image", "img")
) -> Tensor:
    """Decode a column of pictures.

    Args:
        table: Arrow table of `n` rows.
        channels: 1 (grey) or 3 (colour).
        source: Its name in errors.
        names: Names of the column; the first one that the table has is read.

    Returns:
        Pixels `[n, channels, height, width]` uint8.

    Raises:
        DataError: There is no such column, or a cell is not a picture.
    """
    import pyarrow as pa

    cells = column(table, names, source)
    kind = cells.type
    if is_pictures(kind):
        cells = pa.chunked_array(
            [chunk.field("bytes") for chunk in cells.chunks], type=kind.field("bytes").type
        )
    if not pa.types.is_binary(cells.type) and not pa.types.is_large_binary(cells.type):
        raise DataError(
            f"{source}: pictures must be stored as bytes, not as {shortened(str(cells.type))}"
        )
    # One contiguous array: indexing a chunked one searches its chunks for every picture.
    packed = cells.combine_chunks() if cells.num_chunks else pa.array([], type=cells.type)
    return decode_images(
        len(packed), lambda row: packed[row].as_py(), lambda row: f"{source}: row {row}", channels
    )


def decode_in_own_mode(table: Any, name: str, source: str) -> Tensor:
    """Decode a column of pictures, to grey levels if the first one is grey.

    Args:
        table: Arrow table of `n` rows.
        name: Name of the column.
        source: Its name in errors.

    Returns:
        Pixels `[n, channels, height, width]` uint8.

    Raises:
        DataError: A cell is not a picture.
    """
    packed = table.column(name)[0].as_py()
    if not packed or not packed.get("bytes"):
        raise DataError(f"{source}: no picture in row 0")
    with reading(source, "unreadable picture in row 0"), open_picture(packed["bytes"]) as picture:
        is_grey = picture.mode in ("1", "L", "I", "F") or picture.mode.startswith("I;16")
    return decode_column(table, 1 if is_grey else 3, source, [name])


def column(table: Any, names: Sequence[str], source: str) -> Any:
    """Return a column without empty cells.

    Args:
        table: Arrow table.
        names: Names of the column; the first one that the table has is returned.
        source: Its name in errors.

    Returns:
        An Arrow column.

    Raises:
        DataError: The table has no such column, or a cell is empty.
    """
    available = table.column_names
    name = next((name for name in names if name in available), None)
    if name is None:
        listed = shortened(", ".join(available))
        raise DataError(f"{source}: no column {' or '.join(map(repr, names))} (it has: {listed})")
    cells = table.column(name)
    if cells.null_count:
        row = cells.is_null().index(True).as_py()
        raise DataError(f"{source}: nothing in column {name!r} of row {row}")
    return cells
