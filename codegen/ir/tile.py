"""Tiles in shared memory, by which operands that are contiguous along different axes meet: how threads stand on them, and their banks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SECTOR = 32
"""Bytes that memory moves at once."""

ACROSS_BYTES = 72 << 10
"""Of the tiles of a block whose rows are stored across, at most: a multiprocessor has room for three."""

_BANKS_BYTES = 128  # of shared memory, read or written at once
_WORD = 4  # bytes of a bank
_ITERATIONS = 8  # vectors of 16 bytes in all banks


@dataclass(frozen=True)
class Tile:
    """A block's points, and how its threads stand on it to make accesses across.

    Attributes:
        along, across: its size; `across` and all numbers below are powers of two.
        threads: of the block.
        width: points of one access.
        nbytes: of an element.
        vector: points along that a thread computes on and that are one access to shared memory; 1 where each is one.
    """

    along: int
    across: int
    threads: int
    width: int
    nbytes: int
    vector: int = 1

    @property
    def pitch(self) -> int:
        """Elements from one point across to the next in shared memory: an odd number of words, so that what threads
        write across and read along lies in different banks. Vectors change places instead (see `iterations`)."""
        if self.vector > 1:
            return self.along
        unit = max(_WORD // self.nbytes, 1)
        return (-(-self.along // unit) | 1) * unit

    @property
    def iterations(self) -> int:
        """Where vectors change places: the place of one along has its lowest bits turned round by those of the number
        of the access across. So accesses across, side by side, are in different banks, and a vector stays whole."""
        return min(_ITERATIONS, self.along // self.vector)

    @property
    def elements(self) -> int:
        """Places in shared memory."""
        return self.across * self.pitch

    @property
    def shared_bytes(self) -> int:
        return self.elements * self.nbytes

    @property
    def lanes(self) -> int:
        """Threads side by side across: as many as the banks of shared memory take without a conflict."""
        wanted = max(_BANKS_BYTES // max(self.nbytes, _WORD) // self.width, self.threads // power_above(self.along), 1)
        return min(wanted, self.across // self.width)

    @property
    def lines(self) -> int:
        """Points along that the threads cover at once."""
        return self.threads // self.lanes

    @property
    def steps(self) -> tuple[int, int]:
        """How often the threads move across and along."""
        return self.across // (self.width * self.lanes), -(-self.along // self.lines)


def power_above(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length() if count > 1 else 1


def fitting_width(most: int, fits: Callable[[int], bool]) -> int:
    """The largest power of two up to `most` that `fits`; 1 always does."""
    width = most
    while width > 1 and not fits(width):
        width //= 2
    return max(width, 1)
