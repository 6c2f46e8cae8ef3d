"""Text in csv files, its tokens, and their numbers."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import DataError

PAD, UNKNOWN = 0, 1  # ids that stand for no token and for a token outside the vocabulary
# "basic english": quotes and line breaks vanish, these marks become tokens of their own.
_DROPPED = re.compile(r'"')
_SPACED = re.compile(r"<br />|[;:]")
_TOKENS = re.compile(r"[.,()!?']|[^\s.,()!?']+")


def read_csv(path: Path, columns: int) -> list[list[str]]:
    """The rows of a csv file without header, each of `columns` cells; raises `DataError` naming the first bad line."""
    rows: list[list[str]] = []
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            reader = csv.reader(lines, strict=True)
            for row in reader:
                if len(row) != columns:
                    raise DataError(f"{path}: line {reader.line_num} has {len(row)} cells, not {columns}")
                rows.append(row)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: damaged csv after line {len(rows)} ({error})") from error
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def tokens(line: str) -> list[str]:
    """Lower-case words and marks of `line`: double quotes go, `;`, `:` and `<br />` part words, and `. , ( ) ! ? '` are
    tokens of their own (the rules known as "basic english").

    >>> tokens("It's <br />fine; (very)!")
    ['it', "'", 's', 'fine', '(', 'very', ')', '!']
    """
    return _TOKENS.findall(_SPACED.sub(" ", _DROPPED.sub("", line.lower())))


def vocabulary(texts: Iterable[Sequence[str]], most: int | None = None) -> dict[str, int]:
    """Number of each token: 2, 3, ... by falling count, then alphabetically; at most `most` ids in all with the two
    special ones."""
    counts = Counter(token for text in texts for token in text)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return {token: at for at, token in enumerate(ranked[: None if most is None else most - 2], start=2)}


def encode(texts: Sequence[Sequence[str]], numbers: Mapping[str, int], length: int) -> Tensor:
    """Token numbers `[n, length]` int64: each text cut at `length`, or filled up with `PAD`."""
    ids = np.full((len(texts), length), PAD, dtype=np.int64)
    for row, text in enumerate(texts):
        cut = text[:length]
        ids[row, : len(cut)] = [numbers.get(token, UNKNOWN) for token in cut]
    return torch.from_numpy(ids)
