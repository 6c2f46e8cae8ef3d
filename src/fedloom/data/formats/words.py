"""Text as numbers: words and marks of a line, the vocabulary of many, and rows of equal length."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.common.errors import DataError, quoted
from fedloom.common.plugins import found_at
from fedloom.data.formats.limits import reading

PAD, UNKNOWN = 0, 1  # ids of no token and of a token outside the vocabulary
BEGINNING, END = "<s>", "</s>"  # tokens around a text of which a model learns the next word
# "basic english": quotes and line breaks vanish, and each of these marks is a token.
_SPACED = re.compile(r"<br />|[;:]")
_TOKENS = re.compile(r"[.,()!?']|[^\s.,()!?']+")


def tokens(line: str) -> list[str]:
    """Split a line into lower-case words and marks by the rules known as "basic english".

    >>> tokens("It's <br />fine; (very)!")
    ['it', "'", 's', 'fine', '(', 'very', ')', '!']
    """
    return _TOKENS.findall(_SPACED.sub(" ", line.lower().replace('"', "")))


def tokenizer(path: str) -> Callable[[str], Sequence[str]]:
    """Return the function at `module:function`, from a text to its tokens; `tokens` for an empty
    path.
    """
    if not path:
        return tokens
    function = found_at(path, "tokenizer", "'module:function'")

    def split(text: str) -> Sequence[str]:
        with reading(path, "tokenizer failed"):
            words = list(function(text))
        if not all(isinstance(word, str) for word in words):
            raise DataError(f"{path}: a tokenizer must give a list of texts, not {quoted(words)}")
        return words

    return split


def vocabulary(texts: Iterable[Sequence[str]], most: int | None = None) -> dict[str, int]:
    """Number the tokens 2, 3, ... by falling count, then alphabetically.

    Args:
        texts: Tokens of each text.
        most: Number of ids at most, with the two special ones; None for all.

    Returns:
        The number of each token. Rarer tokens than the `most` - 2 most frequent ones are absent.
    """
    counts = Counter(token for text in texts for token in text)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return {
        token: number
        for number, token in enumerate(ranked[: None if most is None else most - 2], start=2)
    }


def encode(texts: Sequence[Sequence[str]], numbers: Mapping[str, int], length: int) -> Tensor:
    """Return the token numbers of texts.

    Args:
        texts: Tokens of `n` texts.
        numbers: Number of each token.
        length: Tokens that a text is cut or, with `PAD`, filled up to.

    Returns:
        `[n, length]` int64.
    """
    ids = np.full((len(texts), length), PAD, dtype=np.int64)
    for row, text in enumerate(texts):
        cut = text[:length]
        ids[row, : len(cut)] = [numbers.get(token, UNKNOWN) for token in cut]
    return torch.from_numpy(ids)
