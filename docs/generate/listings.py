"""Write anew what `fedloom algorithms`, `models` and the other lists say, after a change of what is there or of its docstring:

python docs/generate/listings.py
"""

import json

from fedloom.cli.listing import KINDS, LISTINGS, registered


def text() -> str:
    """What the file should hold."""
    return json.dumps({kind: registered(kind) for kind in KINDS}, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    LISTINGS.write_text(text(), encoding="utf-8")
