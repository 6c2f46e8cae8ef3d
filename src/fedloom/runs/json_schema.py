"""The JSON schema of configuration files, with which an editor completes keys and marks
mistakes.
"""

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from pydantic import Field, create_model

from fedloom.algorithm.method import algorithms
from fedloom.common.fields import type_hints
from fedloom.common.registry import Registry
from fedloom.data.dataset import datasets
from fedloom.data.noise import label_noises
from fedloom.data.partition import partitions
from fedloom.data.shift import shifts
from fedloom.models import models
from fedloom.objectives import objectives
from fedloom.runs.config_file import KEYS
from fedloom.runs.configuration import Configuration
from fedloom.runs.entry import OWN_KEYS
from fedloom.state.files import write_text

SCHEMA = "fedloom.schema.json"
"""File with the schema, beside a configuration file."""

_NAMES: dict[str, dict[str, Registry[Any]]] = {
    "Configuration": {"algorithm": algorithms, "model": models, "objective": objectives},
    "Data": {
        "name": datasets,
        "partition": partitions,
        "label_noise": label_noises,
        "shift": shifts,
    },
}
"""Registries with the names that an editor suggests, by table and key."""


def json_schema() -> dict[str, Any]:
    """Return the schema: every key with its type, range, choices and default."""
    hints = type_hints(Configuration)
    keys = {
        entry.name: (hints[entry.name], _default(entry))
        for entry in fields(Configuration)
        if entry.name in KEYS
    }
    model: Any = create_model("Configuration", **keys)  # type: ignore[call-overload]
    schema = _without_null(model.model_json_schema())
    tables = {"Configuration": schema, **schema["$defs"]}
    for table, registries in _NAMES.items():
        for key, registry in registries.items():
            tables[table]["properties"][key]["examples"] = [entry.name for entry in registry]
    for contents in tables.values():
        contents["additionalProperties"] = False
    settings = "Keys with several values each, all combinations of which are compared."
    schema["properties"]["settings"] = {"type": "object", "description": settings}
    schema["properties"]["methods"] = {"type": "array", "items": _entries(tables)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    """Return the schema as JSON."""
    return json.dumps(json_schema(), indent=1) + "\n"


def write_schema(file: Path) -> Path:
    """Write the schema beside a configuration file, and name it in the file's first line.

    Returns:
        The path of the schema.
    """
    content = file.read_text(encoding="utf-8")
    path = file.with_name(SCHEMA)
    write_text(path, schema_text())
    if not content.startswith("#:schema "):
        write_text(file, f"#:schema {SCHEMA}\n{content}")
    return path


def _entries(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a table `[[methods]]`."""
    keys = tables["Configuration"]["properties"] | tables["Training"]["properties"]
    own = {key: {k: v for k, v in keys[key].items() if k != "default"} for key in OWN_KEYS}
    named = {"algorithm": {**keys["algorithm"]}, "label": {"type": "string"}}
    return {
        "type": "object",
        "description": "A method with its own settings of training and schedule.",
        "properties": named | own,
        "required": ["algorithm"],
        "additionalProperties": False,
    }


def _default(entry: Any) -> Any:
    if entry.default is MISSING:
        return Field(default_factory=entry.default_factory)
    return entry.default


def _without_null(value: Any) -> Any:
    """Return a schema with the text "none" in place of null, which TOML does not have."""
    if isinstance(value, dict):
        if value == {"type": "null"}:
            return {"const": "none"}
        return {
            key: "none" if (key, item) == ("default", None) else _without_null(item)
            for key, item in value.items()
        }
    return list(map(_without_null, value)) if isinstance(value, list) else value
