"""Windows reduced in two stages: first what each row of the tiles comes to, along it, then these numbers down the rows.

A thread that reduces the rows that its own results need does what its neighbours do, too, where windows are large. In two iterations each row
is read and reduced once: threads have strips of rows, lay down what these come to in shared memory, and meet; then each takes what its results need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from fusepass.codegen.device import WARP
from fusepass.codegen.ir.sliding import Reduced
from fusepass.codegen.ir.staged_windows import TileShape
from fusepass.codegen.schedule.plan_output_tile import WindowTile
from fusepass.codegen.schedule.shape import ACCESS, ceil

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


_WIDEST = 4  # states that are laid down at once
_PITCHES = 4  # that are tried
_PAIR = 4  # bytes of two maxima of halves


@dataclass(frozen=True)
class FirstIteration:
    """How a block finds what the rows of a window's tiles come to.

    Attributes:
        lines: rows of all tiles of the block's images.
        strips: of each of these.
        pitch: states from a row's first one to the next row's.
        down: whether neighbouring threads have rows below each other; else strips beside each other.
        wide: states that a thread lays down at once.
        nbytes: of all states.
        read, laid, taken: cycles of shared memory for a warp's access to the tile, to what it lays down, and to what it takes.
    """

    lines: int
    strips: int
    pitch: int
    down: bool
    wide: int
    nbytes: int
    read: int
    laid: int
    taken: int

    @property
    def items(self) -> int:
        """Strips of all rows."""
        return self.lines * self.strips

    def cycles(self, states: int, tiles: Sequence[TileShape]) -> int:
        """Of shared memory for a warp's strips, each of which comes to so many states."""
        return sum(tile.reach // tile.near * self.read for tile in tiles) + ceil(states, self.wide) * self.laid


def first_iteration(plan: WindowTile, way: Reduced, tile: TileShape, element: int) -> FirstIteration:
    """The one whose accesses are repeated least; elements of the tile have so many bytes."""
    down, right = way.window.below[0].steps
    strips = _Strips(
        rows=tile.rows,
        images=plan.planes,
        strips=ceil(plan.lanes * plan.width, plan.along),
        states=plan.along // way.lanes,
        state=_PAIR if way.lanes > 1 else way.window.window.dtype.nbytes,
        read=tile.near * element,
        reads=tile.reach // tile.near,
        apart=(tile.elements(element) * element, tile.pitch * element, plan.along * right * element),
    )
    taken = tuple(
        (plane * tile.rows + group * plan.unroll * down, lane * plan.width // way.lanes)
        for lane, group, plane in first_warp(plan)
    )
    return _least_repeated(strips, taken, plan.width // way.lanes)


def first_warp(plan: WindowTile) -> list[tuple[int, int, int]]:
    """Where the threads of a block's first warp stand: along the rows, down, and in which image."""
    return [plan.stands(thread) for thread in range(min(WARP, plan.threads))]


@dataclass(frozen=True)
class _Strips:
    """Strips of the rows of a block's tiles.

    Attributes:
        rows, images, strips: how many rows an image has, images the block, strips a row.
        states, state: what a strip comes to, and how many bytes one of these has.
        read, reads: bytes that are read of the tile at once, and how often for a strip.
        apart: bytes from an image of the tile to the next one, from a row and from a strip.
    """

    rows: int
    images: int
    strips: int
    states: int
    state: int
    read: int
    reads: int
    apart: tuple[int, int, int]


@lru_cache(4096)
def _least_repeated(of: _Strips, taken: tuple[tuple[int, int], ...], width: int) -> FirstIteration:
    """`taken`: from which row's states on, and which of these, a warp's threads take `width`."""
    lines, wide = of.rows * of.images, gcd(of.states, min(_WIDEST, ACCESS // of.state))
    threads, unit = range(min(WARP, lines * of.strips)), max(wide, width)
    spots = {
        True: [(t % lines, t // lines) for t in threads],
        False: [(t // of.strips, t % of.strips) for t in threads],
    }
    read = {}
    for down, here in spots.items():
        image, row, strip = of.apart
        places = [line // of.rows * image + line % of.rows * row + right * strip for line, right in here]
        read[down] = iterations_of_access(places, of.read)
    least, found = ceil(of.strips * of.states, unit) * unit, list[FirstIteration]()
    for pitch in range(least, least + _PITCHES * unit, unit):
        nbytes = ceil(lines * pitch * of.state, ACCESS) * ACCESS
        takes = iterations_of_access([(line * pitch + at) * of.state for line, at in taken], width * of.state)
        for down, here in spots.items():
            places = [(line * pitch + strip * of.states) * of.state for line, strip in here]
            laid = iterations_of_access(places, wide * of.state)
            found.append(FirstIteration(lines, of.strips, pitch, down, wide, nbytes, read[down], laid, takes))
    often = of.states // wide
    return min(
        found,
        key=lambda iteration: (
            iteration.read * of.reads + (iteration.laid + iteration.taken) * often,
            iteration.nbytes,
        ),
    )
