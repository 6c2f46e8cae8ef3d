"""One stream of random numbers for each (seed, round, client, purpose); no global random state anywhere.

A stream is named, never handed around: whoever draws, wherever and in whatever order, the same name gives the same numbers.
So a resumed run, a run on several processes and a run over real sites draw alike.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def stream_seed(seed: int, purpose: str, *, round: int = 0, client: int = -1) -> int:
    """A 63-bit seed for the stream's name; distinct names give independent streams."""
    name = f"{seed}/{round}/{client}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def stream(seed: int, purpose: str, *, round: int = 0, client: int = -1) -> torch.Generator:
    """A torch generator (on the CPU) for the named stream, at its beginning."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose, round=round, client=client))


def numpy_stream(seed: int, purpose: str, *, round: int = 0, client: int = -1) -> np.random.Generator:
    """A NumPy generator for the named stream, at its beginning."""
    return np.random.Generator(np.random.PCG64(stream_seed(seed, purpose, round=round, client=client)))
