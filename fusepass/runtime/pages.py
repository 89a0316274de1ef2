"""Large pages for large results on a CPU.

Fresh memory of a large tensor costs a page fault for every 4 KiB, which takes several times as long as writing it. Where the
kernel hands out large pages on request (``madvise`` in /sys/kernel/mm/transparent_hugepage/enabled), that is one for
every 2 MiB.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

LEAST_BYTES = 4 << 20
"""Smaller tensors mostly get memory that was in use before."""

_PAGE = 2 << 20


def _madvise() -> Callable[[int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


_advise = _madvise()
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)


def prefer_large(address: int, nbytes: int) -> None:
    """Ask for large pages within these bytes, which have not been written yet; nothing happens where there are none."""
    first = -(-address // _PAGE) * _PAGE
    last = (address + nbytes) // _PAGE * _PAGE
    if _advise is not None and _HUGE is not None and last > first:
        _advise(first, last - first, _HUGE)
