"""Damage of files by disks and of messages by untrusted senders, reproducible by seed.

Disks flip bits, write zeros over blocks and cut the ends of files.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

BLOCK = 512


def damages(content: bytes, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield `count` times a description of one damage and the damaged content.

    Each tenth of the file gets equally many flipped bits. The first bytes, which hold headers, get
    the same number.
    """
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
            position = (
                draw.randrange(min(len(content), 1000))
                if "header" in kind
                else int((k % 10 + draw.random()) * tenth)
            )
            bit = draw.randrange(8)
            flipped = bytes([content[position] ^ 1 << bit])
            yield (
                f"bit {bit} of byte {position} flipped",
                content[:position] + flipped + content[position + 1 :],
            )


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Change, cut, repeat or insert some bytes."""
    damaged = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(damaged) + 1)
        kind = draw.randrange(4)
        put = draw.choice(
            (b"[" * 5000, b"9" * 5000, b"\x00", b"\xff" * 8, b'"', b"nan", b"1e999", b"\x1b[31m")
        )
        piece = damaged[start : start + draw.randrange(1, 40)]
        damaged[start : start + (len(piece) if kind else 0)] = (
            put,
            b"",
            piece * 2,
            draw.randbytes(len(piece)),
        )[kind]
    return bytes(damaged)
