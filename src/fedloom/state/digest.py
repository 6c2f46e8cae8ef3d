"""The digests of the package, one for each purpose; the numbers of random streams come from
`fedloom.randomness`.
"""

import hashlib
import json
from typing import Any

import xxhash

Checksum = xxhash.xxh3_128
"""Notices bits that flipped in a file of this run, about as fast as memory is read. It is no
signature.
"""

Digest = hashlib.sha256
"""Tells apart what must not be confused: settings, models, sites, and whatever strangers may have
changed.
"""


def digest(content: bytes | str) -> str:
    """Return the SHA-256 of bytes, or of a text in UTF-8, as 64 hexadecimal characters."""
    return Digest(content.encode() if isinstance(content, str) else content).hexdigest()


def digest_of_json(value: Any) -> str:
    """Return the SHA-256 of plain values. The order of keys in a table does not matter."""
    return digest(json.dumps(value, sort_keys=True))
