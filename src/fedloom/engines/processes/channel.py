"""A pipe between two processes through which tensors travel in shared memory, and only words about them as bytes."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Plan
from fedloom.engines.processes.shared import Pool, unexpanded

INLINE = 4096
"""Bytes up to which a tensor that is not in shared memory travels inside the message."""

_Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int | bytes]
"""Type, shape in memory, shape, region and offset of a tensor; or region -1 and its bytes."""


@dataclass(frozen=True)
class Parcel:
    """A message ready to be sent, to as many processes as wanted, and the tensors that must live until it has been read."""

    data: bytes
    places: tuple[_Place, ...]
    held: tuple[Tensor, ...]


def pack(message: Any, pool: Pool) -> Parcel:
    """Make a message ready. Tensors that lie in shared memory stay there, the others are copied into it.

    A method goes without its server's state and with no more of its plan than numbers. Raises whatever pickling raises.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(message)
    tensors = [unexpanded(tensor) for tensor in pickler.tensors]
    found = [pool.find(tensor) for tensor in tensors]
    large = [k for k, tensor in enumerate(tensors) if found[k] is None and tensor.nbytes > INLINE]
    for k, copy in zip(large, pool.place([tensors[k] for k in large]) if large else (), strict=True):
        tensors[k], found[k] = copy, pool.find(copy)
    shapes = [tuple(tensor.shape) for tensor in pickler.tensors]
    places = tuple(_described(*item) for item in zip(tensors, shapes, found, strict=True))
    return Parcel(buffer.getvalue(), places, tuple(tensors))


def _described(tensor: Tensor, shape: tuple[int, ...], place: tuple[int, int] | None) -> _Place:
    if place is not None:
        return tensor.dtype, tuple(tensor.shape), shape, place[0], place[1]
    inside = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), shape, -1, inside


class SetsTensorsAside:
    """What a pickler does so that tensors and arrays travel apart: each is named once, in the order of `tensors`.

    A method goes without its server's state, and its plan as the numbers that make it.
    """

    def begin(self) -> None:
        """Before the first message: nothing has been put aside."""
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no two have the same id

    def shared(self, array: npt.NDArray[Any]) -> Tensor | None:
        """An array as the tensor that stands for it, or None where it travels with the words."""
        raise NotImplementedError

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) is Tensor:
            return "tensor", self._number(value, value)
        if type(value) is np.ndarray and (tensor := self.shared(value)) is not None:
            return "array", self._number(value, tensor)
        if isinstance(value, Plan):
            return "plan", value.clients, value.participants, value.rounds, value.seed, value.classes
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Algorithm):
            make, arguments, attributes, *rest = cast(tuple[Any, ...], value.__reduce_ex__(pickle.HIGHEST_PROTOCOL))
            if isinstance(attributes, dict):
                attributes = {name: held for name, held in attributes.items() if name != "state"}
            return make, arguments, attributes, *rest
        return NotImplemented

    def _number(self, value: Any, tensor: Tensor) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(tensor)
            self._alive.append(value)
        return self._numbers[id(value)]


class _Pickler(SetsTensorsAside, pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.begin()

    def shared(self, array: npt.NDArray[Any]) -> Tensor | None:
        large = array.nbytes > INLINE and array.dtype.kind in "biuf"
        return torch.from_numpy(array) if large else None


class Unpickler(pickle.Unpickler):
    """Puts tensors and arrays back in. What else was kept apart is for `resolve`."""

    def __init__(self, data: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, name: Any) -> Any:
        kind, *rest = name
        if kind == "tensor":
            return self._tensors[rest[0]]
        if kind == "array":
            return self._tensors[rest[0]].numpy()
        return self.resolve(kind, rest)

    def resolve(self, kind: str, values: list[Any]) -> Any:
        """The thing that goes by a name on this side."""
        raise pickle.UnpicklingError(f"nothing is called {kind!r} here")


class Channel:
    """One end of the pipe. `receive` returns tensors that lie in the other side's memory: they are lent, not given."""

    def __init__(
        self,
        connection: Connection,
        pool: Pool,
        unpickler: Callable[[bytes, list[Tensor]], pickle.Unpickler] = Unpickler,
    ) -> None:
        self.connection, self.pool, self._unpickler = connection, pool, unpickler
        self._announced: set[int] = set()  # our regions that the other side has mapped
        self._mapped: dict[int, mmap.mmap] = {}  # theirs that we have

    def send(self, parcel: Parcel) -> None:
        """Send a message packed with this end's pool. Raises `OSError` when nobody is at the other end."""
        new = sorted({place[3] for place in parcel.places} - self._announced - {-1})
        gone = [number for number in self._announced if number not in self.pool.regions]
        regions = [self.pool.regions[number] for number in new]
        header = [(region.number, region.size) for region in regions], gone, parcel.places, parcel.data
        self._announced = self._announced.difference(gone).union(new)
        self.connection.send_bytes(pickle.dumps(header, pickle.HIGHEST_PROTOCOL))
        if regions:
            with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
                for region in regions:
                    socket.send_fds(line, [b"\0"], [region.descriptor])

    def receive(self) -> Any:
        """The next message. Raises `EOFError` or `OSError` when nobody is at the other end any more, and whatever unpickling
        raises."""
        new, gone, places, data = pickle.loads(self.connection.recv_bytes())
        for number in gone:
            self._mapped.pop(number, None)
        if new:
            with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
                for number, size in new:
                    _, descriptors, _, _ = socket.recv_fds(line, 1, 1)
                    if not descriptors:
                        raise EOFError
                    self._mapped[number] = mmap.mmap(descriptors[0], size)
                    os.close(descriptors[0])
        return self._unpickler(data, [self._tensor(*place) for place in places]).load()

    def _tensor(
        self, dtype: torch.dtype, lying: tuple[int, ...], shape: tuple[int, ...], region: int, place: int | bytes
    ) -> Tensor:
        if isinstance(place, int):
            count = int(np.prod(lying, dtype=np.int64))
            tensor = torch.frombuffer(self._mapped[region], dtype=dtype, count=count, offset=place)
        elif place:
            # Sums may round differently where memory begins off the boundaries that torch's own tensors keep: hence a copy.
            tensor = torch.frombuffer(bytearray(place), dtype=dtype).clone()
        else:
            tensor = torch.empty(0, dtype=dtype)
        return tensor.view(lying).expand(shape)
