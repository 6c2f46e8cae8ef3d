"""Text of which a model learns the next character or word: Shakespeare's plays, and the posts of
users of Stack Overflow.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from fedloom.common.errors import DataError, InvalidValue, quoted, suggestion
from fedloom.common.fields import Count
from fedloom.data.dataset import Dataset, Samples, datasets, hold_out
from fedloom.data.formats.arrow import read_any
from fedloom.data.formats.csv_files import CsvOptions
from fedloom.data.formats.leaf import json_files, read_leaf
from fedloom.data.formats.limits import read_text, reading, require_room
from fedloom.data.formats.words import BEGINNING, END, PAD, encode, vocabulary
from fedloom.data.formats.words import tokenizer as _tokenizer
from fedloom.data.preprocessing import TextInputs
from fedloom.data.sets.origin import files_named, load
from fedloom.objectives.sequence import NextToken

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters; their numbers begin at 2."""

_OBJECTIVE = NextToken()
_Users = dict[str, list[Sequence[str]]]
"""The sequences of each user: their tokens, of which each but the one at the beginning is predicted
from the earlier ones.
"""


@datasets.register("shakespeare")
def shakespeare(
    *,
    folder: str | None = None,
    length: Count = 80,
    places: Literal["every", "last"] = "every",
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2,
    least: Count = 2,
) -> Dataset:
    """Shakespeare, the next character: `[length]` character numbers and the `[length]` that follow;
    the groups are the speakers.

    There are 82 numbers: 0 fills up, 1 stands for a character that LEAF's 80 do not have.

    Args:
        folder: The folder with LEAF's `train/*.json` and `test/*.json`, or `all_data/*.json` (x:
            texts of 80 characters, y: the next one), or with plays, `*.txt`: speeches with an empty
            line between, each under a line `NAME:` (text without such lines is one speaker's).
        length: A speaker's speeches are joined and cut every `length` characters.
        places: Predict a character at every position, or only at the last, as LEAF does.
        test_fraction: The share of each speaker's sequences, from the end, that tests, in (0, 1).
        least: Speakers with fewer sequences are left out.

    Returns:
        Inputs and targets `[n, length]` int64, and the speaker of each sample. Positions without a
        prediction have the objective's padding as their target.

    Source: McMahan et al., AISTATS 2017; Caldas et al., LEAF, 2018.
    """

    def read(folder: Path) -> tuple[_Users, _Users] | None:
        ready = [json_files(folder / name) for name in ("train", "test")]
        if all(ready):
            train, test = (_leaf_texts(files, length) for files in ready)
            return train, test
        raw = json_files(folder / "all_data") or json_files(folder, "all_data*.json")
        plays = sorted(folder.glob("*.txt"))
        if not raw and not plays:
            return None
        return _split(
            _leaf_texts(raw, length) if raw else _speeches(plays, length), test_fraction, least
        )

    files = "LEAF's train/*.json and test/*.json, all_data/*.json, or plays as *.txt"
    folders = ("shakespeare", "leaf/data/shakespeare")
    train, test = load("shakespeare", folders, files, read, None, folder, False)
    return _dataset(
        "shakespeare", train, test, TextInputs(tuple(ALPHABET), length, "characters"), places
    )


