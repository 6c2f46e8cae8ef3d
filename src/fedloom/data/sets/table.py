"""Tables with named columns, one of them the target: CSV, parquet and folders of Hugging Face's
`save_to_disk`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedloom.common.errors import InvalidValue, shortened
from fedloom.common.fields import Count
from fedloom.data.columns import CLIENT, SMALLEST, Columns, Dates, Missing
from fedloom.data.dataset import Dataset, datasets
from fedloom.data.formats.arrow_columns import (
    is_text,
)
from fedloom.data.formats.csv_files import CsvOptions
from fedloom.data.formats.table_files import read_tables, with_client
from fedloom.data.table_rows import table_dataset


@datasets.register("table")
def table(
    *,
    path: str | Sequence[str] = "",
    test_path: str | Sequence[str] = "",
    target: str = "",
    group: str | Sequence[str] = (),
    inputs: Sequence[str] = (),
    categorical: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dates: Dates = "refuse",
    smallest: Count = SMALLEST,
    kind: Literal["auto", "classification", "regression"] = "auto",
    missing: Missing = "refuse",
    standardise: bool = True,
    test_fraction: float = 0.2,
    seed: int = 0,
    separator: str = "",
    decimal: Literal["", ".", ","] = "",
    encoding: str = "",
) -> Dataset:
    """A table of your own: `table(path='patients.csv', target='outcome', group='hospital')`.

    Args:
        path: A CSV file with a header, a parquet file, or a folder written by Hugging Face's
            `save_to_disk`. One file per client is a folder, a pattern such as `hospitals/*.csv`, or
            a list; without `group`, the name of a file is the client of its rows.
        test_path: The rows to test on, as `path`. Without it and a test part in the folder,
            `test_fraction` of the rows, of each class, is held out by `seed`.
        target: The column to learn.
        group: The column, or several, that name the client of a row, for `partition = "natural"`.
        inputs: The columns to learn from, by default all others: numbers as they are; text as one
            column of 0 and 1 for each category of the training rows. A column of pictures, or of
            text called text, sentence or content, is learned from by default without the others,
            which a notice names.
        categorical: Columns of numbers that are encoded as text is. Text in it may have as many
            categories as rows.
        exclude: Columns that are not learned from, such as the number of a patient. Text with
            nearly as many categories as rows is refused otherwise.
        dates: Dates are refused, or with `ordinal` the number of days since 1970-01-01.
        smallest: Fewest training rows of a category with an input of its own. All rarer categories
            of a column are one input, other, and no file of a run holds them.
        kind: By default floats are a regression, whole numbers and text classes.
        missing: Empty cells are refused, filled with the mean of the rows that clients train on (of
            text: a category of their own), or their rows dropped.
        standardise: Bring columns of numbers, and a target of numbers, to mean 0 and deviation 1
            over the rows that clients train on. Figures and predictions are in the target's own
            units.
        test_fraction: The share of rows held out, in (0, 1).
        seed: The seed of the rows held out.
        separator: The character between the cells of a CSV file, by default the one of comma,
            semicolon and tab that gives the header the most columns.
        decimal: The decimal mark of a CSV file, by default a point, or a comma if it cannot
            separate thousands.
        encoding: The encoding of a CSV file, such as `latin-1`, by default UTF-8 or UTF-16.

    Returns:
        Features `[n, d]`, pictures or tokens, with classes or numbers as targets.

    Raises:
        DataError: For a file that is missing, damaged or too large, with the column.
        InvalidValue: For a column that the table does not have.
    """
    if not path:
        raise InvalidValue(
            "table needs path: a CSV file, a parquet file or a folder, and target: the column "
            "to learn (real sites "
            "have their own rows, and need no path)"
        )
    columns = Columns(
        target, group, inputs, categorical, kind, missing, standardise, True,
        exclude, dates, smallest,
    )  # fmt: skip
    options = CsvOptions(columns.text, (), separator, decimal, encoding)
    train, test = read_tables(path, options, exclude)
    if CLIENT in train.column_names and not columns.groups:
        columns = replace(columns, group=CLIENT)
    if test_path:
        alike = [field.name for field in train.schema if is_text(field.type)]
        test = read_tables(test_path, replace(options, text=alike), exclude)[0]
        if columns.groups == [CLIENT] and CLIENT not in test.column_names:
            test = with_client(test, Path(str(test_path)).stem)
    source = path if isinstance(path, str) else shortened(", ".join(path))
    return table_dataset(
        "table", train, test, columns, source, test_fraction=test_fraction, seed=seed
    )
