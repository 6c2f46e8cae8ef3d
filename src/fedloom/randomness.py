"""One stream of random numbers for each (seed, round, client, purpose); no global random state
anywhere.

Streams have names and are not passed around: the same name gives the same numbers, wherever and in
whatever order it is drawn. So a resumed run, a run on several processes and a run over real sites
draw alike.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_WORDS = 624
"""Words of 32 bits in the Mersenne twister, torch's generator on the CPU.
`get_state` gives each in 64 bits, from byte 24 on."""


_SEEDED = torch.Generator().manual_seed(0).get_state().numpy()
"""State of a generator that has been seeded and has drawn nothing yet."""


def _name(seed: int, purpose: str, round: int, client: int) -> bytes:
    return f"{seed}/{round}/{client}/{purpose}".encode()


def stream_seed(seed: int, purpose: str, *, round: int = 0, client: int = -1) -> int:
    """Return a 63-bit seed for the stream's name, for generators that use all of it: NumPy's and
    CUDA's.
    """
    digest = hashlib.blake2b(_name(seed, purpose, round, client), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stream_bytes(size: int, seed: int, purpose: str, *, round: int = 0, client: int = -1) -> bytes:
    """Return `size` bytes of SHAKE-128 of the stream's name; shorter ones are beginnings of longer
    ones.
    """
    return hashlib.shake_128(_name(seed, purpose, round, client)).digest(size)


def stream(seed: int, purpose: str, *, round: int = 0, client: int = -1) -> torch.Generator:
    """Return a torch generator (on the CPU) for the named stream, at its beginning.

    All of its state is drawn from the name: `manual_seed` uses 32 bits, so that among 10^6 streams
    a hundred pairs would agree.
    """
    words = np.frombuffer(
        stream_bytes(4 * _WORDS, seed, purpose, round=round, client=client), np.uint32
    )
    state = _SEEDED.copy()
    state[24 : 24 + 8 * _WORDS].view(np.uint64)[:] = words
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(state))
    return generator


_GLOBAL = threading.RLock()
"""Held by the thread that uses torch's global generators, which all threads share."""


@contextmanager
def preserved_generator(device: torch.device | None = None) -> Iterator[None]:
    """Restore torch's global generators, of the CPU and of a GPU `device`, at the end of the block.

    Other threads wait at the beginnings of such blocks.
    """
    devices = [device.index or 0] if device is not None and device.type == "cuda" else []
    with _GLOBAL, torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def global_stream(
    seed: int, purpose: str, *, round: int = 0, client: int = -1, device: torch.device | None = None
) -> Iterator[None]:
    """Put torch's global generators, of the CPU and of a GPU `device`, at the beginning of the
    stream inside the block.

    For what can draw from nothing else: layers, and functions that initialise them.
    """
    with preserved_generator(device):
        # torch.manual_seed would also take down a stack trace for devices not in use: a third of a
        # small client's time.
        torch.default_generator.set_state(
            stream(seed, purpose, round=round, client=client).get_state()
        )
        if device is not None and device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(
                stream_seed(seed, purpose, round=round, client=client)
            )
        yield


def numpy_stream(
    seed: int, purpose: str, *, round: int = 0, client: int = -1
) -> np.random.Generator:
    """Return a NumPy generator for the named stream, at its beginning."""
    return np.random.Generator(
        np.random.PCG64(stream_seed(seed, purpose, round=round, client=client))
    )
