"""Tables in several files, one for each client."""

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.common.errors import DataError, quoted, shortened
from fedloom.data.columns import CLIENT
from fedloom.data.formats.arrow import PARQUET, checked, read_any
from fedloom.data.formats.arrow_columns import inferred_column, is_date, is_text
from fedloom.data.formats.csv_files import TEXT_TABLES, CsvOptions, read_text_table, typed
from fedloom.data.formats.limits import reading

_PATTERN = "*?["
_IN_FOLDERS = (".csv", ".tsv", *PARQUET)


def read_tables(
    path: str | Sequence[str], options: CsvOptions, exclude: Sequence[str] = ()
) -> tuple[Any, Any]:
    """Read one file or folder, or one file per client.

    Args:
        path: A path, a pattern, or several paths.
        options: Types of columns and the format of CSV files.
        exclude: Columns that need not be in all files.

    Returns:
        Arrow tables of the rows to train on, and of the rows to test on or None. Of one file per
        client, the rows have the column `CLIENT`.
    """
    files = client_files(path)
    if files:
        return read_clients(files, options, exclude), None
    return read_any(Path(str(path)), options)


def client_files(path: str | Sequence[str]) -> list[Path]:
    """Return the files of a list, a pattern or a folder; none for one file, or one data set.

    Args:
        path: A path, a pattern such as `hospitals/*.csv`, or several paths.

    Raises:
        DataError: No file matches, or two clients have one name.
    """
    if not isinstance(path, str):
        files = [Path(name) for name in path]
    elif Path(path).is_dir():
        saved = any((Path(path) / name).exists() for name in ("state.json", "dataset_dict.json"))
        listed = [] if saved else sorted(Path(path).iterdir())
        files = [file for file in listed if file.suffix.lower() in _IN_FOLDERS]
    elif any(mark in path for mark in _PATTERN) and not Path(path).exists():
        files = sorted(map(Path, glob.glob(path, recursive=True)))
        if not files:
            raise DataError(f"{path}: no file has such a name")
    else:
        return []
    clients: dict[str, Path] = {}
    for file in files:
        if file.stem in clients:
            raise DataError(
                f"{file} and {clients[file.stem]} name one client, {quoted(file.stem)}: rename one"
            )
        clients[file.stem] = file
    return files


def read_clients(
    files: Sequence[Path], options: CsvOptions | None = None, exclude: Sequence[str] = ()
) -> Any:
    """Read one table of all files, with the name of each row's file in the column `CLIENT`.

    Args:
        files: CSV or parquet files.
        options: Types of columns and the format of CSV files.
        exclude: Columns that need not be alike in all files.

    Returns:
        An Arrow table.

    Raises:
        DataError: A column is missing in a file, or of another type than in the first.
    """
    import pyarrow as pa

    options = options or CsvOptions()
    is_csv = all(file.suffix.lower() in TEXT_TABLES for file in files)
    tables = {}
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: no such file")
        with reading(file, "damaged csv"):
            read = read_text_table(file, options) if is_csv else read_any(file, options)[0]
        tables[file] = checked(read, file)
    _require_alike(tables, options, is_csv, exclude)
    parts = [with_client(table, file.stem) for file, table in tables.items()]
    with reading(files[0], "other columns than the other files"):
        joined = pa.concat_tables(parts, promote_options="permissive")
    source = shortened(", ".join(map(str, files)))
    joined = checked(joined, source)
    return typed(joined, source, _with_text(options, CLIENT)) if is_csv else joined


def with_client(table: Any, name: str) -> Any:
    """Return an Arrow table with the name of a client in the column `CLIENT` of all rows.

    Args:
        table: Arrow table without such a column.
        name: Name of the client, for example of its file.

    Returns:
        The Arrow table with one more column.
    """
    import pyarrow as pa

    return table.append_column(CLIENT, pa.array([name] * len(table), pa.string()))


def _with_text(options: CsvOptions, name: str) -> CsvOptions:
    settings = vars(options) | {"text": [*options.text, name]}
    return CsvOptions(**settings)


def _require_alike(
    tables: Mapping[Path, Any], options: CsvOptions, is_csv: bool, exclude: Sequence[str]
) -> None:
    """Raise `DataError` for the first column that two files do not have alike."""
    first, *others = tables
    columns = {
        file: [name for name in table.column_names if name not in exclude]
        for file, table in tables.items()
    }
    known = dict.fromkeys(columns[first], ("", first))
    for file in (first, *others):
        names = columns[file]
        for name in sorted(known.keys() ^ {*names}):
            has, lacks = (first, file) if name in known else (file, first)
            raise DataError(
                f"{lacks}: no column {quoted(name)}, which {has} has: add it with empty cells, or "
                f"set exclude=[{name!r}]"
            )
        for name in names:
            kind = "" if name in options.text else _kind(tables[file].column(name), is_csv, options)
            earlier, source = known[name]
            if kind and earlier and kind != earlier:
                raise DataError(
                    f"{file}: column {quoted(name)} is {kind}, and {earlier} in {source}: correct "
                    f"it, or set categorical=[{name!r}] to read all of it as text"
                )
            known[name] = (earlier, source) if earlier else (kind, file)


def _kind(cells: Any, is_csv: bool, options: CsvOptions) -> str:
    """Return the kind of the cells of one file; "" if all are empty."""
    if is_csv:
        cells = inferred_column(cells, options.decimal)
    if cells.null_count == len(cells):
        return ""
    if is_text(cells.type):
        return "text"
    return "dates" if is_date(cells.type) else "numbers"
