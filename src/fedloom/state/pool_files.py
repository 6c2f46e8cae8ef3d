"""Pools of models that are larger than memory: matrices in memory-mapped files, which checkpoints name."""

import json
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom.errors import DamagedCheckpoint
from fedloom.state.digest import Checksum
from fedloom.state.files import flush, make_folder, not_written, remove, temporary_folder
from fedloom.state.tensors import tensor_bytes

_NAMES = "rows-" + 7 * "[0-9]"


@dataclass
class _MappedFile:
    """A file whose tensor is in use: `written` is its entry in a checkpoint, made when the tensor had this `fingerprint`."""

    name: str
    memory: weakref.ref[np.ndarray]
    fingerprint: object = None
    written: str = ""


class PoolFiles:
    """Makes matrices of models: in memory, or in files of `directory` where one is larger than `budget` bytes.

    Such a matrix is a tensor like any other, whose pages the system reads and writes back as it finds room; so its numbers are
    those that it would have in memory. Each matrix has a new file. A checkpoint holds the file's name and checksum instead of
    the numbers, and a run that goes on maps the file again, so a file that a checkpoint names must not change any more. Files
    that neither a tensor nor one of the two newest checkpoints needs are removed. A method whose state is one pool has two
    files between rounds, and a third one while a round makes its new pool. Without a directory they lie in a temporary one.
    """

    def __init__(self, directory: Path | None = None, budget: int | None = None) -> None:
        self.directory, self.budget = directory, budget
        self._mapped: dict[int, _MappedFile] = {}  # by address
        self._moved: list[Tensor] = []  # to files, for the checkpoint that is being written
        # Which of the files on the disk the checkpoints there name is not known before the first two are adopted or written.
        self._newest = set() if directory is None else {path.name for path in directory.glob(_NAMES)}
        self._older = self._newest
        self._next = 1 + max((int(name.removeprefix("rows-")) for name in self._newest), default=-1)

    def takes(self, tensor_bytes: int, device: torch.device | None = None) -> bool:
        """Return True if a tensor of so many bytes lies in a file. Tensors of an accelerator stay there."""
        return self.budget is not None and tensor_bytes > self.budget and (device is None or device.type == "cpu")

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Return an uninitialised tensor. Raises `CheckpointError` where there is no room for its file."""
        size = prod(shape) * dtype.itemsize
        if not self.takes(size, device):
            return torch.empty(*shape, dtype=dtype, device=device)
        folder = self._folder()
        self._remove_needless(folder)
        path = folder / f"rows-{self._next:07d}"
        self._next += 1
        try:
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a page of the map on a full disk would end the process
        except OSError as error:
            remove(path)
            raise not_written(path, error, size) from None
        return self._map(path, shape, dtype)

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if one of these lies in a file."""
        return any(self._find(tensor) is not None for tensor in tensors)

    # --- checkpoints ---

    def write(self, tensor: Tensor) -> str | None:
        """Return a tensor's entry in a checkpoint, None for one that lies in memory. A tensor that is too large for that moves
        to a file. The file is on the disk when this returns; one that has not changed since the last time is not written."""
        mapped = self._find(tensor)
        if mapped is None:
            if not self.takes(tensor.nbytes, tensor.device):
                return None
            self._moved.append(self.empty(tensor.shape, tensor.dtype).copy_(tensor))
            return self.write(self._moved[-1])
        if mapped.fingerprint != _fingerprint(tensor):
            flush(self._folder() / mapped.name)
            flush(self._folder())
            about = {"file": mapped.name, "digest": _checksum(tensor), "shape": list(tensor.shape)}
            about["dtype"] = str(tensor.dtype).removeprefix("torch.")
            mapped.fingerprint, mapped.written = _fingerprint(tensor), json.dumps(about)
        return mapped.written

    def read(self, written: str) -> Tensor:
        """Return the tensor of an entry that `write` gave. Raises `DamagedCheckpoint` when its file is missing or not as it was
        written."""
        about = json.loads(written)
        path, dtype = self._folder() / about["file"], getattr(torch, about["dtype"])
        try:
            tensor = self._map(path, about["shape"], dtype, written)
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
        if _checksum(tensor) != about["digest"]:
            raise DamagedCheckpoint(f"{path} is damaged: it does not match its digest")
        return tensor

    def keep(self, written: Iterable[str]) -> None:
        """Keep the files of the newest checkpoint, which has these entries, and of the one before it. Others are removed."""
        newest = {json.loads(text)["file"] for text in written}
        self._moved.clear()
        if newest != self._newest or not newest:  # else this round's checkpoint is written again
            self._older, self._newest = self._newest, newest
        if newest:  # what a killed round was making is no checkpoint's
            self._older = {name for name in self._older if name <= max(newest)}
        if self.directory is not None and self.directory.is_dir():
            self._remove_needless(self.directory)

    # --- files ---

    def _map(self, path: Path, shape: Sequence[int], dtype: torch.dtype, written: str = "") -> Tensor:
        with path.open("r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), prod(shape) * dtype.itemsize), np.uint8)
        tensor = torch.from_numpy(memory).view(dtype).view(*shape)
        fingerprint = _fingerprint(tensor) if written else None
        self._mapped[tensor.data_ptr()] = _MappedFile(path.name, weakref.ref(memory), fingerprint, written)
        return tensor

    def _find(self, tensor: Tensor) -> _MappedFile | None:
        mapped = self._mapped.get(tensor.data_ptr()) if tensor.is_contiguous() else None
        return None if mapped is None or mapped.memory() is None else mapped

    def _remove_needless(self, folder: Path) -> None:
        self._mapped = {address: mapped for address, mapped in self._mapped.items() if mapped.memory() is not None}
        needed = {*self._newest, *self._older, *(mapped.name for mapped in self._mapped.values())}
        for path in folder.glob(_NAMES):
            if path.name not in needed:
                remove(path)

    def _folder(self) -> Path:
        if self.directory is None:
            self.directory = temporary_folder(self, "pool")
        make_folder(self.directory)
        return self.directory


def _fingerprint(tensor: Tensor) -> object:
    """Return a value that changes when the tensor is modified."""
    return tensor._version, tensor.shape, tensor.dtype


def _checksum(tensor: Tensor) -> str:
    return str(Checksum(tensor_bytes(tensor)).hexdigest())
