"""The versions and the machine that a run is computed with."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import numpy
import torch

import fedloom

_DECIDING = ("python", "torch", "numpy", "fedloom", "threads", "machine")
"""What may change the last digits of a figure."""


def environment() -> dict[str, Any]:
    """Versions, platform and threads, as plain values."""
    return {
        "fedloom": fedloom.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def version_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs, such as `torch 2.12.0 (now 2.13.0)`; empty when nothing does that could change a figure."""
    changed = [key for key in _DECIDING if before.get(key) != now.get(key)]
    return ", ".join(f"{key} {before.get(key)} (now {now.get(key)})" for key in changed)
