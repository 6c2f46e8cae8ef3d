"""The JSON schema of configuration files, with which an editor completes keys and marks mistakes."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from fedloom.algorithm import algorithms
from fedloom.config.registry import Registry
from fedloom.data.dataset import datasets
from fedloom.data.noise import label_noises
from fedloom.data.partition import partitions
from fedloom.data.shift import shifts
from fedloom.experiment.configuration import Configuration
from fedloom.models import models
from fedloom.objectives import objectives

_NAMES: dict[str, dict[str, Registry[Any]]] = {
    "Configuration": {"algorithm": algorithms, "model": models, "objective": objectives},
    "Data": {"name": datasets, "partition": partitions, "label_noise": label_noises, "shift": shifts},
}
"""Registries whose names an editor suggests, by table and key."""


def json_schema() -> dict[str, Any]:
    """Return the schema: every key with its type, range, choices and default."""
    schema: dict[str, Any] = _without_null(TypeAdapter(Configuration).json_schema())
    tables = schema["$defs"]
    for table, registries in _NAMES.items():
        for key, registry in registries.items():
            tables[table]["properties"][key]["examples"] = [entry.name for entry in registry]
    for table in tables.values():
        table["additionalProperties"] = False
    keys = tables["Configuration"]["properties"]
    del keys["variants"], keys["changes"]
    keys["settings"] = {
        "type": "object",
        "description": "Keys with several values each, all combinations of which are compared.",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _without_null(value: Any) -> Any:
    """Return a schema in which the text "none" stands for null, as it does in TOML."""
    if isinstance(value, dict):
        if value == {"type": "null"}:
            return {"const": "none"}
        return {key: "none" if (key, item) == ("default", None) else _without_null(item) for key, item in value.items()}
    return list(map(_without_null, value)) if isinstance(value, list) else value
