"""Preprocessing: from a sample of the user's data to a model's input, and from a model's output to
an answer.

It belongs to the data set of a task, is saved with every run as plain JSON, and is delivered with
the model. The sites of a federation agree on it. It has values only: reading it runs no code.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from fedloom.common.digest import digest_of_json
from fedloom.common.errors import DataError, InvalidValue, quoted
from fedloom.data.columns import TableInputs
from fedloom.data.convert import as_inputs, require_finite
from fedloom.data.formats.arrow import as_arrow
from fedloom.data.formats.csv_files import CsvOptions
from fedloom.data.formats.limits import naming, reading
from fedloom.data.formats.pictures import read_files
from fedloom.data.formats.words import UNKNOWN, encode, tokens
from fedloom.objectives import Answer, on_device

Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, pixels in [0, 1]."""


@dataclass(frozen=True)
class TensorInputs:
    """Samples that are tensors already, of a shape and a type: `float32`, `float64` or `int64`."""

    shape: tuple[int, ...]
    dtype: str
    kind: Literal["tensors"] = "tensors"


@dataclass(frozen=True)
class PictureInputs:
    """Pictures as bytes `[n, channels, height, width]`, normalised batch by batch, without a mean
    only divided by 255.
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    kind: Literal["pictures"] = "pictures"


@dataclass(frozen=True)
class TextInputs:
    """Texts as token numbers `[n, length]`: 0 fills up, 1 stands for a token that is none of
    `words`.

    Attributes:
        words: The tokens with the numbers 2, 3, ...
        length: The tokens that a text is cut or filled up to.
        tokenizer: Splits a text: `words` (lower case, as in `ag_news`), `characters`, or a function
            of the user's, `module:function`.
        column: The column of a table with the texts.
    """

    words: tuple[str, ...]
    length: int
    tokenizer: str = "words"
    column: str = ""
    kind: Literal["text"] = "text"

    def split(self, text: str) -> Sequence[str]:
        """Return the tokens of a text; raises `InvalidValue` for a tokenizer of the user's, which
        no file may name.
        """
        if ":" in self.tokenizer:
            raise InvalidValue(
                f"its tokenizer is your own ({self.tokenizer}): give token numbers [n, "
                f"{self.length}]"
            )
        return list(text) if self.tokenizer == "characters" else tokens(text)

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return token numbers `[n, length]` int64. Raises as `split`."""
        return encode([self.split(text) for text in texts], self.numbers, self.length)

    def tokens(self, text: str) -> list[int]:
        """Return the token numbers of a text, however long. Raises as `split`."""
        return [self.numbers.get(token, UNKNOWN) for token in self.split(text)]

    def text(self, numbers: Sequence[int]) -> str:
        """Return the text of token numbers, words with a blank before each."""
        blank = "" if self.tokenizer == "characters" else " "
        return "".join(blank + self.words[number - 2] for number in numbers)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each token."""
        return {word: number for number, word in enumerate(self.words, start=2)}


Inputs = TensorInputs | PictureInputs | TextInputs | TableInputs


LabelType = Literal["", "text", "number", "boolean"]
"""What the names of classes were in the data; "" in files of earlier versions."""


def label_type(names: Sequence[str]) -> LabelType:
    """Return `number` if all names are whole numbers as Python writes them, else `text`."""
    is_number = all(
        name.removeprefix("-").isdecimal() and len(name) < 19 and str(int(name)) == name
        for name in names
    )
    return "number" if is_number else "text"


@dataclass(frozen=True)
class ModelOutputs:
    """The meaning of a model's outputs: answers of the objective's kind to the column `name`, or
    one of `classes`.

    Numbers that were standardised for training have a mean and a standard deviation for each column
    of the target.
    """

    answer: Answer = "class"
    name: str = ""
    classes: tuple[str, ...] = ()
    label_type: LabelType = ""
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def in_units(self, values: Tensor) -> Tensor:
        """Return standardised targets or outputs, `[n]` or `[n, d]`, in the target's own units."""
        if not self.mean:
            return values
        mean, deviation = (
            on_device(x, values.device, values.dtype) for x in (self.mean, self.deviation)
        )
        return values * deviation + mean


