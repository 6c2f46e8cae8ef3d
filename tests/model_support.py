"""Helpers of the model tests."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedloom.config.expression import Call
from fedloom.data import DataSpec
from fedloom.models.build import build_model


def make_model(name: str, spec: DataSpec, seed: int, options: dict[str, Any]) -> nn.Module:
    return build_model(str(Call(name, named=options)), spec, seed)
