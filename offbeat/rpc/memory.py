"""How the C library keeps memory, for processes through which many bytes pass."""

import ctypes
import sys

MIB = 1024**2
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""glibc's malloc.h."""
OPTIONS = {MMAP_THRESHOLD: 32 * MIB, TRIM_THRESHOLD: 256 * MIB, TOP_PAD: 16 * MIB}


def keep_freed_memory() -> bool:
    """Lets this process keep up to 256 MiB that it freed, rather than hand each message's memory back at once.

    A megabyte that comes through gRPC is allocated and freed several times; handed back in between, its pages are
    cleared anew each time, which is a quarter of the CPU that moving weights takes. False where the C library is not
    glibc, and nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*option) == 1 for option in OPTIONS.items())
