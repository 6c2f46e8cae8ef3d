"""Tables from the Hugging Face hub, through the optional package `datasets`."""

from __future__ import annotations

import importlib
from typing import Any

from fedloom.errors import DataError, MissingExtra


def hub_installed() -> bool:
    """Whether the package `datasets` can be imported."""
    try:
        importlib.import_module("datasets")
    except ImportError:
        return False
    return True


def hub_table(repository: str, split: str) -> Any:
    """The `split` of the hub's data set `repository` as an Arrow table, pictures still packed.

    Raises `MissingExtra` if `datasets` is not installed and `DataError` if the hub cannot give the data.
    """
    if not hub_installed():
        raise MissingExtra("datasets", "hub", f"loading {repository} from the Hugging Face hub")
    hub = importlib.import_module("datasets")
    try:
        # The format "arrow" hands out the stored columns; decoding each picture into an object would cost minutes.
        return hub.load_dataset(repository, split=split).with_format("arrow")[:]
    # Network, hub and file errors of several packages reach here; each means that the hub gave no data.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"hub data set {repository!r}, split {split!r}: cannot be loaded ({reason})") from error
