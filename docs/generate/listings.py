"""Write anew what `fedloom algorithms`, `models` and the other lists say, after a change of what is
there or of its docstring:

python docs/generate/listings.py
"""

import json
from importlib import import_module

from fedloom.cli.listing import KINDS, LISTINGS, registered


def text() -> str:
    """Return the text of the file: the entries of fedloom itself, whatever else is registered in
    this process.
    """
    entries_by_kind = {}
    for kind, (_, module) in KINDS.items():
        entries = getattr(import_module(module), kind)
        names = {entry.name for entry in entries if entry.make.__module__.startswith("fedloom.")}
        entries_by_kind[kind] = {
            name: listed for name, listed in registered(kind).items() if name in names
        }
    return json.dumps(entries_by_kind, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    LISTINGS.write_text(text(), encoding="utf-8")
