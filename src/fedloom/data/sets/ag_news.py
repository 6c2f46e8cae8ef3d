"""AG News: the topics of news articles."""

from __future__ import annotations

import csv
import io
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from fedloom.config.fields import Count
from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.formats.arrow import column, hub_table, read_tables
from fedloom.data.formats.labels import class_labels
from fedloom.data.formats.limits import read_text
from fedloom.data.formats.words import encode, tokens, vocabulary
from fedloom.data.sets.origin import Origin, files_named, load, parquet_files
from fedloom.errors import DataError

_NAMES = ("World", "Sports", "Business", "Sci/Tech")
_REPOSITORY = "fancyzhx/ag_news"
VocabularySize = Annotated[int, Field(ge=3)]  # padding, unknown and a token at least
_Texts = tuple[list[list[str]], Tensor]  # tokens of each article, labels


@datasets.register("ag_news")
def ag_news(
    *,
    folder: str | None = None,
    hub: bool | None = None,
    length: Count = 200,
    max_vocabulary: VocabularySize | None = 98635,
    vocabulary_from: Literal["train", "all"] = "train",
) -> Dataset:
    """AG News: 120,000 and 7,600 articles of 4 topics, as token numbers `[length]` int64.

    Title and description, lower-cased and split ("basic english"), cut or filled up to `length` with 0; 1 stands for
    tokens outside the vocabulary, which holds the commonest tokens of the training articles (`vocabulary_from="all"`: of
    both parts, as FedALA builds it), at most `max_vocabulary` ids with 0 and 1, or all. Read from `train.csv` and
    `test.csv` (class 1..4, title, description) or parquet (text, label 0..3).
    Source: Zhang et al., Character-level Convolutional Networks, 2015; FedALA, section 5.1.
    """
    folders = ("ag_news_csv", "ag_news", "AG_NEWS", "agnews")
    wanted = "train.csv, test.csv (class 1..4, title, description) or train*.parquet, test*.parquet"
    train, test = load(Origin("ag_news", folders, wanted, _read, _fetch), folder, hub)
    numbers = vocabulary(train[0] if vocabulary_from == "train" else chain(train[0], test[0]), max_vocabulary)
    first, second = (Samples(encode(texts, numbers, length), labels) for texts, labels in (train, test))
    return Dataset("ag_news", first, second, len(_NAMES), vocabulary=len(numbers) + 2, class_names=_NAMES)


def _read(place: Path) -> tuple[_Texts, _Texts] | None:
    files = files_named(place, ("train.csv", "test.csv"))
    if files is not None:
        return _csv_texts(files[0]), _csv_texts(files[1])
    found = parquet_files(place)
    if found is None:
        return None
    train, test = (_table_texts(read_tables(paths), str(paths[0])) for paths in found)
    return train, test


def _fetch() -> tuple[_Texts, _Texts]:
    train, test = (_table_texts(hub_table(_REPOSITORY, split), _REPOSITORY) for split in ("train", "test"))
    return train, test


def _csv_texts(path: Path) -> _Texts:
    rows = read_csv(path, 3)
    try:
        classes = np.array([int(row[0]) for row in rows])
    except ValueError as error:
        raise DataError(f"{path}: the first cell of a row must be a class 1..4 ({error})") from error
    return [tokens(f"{title} {description}") for _, title, description in rows], class_labels(classes - 1, 4, path)


def _table_texts(table: Any, source: str) -> _Texts:
    labels = class_labels(column(table, ("label",), source).to_numpy(), len(_NAMES), source)
    texts = column(table, ("text",), source).to_pylist()
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{source}: column 'text' must hold texts")
    return [tokens(text) for text in texts], labels


def read_csv(path: Path, columns: int) -> list[list[str]]:
    """The rows of a csv file without header, each of `columns` cells; raises `DataError` naming the first bad line."""
    rows: list[list[str]] = []
    reader = csv.reader(io.StringIO(read_text(path, "csv"), newline=""), strict=True)
    try:
        for row in reader:
            if len(row) != columns:
                raise DataError(f"{path}: line {reader.line_num} has {len(row)} cells, not {columns}")
            rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}: damaged csv after line {len(rows)} ({error})") from error
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows
