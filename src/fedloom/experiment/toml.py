"""A configuration's table as a TOML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_toml(table: Mapping[str, Any]) -> str:
    """A table of plain values, and of tables of them, as text that `tomllib` reads back."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    sections = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    blocks = [_lines(plain), *(f"[{_key(name)}]\n{_lines(section)}" for name, section in sections.items())]
    return "\n".join(block for block in blocks if block)


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items())


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(one)}' for key, one in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if value is None:
        return '"none"'
    # JSON's text, numbers and true are TOML's; what JSON leaves as it is, U+007F, TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
