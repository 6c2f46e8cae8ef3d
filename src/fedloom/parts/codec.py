"""Base of parts that compress uploads: fewer bits, fewer numbers or matrices of low rank."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.algorithm.method import name_of
from fedloom.algorithm.records import Message, Specs, TensorSpec
from fedloom.common.round import Round
from fedloom.flat.layout import Layout
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Inner, Part, shared_trainable

CODE_NUMBERS = ("values", "factors")
"""Names of the floats in a code. Another part can code them again."""

Streams = Callable[[], list[torch.Generator]]
"""Returns a random stream for each client of a cohort."""


class Codec(Part):
    """Codes uploads.

    A client codes its update d_i = w_i - w of the trainable parameters, with w the model that it
    received, and every other tensor of that length (SCAFFOLD's variate). Batch-norm statistics
    travel in full as `rest`, since coded statistics would no longer be variances. Other tensors
    stay unchanged. The server uses w + decoded(d_i) as the client's model. With `feedback` a client
    adds the coding error e_i to its next update: c_i = code(d_i + e_i), e_i <- d_i + e_i -
    decoded(c_i).
    """

    once: ClassVar[bool] = True
    recodes: ClassVar[bool] = False
    """True if the part codes the numbers of another code again."""
    code_types: ClassVar[Mapping[str, torch.dtype]] = {}
    """Types of tensors in the code that differ from the model's type."""
    requires: ClassVar[tuple[str, ...]] = ("one update",)

    @abstractmethod
    def code_shapes(self, size: int, layout: Layout) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor in the code of `size` numbers, by name.

        Args:
            size: Number of coded columns.
            layout: Layout of the model.

        Returns:
            Shapes by name, without the dimension of clients.
        """

    @abstractmethod
    def encode_rows(self, rows: Tensor, streams: Streams, layout: Layout) -> dict[str, Tensor]:
        """Code rows.

        Args:
            rows: Rows, `[k, n]`.
            streams: Returns the random streams of the clients.
            layout: Layout of the model.

        Returns:
            The tensors of the code by name, `[k, ...]`.
        """

    @abstractmethod
    def decode_rows(self, code: Mapping[str, Tensor], size: int, layout: Layout) -> Tensor:
        """Decode rows.

        Args:
            code: The tensors of the code by name, `[k, ...]`.
            size: Number of columns of a row.
            layout: Layout of the model.

        Returns:
            The rows, `[k, size]`.
        """

    # --- the coded tensors ---

    def sizes(self, shapes: Mapping[str, tuple[int, ...]], inner: Inner) -> dict[str, int]:
        """Return the number of coded columns of each coded tensor of a reply, by name.

        If `recodes` is set and the reply contains another code, these are its numbers; otherwise
        the model and tensors of the same length.

        Args:
            shapes: Shapes of the tensors in a reply, by name, without the dimension of clients.
            inner: The algorithm and the parts inside.

        Returns:
            Numbers of columns by name. Uncoded tensors are absent.
        """
        if self.recodes:
            codes = {
                name: shape[0] for name, shape in shapes.items() if name.endswith(CODE_NUMBERS)
            }
            if codes:
                return codes
        return update_sizes(shapes, inner)

    def coded(self, round: Round, specs: Specs, inner: Inner) -> Specs:
        layout = inner.algorithm.plan.layout
        shapes = {name: spec.shape for name, spec in specs.items()}
        coded = dict(specs)
        for name, size in self.sizes(shapes, inner).items():
            (total,) = coded.pop(name).shape
            if total > size:
                coded[f"{name}.rest"] = TensorSpec((total - size,), layout.dtype)
            for key, shape in self.code_shapes(size, layout).items():
                coded[f"{name}.{key}"] = TensorSpec(shape, self.code_types.get(key, layout.dtype))
        return coded

    # --- coding at the clients, decoding on the server ---

    def encode(self, cohort: Cohort, inbox: Message, reply: Message, inner: Inner) -> Message:
        coded = dict(reply)
        shapes = {name: tuple(rows.shape[1:]) for name, rows in reply.items()}
        for name, size in self.sizes(shapes, inner).items():
            rows = coded.pop(name)
            if name == "model":
                rows = rows - inbox["model"]
            coded |= packed(name, rows, size, self._code(cohort, name, rows[:, :size]))
        return coded

    def _code(self, cohort: Cohort, name: str, rows: Tensor) -> dict[str, Tensor]:
        """Return the code of `rows [k, n]`, with feedback of earlier errors."""
        layout = cohort.layout
        size = rows.shape[1]
        own_name = name_of(self)
        feedback = getattr(self, "feedback", False)
        error_name = f"{own_name}_error_{name}_{size}"
        if feedback:
            rows = rows + cohort.memory.get(error_name, torch.zeros_like(rows[:1]))
        code = self.encode_rows(rows, partial(cohort.stream, f"{own_name}/{name}"), layout)
        if feedback:
            error = rows - self.decode_rows(code, size, layout)
            cohort.memory.write(error_name, error, cohort.uploads)
        return code

    def decode(self, round: Round, specs: Specs, message: Message, inner: Inner) -> Message:
        layout = inner.algorithm.plan.layout
        tensors = dict(message)
        shapes = {name: spec.shape for name, spec in specs.items()}
        for name, size in self.sizes(shapes, inner).items():
            code = {key: tensors.pop(f"{name}.{key}") for key in self.code_shapes(size, layout)}
            tensors[name] = with_rest(tensors, name, self.decode_rows(code, size, layout))
        return tensors


def update_sizes(shapes: Mapping[str, tuple[int, ...]], inner: Inner) -> dict[str, int]:
    """Find the tensors that are an update of the model or as long as one.

    Args:
        shapes: Shapes of the tensors of a message by name, for one client.
        inner: The algorithm and the parts inside.

    Returns:
        The number of trainable columns of each such tensor by name.
    """
    plan = inner.algorithm.plan
    trainable = plan.layout.trainable
    sizes = {}
    for name, shape in shapes.items():
        if name == "model":
            sizes[name] = shared_trainable(inner)
        elif tuple(shape) == (trainable,):
            sizes[name] = trainable
    return sizes


def packed(name: str, rows: Tensor, size: int, code: Mapping[str, Tensor]) -> Message:
    """Return the message of a coded tensor.

    Args:
        name: Name of the tensor.
        rows: The tensor before coding, `[k, m]`.
        size: Number of coded columns, which come first. The remaining columns become `rest`.
        code: Tensors of the code by name.

    Returns:
        Tensors by name: `name.key` for the code, and `name.rest`.
    """
    message = {f"{name}.{key}": tensor for key, tensor in code.items()}
    if rows.shape[1] > size:
        message[f"{name}.rest"] = rows[:, size:]
    return message


def with_rest(message: Message, name: str, rows: Tensor) -> Tensor:
    """Return the decoded columns and the remaining columns of a tensor.

    Args:
        message: The coded message. The remaining columns are removed from it.
        name: Name of the tensor.
        rows: Its decoded columns, `[k, size]`.

    Returns:
        The tensor, `[k, m]`.
    """
    if f"{name}.rest" in message:
        return torch.cat([rows, message.pop(f"{name}.rest")], 1)
    return rows
