"""One stream of random numbers for each (seed, round, client, purpose), without global state.

Streams have names and are not passed around: the same name gives the same numbers, wherever and in
whatever order it is drawn. Therefore a resumed run, a run on several processes and a run over real
sites draw the same numbers.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_WORDS = 624
"""Words of 32 bits in the Mersenne twister, torch's generator on the CPU.

`get_state` returns each word in 64 bits, from byte 24 on.
"""


_SEEDED = torch.Generator().manual_seed(0).get_state().numpy()
"""State of a generator that has been seeded and has not drawn a number yet."""


def _name(seed: int, purpose: str, round: int, client: int) -> bytes:
    return f"{seed}/{round}/{client}/{purpose}".encode()


def stream_seed(seed: int, purpose: str, *, round: int = 0, client: int = -1) -> int:
    """Return a 63-bit seed for the named stream.

    It is for generators that use all of its bits, NumPy's and CUDA's. See `stream` for torch's CPU
    generator.

    Args:
        seed: Seed of the run.
        purpose: Name of the draw, such as "select".
        round: Number of the round; 0 outside of rounds.
        client: Number of the client; -1 for draws of the server.

    Returns:
        The seed, in [0, 2^63).
    """
    digest = hashlib.blake2b(_name(seed, purpose, round, client), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stream_bytes(size: int, seed: int, purpose: str, *, round: int = 0, client: int = -1) -> bytes:
    """Return SHAKE-128 of the stream's name; `stream` describes the name.

    Args:
        size: Number of bytes. A shorter result is the beginning of a longer one.
        seed: Seed of the run.
        purpose: Name of the draw.
        round: Number of the round; 0 outside of rounds.
        client: Number of the client; -1 for draws of the server.

    Returns:
        `size` bytes.
    """
    return hashlib.shake_128(_name(seed, purpose, round, client)).digest(size)


def stream(seed: int, purpose: str, *, round: int = 0, client: int = -1) -> torch.Generator:
    """Return a torch generator (on the CPU) at the beginning of the named stream.

    The name determines the whole state. `manual_seed` uses only 32 bits, so among 10^6 streams
    about a hundred pairs would be equal.

    Args:
        seed: Seed of the run.
        purpose: Name of the draw, such as "select".
        round: Number of the round; 0 outside of rounds.
        client: Number of the client; -1 for draws of the server.

    Returns:
        A new generator. Equal arguments give equal draws.
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
"""Lock of torch's global generators, which all threads share."""


@contextmanager
def preserved_generator(device: torch.device | None = None) -> Iterator[None]:
    """Restore torch's global generators, of the CPU and of a GPU `device`, after the block.

    Only one thread at a time can be in such a block.
    """
    devices = [device.index or 0] if device is not None and device.type == "cuda" else []
    with _GLOBAL, torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def global_stream(
    seed: int, purpose: str, *, round: int = 0, client: int = -1, device: torch.device | None = None
) -> Iterator[None]:
    """Set torch's global generators to the beginning of the named stream inside the block.

    For code that can only draw from them: layers, and functions that initialise layers. After the
    block, the generators have their previous states again.

    Args:
        seed: Seed of the run.
        purpose: Name of the draw.
        round: Number of the round; 0 outside of rounds.
        client: Number of the client; -1 for draws of the server.
        device: A GPU; its generator is set too.
    """
    with preserved_generator(device):
        # torch.manual_seed would also record a stack trace for devices not in use, which takes
        # a third of a small client's time.
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
    """Return a NumPy generator at the beginning of the named stream.

    Args:
        seed: Seed of the run.
        purpose: Name of the draw, such as "partition".
        round: Number of the round; 0 outside of rounds.
        client: Number of the client; -1 for draws of the server.

    Returns:
        A new generator. Its draws differ from the draws of `stream`.
    """
    return np.random.Generator(
        np.random.PCG64(stream_seed(seed, purpose, round=round, client=client))
    )
