"""What disks do to files: flipped bits, zeroed blocks, lost ends; and what strangers do to messages. The same seed damages
alike."""

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


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Some of the bytes changed, cut or repeated, or others put in."""
    damaged = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(damaged) + 1)
        kind = draw.randrange(4)
        put = draw.choice((b"[" * 5000, b"9" * 5000, b"\x00", b"\xff" * 8, b'"', b"nan", b"1e999", b"\x1b[31m"))
        part = damaged[start : start + draw.randrange(1, 40)]
        damaged[start : start + (len(part) if kind else 0)] = (put, b"", part * 2, draw.randbytes(len(part)))[kind]
    return bytes(damaged)
