"""AG News: the topics of news articles."""

import csv
import io
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from fedloom.common.errors import DataError
from fedloom.common.fields import Count
from fedloom.data.convert import class_labels
from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.formats.arrow import column, hub_table, read_parquet
from fedloom.data.formats.limits import read_text, reading
from fedloom.data.formats.words import encode, tokens, vocabulary
from fedloom.data.preprocessing import TextInputs
from fedloom.data.sets.origin import files_named, load, parquet_files

_NAMES = ("World", "Sports", "Business", "Sci/Tech")
_REPOSITORY = "fancyzhx/ag_news"
VocabularySize = Annotated[int, Field(ge=3)]  # padding, unknown and a token at least
_Texts = tuple[list[list[str]], Tensor]  # tokens of each article, labels


@datasets.register("ag_news")
def ag_news(
    *,
    folder: str | None = None,
    hub: bool = False,
    length: Count = 200,
    max_vocabulary: VocabularySize | None = 98635,
    vocabulary_from: Literal["train", "all"] = "train",
) -> Dataset:
    """AG News: 120,000 and 7,600 articles of 4 topics, as token numbers `[length]` int64.

    Title and description are lower-cased and split ("basic english"); 0 fills up, 1 stands for
    tokens outside the vocabulary.

    Args:
        folder: The folder with `train.csv` and `test.csv` (class 1..4, title, description) or
            parquet (text, label 0..3).
        hub: Download from the Hugging Face hub.
        length: Tokens that a text is cut or filled up to.
        max_vocabulary: The most ids, 0 and 1 included, of the commonest tokens; None for all.
        vocabulary_from: Count the tokens of the training articles, or of all, as FedALA does.

    Returns:
        Token numbers `[n, length]` int64, and labels from 0 to 3.

    Source: Zhang et al., Character-level Convolutional Networks, 2015; FedALA, section 5.1.
    """
    folders = ("ag_news_csv", "ag_news", "AG_NEWS", "agnews")
    files = "train.csv, test.csv (class 1..4, title, description) or train*.parquet, test*.parquet"
    texts = load("ag_news", folders, files, _read, _fetch, folder, hub)
    counted = texts[0][0] if vocabulary_from == "train" else chain(texts[0][0], texts[1][0])
    numbers = vocabulary(counted, max_vocabulary)
    train, test = (Samples(encode(articles, numbers, length), labels) for articles, labels in texts)
    encoding = TextInputs(tuple(numbers), length)
    return Dataset(
        "ag_news",
        train,
        test,
        len(_NAMES),
        vocabulary=len(numbers) + 2,
        class_names=_NAMES,
        encoding=encoding,
    )


def _read(folder: Path) -> tuple[_Texts, _Texts] | None:
    files = files_named(folder, ("train.csv", "test.csv"))
    if files is not None:
        return _csv_texts(files[0]), _csv_texts(files[1])
    tables = [
        _table_texts(read_parquet(paths), str(paths[0])) for paths in parquet_files(folder) or ()
    ]
    return (tables[0], tables[1]) if tables else None


def _fetch() -> tuple[_Texts, _Texts]:
    train, test = (
        _table_texts(hub_table(_REPOSITORY, split), _REPOSITORY) for split in ("train", "test")
    )
    return train, test


def _csv_texts(path: Path) -> _Texts:
    rows = read_csv(path, 3)
    with reading(path, "the first cell of a row must be a class 1..4"):
        classes = np.array([int(row[0]) for row in rows], np.int64)
    return [tokens(f"{title} {description}") for _, title, description in rows], class_labels(
        classes - 1, 4, path
    )


def _table_texts(table: Any, source: str) -> _Texts:
    labels = class_labels(column(table, ("label",), source).to_numpy(), len(_NAMES), source)
    texts = column(table, ("text",), source).to_pylist()
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{source}: column 'text' must hold texts")
    return [tokens(text) for text in texts], labels


def read_csv(path: Path, columns: int) -> list[list[str]]:
    """Read the rows of a CSV file without header.

    Args:
        path: The file.
        columns: Number of cells in a row.

    Returns:
        The cells of each row.

    Raises:
        DataError: The file is damaged, or a row has another number of cells.
    """
    with reading(path, "damaged csv"):
        rows = list(csv.reader(io.StringIO(read_text(path, "csv"), newline=""), strict=True))
    if not rows or any(len(row) != columns for row in rows):
        raise DataError(f"{path}: wanted rows of {columns} cells each")
    return rows