@dataclass(frozen=True)
class Preprocessing:
    """The way from a person's data to a model's inputs, and from its outputs to answers.

    frame -> apply -> inputs [n, ...] -> prepare -> the model -> outputs.in_units
    """

    inputs: Annotated[Inputs, Field(discriminator="kind")]
    outputs: ModelOutputs = field(default_factory=ModelOutputs)

    @property
    def digest(self) -> str:
        """A digest of all its values."""
        values = asdict(self)
        # earlier versions had none of these
        if not self.outputs.label_type:
            del values["outputs"]["label_type"]
        if isinstance(self.inputs, TableInputs):
            if self.inputs.dates == "refuse":
                del values["inputs"]["dates"]
            for column in values["inputs"]["columns"]:
                if not column["other"]:
                    del column["other"]
        return digest_of_json(values)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample as `apply` returns it."""
        encoding = self.inputs
        if isinstance(encoding, TableInputs):
            return (encoding.features,)
        return (encoding.length,) if isinstance(encoding, TextInputs) else encoding.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of a sample as `apply` returns it."""
        encoding = self.inputs
        if isinstance(encoding, TensorInputs):
            return cast(torch.dtype, getattr(torch, encoding.dtype))
        return {"pictures": torch.uint8, "text": torch.int64, "table": torch.float64}[encoding.kind]

    def to_json(self) -> str:
        """Return it as JSON, with its digest."""
        return json.dumps({**asdict(self), "digest": self.digest}, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "preprocessing") -> "Preprocessing":
        """Read what `to_json` wrote.

        Args:
            text: JSON.
            source: Its name in errors.

        Returns:
            The preprocessing, with the same digest.

        Raises:
            DataError: The text is anything else, or was changed.
        """
        try:
            values = json.loads(text)
            preprocessing: Preprocessing = TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            details = error.errors(include_url=False)[0]
            raise DataError(
                f"{source}: {'.'.join(map(str, details['loc']))}: {details['msg'].lower()}"
            ) from None
        except (ValueError, RecursionError):
            raise DataError(f"{source}: damaged: no JSON") from None
        if values.get("digest", preprocessing.digest) != preprocessing.digest:
            raise DataError(f"{source}: changed since it was written")
        return preprocessing

    @property
    def csv_options(self) -> CsvOptions:
        """Types of the columns of a CSV file: text that was text in training, and numbers."""
        if isinstance(self.inputs, TextInputs):
            return CsvOptions([self.inputs.column])
        columns = self.inputs.columns if isinstance(self.inputs, TableInputs) else ()
        text = [column.name for column in columns if column.categories is not None]
        numbers = [column.name for column in columns if column.name not in text]
        if isinstance(self.inputs, TableInputs) and self.inputs.dates == "ordinal":
            numbers = []  # some of them are dates
        return CsvOptions(text, numbers)

    def apply(self, data: Any, source: str = "data") -> tuple[Tensor, list[str]]:
        """Encode a table, an array, paths of pictures or texts.

        Args:
            data: Data of `n` samples.
            source: Its name in errors and notices.

        Returns:
            The model's inputs `[n, ...]`, and notices in a line each.

        Raises:
            DataError: Columns, cells or pictures do not fit.
            InvalidValue: An array has another shape.
        """
        encoding = self.inputs
        table = as_arrow(data)
        if isinstance(encoding, TableInputs):
            with naming(source):
                inputs, notices = self._of_table(encoding, table, data)
            return inputs, [f"{source}: {notice}" for notice in notices]
        if table is None:
            data = _as_list(data)
        if isinstance(encoding, TextInputs):
            data = data if table is None else _texts(table, encoding.column, source)
            texts = _items(data, str)
            if texts is not None:
                return encoding.encode(texts), []
        if isinstance(encoding, PictureInputs) and (paths := _items(data, str, Path)):
            channels, height, width = encoding.shape
            return read_files(list(map(Path, paths)), channels, (height, width)), []
        return self._tensor(data, source), []

    def _of_table(self, encoding: TableInputs, table: Any, data: Any) -> tuple[Tensor, list[str]]:
        if table is None:
            given = type(data).__name__
            raise InvalidValue(f"the model was trained on a table: give one, not {given}")
        inputs, notices = encoding.encode(table)
        expected = {*(column.name for column in encoding.columns), self.outputs.name}
        if unknown := [name for name in table.column_names if name not in expected]:
            listed = ", ".join(map(quoted, unknown))
            notices.insert(0, f"left out columns that the model was not trained on: {listed}")
        return encoding.scaled(inputs), notices

    def _tensor(self, data: Any, source: str) -> Tensor:
        with reading(source, "no inputs"):
            inputs = as_inputs(data)
        shape = self.shape
        dtype = self.dtype
        if tuple(inputs.shape[1:]) != shape and tuple(inputs.shape) == shape:
            inputs = inputs.unsqueeze(0)  # one sample
        if dtype.is_floating_point and not inputs.is_floating_point():
            inputs = inputs.to(dtype)
        if (
            tuple(inputs.shape[1:]) != shape
            or inputs.is_floating_point() != dtype.is_floating_point
        ):
            given = f"{list(inputs.shape)} of {str(inputs.dtype).removeprefix('torch.')}"
            wanted = f"[n, {', '.join(map(str, shape))}] of {str(dtype).removeprefix('torch.')}"
            raise InvalidValue(f"{source}: the model was trained on {wanted}, not on {given}")
        require_finite(inputs, source)
        return inputs.to(dtype)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return a batch as the model takes it: bytes as normalised float32, other inputs
        unchanged.
        """
        scale = None
        if isinstance(self.inputs, PictureInputs) and self.inputs.mean:
            scale = (self.inputs.mean, self.inputs.deviation)
        return normalised(inputs, scale)

    def differences(self, other: "Preprocessing") -> list[str]:
        """Return a line for everything that is not alike in both; of a table, each column is
        named.
        """
        ours = self._entries()
        theirs = other._entries()
        lines = []
        for name in {**ours, **theirs}:
            if name not in ours or name not in theirs:
                lines.append(f"{name} is on one side alone")
            elif ours[name] != theirs[name]:
                lines.append(f"{name}: {quoted(ours[name])} and {quoted(theirs[name])}")
        return lines or ([] if self == other else ["the columns are in another order"])

    def _entries(self) -> dict[str, Any]:
        values = asdict(self)
        entries = {
            f"column {quoted(column.pop('name'))}": column
            for column in values["inputs"].pop("columns", ())
        }
        return entries | {
            f"{part}, {key}": x for part, sub in values.items() for key, x in sub.items()
        }


def normalised(inputs: Tensor, scale: Scale | None) -> Tensor:
    """Return bytes as normalised float32, other inputs unchanged.

    Args:
        inputs: Inputs `[n, channels, ...]`.
        scale: Mean and deviation of each channel, pixels in [0, 1]; None divides by 255 only.

    Returns:
        Inputs of the same shape: (pixel / 255 - mean) / deviation.
    """
    if inputs.dtype != torch.uint8:
        return inputs
    pixels = inputs.to(torch.float32).div_(255)
    if scale is None:
        return pixels
    mean, deviation = (
        on_device(x, inputs.device).view(1, -1, *([1] * (inputs.dim() - 2))) for x in scale
    )
    return pixels.sub_(mean).div_(deviation)


def _as_list(data: Any) -> Any:
    """Return an array or a column of texts as a list; other data unchanged."""
    is_text = str(getattr(data, "dtype", "")).startswith(("<U", "object", "str", "String"))
    return data.tolist() if is_text and hasattr(data, "tolist") else data


def _items(data: Any, *kinds: type) -> list[Any] | None:
    """Return one object or several of these types as a list, None for other data."""
    items = [data] if isinstance(data, kinds) else data
    fit = isinstance(items, Sequence) and all(isinstance(item, kinds) for item in items)
    return list(items) if fit else None


def _texts(table: Any, name: str, source: str) -> list[Any]:
    if name not in table.column_names:
        raise DataError(f"{source}: no column {quoted(name)}, which the model was trained on")
    texts: list[Any] = table.column(name).to_pylist()
    return texts
