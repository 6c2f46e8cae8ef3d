"""Devices with a task's data and models: the CPU or an accelerator."""

import ctypes
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedloom.common.errors import InvalidValue, quoted, suggestion

# mallopt's parameters, from malloc.h
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
_LARGEST = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc refuses more on 64 bits


def require_device(name: str) -> None:
    """Raise `InvalidValue` unless `name` is cpu, cuda, cuda:1 or auto.

    The device need not exist on this machine.
    """
    if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", name):
        nearest = suggestion({"gpu": "cuda"}.get(name, name), ("cpu", "cuda", "auto"))
        raise InvalidValue(
            f"device {quoted(name)} is not allowed{nearest} (allowed: cpu, cuda, cuda:1, auto)"
        )


def present() -> list[str]:
    """Return the names of the devices of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{number}" for number in range(count))]


@cache
def processor() -> str:
    """Return the name of the processor model."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return platform.processor()


def find_device(name: str) -> torch.device:
    """Return the device named cpu, cuda (the first one), cuda:1 or auto.

    Raises:
        InvalidValue: If the name is not allowed, or this machine does not have the device.
    """
    require_device(name)
    devices = present()
    device = {"auto": devices[min(1, len(devices) - 1)], "cuda": "cuda:0"}.get(name, name)
    if device not in devices:
        raise InvalidValue(
            f"device {quoted(name)} does not exist on this machine (available: "
            f"{', '.join(devices)})"
        )
    return torch.device(device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on another device. Copies from the CPU to a GPU are asynchronous.

    Args:
        tensor: The tensor.
        device: The target. The tensor itself is returned if it is already there.

    Returns:
        The tensor on `device`. On a GPU the copy may still be under way.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def moved_back(
    tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Move tensors of a file to their devices.

    Args:
        tensors: Tensors by name.
        like: Tensors with the target devices, by name.
        device: Device of the tensors without a name in `like`.

    Returns:
        Tensors by the names in `tensors`.
    """
    return {
        name: tensor.to(like[name].device if name in like else device)
        for name, tensor in tensors.items()
    }


def keep_pages() -> bool:
    """Configure glibc to reuse freed pages. Return True if this was possible.

    By default, glibc returns large buffers to the system when they are freed, so every step of a
    convolution causes page faults. They cost about a third of a small CNN's time on a CPU. Training
    needs the same sizes in each step, so reuse needs no additional memory.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = (
        (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_TRIM_THRESHOLD, _LARGEST),
        (_TOP_PAD, 64 * 2**20),
    )
    accepted = [bool(mallopt(parameter, value)) for parameter, value in settings]
    return all(accepted)
