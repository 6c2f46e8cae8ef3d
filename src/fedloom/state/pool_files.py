"""Pools of models that are larger than memory: matrices in memory-mapped files, which are their checkpoints' part too."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from fedloom.errors import DamagedCheckpoint
from fedloom.state.files import flush, flush_directory, not_written

_CHUNK = 1 << 24  # bytes of a file that are digested at a time


@dataclass
class _MappedFile:
    """A file whose tensor is in use: `written` is what a checkpoint says of it, as of that `state` of the tensor."""

    name: str
    memory: weakref.ref[np.ndarray]
    state: object = None
    written: str = ""


class PoolFiles:
    """Makes matrices of models: in memory, or in files of `directory` where one is larger than `budget` bytes.

    Such a matrix is a tensor like any other, whose pages the system reads and writes back as it finds room; so its numbers are
    those that it would have in memory. Each matrix has a new file. A checkpoint holds the file's name and digest instead of the
    numbers, and whoever goes on from it maps the file again, so a file that a checkpoint names must not change any more. Before
    a file is made, those that neither a tensor nor the last checkpoint needs are removed: a method whose state is one pool has
    two files at most, that of the round before and the one in the making. Without a directory they lie in a temporary one.
    """

    def __init__(self, directory: Path | None = None, budget: int | None = None) -> None:
        self.directory, self.budget = directory, budget
        self._mapped: dict[int, _MappedFile] = {}  # by address
        self._kept: Collection[str] = ()
        self._next = 0

    def takes(self, tensor_bytes: int, device: torch.device | None = None) -> bool:
        """Whether a tensor of so many bytes lies in a file. Those of an accelerator stay there."""
        return self.budget is not None and tensor_bytes > self.budget and (device is None or device.type == "cpu")

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """An uninitialised tensor. Raises `CheckpointError` where there is no room for its file."""
        size = prod(shape) * dtype.itemsize
        if not self.takes(size, device):
            return torch.empty(*shape, dtype=dtype, device=device)
        folder = self._folder()
        self._remove_needless(folder)
        path = folder / f"rows-{self._next:07d}"
        self._next += 1
        try:
            with path.open("xb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(
                        file.fileno(), 0, size
                    )  # a full disk is noticed here, and not by a page of the map
                else:
                    file.truncate(size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise not_written(path, error, size) from None
        return self._map(path, shape, dtype)

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of these lies in a file."""
        return any(self._find(tensor) is not None for tensor in tensors)

    # --- checkpoints ---

    def write(self, tensor: Tensor) -> str | None:
        """What a checkpoint says of a tensor that lies in a file, or that is moved to one since it is so large; None of others.
        The file is on the disk when it returns; nothing is written where the tensor has not changed since the last time."""
        mapped = self._find(tensor)
        if mapped is None:
            if not self.takes(tensor.numel() * tensor.element_size(), tensor.device):
                return None
            tensor = self.empty(tensor.shape, tensor.dtype).copy_(tensor)
            mapped = self._find(tensor)
            assert mapped is not None
        if mapped.state != _state(tensor):
            digest = _digest(tensor)
            flush(self._folder() / mapped.name)
            flush_directory(self._folder())
            about = {"file": mapped.name, "digest": digest, "shape": list(tensor.shape),
                     "dtype": str(tensor.dtype).removeprefix("torch.")}  # fmt: skip
            mapped.state, mapped.written = _state(tensor), json.dumps(about)
        return mapped.written

    def read(self, written: str) -> Tensor:
        """The tensor of which `write` said so. Raises `DamagedCheckpoint` when its file is missing or not as it was written."""
        about = json.loads(written)
        path, dtype = self._folder() / about["file"], getattr(torch, about["dtype"])
        try:
            tensor = self._map(path, about["shape"], dtype)
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
        if _digest(tensor) != about["digest"]:
            raise DamagedCheckpoint(f"{path} is damaged: it does not match its digest")
        mapped = self._find(tensor)
        assert mapped is not None
        mapped.state, mapped.written = _state(tensor), written
        self._next = max(self._next, int(about["file"].rpartition("-")[2]) + 1)
        return tensor

    def keep(self, written: Iterable[str]) -> None:
        """The last checkpoint says this: its files stay, whether or not a tensor is in them. Where neither it nor the one before
        has any, those of a run that had are removed."""
        before, self._kept = self._kept, {json.loads(text)["file"] for text in written}
        if not before and not self._kept and self.directory is not None and self.directory.exists():
            self._remove_needless(self.directory)

    # --- files ---

    def _map(self, path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with path.open("r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), prod(shape) * dtype.itemsize), np.uint8)
        address = int(memory.ctypes.data)
        mapped = _MappedFile(path.name, weakref.ref(memory))
        self._mapped[address] = mapped
        return torch.from_numpy(memory).view(dtype).view(*shape)

    def _find(self, tensor: Tensor) -> _MappedFile | None:
        mapped = self._mapped.get(tensor.data_ptr()) if tensor.is_contiguous() else None
        return None if mapped is None or mapped.memory() is None else mapped

    def _remove_needless(self, folder: Path) -> None:
        self._mapped = {address: mapped for address, mapped in self._mapped.items() if mapped.memory() is not None}
        needed = {*self._kept, *(mapped.name for mapped in self._mapped.values())}
        for path in folder.glob("rows-*"):
            if path.name not in needed:
                path.unlink(missing_ok=True)

    def _folder(self) -> Path:
        if self.directory is None:
            self.directory = Path(tempfile.mkdtemp(prefix="fedloom-pool-"))
            weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        return self.directory


def _state(tensor: Tensor) -> object:
    """What changes with a tensor's numbers."""
    return tensor._version, tensor.shape, tensor.dtype


def _digest(tensor: Tensor) -> str:
    content = tensor.reshape(-1).view(torch.uint8).numpy()
    digest = xxhash.xxh3_128()
    for start in range(0, len(content), _CHUNK):
        digest.update(content[start : start + _CHUNK].data)
    return str(digest.hexdigest())
