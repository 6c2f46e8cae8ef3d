"""What a site answers, and where it keeps what must outlive the message: what loads at once, whatever the message is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import RefusedReply

if TYPE_CHECKING:
    from torch import Tensor

_FEDERATION = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Answer:
    """What a site answers: words, tensors by name, figures, and what others than the server are to read."""

    words: dict[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    parcel: bytes = b""


def default_folder() -> Path:
    """`fedloom` under FLWR_HOME, or under ~/.flwr where that is not set."""
    home = os.environ.get("FLWR_HOME")
    return (Path(home) if home else Path.home() / ".flwr") / "fedloom"


def memory_folder(node_config: Mapping[str, Any]) -> Path:
    """Where a site keeps what it must remember, as its SuperNode says."""
    folder = node_config.get("memory")
    return Path(str(folder)).expanduser() if folder else default_folder()


def federation_folder(folder: Path, federation: str) -> Path:
    """The part of `folder` that is for one federation. Raises `RefusedReply` for a name that could lead elsewhere."""
    if not _FEDERATION.fullmatch(federation):
        raise RefusedReply(f"{federation!r:.40} is not the name of a federation")
    return folder / federation
