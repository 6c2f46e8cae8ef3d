"""Keep freed memory instead of giving its pages back to the system.

glibc returns big buffers to the system as soon as they are freed, so every step of a convolution faults its pages in anew:
about a third of a small CNN's time on a CPU. Training asks for the same sizes again and again; keeping them costs nothing.
"""

from __future__ import annotations

import ctypes
import platform

# mallopt's parameters, from malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc refuses more on 64 bits


def keep_pages() -> bool:
    """Ask the C library to keep freed pages for this process. Return True if it agreed (glibc)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_TRIM_THRESHOLD, _LARGEST), (_TOP_PAD, 64 * 2**20))
    granted = [bool(mallopt(parameter, value)) for parameter, value in settings]
    return all(granted)
