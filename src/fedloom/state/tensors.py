"""Named tensors as safetensors files, which are complete or not there at all. Reading them runs no code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedloom.errors import CheckpointError, DamagedCheckpoint
from fedloom.state.files import replacing


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], durable: bool = True) -> None:
    """A safetensors file. The same tensors and metadata give the same bytes.

    All metadata goes under one key, as JSON: safetensors writes several keys in an order that changes from run to run.
    `durable` as in `replacing`. Raises `CheckpointError` when it cannot be written, such as on a full disk.
    """
    owned: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        # Tensors that share memory (tied weights, views of one buffer) are refused by safetensors.
        if storage.data_ptr() in storages or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        owned[name] = plain
    try:
        with replacing(path, durable=durable) as temporary:
            save_file(owned, temporary, {"fedloom": json.dumps(dict(metadata), sort_keys=True)})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be written ({_one_line(error)})") from None


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """An open safetensors file with its `keys()`, `metadata()` and `get_tensor(name)`, which may be a view of the file.

    Raises `DamagedCheckpoint` when the file is missing, cut short or not one at all.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({_one_line(error)})") from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, copied, and the metadata of a file that `write_tensors` wrote.

    Raises `DamagedCheckpoint` as `open_tensors` does.
    """
    with open_tensors(path) as file:
        metadata = json.loads((file.metadata() or {}).get("fedloom", "{}"))
        return {name: file.get_tensor(name).clone() for name in file.keys()}, metadata  # noqa: SIM118


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
