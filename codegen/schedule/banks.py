"""How often a warp's access to shared memory has to be repeated: neighbouring words of 4 bytes lie in 32 banks, each of which gives one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_WORD = 4  # bytes
_AT_ONCE = 128  # bytes that all banks give


def iterations_of_access(places: Sequence[int], nbytes: int) -> int:
    """Cycles that shared memory takes for an access of `nbytes` of each thread of a warp, from these bytes on, multiples of that.

    Threads that read the same word share it. Of accesses of 8 bytes half of a warp goes at once, of 16 a quarter of it.
    """
    unit = max(nbytes, _WORD)
    together, cycles = _AT_ONCE // unit, 0
    for first in range(0, len(places), together):
        units = {place // unit for place in places[first : first + together]}
        cycles += max(Counter([each % together for each in units]).values())
    return cycles
