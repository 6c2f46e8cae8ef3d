"""Write anew what `fedloom algorithms`, `models` and the other lists say, after a change of what is there or of its docstring:

python docs/generate/listings.py
"""

import json
from importlib import import_module

from fedloom.cli.listing import KINDS, LISTINGS, registered


def text() -> str:
    """What the file should hold: what is fedloom's own, whatever else is registered in this process."""
    found = {}
    for kind, (_, module) in KINDS.items():
        entries = getattr(import_module(module), kind)
        own = {entry.name for entry in entries if entry.make.__module__.startswith("fedloom.")}
        found[kind] = {name: listed for name, listed in registered(kind).items() if name in own}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    LISTINGS.write_text(text(), encoding="utf-8")
