"""What disks do to files: flipped bits, zeroed blocks, lost ends. The same seed damages alike."""

from __future__ import annotations

import random
from collections.abc import Iterator

BLOCK = 512


def damages(content: bytes, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """`count` times the content with one thing wrong, and what it is. Bits flip in every tenth of the file alike, and as often
    in its first bytes, where headers are."""
    draw = random.Random(f"{seed} {len(content)}")
    for k in range(count):
        kind = ("flipped", "flipped in the header", "zeroed", "cut")[k % 4]
        if kind == "cut":
            size = draw.randrange(len(content))
            yield f"cut to {size} of {len(content)} bytes", content[:size]
        elif kind == "zeroed":
            start = draw.randrange(0, len(content), 1 if len(content) < 4 * BLOCK else BLOCK)
            block = content[start : start + BLOCK]
            yield (
                f"{len(block)} bytes from {start} zeroed",
                content[:start] + bytes(len(block)) + content[start + BLOCK :],
            )
        else:
            tenth = len(content) / 10
            place = (
                draw.randrange(min(len(content), 1000)) if "header" in kind else int((k % 10 + draw.random()) * tenth)
            )
            bit = draw.randrange(8)
            flipped = bytes([content[place] ^ 1 << bit])
            yield f"bit {bit} of byte {place} flipped", content[:place] + flipped + content[place + 1 :]
