"""Pools of models that exceed memory: matrices in memory-mapped files, named in checkpoints."""

import json
import os
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fedloom.common.digest import Checksum
from fedloom.common.errors import DamagedCheckpoint
from fedloom.state.files import flush, make_folder, not_written, remove, temporary_folder
from fedloom.state.tensors import tensor_bytes

_NAMES = "rows-" + 7 * "[0-9]"


class PoolFiles:
    """Makes matrices of models: in memory, or in files of `directory` above `budget` bytes.

    A matrix in a file is a normal tensor with the same numbers as in memory. The system reads its
    pages and writes them back as memory allows. Each matrix has a new file. A checkpoint contains
    the file's name and checksum instead of the numbers, and a resumed run maps the file again.
    Therefore a file must not change once a checkpoint names it. Files that neither of the two
    newest checkpoints needs are removed with the next one. A method with one pool as its state has
    two files between rounds, and a third one during a round. Without a directory a file has no
    name, and is removed with its tensor.
    """

    def __init__(self, directory: Path | None = None, budget: int | None = None) -> None:
        self.directory = directory
        self.budget = budget
        self._temporary: Path | None = None
        self._entries: dict[
            str, tuple[object, str]
        ] = {}  # by file: fingerprint of its tensor, and entry in a checkpoint
        # Until two checkpoints are adopted or written, any of these files may belong to one.
        self._newest = (
            set() if directory is None else {path.name for path in directory.glob(_NAMES)}
        )
        self._older = self._newest
        self._next = 1 + max((int(name.removeprefix("rows-")) for name in self._newest), default=-1)

    def takes(self, tensor_bytes: int, device: torch.device | None = None) -> bool:
        """Return True if a tensor of this size is stored in a file.

        Tensors of an accelerator stay there.

        Args:
            tensor_bytes: Size of the tensor in bytes.
            device: Device of the tensor; None is the CPU.

        Returns:
            True above the budget of bytes on the CPU.
        """
        return (
            self.budget is not None
            and tensor_bytes > self.budget
            and (device is None or device.type == "cpu")
        )

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """Return an uninitialised tensor.

        Args:
            shape: Shape of the tensor, usually `[models, P]`.
            dtype: Type of its numbers.
            device: Device of the tensor; None is the default device, usually the CPU.

        Returns:
            A new tensor with any numbers, mapped from a new file if `takes` is True for its size.

        Raises:
            CheckpointError: The disk has no room for its file.
        """
        size = prod(shape) * dtype.itemsize
        if not self.takes(size, device):
            return torch.empty(*shape, dtype=dtype, device=device)
        path = self._folder() / f"rows-{self._next:07d}"
        self._next += 1
        try:
            with path.open("xb") as file:
                # writing a mapped page on a full disk would end the process
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            remove(path)
            raise not_written(path, error, size) from None
        tensor = _mapped(path, shape, dtype)
        if self.directory is None:
            path.unlink()
        return tensor

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if one of these tensors is in a file."""
        return any(self._name(tensor) for tensor in tensors)

    # --- checkpoints ---

    def write(self, tensor: Tensor) -> str | None:
        """Return a tensor's entry in a checkpoint; None if the tensor is in memory.

        A tensor that is too large for memory is moved to a file. The file is on the disk when this
        returns. An unchanged tensor is not written again.
        """
        name = self._name(tensor)
        if not name:
            if not self.takes(tensor.nbytes, tensor.device):
                return None
            return self.write(self.empty(tensor.shape, tensor.dtype).copy_(tensor))
        fingerprint, entry = self._entries.get(name, (None, ""))
        if fingerprint != _fingerprint(tensor):
            flush(self._folder() / name)
            flush(self._folder())
            about = {"file": name, "digest": _checksum(tensor), "shape": list(tensor.shape)}
            entry = json.dumps({**about, "dtype": str(tensor.dtype).removeprefix("torch.")})
            self._entries[name] = _fingerprint(tensor), entry
        return entry

    def read(self, entry: str) -> Tensor:
        """Return the tensor of an entry of `write`.

        Raises:
            DamagedCheckpoint: Its file is missing or was changed.
        """
        about = json.loads(entry)
        path = self._folder() / about["file"]
        dtype = getattr(torch, about["dtype"])
        try:
            if path.stat().st_size == prod(about["shape"]) * dtype.itemsize:
                tensor = _mapped(path, about["shape"], dtype)
                if _checksum(tensor) == about["digest"]:
                    self._entries[path.name] = _fingerprint(tensor), entry
                    return tensor
        except (OSError, RuntimeError) as error:
            raise DamagedCheckpoint(
                f"{path} cannot be read ({getattr(error, 'strerror', None) or error})"
            ) from None
        raise DamagedCheckpoint(f"{path} is damaged: it does not match its digest")

    def keep(self, entries: Iterable[str]) -> None:
        """Remove all files except those in the newest and in the previous checkpoint.

        The newest checkpoint has these entries.
        """
        newest = {json.loads(entry)["file"] for entry in entries}
        if newest != self._newest or not newest:  # equal: this round's checkpoint is written again
            self._older = self._newest
            self._newest = newest
        if newest:  # files of a killed round belong to no checkpoint
            self._older = {name for name in self._older if name <= max(newest)}
        for path in [] if self.directory is None else self.directory.glob(_NAMES):
            if path.name not in self._newest | self._older:
                remove(path)

    def _name(self, tensor: Tensor) -> str:
        """Return the name of the file that backs the tensor from its first byte, or ""."""
        file = (
            tensor.untyped_storage().filename
            if tensor.is_contiguous() and not tensor.storage_offset()
            else None
        )
        return (
            Path(file).name
            if file and Path(file).parent in (self.directory, self._temporary)
            else ""
        )

    def _folder(self) -> Path:
        if self.directory is None and self._temporary is None:
            self._temporary = temporary_folder(self, "pool")
        folder = self.directory or self._temporary
        assert folder is not None
        make_folder(folder)
        return folder


def _mapped(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype).view(*shape)


def _fingerprint(tensor: Tensor) -> object:
    """Return a value that changes when the tensor is modified."""
    return tensor._version, tensor.shape, tensor.dtype


def _checksum(tensor: Tensor) -> str:
    return str(Checksum(tensor_bytes(tensor)).hexdigest())
