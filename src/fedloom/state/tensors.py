"""Named tensors as safetensors files. They are complete or absent, and reading them runs no code.

Each file contains a checksum of its contents, which reveals flipped bits.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedloom.common.digest import Checksum
from fedloom.common.errors import CheckpointError, DamagedCheckpoint
from fedloom.state.files import not_written, replacing

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
    torch.complex64: "C64",
}  # fmt: skip


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    durable: bool = True,
    mode: int = 0o666,
) -> None:
    """Write a safetensors file: the same bytes for the same tensors.

    Args:
        path: The file.
        tensors: Tensors by name.
        metadata: Texts by name.
        durable: As in `replacing`.
        mode: As in `replacing`.

    Raises:
        CheckpointError: The file cannot be written, or safetensors does not support a type.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES:
            raise CheckpointError(
                f"{path} cannot be written: safetensors does not support {tensor.dtype}, the "
                f"type of {name}"
            )
    plain = _ordered({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    about = json.dumps(dict(metadata), sort_keys=True)
    header = _header(plain, about)
    try:
        with replacing(path, mode=mode, durable=durable) as temporary, temporary.open("wb") as file:
            file.write(header)
            for tensor in plain.values():
                file.write(tensor_bytes(tensor))
    except OSError as error:
        raise not_written(
            path, error, len(header) + sum(tensor.nbytes for tensor in plain.values())
        ) from None


def read_tensors(path: Path, **expected: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return copies of the tensors in a file of `write_tensors`, and its metadata.

    Args:
        path: The file.
        **expected: Entries that the metadata must have.

    Returns:
        The tensors by name in the order of the file, on the CPU, and the metadata: texts by name.

    Raises:
        DamagedCheckpoint: The file is missing, incomplete, of another format, or was changed.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a file, but a pipe, a device or a folder")
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            names = list(file.keys())
            tensors = _ordered({name: file.get_tensor(name).clone() for name in names})
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({' '.join(str(error).split())})") from None
    about = header.get("fedloom", "")
    if header.get("digest") != _checksum(tensors, about):
        raise DamagedCheckpoint(f"{path} is damaged: it does not match its digest")
    try:
        metadata: object = json.loads(about)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise DamagedCheckpoint(f"{path} is damaged: its metadata must be texts by name")
    for name, value in expected.items():
        if metadata.get(name) != value:
            raise DamagedCheckpoint(f"{path} is of {name} {metadata.get(name)}, not {value}")
    return tensors, metadata


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in memory, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _ordered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sort tensors in the order of the file: larger number types first, so that all are aligned."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def _header(tensors: Mapping[str, Tensor], about: str) -> bytes:
    """Return the beginning of a safetensors file: the length of the header, then JSON."""
    entries: dict[str, object] = {
        "__metadata__": {"digest": _checksum(tensors, about), "fedloom": about}
    }
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + tensor.nbytes]
        entries[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    """Return the checksum of all contents of a file."""
    shapes = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()]
    checksum = Checksum(json.dumps([about, shapes]).encode())
    for tensor in tensors.values():
        checksum.update(tensor_bytes(tensor))
    return str(checksum.hexdigest())
