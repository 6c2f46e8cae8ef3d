"""Helpers of the model tests."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedloom.common.expression import Call
from fedloom.data import DataSpec
from fedloom.models.build import build_model


def one_line(error: BaseException) -> str:
    """Return the text of an error; it must have one line."""
    text = str(error)
    assert "\n" not in text
    return text


def make_model(name: str, spec: DataSpec, seed: int, options: dict[str, Any]) -> nn.Module:
    return build_model(str(Call(name, named=options)), spec, seed)