@datasets.register("stackoverflow")
def stackoverflow(
    *,
    folder: str | None = None,
    length: Count = 20,
    max_vocabulary: Annotated[int, Field(ge=5)] = 10_004,
    tokenizer: str = "",
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Texts of many users, the next word: `[length]` word numbers and the `[length]` that follow;
    the groups are the users.

    Each text is one sample: its beginning, its words, its end.

    Args:
        folder: The folder with `train.jsonl` and perhaps `test.jsonl`: on each line `{"user": "42",
            "text": "how do i ..."}`, or all of a user's texts as `{"user": "42", "texts": ["...",
            "..."]}`.
        length: Words that a text is cut or filled up to.
        max_vocabulary: The most numbers of the commonest words of the training texts, with those
            that fill up (0) and stand for other words (1), the beginning and the end.
        tokenizer: A function of yours, `module:function`, from a text to its words; by default as
            in `ag_news`.
        test_fraction: Without `test.jsonl`, the share of each user's texts that is held out, in (0,
            1).
        seed: The seed of the texts held out.

    Returns:
        Inputs and targets `[n, length]` int64, and the user of each sample.

    Source: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (20 words, 10,000 in the
    vocabulary).
    """

    def read(folder: Path) -> tuple[_Users, _Users | None] | None:
        train = files_named(folder, ("train.jsonl",))
        if train is None:
            return None
        tests = files_named(folder, ("test.jsonl",))
        return _lines(train[0], split), None if tests is None else _lines(tests[0], split)

    split = _tokenizer(tokenizer)
    files = 'train.jsonl (a line: {"user": "42", "text": "..."}) and perhaps test.jsonl'
    train, test = load("stackoverflow", ("stackoverflow",), files, read, None, folder, False)
    if test is None:
        train, test = _held_out(train, test_fraction, seed)
    numbers = vocabulary((text for texts in train.values() for text in texts), max_vocabulary)
    return _dataset(
        "stackoverflow",
        train,
        test,
        TextInputs(tuple(numbers), length, tokenizer or "words"),
        "every",
    )


@datasets.register("texts")
def texts(
    *,
    path: str = "",
    column: str = "text",
    group: str = "",
    length: Count = 20,
    max_vocabulary: Annotated[int, Field(ge=5)] = 10_004,
    tokenizer: str = "",
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Texts in a column of a table of your own, the next word: `texts(path='posts.csv')`.

    Each text is one sample: its beginning, its words, its end.

    Args:
        path: A CSV file with a header, a parquet file, or a folder of `save_to_disk`, which may
            have a part for testing.
        column: The column of the texts.
        group: The column that names the client of a text, for `partition = "natural"`.
        length: Words that a text is cut or filled up to.
        max_vocabulary: The most numbers of the commonest words of the training texts, with those
            that fill up (0) and stand for other words (1), the beginning and the end.
        tokenizer: A function of yours, `module:function`, from a text to its words; by default as
            in `ag_news`.
        test_fraction: Without a part for testing, the share of each client's texts that is held
            out, in (0, 1).
        seed: The seed of the texts held out.

    Returns:
        Inputs and targets `[n, length]` int64 and, with `group`, the client of each sample.

    Raises:
        DataError: For a file that is missing, damaged or too large, or an empty cell.
        InvalidValue: For a column that the table does not have.
    """
    if not path:
        raise InvalidValue("texts needs path: a CSV file, a parquet file or a folder")
    split = _tokenizer(tokenizer)
    options = CsvOptions([name for name in (column, group) if name])
    table, test_table = read_any(Path(path), options)
    train = _cells(table, column, group, path, split)
    if test_table is None:
        train, test = _held_out(train, test_fraction, seed)
    else:
        test = _cells(test_table, column, group, path, split)
    numbers = vocabulary((text for texts in train.values() for text in texts), max_vocabulary)
    encoding = TextInputs(tuple(numbers), length, tokenizer or "words", column)
    dataset = _dataset("texts", train, test, encoding, "every")
    if group:
        return dataset
    alone = [replace(samples, groups=None) for samples in (dataset.train, dataset.test)]
    return replace(dataset, train=alone[0], test=alone[1])


def _cells(
    table: Any, column: str, group: str, source: str, split: Callable[[str], Sequence[str]]
) -> _Users:
    """Return the sequences of each client in a column of texts."""
    names = [name for name in (column, group) if name]
    for name in names:
        if name not in table.column_names:
            near = suggestion(name, table.column_names)
            raise InvalidValue(f"{source}: no column {quoted(name)}{near}")
    cells = [table.column(name).to_pylist() for name in names]
    users: _Users = {}
    for row, (text, *owner) in enumerate(zip(*cells, strict=True), start=1):
        if not isinstance(text, str) or None in owner:
            empty = column if not isinstance(text, str) else group
            raise DataError(f"{source}: column {quoted(empty)} has no text in row {row}")
        users.setdefault(str(owner[0]) if owner else "", []).append([BEGINNING, *split(text), END])
    return users


def _dataset(
    name: str, train: _Users, test: _Users, encoding: TextInputs, places: Literal["every", "last"]
) -> Dataset:
    numbers = encoding.numbers
    length = encoding.length
    position = {user: number for number, user in enumerate(dict.fromkeys([*train, *test]))}
    splits = []
    for users in (train, test):
        texts = [text for sequences in users.values() for text in sequences]
        require_room(16 * len(texts) * length, f"{len(texts):,} sequences of {length}")
        inputs = encode([text[:-1] for text in texts], numbers, length)
        targets = encode([text[1:] for text in texts], numbers, length)
        targets[targets == PAD] = _OBJECTIVE.padding
        if places == "last" and len(texts):
            ends = (targets != _OBJECTIVE.padding).sum(1, keepdim=True) - 1
            targets[torch.arange(length) != ends] = _OBJECTIVE.padding
        owners = [position[user] for user, sequences in users.items() for _ in sequences]
        splits.append(Samples(inputs, targets, torch.tensor(owners, dtype=torch.int64)))
    if not len(splits[0]):
        raise DataError(f"{name}: no text to learn from")
    size = len(numbers) + 2
    return Dataset(
        name, splits[0], splits[1], vocabulary=size, objective=_OBJECTIVE, encoding=encoding
    )


def _split(users: _Users, test_fraction: float, least: int) -> tuple[_Users, _Users]:
    """Return each user's sequences as (training, test): those at the end test, and at least one
    trains.
    """
    train = {}
    test = {}
    for user, texts in users.items():
        if len(texts) >= least:
            cut = max(1, int((1 - test_fraction) * len(texts) + 1e-9))
            train[user], test[user] = texts[:cut], texts[cut:]
    return train, test


def _held_out(users: _Users, test_fraction: float, seed: int) -> tuple[_Users, _Users]:
    sequences = [(user, text) for user, texts in users.items() for text in texts]
    owners = torch.tensor(
        [number for number, texts in enumerate(users.values()) for _ in texts], dtype=torch.int64
    )
    train, test = hold_out(Samples(torch.arange(len(sequences)), owners), test_fraction, seed)
    splits: tuple[_Users, _Users] = {}, {}
    for users, samples in zip(splits, (train, test), strict=True):
        for row in samples.inputs.tolist():
            users.setdefault(sequences[row][0], []).append(sequences[row][1])
    return splits


def _leaf_texts(paths: Iterable[Path], length: int) -> _Users:
    """Read each user's texts, at most `length` characters and the one that follows."""
    users: _Users = {}
    for path in paths:
        for user, (x, y) in read_leaf(path).items():
            lists = isinstance(x, list) and isinstance(y, list) and len(x) == len(y)
            if not lists or not all(isinstance(text, str) and text for text in (*x, *y)):
                raise DataError(
                    f"{path}: user {quoted(user)}: x must be texts and y one character for each"
                )
            users.setdefault(user, []).extend(
                text[-length:] + target[0] for text, target in zip(x, y, strict=True)
            )
    return users


def _speeches(paths: Iterable[Path], length: int) -> _Users:
    """Read each speaker's text in pieces of `length` characters and the one that follows."""
    spoken: dict[str, list[str]] = {}
    for path in paths:
        for block in read_text(path).replace("\r\n", "\n").split("\n\n"):
            name, _, speech = block.strip("\n").partition("\n")
            if not name.endswith(":") or len(name) > 100:
                name = ":"
                speech = block.strip("\n")
            spoken.setdefault(name[:-1].strip(), []).append(speech)
    joined = {
        name: "\n".join(speeches) for name, speeches in spoken.items() if name or len(spoken) == 1
    }
    return {
        name: [text[start : start + length + 1] for start in range(0, len(text) - 1, length)]
        for name, text in joined.items()
        if len(text) > 1
    }


def _lines(path: Path, split: Callable[[str], Sequence[str]]) -> _Users:
    users: _Users = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if line.strip():
            with reading(f"{path}: line {number}", 'wanted {"user": "42", "text": "how do i ..."}'):
                post = json.loads(line)
                user = post["user"]
                texts = post["texts"] if "texts" in post else [post["text"]]
                users.setdefault(str(user), []).extend(
                    [BEGINNING, *split(text), END] for text in texts
                )
    return users
