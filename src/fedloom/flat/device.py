"""Where a task's data and models lie: the processor's own memory, or that of an accelerator."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedloom.errors import InvalidValue, quoted, suggestion


def require_device(name: str) -> None:
    """Raise `InvalidValue` unless `name` can name a device (which need not be here): cpu, cuda, cuda:1 or auto."""
    if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", name):
        known = ("cpu", "cuda", "auto")
        raise InvalidValue(
            f"device {quoted(name)} is not allowed{suggestion(name, known)} (allowed: cpu, cuda, cuda:1, auto)"
        )


def present() -> list[str]:
    """The names of the devices that are here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{number}" for number in range(count))]


@cache
def processor() -> str:
    """The model of the processor, as Linux says; elsewhere what Python knows of it."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return platform.processor()


def find_device(name: str) -> torch.device:
    """The device called `name`: `cpu`, `cuda` (the first), `cuda:1`, or `auto`, which is the first GPU where there is one.

    Raises `InvalidValue`, with what there is, for a device that is not here.
    """
    require_device(name)
    here = present()
    wanted = {"auto": here[min(1, len(here) - 1)], "cuda": "cuda:0"}.get(name, name)
    if wanted not in here:
        raise InvalidValue(f"there is no device {quoted(name)} here (there are: {', '.join(here)})")
    return torch.device(wanted)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. A copy to a GPU does not block this process; it comes in order with the GPU's other work."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def moved_back(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Tensors read from a file, each moved to the device of the tensor of that name in `like`, or else to `device`."""
    return {name: tensor.to(like[name].device if name in like else device) for name, tensor in tensors.items()}
