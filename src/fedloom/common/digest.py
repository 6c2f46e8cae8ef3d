"""Hash functions of the package, one for each purpose.

The numbers of random streams come from `fedloom.common.randomness`.
"""

import hashlib
import json
from typing import Any

import xxhash

Checksum = xxhash.xxh3_128
"""Detects flipped bits in a file of this run, about as fast as memory is read.

It is not a signature.
"""

Digest = hashlib.sha256
"""Identifies settings, models and sites, and files that a stranger may have changed."""


def digest(content: bytes | str) -> str:
    """Return the SHA-256 of bytes, or of a text in UTF-8, as 64 hexadecimal characters."""
    return Digest(content.encode() if isinstance(content, str) else content).hexdigest()


def digest_of_json(value: Any) -> str:
    """Return the SHA-256 of plain values. The order of keys in a table has no effect."""
    return digest(json.dumps(value, sort_keys=True))
